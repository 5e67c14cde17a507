"""Where pages of HTML come from: the templates beside this file, everything escaped, nothing undefined let through."""

from __future__ import annotations

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape


def environment() -> Environment:
    """A fresh one, so that a page may add filters of its own."""
    return Environment(
        loader=PackageLoader("podium.lab.report"),
        autoescape=select_autoescape(["html", "html.j2"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
