"""A Markdown page of a study as one printable HTML file, with its figures inside and without scripts or requests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from markupsafe import Markup

from podium.errors import ConfigError
from podium.lab.report.links import slug
from podium.lab.report.templating import environment
from podium.records.disk import write_atomically

_XML = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>", re.DOTALL)


def write_html(page: str | Path) -> Path:
    """Write `PAGE.html` beside `PAGE.md`; its SVG figures are embedded."""
    place = Path(page)
    try:
        text = place.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"report: {place} cannot be read: {error.strerror}") from error
    path = place.with_suffix(".html")
    write_atomically(path, to_html(text, place.parent))
    return path


def to_html(text: str, folder: Path) -> str:
    """The HTML of a page; figures are read from `folder`."""
    reader = MarkdownIt("commonmark", {"html": True}).enable("table")  # we make the pages, with anchors in HTML
    tokens = reader.parse(text)
    for at, token in enumerate(tokens):
        if token.type == "heading_open":
            token.attrSet("id", slug(tokens[at + 1].content))
        _put_figures_in(token, folder)
    title = next((tokens[at + 1].content for at, token in enumerate(tokens) if token.type == "heading_open"), "")
    body = reader.renderer.render(tokens, reader.options, {})
    # Only the table scrolls if it is wide. Our own figures and text are markup already.
    body = body.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")
    return environment().get_template("page.html.j2").render(title=title, body=Markup(body))


def _put_figures_in(token: Token, folder: Path) -> None:
    for inner in token.children or ():
        if inner.type != "image":
            continue
        source: Any = inner.attrGet("src")
        path = folder / str(source)
        if path.suffix == ".svg" and path.is_file():
            inner.type, inner.content = "html_inline", _XML.sub("", path.read_text(encoding="utf-8")).strip()
