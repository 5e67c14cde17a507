"""Data types that several kinds of figures share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from podium.lab.study.results import number


@dataclass(frozen=True)
class Line:
    """One run."""

    seed: int
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class Trace:
    """One worker's values, or a value over all workers; None in steps without it."""

    name: str
    x: tuple[int, ...]
    """Steps."""
    y: tuple[float | None, ...]


MOST_LAYERS = 8
"""More workers would share colours, so they are drawn as one."""


def scaled(value: Any, scale: float) -> float | None:
    known = number(value)
    return None if known is None else known * scale
