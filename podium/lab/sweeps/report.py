"""The report of a sweep: one HTML file that needs no network, no script and no second file.

It is made only from the files in the sweep's folder, and the same folder gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from podium.lab.report import format as written
from podium.lab.report.templating import environment
from podium.lab.sweeps.drawing import STATUS_COLOURS, standalone, to_svg
from podium.lab.sweeps.figures import Figure, curve_figure, score_figure, timeline_figure
from podium.lab.sweeps.reproduce import command, python_call
from podium.lab.sweeps.table import format_statuses, headings, values
from podium.records.disk import write_atomically
from podium.records.manifest import read_manifest
from podium.records.window import LABEL
from podium.sweeps.formats import format_mean, format_number, format_options, format_p, format_value
from podium.sweeps.ranking import count_pairs
from podium.sweeps.result import Sweep

FIGURE_NAMES = ("scores", "curves", "slots")
MOST_POINTS = 200
MOST_TRIALS = 500
"""The most rows of the report's tables; `points.csv` and `results.jsonl` have all."""

FIGURES = {
    "energy_j": ("energy", "J"),
    "energy_over_idle_j": ("energy over idle", "J"),
    "power_w": ("mean power", "W"),
    "power_over_idle_w": ("mean power over idle", "W"),
    "memory_bytes": ("device memory at its peak", "bytes"),
    "utilisation": ("time with any kernel running", "%"),
    "sm_util": ("multiprocessors busy", "%"),
    "sm_occupancy": ("occupancy in warps", "%"),
    "any_tensor_util": ("tensor cores busy", "%"),
    "dram_bw_util": ("memory bandwidth used", "%"),
    "temperature_before_c": ("temperature before", "°C"),
    "temperature_after_c": ("temperature after", "°C"),
    "host_memory_bytes": ("host memory at its peak", "bytes"),
    "cpu_s": ("processor time", "s"),
}
"""Fields of a reading: their descriptions and units."""


def write_report(sweep: Sweep) -> Path:
    """Write `report.html` and, where matplotlib is installed, `figures/*.svg` into the sweep's folder."""
    folder = Path(sweep.folder)
    figures = draw(sweep)
    for name, (_, svg) in figures.items():
        if svg is not None:
            write_atomically(folder / "figures" / f"{name}.svg", standalone(svg))
    write_atomically(folder / "report.html", render(sweep, read_manifest(folder), figures))
    return folder / "report.html"


def draw(sweep: Sweep) -> dict[str, tuple[Figure, str | None]]:
    """All figures with data, each with its SVG (None without matplotlib)."""
    made = (score_figure(sweep), curve_figure(sweep), timeline_figure(sweep.folder))
    named = zip(FIGURE_NAMES, made, strict=True)
    return {name: (figure, to_svg(figure)) for name, figure in named if figure is not None}


def render(sweep: Sweep, manifest: Mapping[str, Any], figures: Mapping[str, tuple[Figure, str | None]]) -> str:
    said, caution = sweep.answer.split("\n", 1)
    config = manifest["config"]
    return (
        _environment()
        .get_template("sweep.html.j2")
        .render(
            sweep=sweep,
            config=config,
            manifest=manifest,
            answer=said,
            caution=caution,
            headings=headings(sweep)[1:],
            lines=[values(sweep, place, point) for place, point in enumerate(sweep.points[:MOST_POINTS], 1)],
            figures={name: _shown(*figures[name]) if name in figures else None for name in FIGURE_NAMES},
            legend=_legend(figures),
            drawn=not figures or any(svg is not None for _, svg in figures.values()),
            rivals=[_rival(sweep, place) for place in range(min(len(sweep.rivals), MOST_POINTS))],
            trials=[_trial(outcome, sweep.metric) for outcome in sweep.outcomes[:MOST_TRIALS]],
            all_pairs=count_pairs(sweep.points),
            unmeasured=_unmeasured(sweep),
            measured=_measured(sweep),
            absent=_absent(sweep),
            joules_per_trial=_joules_per_trial(sweep),
            label=LABEL,
            refused=[probe for probe in sweep.probes if not probe["fuses"]],
            looped=[probe for probe in sweep.probes if probe["fuses"] and probe["looped"]],
            options=format_options(config["options"]) if config["options"] else "the task's defaults",
            command=command(config),
            python_call=python_call(config),
        )
    )


def _shown(figure: Figure, svg: str | None) -> list[dict[str, Any]]:
    return [{"name": figure.name, "svg": Markup(svg) if svg else None, "json": None}]  # matplotlib escapes the labels


def _legend(figures: Mapping[str, tuple[Figure, str | None]]) -> list[tuple[str, str]]:
    from podium.lab.report.drawing import COLOURS
    from podium.lab.report.figures import Convergence

    found = figures.get("curves", (None, None))[0]
    if not isinstance(found, Convergence):
        return []
    return [(curve.cell, COLOURS[place % len(COLOURS)]) for place, curve in enumerate(found.curves)]


def _rival(sweep: Sweep, place: int) -> dict[str, Any]:
    rival = sweep.rivals[place]
    point = next(point for point in sweep.points if point.number == rival.point)
    verdict = "one pair: not tested" if rival.p is None else "worse" if rival.is_distinct else "no difference detected"
    verdict = "better in these pairs, with fewer trials" if rival.is_better else verdict
    facts = {"name": point.name, "mean": format_mean(point), "pairs": rival.pairs, "gap": format_number(rival.gap)}
    return {**facts, "p": format_p(rival.p).removeprefix("= "), "verdict": verdict}


def _trial(outcome: Any, metric: str) -> dict[str, Any]:
    evaluation = outcome.evaluation
    # A trial may have failed because it lacks the metric.
    value = None if evaluation is None else evaluation.loss if metric == "loss" else evaluation.metrics.get(metric)
    return {
        "outcome": outcome,
        "options": format_options(outcome.trial.options),
        "value": written.ABSENT if value is None else format_number(value),
        "seconds": format_number(outcome.seconds, 3),
        "colour": STATUS_COLOURS[outcome.status],
    }


def _measured(sweep: Sweep) -> list[tuple[str, str]]:
    """(description, value with unit) of every measured field of the reading."""
    reading = sweep.reading or {}
    lines = []
    for field, (what, unit) in FIGURES.items():
        if reading.get(field) is not None:
            hint = field.startswith(("energy", "power")) and reading["energy_is_short"]
            note = " (the window was shorter than a minute: a hint, not a result)" if hint else ""
            lines.append((what, _with_unit(reading[field], unit) + note))
    return lines


def _unmeasured(sweep: Sweep) -> int:
    """How many trials were trained in sessions that were killed, which wrote no session record."""
    trained = sum(outcome.steps > 0 for outcome in sweep.outcomes)
    measured: int = sum(session["trained"] for session in sweep.sessions)
    return max(0, trained - measured)


def _joules_per_trial(sweep: Sweep) -> float | None:
    """Of the measured session; None without energy."""
    trained = [session["trained"] for session in sweep.sessions if session["trained"]]
    energy = (sweep.reading or {}).get("energy_j")
    return None if energy is None or not trained else float(energy) / trained[-1]


def _absent(sweep: Sweep) -> list[tuple[str, str]]:
    """(descriptions, reason) of the fields that were not measured."""
    found: dict[str, list[str]] = {}
    for field, why in (sweep.reading or {}).get("absent", {}).items():
        found.setdefault(why or "not measured", []).append(FIGURES.get(field, (field.replace("_", " "), ""))[0])
    return [(", ".join(names), why) for why, names in found.items()]


def _with_unit(value: float, unit: str) -> str:
    if unit == "bytes":
        return f"{written.plain(value / 2**20)} MiB"
    return f"{written.plain(float(value))} {unit}"


def _environment() -> Environment:
    found = environment()
    found.filters["plain"] = written.plain
    found.filters["told"] = format_value
    found.filters["statuses"] = format_statuses
    return found
