"""Rate against accuracy: what each codec costs in accuracy for the bytes that it saves.

    rates.jsonl    one row per run, appended as runs end; all else is made from it
    rates.md       the answer, its limits, the tables
    rates.svg      the figure: bytes against accuracy, one panel per task

Each run is a process of its own on one core, several at a time: what is measured are bytes and accuracy, not time.
Workers live in virtual time, so that bytes are those of a cluster whose nodes share nothing. A run that diverged is a
result and stays; one that failed for another reason is tried again when the study is asked for again.

*Ratio* is bytes sent by all workers over bytes sent by all workers with `dense`, with the same task and seed. It holds
for this number of workers: wires that are gathered go to everybody, so their ratio grows with the number of workers,
while wires that are summed keep theirs.
"""

from __future__ import annotations

from podium.lab.published.rates.design import CODECS, PAIRS, QUICK, Cell, Rates, Workload
from podium.lab.published.rates.markdown import answer, page
from podium.lab.published.rates.one import train_one
from podium.lab.published.rates.output import draw
from podium.lab.published.rates.rows import failure, is_final, open_store
from podium.lab.published.rates.running import run
from podium.lab.published.rates.svg import figure, place_names
from podium.lab.published.rates.tables import Line, Panel, tabulate

__all__ = [
    "CODECS",
    "PAIRS",
    "QUICK",
    "Cell",
    "Line",
    "Panel",
    "Rates",
    "Workload",
    "answer",
    "draw",
    "failure",
    "figure",
    "is_final",
    "open_store",
    "page",
    "place_names",
    "run",
    "tabulate",
    "train_one",
]
