"""Markdown pages of studies as HTML: figures inside, links that lead somewhere, nothing to fetch."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from podium.cli import main
from podium.errors import ConfigError
from podium.lab.report.html import to_html, write_html

PAGE = """# Times, and *what* of it

See [the cells](#times-at-100-mbits) and <a id="here"></a>[a record](x.jsonl#L2).

![Times](times.svg)

## Times at 100 Mbit/s

| cell | s |
| --- | ---: |
| [`a < b`](#here) | 1.5 |
"""
SVG = '<?xml version="1.0"?>\n<!DOCTYPE svg PUBLIC "x" "y">\n<svg viewBox="0 0 1 1"><path d="M0 0"/></svg>\n'


def test_headings_can_be_linked_to_tables_scroll_and_figures_are_inside(tmp_path: Path) -> None:
    (tmp_path / "times.svg").write_text(SVG)
    (tmp_path / "page.md").write_text(PAGE)
    html = write_html(tmp_path / "page.md").read_text(encoding="utf-8")
    assert '<h2 id="times-at-100-mbits">' in html and 'href="#times-at-100-mbits"' in html
    assert '<a id="here"></a>' in html and '<a href="x.jsonl#L2">' in html
    assert '<div class="scroll"><table>' in html and "<code>a &lt; b</code>" in html
    assert "<svg" in html and "<?xml" not in html and "<img" not in html and "<script" not in html
    assert html == to_html(PAGE, tmp_path)


def test_a_page_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.md cannot be read"):
        write_html(tmp_path / "none.md")


def test_the_command_line_makes_it_beside_the_page(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    result = CliRunner().invoke(main, ["report", str(tmp_path / "page.md")])
    assert result.exit_code == 0 and (tmp_path / "page.html").is_file()
    assert CliRunner().invoke(main, ["report", str(tmp_path / "page.md"), "--figures"]).exit_code == 2
