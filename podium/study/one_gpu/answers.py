"""The answer in words, and what may not be concluded from it."""

from __future__ import annotations

from collections.abc import Sequence

from podium.measure.window import ENERGY_WINDOW_S, LABEL
from podium.study.format import plain
from podium.study.one_gpu.tables import GROUPS, Line, Panel, Race, races
from podium.study.store import Row

_OTHERS = ("driver", "runtime", "one after another")
_NAMES = {"driver": "the driver's best", "runtime": "the runtime's best", "one after another": "one after another"}


def answer(panels: Sequence[Panel]) -> str:
    """One sentence for all tasks."""
    told = [said for group in _OTHERS if (said := _over_all(panels, group))]
    if not told:
        return "**No two levels have been measured on the same task yet.**"
    return f"**Of the levels at which many trainings share one device, the framework is {_listed(told)}.**"


def _over_all(panels: Sequence[Panel], group: str) -> str:
    ratios = sorted(gain for panel in panels if (gain := gain_over(panel, group)) is not None)
    if not ratios:
        return ""
    low, high = plain(ratios[0], 2), plain(ratios[-1], 2)
    times = f"{low}×" if low == high else f"{low} to {high}×"
    where = "" if len(ratios) > 1 else f" ({next(p.title for p in panels if gain_over(p, group) is not None)} only)"
    return f"{times} as fast as {_NAMES[group]}{where}"


def gain_over(panel: Panel, group: str) -> float | None:
    """How many times as fast the framework's best arm is as the best of this group; below 1 it is slower."""
    ours, theirs = panel.best(GROUPS["framework"]), panel.best(GROUPS[group])
    if ours is None or theirs is None or not ours.us or not theirs.us:
        return None
    return theirs.us / ours.us


def answers(panels: Sequence[Panel], rows: Sequence[Row]) -> list[str]:
    """One per task in steady state, then one per race of whole sweeps."""
    return [*filter(None, map(_steady, panels)), *filter(None, map(_raced, races(rows)))]


def _steady(panel: Panel) -> str:
    ours = panel.best(GROUPS["framework"])
    if ours is None:
        return ""
    text = f"**{panel.title}, {panel.trials} trials, {panel.precision}.** `{ours.arm}` takes {plain(ours.us)} µs per "
    text += "model-step"
    for group in _OTHERS:
        theirs = panel.best(GROUPS[group])
        if theirs is not None:
            text += f"; {_NAMES[group]}, `{theirs.arm}`, {plain(theirs.us)} ({plain(gain_over(panel, group), 2)}×)"
    return text + "." + _energy(panel) + _busy(ours)


def _energy(panel: Panel) -> str:
    ours = panel.thriftiest(GROUPS["framework"])
    if ours is None or ours.figures.j is None:
        return ""
    parts = []
    for group in _OTHERS:
        theirs = panel.thriftiest(GROUPS[group])
        if theirs is not None and theirs.figures.j is not None:
            times = f"{plain(theirs.figures.j / ours.figures.j, 2)}× of that with `{theirs.arm}`"
            parts.append(times + (" (a hint)" if theirs.figures.j_is_hint else ""))
    hint = " (a hint)" if ours.figures.j_is_hint else ""
    told = f" Energy: {plain(ours.figures.j)} J per trial with `{ours.arm}`{hint}"
    return told + (f"; {', '.join(parts)}." if parts else ".")


def _busy(line: Line) -> str:
    if line.figures.sm is None or line.figures.dram is None:
        return ""
    sm, dram = plain(line.figures.sm, 2), plain(line.figures.dram, 2)
    return f" It keeps {sm} % of the multiprocessors and {dram} % of the memory's bandwidth busy."


def _raced(race: Race) -> str:
    done = [runner for runner in race.runners if runner.seconds]
    if len(done) < 2:
        return ""
    first, last = done[0], done[-1]
    what = "k-fold" if race.part == "folds" else "search with ASHA"
    text = f"**{race.title}, {what}, {race.trials} trials from end to end.** `{first.arm}` {plain(first.seconds)} s"
    rest = ", ".join(f"`{runner.arm}` {plain(runner.seconds)} s" for runner in done[1:])
    scores = [runner.best["mean"] for runner in (first, last) if runner.best]
    same = f"; best {race.metric} {' and '.join(plain(score) for score in scores)} (first, last)" if scores else ""
    return f"{text}, {rest}{same}."


def limits(rows: Sequence[Row], panels: Sequence[Panel]) -> str:
    sessions = [row for row in rows if row["kind"] == "session"]
    devices = sorted({str((row["device"] or {}).get("name") or row["device"]["type"]) for row in sessions})
    said = [
        f"One machine ({', '.join(devices)}): another board has other ratios of launching, computing and memory.",
        "Microseconds per model-step are of the steady state: start-up, evaluation and the last, half-empty rows are "
        "left out and are in the makespans. Which arm wins a short sweep may be another one.",
        "One profile of models: small ones, batch 64, that leave most of the device idle when trained alone. Models "
        "that fill it gain little or nothing.",
        f"Energy is {LABEL}: the board's counter, whoever uses it, without host and power supply. These are not MLPerf "
        f"results. Windows shorter than {ENERGY_WINDOW_S:.0f} s are marked ~: a hint, not a result.",
        "Joules per trial are the window's divided by its model-steps, times the steps of ten epochs; no counter knows "
        "one trial. *Over idle* takes off what the board draws with a context and no work.",
        "Scores are of the images that were in the data folder, which may be a part of the whole set, and of short "
        "trainings: they show that executors train the same models, and are not comparable with published ones.",
        "Spread is over rounds of one run, one after the other: it says how steady a step is, not how runs differ.",
        "Processes, MPS and Ray run as many models at a time as there are host cores; their rows for more trials are "
        "that same measurement. Ray's actors step without a graph, as users' own code mostly does; `mps-graph` shows "
        "what capturing adds to processes.",
    ]
    if any(row["size"] == "small" for row in sessions):
        said.insert(0, "This page is of the small size, made on a CPU to see that it works: no GPU was involved.")
    if any(line.why for panel in panels for line in panel.lines):
        said.append("Arms that could not run are listed with their reason, and are no part of any comparison.")
    return "What may not be concluded:\n\n" + "\n".join(f"- {line}" for line in said)


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
