"""Page and figure on disk, from `rates.jsonl` alone."""

from __future__ import annotations

import importlib
from pathlib import Path

from podium.errors import ConfigError, MissingExtra
from podium.lab.published.rates.markdown import page
from podium.lab.published.rates.rows import open_store
from podium.lab.published.rates.svg import figure
from podium.lab.published.rates.tables import tabulate
from podium.lab.study.store import write_whole


def draw(out: Path) -> None:
    """Make the page and the figure from `rates.jsonl` alone."""
    require_drawing()
    rows = open_store(out).rows()
    panels = tabulate(rows)
    if not panels:
        raise ConfigError(f"rates: {out / 'rates.jsonl'} must hold a finished run with dense, got {len(rows)} rows")
    write_whole(out / "rates.svg", figure(panels))
    write_whole(out / "rates.md", page(panels, rows))


def require_drawing() -> None:
    """Find out about missing packages before hours of runs, not after."""
    for module in ("scipy.stats", "matplotlib.figure"):
        try:
            importlib.import_module(module)
        except ImportError:
            raise MissingExtra(module.partition(".")[0], "study", "the study of rates") from None
