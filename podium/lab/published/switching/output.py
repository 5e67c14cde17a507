"""Page and figure on disk, from `switching.jsonl` alone."""

from __future__ import annotations

import importlib
from pathlib import Path

from podium.errors import ConfigError, MissingExtra
from podium.lab.published.switching.markdown import page
from podium.lab.published.switching.rows import open_store
from podium.lab.published.switching.svg import figure
from podium.lab.published.switching.tables import panels
from podium.lab.study.store import write_whole


def draw(out: Path) -> None:
    """Make the page and the figure from `switching.jsonl` alone."""
    require_drawing()
    rows = open_store(out).rows()
    found = panels(rows)
    if not found:
        raise ConfigError(
            f"switching: {out / 'switching.jsonl'} must hold a finished run of all-reduce, got {len(rows)} rows"
        )
    write_whole(out / "switching.svg", figure(found, rows))
    write_whole(out / "switching.md", page(rows))


def require_drawing() -> None:
    """Find out about missing packages before hours of runs, not after."""
    for module in ("scipy.stats", "matplotlib.figure"):
        try:
            importlib.import_module(module)
        except ImportError:
            raise MissingExtra(module.partition(".")[0], "study", "the study of switching") from None
