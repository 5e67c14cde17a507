"""Sections of a report as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from podium.lab.report.blocks import Entry, Inline, Lines, Name, Section, Source, Table
from podium.lab.report.format import ABSENT, spread
from podium.lab.report.links import Records, code, to
from podium.lab.stats.statistics import Mean


def section_text(section: Section, places: Mapping[str, int], records: Records) -> str:
    """A section under a heading; `places` has the number of each cell's row on the page."""
    blocks = [
        _table(block, places, records)
        if isinstance(block, Table)
        else "".join(_inline(inline, places) for inline in block)
        for block in section.blocks
    ]
    return "\n\n".join([f"## {section.title}", *blocks])


def _table(table: Table, places: Mapping[str, int], records: Records) -> str:
    lines = [[_entry(entry, places, records) for entry in row] for row in table.rows]
    return markdown_table(table.columns, table.sides, lines)


def markdown_table(names: Sequence[str], sides: str, lines: Sequence[Sequence[str]]) -> str:
    rules = ["---:" if side == "r" else "---" for side in sides]
    return "\n".join(f"| {' | '.join(line)} |" for line in (names, rules, *lines))


def _inline(inline: Inline, places: Mapping[str, int]) -> str:
    if isinstance(inline, Name):
        return to(code(inline.text), f"cell-{places[inline.cell]}") if inline.cell else code(inline.text)
    return f"[{inline.text}]({inline.file})" if isinstance(inline, Source) else inline


def _entry(entry: Entry, places: Mapping[str, int], records: Records) -> str:
    if isinstance(entry, Mean):
        return spread(entry.mean, entry.low, entry.high)
    if isinstance(entry, Lines):
        return records.spans(entry.numbers)
    if isinstance(entry, str | Name):
        return _inline(entry, places)
    return ", ".join(_inline(name, places) for name in entry or ()) or ABSENT
