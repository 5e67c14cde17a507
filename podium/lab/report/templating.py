"""The Jinja environment of all HTML pages: values are escaped, and an undefined name is an error."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape


def environment() -> Environment:
    """A new environment, to which a page may add filters."""
    return Environment(
        loader=PackageLoader("podium.lab.report"),
        autoescape=select_autoescape(["html", "html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
