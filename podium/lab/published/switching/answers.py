"""The answers, each with whether its target was met, and what may not be concluded from them.

Numbers link to the row of a table that has them, and those rows to their records.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from podium.lab.published.switching.clock import Timing
from podium.lab.published.switching.design import (
    ALL_REDUCE,
    ASYNC,
    ASYNC_FP16,
    BALANCED,
    BALANCED_SMALL,
    SMALL,
    SWITCH,
    SWITCH_FP16,
    SYNC_EVERY,
    TIMED_FOR,
)
from podium.lab.published.switching.moments import LATER, Ablation, Chance, chances
from podium.lab.published.switching.tables import Line, Panel
from podium.lab.published.switching.text import part, signed
from podium.lab.report.format import ABSENT, plain, probability
from podium.lab.report.links import INTERVALS, place, to
from podium.lab.stats.statistics import ALPHA, Mean
from podium.lab.study.subsets import origin

TIME, POINTS, POINT = 0.6, 0.3, 1.0
"""The targets: a switch ends in this part of all-reduce's time and this many points below at most; DiLoCo one point."""


CODE = "../../podium/lab/published/switching"
"""Where the study's own numbers are set, as its page links to it."""


def row_of(panel: Panel, arm: str) -> str:
    """The place of an arm's row; of the setting's sizes where no table has the arm."""
    if panel.switches:
        return place(panel.setting, arm)
    return place("rounds", panel.setting, arm) if rounds(panel) else size_of(panel.setting)


def size_of(setting: str) -> str:
    """The place of a setting's row in the table of sizes."""
    return place("sizes", setting)


def moments_of(one: Ablation) -> str:
    """The place of a setting's row in the table of moments."""
    return place("moments", one.setting)


def answer_switch(panel: Panel, timed: Sequence[Timing] = ()) -> str:
    found = [line for line in (panel.line(SWITCH.name), panel.line(SWITCH_FP16.name)) if line is not None]
    start = panel.line(ASYNC_FP16.name)
    said = f"**{panel.title}.** Targets: [{TIME:g} of all-reduce's time, {POINTS:g} points below it at "
    said += f"most]({CODE}/answers.py). " + " ".join(_verdict(panel, line) for line in found)
    if start is not None and start.time is not None:
        said += f" {to('Asynchronous from the start', row_of(panel, start.arm))}: time {part(start.time)}, accuracy "
        said += f"{signed(start.gap)} points."
    base = panel.line(ALL_REDUCE.name)
    if base is not None and base.setbacks:
        count = to(f"{len(base.setbacks)} of {len(base.accuracies)} runs", place("setbacks", panel.setting, base.arm))
        said += f" {count} of all-reduce itself met a setback, so here medians say more than means."
    return said + _other_baselines([one for one in timed if TIMED_FOR[one.setting] == panel.setting])


def _other_baselines(timed: Sequence[Timing]) -> str:
    """What the targets' all-reduce lacks, and what is left of the switch's gain where it has it, by the timings."""
    told = [_other_baseline(one) for one in timed]
    if not any(told):
        return ""
    said = (
        " The all-reduce of these ratios lacks two things: its gradients leave in one bucket, so no exchange overlaps "
    )
    said += "the backward pass, and its workers have equal parts although one is slower. Timed with each "
    return said + f"({to('short runs', place('where the time goes'))}): " + "; ".join(filter(None, told)) + "."


def _other_baseline(one: Timing) -> str:
    ms = one.step_ms
    overlap = one.ratio(SMALL.name, ASYNC.name, SMALL.name)
    if overlap is None or not {ALL_REDUCE.name, BALANCED.name, BALANCED_SMALL.name} <= ms.keys():
        return ""
    base, even, both = (ms[arm.name] for arm in (ALL_REDUCE, BALANCED, BALANCED_SMALL))
    where = f"{one.title}, a switch takes {plain(overlap)} of all-reduce's time with small buckets on both sides, "
    where += f"and all-reduce with parts by speed (`equal-finish`) {plain(even / base)} of it without a switch "
    return where + f"({plain(base)} to {plain(even)} ms a step, {plain(both)} with small buckets)"


def _verdict(panel: Panel, line: Line) -> str:
    assert line.time is not None
    assert line.gap is not None
    name = to(f"`{line.arm}`", row_of(panel, line.arm))
    text = f"{name}: time {part(line.time)} ({_met(line.time, TIME, below=True)}), accuracy "
    middle = f"{statistics.median(line.gaps):+.2f}".replace("-", "−")
    text += f"{signed(line.gap)} points ({_met(line.gap, -POINTS, below=False)}; median {middle})"
    if line.time_equal is not None and line.time_equal != line.time:
        text += f"; against all-reduce with the same codec: time {part(line.time_equal)} "
        text += f"({_met(line.time_equal, TIME, below=True)}), accuracy {signed(line.gap_equal)} points"
        text += f" ({_met(line.gap_equal, -POINTS, below=False)})" if line.gap_equal is not None else ""
    return text + "."


def _met(mean: Mean, bound: float, *, below: bool) -> str:
    """Whether the mean keeps to the bound, and whether the whole interval does."""
    good = mean.mean <= bound if below else mean.mean >= bound
    if mean.low is None or mean.high is None:
        sure = False
    else:
        sure = (mean.high <= bound or mean.low > bound) if below else (mean.low >= bound or mean.high < bound)
    return ("met" if good else "missed") + ("" if sure else ", not settled by these seeds")


def answer_moments(kept: Sequence[Ablation]) -> list[str]:
    """One sentence per setting; p-values are Holm's over all of them together."""
    found = chances([pairs for one in kept for pairs in (one.accuracies, one.losses, one.later)])
    said = []
    for i, one in enumerate(kept):
        of_accuracy, of_loss, of_later = found[3 * i : 3 * i + 3]
        text = f"**Moments at the switch, {one.title}.** Kept minus dropped, "
        text += f"{to(f'{one.accuracy.n} seeds', moments_of(one))}: final accuracy "
        text += f"{signed(one.accuracy)} points ({_detected(of_accuracy)})"
        if one.loss is not None:
            text += f", training loss over the epoch after the switch {signed(one.loss)} ({_detected(of_loss)})"
        if one.loss_later is not None:
            text += f", over the {LATER} epochs that follow {signed(one.loss_later)} ({_detected(of_later)})"
        said.append(text + ".")
    return said


def _detected(chance: Chance | None) -> str:
    if chance is None:
        return "too few pairs to say"
    word = "detectable" if chance.p_holm < ALPHA else "not detectable"
    return f"{word}: p {probability(chance.p)} alone, {probability(chance.p_holm)} after Holm's correction"


def rounds(panel: Panel) -> list[Line]:
    return [line for line in panel.lines if line.arm.startswith("diloco")]


def best_round(panel: Panel) -> Line:
    """The arm that went on with all seeds; the most accurate where only one seed was run."""
    return max(rounds(panel), key=lambda line: (line.tried, line.accuracy.mean if line.accuracy else 0.0))


def answer_diloco(panel: Panel) -> str:
    best, base = best_round(panel), panel.line(ALL_REDUCE.name)
    assert best.gap is not None
    assert base is not None
    rarer = f"1/{(base.exchanges or 0) / best.exchanges:.0f}" if best.exchanges else ABSENT
    row = row_of(panel, best.arm)
    which = to(f"H = {SYNC_EVERY}, {panel.facts['config']['workers']} equal workers", row)
    return (
        f"**DiLoCo, {which}.** Target: within one point at a fiftieth of the exchanges. The best outer step tried "
        f"({to(f'`{best.arm}`', row)}: rate, momentum): {signed(best.gap)} "
        f"points ({_met(best.gap, -POINT, below=False)}) with {best.exchanges} exchanges against {base.exchanges} "
        f"({rarer}), {plain(best.bytes_ratio, 2)} of the bytes, {part(best.time)} of the time."
    )


def limits(found: Sequence[Panel], timed: Sequence[Timing]) -> str:
    said = [
        f"Means over seeds with [95 % t intervals]({INTERVALS}), each of its line alone. *Not settled* means that the "
        "interval reaches over the target.",
        "Virtual time says what the described machines would take, computing and network, and nothing of real ones' "
        "noise. Validation is left out.",
    ]
    said += [_sampling(panel) for panel in found if panel.line(ALL_REDUCE.name)]
    if timed:
        said.append(
            "How much a switch saves depends on the ratio of computing to network: see "
            "[Where the time goes](#where-the-time-goes). Only the straggler's computing is won, which dividing steps "
            "by speed wins too, without stale gradients; the network's part is the same before and after. Accuracy "
            "with steps divided by speed was not measured: sums of gradients are the same to rounding, but BatchNorm "
            "then sees other parts of a batch."
        )
    if any(panel.facts["config"]["device"] == "cuda" for panel in found):
        said.append(
            "Runs on a GPU do not repeat bit by bit: two runs with the same seed may switch an epoch apart. Pairs of "
            "such runs are paired in their samples, not in their rounding."
        )
    if any(rounds(panel) for panel in found):
        said.append(
            "DiLoCo's outer step was chosen by the first seed's accuracy, which favours it there; the other seeds were "
            "not looked at before. All settings tried are in the table."
        )
    return "What may not be concluded:\n\n" + "\n".join(f"- {line}" for line in said)


def _sampling(panel: Panel) -> str:
    facts, base = panel.facts, panel.line(ALL_REDUCE.name)
    assert base is not None
    assert base.accuracy is not None
    p = min(1.0, base.accuracy.mean / 100)
    error = 196 * math.sqrt(p * (1 - p) / facts["test"])
    size = to(f"{facts['train']:,} training images, {facts['test']:,} test images", size_of(panel.setting))
    row = row_of(panel, base.arm)
    text = f"{panel.title}: {size}, {to(f'{base.accuracy.n} seeds', row)}. One accuracy is uncertain by "
    text += f"{to(f'±{plain(error, 2)} points', row)} from the test images alone"
    if base.accuracy.n < 10 and error > POINTS:
        text += f", so a difference of {POINTS:g} points cannot be told from luck"
    source = origin(facts["config"]["task"], facts["train"], facts["test"])
    return f"{text}. The images: {to(source, size_of(panel.setting))}." if source else f"{text}."
