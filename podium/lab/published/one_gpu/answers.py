"""The answer in words, and what may not be concluded from it. Names of arms link to their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from podium.lab.published.one_gpu.tables import GROUPS, Line, Panel, Race, races
from podium.lab.report.format import plain
from podium.lab.report.links import place, to
from podium.lab.study.store import Row
from podium.records.window import ENERGY_WINDOW_S, LABEL

Link = Callable[[str, int], str]
"""Makes a text lead to a line of the records."""

_BATCH = "../../podium/tasks/mnist.py"
_OTHERS = ("driver", "runtime", "one after another")
_NAMES = {
    "driver": "the driver's best",
    "runtime": "the runtime's best (Ray, its steps not captured)",
    "one after another": "one after another",
}


def answer(panels: Sequence[Panel]) -> str:
    """One sentence for all tasks."""
    told = [said for group in _OTHERS if (said := _over_all(panels, group))]
    if not told:
        return "**No two levels have been measured on the same task yet.**"
    by_task = ", ".join(to(panel.title, place(panel.where)) for panel in panels)
    lead = f"**Of the levels at which many trainings share one device, the framework is {_listed(told)}.**"
    return f"{lead} (By task: {by_task}.)"


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


def answers(panels: Sequence[Panel], rows: Sequence[Row], link: Link) -> list[str]:
    """One per task in steady state, then one per race of whole sweeps."""
    return [
        *filter(None, (_steady(panel, link) for panel in panels)),
        *filter(None, (_raced(race, link) for race in races(rows))),
    ]


def _steady(panel: Panel, link: Link) -> str:
    ours = panel.best(GROUPS["framework"])
    if ours is None:
        return ""
    text = f"**{panel.where}.** {link(f'`{ours.arm}`', ours.line)} takes {plain(ours.us)} µs per model-step"
    for group in _OTHERS:
        theirs = panel.best(GROUPS[group])
        if theirs is not None:
            name = link(f"`{theirs.arm}`", theirs.line)
            text += f"; {_NAMES[group]}, {name}, {plain(theirs.us)} ({plain(gain_over(panel, group), 2)}×)"
    return text + "." + _energy(panel, link) + _busy(ours, link)


def _energy(panel: Panel, link: Link) -> str:
    ours = panel.thriftiest(GROUPS["framework"])
    if ours is None or ours.figures.j is None:
        return ""
    parts = []
    for group in _OTHERS:
        theirs = panel.thriftiest(GROUPS[group])
        if theirs is not None and theirs.figures.j is not None:
            name = link(f"`{theirs.arm}`", theirs.line)
            times = f"{plain(theirs.figures.j / ours.figures.j, 2)}× of that with {name}"
            parts.append(times + (" (a hint)" if theirs.figures.j_is_hint else ""))
    hint = " (a hint)" if ours.figures.j_is_hint else ""
    told = f" Energy: {plain(ours.figures.j)} J per trial with {link(f'`{ours.arm}`', ours.line)}{hint}"
    return told + (f"; {', '.join(parts)}." if parts else ".")


def _busy(line: Line, link: Link) -> str:
    if line.figures.sm is None or line.figures.dram is None:
        return ""
    sm, dram = plain(line.figures.sm, 2), plain(line.figures.dram, 2)
    busy = link(f"{sm} % of the multiprocessors and {dram} % of the memory's bandwidth", line.line)
    return f" It keeps {busy} busy."


def _raced(race: Race, link: Link) -> str:
    done = [runner for runner in race.runners if runner.seconds]
    if len(done) < 2:
        return ""
    first, last = done[0], done[-1]
    what = "k-fold" if race.part == "folds" else "search with ASHA"
    text = f"**{race.title}, {what}, {race.trials} trials from end to end.** "
    times = ", ".join(f"{link(f'`{runner.arm}`', runner.line)} {plain(runner.seconds)} s" for runner in done)
    scores = [runner.best["mean"] for runner in (first, last) if runner.best]
    same = f"; best {race.metric} {' and '.join(plain(score) for score in scores)} (first, last)" if scores else ""
    return f"{text}{times}{same}."


def limits(rows: Sequence[Row], panels: Sequence[Panel]) -> str:
    sessions = [row for row in rows if row["kind"] == "session"]
    devices = sorted({str((row["device"] or {}).get("name") or row["device"]["type"]) for row in sessions})
    said = [
        f"One machine ({', '.join(devices)}): another board has other ratios of launching, computing and memory.",
        "Microseconds per model-step are of the steady state: start-up, evaluation and the last, half-empty rows are "
        "left out and are in the makespans. Which arm wins a short sweep may be another one.",
        f"One profile of models: small ones, [batch 64]({_BATCH}), that leave most of the device idle when trained "
        "alone. Models that fill it gain little or nothing.",
        f"Energy is {LABEL}: the board's counter, whoever uses it, without host and power supply. These are not MLPerf "
        f"results. Windows shorter than [{ENERGY_WINDOW_S:.0f} s](../../podium/records/window.py) are marked ~: a "
        "hint, not a result.",
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
