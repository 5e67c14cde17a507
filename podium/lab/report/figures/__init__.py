"""The data of the figures, computed from rows; `drawing` draws them. One file per kind."""

from __future__ import annotations

from podium.lab.report.figures.bars import Bar, Bars, cost_bars, staleness_bars
from podium.lab.report.figures.base import MOST_LAYERS, Line, Trace
from podium.lab.report.figures.course import Course, Strip, balance_courses
from podium.lab.report.figures.curves import AXES, Convergence, Curve, convergence, convergence_panels, energy_said
from podium.lab.report.figures.histogram import Histogram, Layer, staleness_histograms
from podium.lab.report.figures.interaction import Interaction, interactions
from podium.lab.report.figures.items import timeline_items
from podium.lab.report.figures.stack import WIDE, Panel, Stack, phase_stacks
from podium.lab.report.figures.timeline import Timeline, timelines
from podium.lab.report.figures.topology import Topology, topologies
from podium.lab.report.figures.tradeoff import Tradeoff, tradeoffs

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
    "Tradeoff",
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
    "tradeoffs",
]

Figure = Convergence | Bars | Histogram | Stack | Course | Interaction | Timeline | Topology | Tradeoff
