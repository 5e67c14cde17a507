"""Page and figures on disk, from the records alone."""

from __future__ import annotations

import importlib
from pathlib import Path

from podium.errors import ConfigError, MissingExtra
from podium.lab.published.one_gpu.figures import draw_bars, draw_curves, find_bars, find_curves
from podium.lab.published.one_gpu.markdown import page
from podium.lab.published.one_gpu.rows import numbered, open_store
from podium.lab.report.html import write_html
from podium.lab.study.store import write_whole


def draw(out: Path) -> list[Path]:
    """Make page (`.md`, `.html`) and figures (times and, where there is energy, joules) beside `NAME.jsonl`."""
    require_drawing()
    rows = open_store(out).rows()
    if all(row["kind"] == "session" for row in rows):
        raise ConfigError(f"one_gpu: {out} must hold a measurement, got {len(rows)} lines")
    found = numbered(rows)
    made = {out.with_suffix(".md"): page(rows, out.stem)}
    if spots := find_curves(found):
        made[out.with_name(f"{out.stem}-times.svg")] = draw_curves(spots)
    if bars := find_bars(found):
        made[out.with_name(f"{out.stem}-joules.svg")] = draw_bars(bars)
    for path, text in made.items():
        write_whole(path, text)
    return [*made, write_html(out.with_suffix(".md"))]


def require_drawing() -> None:
    """Find out about a missing package before minutes of measuring, not after."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        raise MissingExtra("matplotlib", "study", "the study of one GPU") from None
