"""Sections of a report as data: titles, sentences and tables, from which HTML and Markdown are rendered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podium.lab.stats.statistics import Mean


@dataclass(frozen=True)
class Name:
    """A level or a cell, set as code; with a `cell` it links to that cell's row."""

    text: str
    cell: str = ""


@dataclass(frozen=True)
class Source:
    """A link to the file beside the page that sets a number."""

    text: str
    file: str


@dataclass(frozen=True)
class Lines:
    """Line numbers of `results.jsonl` that a row was made from."""

    numbers: tuple[int, ...]


Inline = str | Name | Source
Text = Sequence[Inline]
Entry = str | Name | Lines | Mean | None | Sequence[Name]
"""One field of a table; None is shown as a dash."""


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
