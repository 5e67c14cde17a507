"""The data of the figures, from rows alone; `drawing` puts them on paper and on the screen. One file per kind."""

from __future__ import annotations

from podium.study.figures.bars import Bar, Bars, cost_bars, staleness_bars
from podium.study.figures.base import MOST_LAYERS, Line, Trace
from podium.study.figures.course import Course, Strip, balance_courses
from podium.study.figures.curves import AXES, Convergence, Curve, convergence, convergence_panels, energy_said
from podium.study.figures.histogram import Histogram, Layer, staleness_histograms
from podium.study.figures.interaction import Interaction, interactions
from podium.study.figures.items import timeline_items
from podium.study.figures.stack import WIDE, Panel, Stack, phase_stacks
from podium.study.figures.timeline import Timeline, timelines
from podium.study.figures.topology import Topology, topologies

__all__ = [
    "AXES",
    "MOST_LAYERS",
    "WIDE",
    "Bar",
    "Bars",
    "Convergence",
    "Course",
    "Curve",
    "Figure",
    "Histogram",
    "Interaction",
    "Layer",
    "Line",
    "Panel",
    "Stack",
    "Strip",
    "Timeline",
    "Topology",
    "Trace",
    "balance_courses",
    "convergence",
    "convergence_panels",
    "cost_bars",
    "energy_said",
    "interactions",
    "phase_stacks",
    "staleness_bars",
    "staleness_histograms",
    "timeline_items",
    "timelines",
    "topologies",
]

Figure = Convergence | Bars | Histogram | Stack | Course | Interaction | Timeline | Topology
