"""Sections of a report before they are written: titles, sentences and tables, which HTML and Markdown are made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podium.lab.stats.statistics import Mean


@dataclass(frozen=True)
class Name:
    """A level or a cell, as programs write it; one with a `cell` links to that cell's row."""

    text: str
    cell: str = ""


@dataclass(frozen=True)
class Source:
    """A link to a file beside the page that says where a number was set."""

    text: str
    file: str


@dataclass(frozen=True)
class Lines:
    """Lines of `results.jsonl` that numbers were made from."""

    numbers: tuple[int, ...]


Inline = str | Name | Source
Text = Sequence[Inline]
Entry = str | Name | Lines | Mean | None | Sequence[Name]
"""One field of a table; a missing value is shown as such."""


@dataclass(frozen=True)
class Table:
    """`sides` has a letter for each column: `l` or, for numbers, `r`."""

    columns: tuple[str, ...]
    sides: str
    rows: tuple[tuple[Entry, ...], ...]


@dataclass(frozen=True)
class Section:
    """Paragraphs and tables under a title."""

    name: str
    title: str
    blocks: tuple[Text | Table, ...]
