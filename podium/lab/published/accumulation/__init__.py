"""Gradient accumulation on slow links: an exchange every batch against one every 4 batches, and models of the time.

    accumulation.jsonl    rows of three kinds, appended as they come to be; all else is made from them
        study             what was asked for, versions, hardware
        profile           what a pass takes on one core of this machine, measured; virtual time is made of it
        run               one run: `part` says whether virtual, real (on shaped links) or predicted (virtual, for real)
    accumulation.md       the answer, its limits, tables, models
    accumulation.svg      the time of an epoch by cell

ResNet-50 and EfficientNet-B0 on 64 × 64 images of 200 classes; batch 32, 64, 100 on each of 1, 2, 3 nodes; 5 seeds.
The machine at hand has two cores, so runs of the design are in virtual time: the models' own parameters travel, and
compute time comes from the profile. A few cells are run for real to see how far that can be trusted.

Every run goes through the same number of batches on each node, `epoch_s` is what 100,000 images (TinyImageNet's
training set) take at its pace.
"""

from __future__ import annotations

from podium.lab.published.accumulation.design import CORE, SMALL, Cell, Network, Study, design
from podium.lab.published.accumulation.markdown import page
from podium.lab.published.accumulation.one import run_one
from podium.lab.published.accumulation.output import draw, require_drawing
from podium.lab.published.accumulation.profile import Profile, measure_profile
from podium.lab.published.accumulation.rows import open_store
from podium.lab.published.accumulation.running import run_real, run_virtual
from podium.lab.published.accumulation.svg import figure

__all__ = [
    "CORE",
    "SMALL",
    "Cell",
    "Network",
    "Profile",
    "Study",
    "design",
    "draw",
    "figure",
    "measure_profile",
    "open_store",
    "page",
    "require_drawing",
    "run_one",
    "run_real",
    "run_virtual",
]
