"""When to leave all-reduce: Strategy-Switch with a straggler, moments at the switch, and DiLoCo, in virtual time.

    switching.jsonl    one row per run, appended as runs end; all else is made from it
    switching.md       the answers, their limits, the tables
    switching.svg      the figure: accuracy over virtual time

Each run is a process of its own on one core, several at a time. Gradients are real, machines and network are described
and computed, so times are the same on whatever machine the study runs. A run that diverged is a result and stays; one
that failed for another reason is tried again when the study is asked for again.
"""

from __future__ import annotations

from podium.lab.published.switching.clock import timings
from podium.lab.published.switching.design import ABLATIONS, QUICK, Arm, Cell, Machines, Part, Setting, Study
from podium.lab.published.switching.markdown import page
from podium.lab.published.switching.moments import ablations, chances
from podium.lab.published.switching.one import train_one
from podium.lab.published.switching.output import draw, require_drawing
from podium.lab.published.switching.rows import failure, is_final, open_store
from podium.lab.published.switching.running import run
from podium.lab.published.switching.svg import figure
from podium.lab.published.switching.tables import panels, setback, time_to

__all__ = [
    "ABLATIONS",
    "QUICK",
    "Arm",
    "Cell",
    "Machines",
    "Part",
    "Setting",
    "Study",
    "ablations",
    "chances",
    "draw",
    "failure",
    "figure",
    "is_final",
    "open_store",
    "page",
    "panels",
    "require_drawing",
    "run",
    "setback",
    "time_to",
    "timings",
    "train_one",
]
