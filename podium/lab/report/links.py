"""Links from a page to the records that its numbers were made from.

A page is in the same folder as its records, one row per line. A table's row links to the lines it was made from, and
may have an anchor that sentences link to, so that every number is at most two links away from its record.
`tests/lab/test_traces.py` checks that on all pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Records:
    """The lines of one file of records, for links to them.

    `rows` are all rows of the file, in its order. Rows are looked up by identity, so copies of them have no line.
    """

    def __init__(self, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.name = name
        self._lines = {id(row): number for number, row in enumerate(rows, 1)}
        self._rows = rows  # an id is only valid while its object lives

    def line(self, row: Mapping[str, Any]) -> int:
        """The line number of a row, from 1."""
        return self._lines[id(row)]

    def link(self, text: str, row: Mapping[str, Any]) -> str:
        return f"[{text}]({self.name}#L{self.line(row)})"

    def links(self, rows: Iterable[Mapping[str, Any]]) -> str:
        """Their line numbers as links, each once, in the file's order; three or more in sequence are one link."""
        return self.spans(self.line(row) for row in rows)

    def spans(self, lines: Iterable[int]) -> str:
        """The same for line numbers."""
        told = []
        for first, last in _spans(sorted(set(lines))):
            if last - first > 1:
                told.append(f"[{first}–{last}]({self.name}#L{first}-L{last})")
            else:
                told += [f"[{line}]({self.name}#L{line})" for line in range(first, last + 1)]
        return " ".join(told)

    def whole(self, text: str) -> str:
        """A link to the whole file."""
        return f"[{text}]({self.name})"


def _spans(lines: Iterable[int]) -> list[tuple[int, int]]:
    """The first and last number of each sequence without a gap."""
    found: list[tuple[int, int]] = []
    for line in lines:
        if found and found[-1][1] == line - 1:
            found[-1] = (found[-1][0], line)
        else:
            found.append((line, line))
    return found


def place(*words: object) -> str:
    """The name of an anchor, made from words: `mnist-top-k-ratio-0-1`."""
    text = "-".join(str(word) for word in words).lower()
    return "-".join("".join(c if c.isascii() and c.isalnum() else " " for c in text).split())


def mark(name: str) -> str:
    """An anchor, to which `to` links."""
    return f'<a id="{name}"></a>'


def to(text: str, name: str) -> str:
    """A link to an anchor on the same page."""
    return f"[{text}](#{name})"


def slug(heading: str) -> str:
    """The anchor that Markdown renderers give a heading."""
    kept = "".join(c for c in heading.strip().lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def code(value: object) -> str:
    """A name as inline code; a pipe would end a table's cell, a backtick or a newline would end the code."""
    text = " ".join(str(value).split()).replace("|", chr(92) + "|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"
