"""Histograms of staleness: a column per value and, with few workers, a layer per worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podium.lab.report.figures.base import MOST_LAYERS
from podium.lab.report.staleness import staleness_by_cell
from podium.lab.study.store import Row
from podium.records.staleness import Spread, bin_of


@dataclass(frozen=True)
class Layer:
    """One worker's part of a histogram's columns, or all workers' together."""

    name: str
    updates: tuple[int, ...]
    """One number per column."""


@dataclass(frozen=True)
class Histogram:
    """How stale one strategy's updates were: a column per staleness, made of a layer per worker."""

    cell: str
    columns: tuple[str, ...]
    """The staleness of each column: `3`, or `65–128`."""
    layers: tuple[Layer, ...]

    @property
    def name(self) -> str:
        return f"staleness, {self.cell}"


def staleness_histograms(rows: Sequence[Row]) -> dict[str, Histogram]:
    """By strategy that made updates: their staleness, all seeds together."""
    found = {}
    for cell, tables in staleness_by_cell(rows).items():
        if tables.overall is None:
            continue
        parts = {f"worker {worker}": spread for worker, spread in tables.workers.items()}
        if len(parts) > MOST_LAYERS:
            parts = {"all workers": tables.overall}
        bins = _columns(tables.overall)
        layers = tuple(Layer(name, _heights(spread, bins)) for name, spread in parts.items())
        found[cell] = Histogram(cell, tuple(_column_name(*ends) for ends in bins), layers)
    return found


def _columns(spread: Spread) -> list[tuple[int, int]]:
    """All bins from the lowest to the highest; empty ones too, so that gaps show."""
    columns = [spread.histogram[0][:2]]
    while columns[-1][1] < spread.histogram[-1].high:
        columns.append(bin_of(columns[-1][1] + 1))
    return columns


def _column_name(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}–{high}"


def _heights(spread: Spread, columns: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    updates = {bin[:2]: bin.updates for bin in spread.histogram}
    return tuple(updates.get(ends, 0) for ends in columns)
