"""Page and figure on disk, from `accumulation.jsonl` alone."""

from __future__ import annotations

import importlib
from pathlib import Path

from podium.errors import ConfigError, MissingExtra
from podium.lab.published.accumulation.markdown import page, titles_of
from podium.lab.published.accumulation.rows import open_store
from podium.lab.published.accumulation.svg import figure
from podium.lab.published.accumulation.tables import panels
from podium.lab.report.html import write_html
from podium.lab.study.store import write_whole


def draw(out: Path) -> list[Path]:
    """Make the page and the figure; returns their paths."""
    require_drawing()
    store = open_store(out)
    rows = store.rows()
    found = panels(rows)
    if not found:
        raise ConfigError(
            f"accumulation: {store.results} must hold finished virtual runs with an exchange every batch and every so "
            f"many, got {len(rows)} rows"
        )
    image, text = out / "accumulation.svg", out / "accumulation.md"
    write_whole(image, figure(found, titles_of(rows)))
    write_whole(text, page(rows, found))
    return [text, image, write_html(text)]


def require_drawing() -> None:
    """Find out about missing packages before minutes of runs, not after."""
    for module in ("scipy.stats", "statsmodels.regression.linear_model", "matplotlib.figure"):
        try:
            importlib.import_module(module)
        except ImportError:
            raise MissingExtra(module.partition(".")[0], "study", "the study of accumulation") from None
