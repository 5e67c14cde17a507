"""Many trainings on one device at three levels: the driver (MPS), the runtime (Ray), the framework (fusion, branches).

    one-gpu.jsonl         one line per session, arm in a cell, choice of `auto`, whole sweep; all else is made from it
    one-gpu.md            the answer, its limits, the tables
    one-gpu-times.svg     microseconds per model-step over the number of trials
    one-gpu-joules.svg    joules per trial

Arms in a cell are timed by `podium.lab.bench.sweep`, whole sweeps are run by `podium.sweeps.sweep`, each in a process
of its own. What is on disk is not measured again.
"""

from __future__ import annotations

from podium.lab.published.one_gpu.design import PARTS, SIZES, Cell, Design, Key, design
from podium.lab.published.one_gpu.figures import draw_bars, draw_curves, find_bars, find_curves
from podium.lab.published.one_gpu.markdown import page
from podium.lab.published.one_gpu.output import draw, require_drawing
from podium.lab.published.one_gpu.rows import from_bench, numbered, open_store
from podium.lab.published.one_gpu.running import Ended, run, waiting
from podium.lab.published.one_gpu.tables import curves, judgements, main_panels, missing, panel, races

__all__ = [
    "PARTS",
    "SIZES",
    "Cell",
    "Design",
    "Ended",
    "Key",
    "curves",
    "design",
    "draw",
    "draw_bars",
    "draw_curves",
    "find_bars",
    "find_curves",
    "from_bench",
    "judgements",
    "main_panels",
    "missing",
    "numbered",
    "open_store",
    "page",
    "panel",
    "races",
    "require_drawing",
    "run",
    "waiting",
]
