"""The page as Markdown: the answers, their limits, the tables, how to make it again.

Rows of tables link to their lines of `switching.jsonl`; numbers in sentences link to those rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from podium.lab.published.switching.answers import (
    CODE,
    POINT,
    answer_diloco,
    answer_moments,
    answer_switch,
    best_round,
    limits,
    moments_of,
    rounds,
    row_of,
    size_of,
)
from podium.lab.published.switching.clock import COMPARED, Timing, timings
from podium.lab.published.switching.design import (
    ALL_REDUCE,
    ALL_REDUCE_FP16,
    ASYNC_FP16,
    DROPPED_FP16,
    SMALL_FP16,
    SWITCH,
    SWITCH_FP16,
    SYNC_EVERY,
    TIMED_FOR,
    TITLES,
)
from podium.lab.published.switching.moments import LATER, Ablation, ablations
from podium.lab.published.switching.tables import HIGH, LOW, SLACK, Line, Panel, of_setting, panels, setting_names
from podium.lab.published.switching.text import interval, listed, part, reached, signed, table
from podium.lab.report.format import ABSENT, between, plain, switch_cost
from podium.lab.report.links import Records, mark, place, to
from podium.lab.study.rows import RuleLine, deciding_rows
from podium.lab.study.store import Row


def page(rows: Sequence[Row]) -> str:
    """All of it, from the rows alone."""
    found, traces = panels(rows), _Traces(rows)
    with_switch = [panel for panel in found if panel.switches]
    with_rounds = [panel for panel in found if rounds(panel)]
    timed, kept = timings(rows, found), ablations(rows)
    answers = [
        *(answer_switch(panel, timed) for panel in with_switch),
        *answer_moments(kept),
        *map(answer_diloco, with_rounds),
    ]
    parts = ["# When to leave all-reduce", _introduction([*with_switch, *found][0], traces)]
    parts += ["\n".join(f"- {text}" for text in answers)]
    parts += [limits(found, timed), "![Accuracy over virtual time, one panel per setting](switching.svg)", _LEGEND]
    parts += [_switching(panel, timed, traces) for panel in with_switch]
    parts += filter(None, [_fired(with_switch, traces), _others(with_switch, traces), _timed(timed, traces)])
    parts += filter(None, [_moments(kept, traces)])
    parts += [_diloco(panel, traces) for panel in with_rounds]
    parts += filter(None, [_setbacks(found, traces), _failures(rows, traces), _sizes(rows, traces)])
    parts += [_again(rows, traces)]
    return "\n\n".join(parts) + "\n"


class _Traces(Records):
    """Links to lines of `switching.jsonl`, found by setting and arm."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__("switching.jsonl", rows)
        self._by_setting = {name: of_setting(rows, name) for name in setting_names(rows)}

    def runs(self, setting: str, *arms: str) -> list[Row]:
        """One row per arm and seed, failures among them."""
        return [row for row in self._by_setting.get(setting, ()) if row["cell"] in arms]

    def of(self, setting: str, *arms: str, name: str = "") -> str:
        """The column `records` of a table's row; `name` is that of the place it makes."""
        return (mark(name) if name else "") + self.links(self.runs(setting, *arms))


def _introduction(panel: Panel, traces: _Traces) -> str:
    workers = traces.link(f"{panel.facts['config']['workers']} workers", panel.facts)
    return (
        "Strategy-Switch (Provatas et al., 2025) trains with all-reduce until the loss has settled and then with an "
        f"asynchronous parameter server, which does not wait for slow workers. Here: {workers}, one of them at a "
        "quarter of the others' speed, links of 100 Mbit/s, one server beside each worker. Gradients are real; the "
        "clock is virtual. *Records* in the tables are lines of "
        f"{traces.whole('`switching.jsonl`')}, one per run."
    )


_LEGEND = (
    "A line is a run, a point its end, a dotted line a switch. The lower part of the axis is cut off. Runs with "
    "dropped moments are left out."
)


def _switching(panel: Panel, timed: Sequence[Timing], traces: _Traces) -> str:
    head = ["arm", "accuracy, %", "minus all-reduce, points", "time", "reaches it at", "nearly at"]
    head += ["time, same codec", "points, same codec", "staleness", "bytes", "by seed, %", "records"]
    rows = [
        [*_switching_row(line), traces.of(panel.setting, line.arm, name=row_of(panel, line.arm))]
        for line in panel.lines
    ]
    extra = _small_buckets(panel, timed, traces)
    if extra:
        rows.insert(1 + (panel.line(ALL_REDUCE_FP16.name) is not None), extra)
    text = (
        "*Time* and *bytes* are parts of all-reduce's with the same seed. *Reaches it at*: the first validation with "
    )
    text += "at least the accuracy that all-reduce ends with, by the median over the seeds that got there, in parts of "
    text += f"all-reduce's whole time. *Nearly at*: the same for [{SLACK:g} points less]({CODE}/tables.py). *Same "
    text += "codec*: fp16 against all-reduce fp16. *Staleness*: mean over updates."
    if extra:
        steps = to(f"{_of(timed, panel).steps} steps", place("where the time goes"))
        text += f" The line marked * was only timed, over {steps}: buckets do not change results."
    return f"## {panel.title}\n\n{text}\n\n" + table(head, rows, left=1)


def _switching_row(line: Line) -> list[str]:
    n = len(line.accuracies)
    base = line.arm == ALL_REDUCE.name
    own = base or line.arm == ALL_REDUCE_FP16.name
    return [
        f"`{line.arm}`" + (f" ({n} of {line.tried} seeds)" if n < line.tried else ""),
        interval(line.accuracy),
        ABSENT if base else signed(line.gap),
        "1" if base else part(line.time),
        reached(line.reached, n),
        reached(line.nearly, n),
        ABSENT if own or line.time_equal == line.time else part(line.time_equal),
        ABSENT if own or line.time_equal == line.time else signed(line.gap_equal),
        plain(line.staleness),
        "1" if base else plain(line.bytes_ratio),
        listed(line.accuracies, 2),
    ]


def _of(timed: Sequence[Timing], panel: Panel) -> Timing:
    return next(one for one in timed if TIMED_FOR[one.setting] == panel.setting)


def _small_buckets(panel: Panel, timed: Sequence[Timing], traces: _Traces) -> list[str]:
    mine = [one for one in timed if TIMED_FOR[one.setting] == panel.setting][:1]
    if not mine or not {SMALL_FP16.name, ALL_REDUCE.name, ALL_REDUCE_FP16.name} <= mine[0].step_ms.keys():
        return []
    ms = mine[0].step_ms
    time, equal = ms[SMALL_FP16.name] / ms[ALL_REDUCE.name], ms[SMALL_FP16.name] / ms[ALL_REDUCE_FP16.name]
    name = f"`{SMALL_FP16.name}` *"
    used = traces.of(mine[0].setting, SMALL_FP16.name, ALL_REDUCE.name, ALL_REDUCE_FP16.name)
    return [name, ABSENT, ABSENT, plain(time), ABSENT, ABSENT, plain(equal), *[ABSENT] * 4, used]


def _fired(found: Sequence[Panel], traces: _Traces) -> str:
    """When each switch happened, why, and what it cost."""
    if not found:
        return ""
    head = ["setting", "arm", "epochs, by seed", "part of the budget", "change", "threshold", "why", "dearest switch"]
    head.append("records")
    rows = []
    for panel in found:
        for arm in dict.fromkeys(one.arm for one in panel.switches):
            mine = [one for one in panel.switches if one.arm == arm]
            words = dict.fromkeys(one.why.partition(":")[0] for one in mine)
            dearest = max(mine, key=lambda one: one.cost_ms["total"])
            rows.append(
                [
                    panel.title,
                    f"`{arm}`",
                    listed([one.epoch for one in mine], 1),
                    between([round(one.share, 3) for one in mine]),
                    between([one.value for one in mine if one.value is not None]),
                    plain(mine[0].threshold),
                    "; ".join(words),
                    switch_cost({"cost_ms": dearest.cost_ms}),
                    traces.of(panel.setting, arm),
                ]
            )
    text = "The rule is `plateau` with [its defaults](../../podium/strategies/triggers/plateau.py): over the last 6 "
    text += "epochs the mean training loss changed by at most 0.05 of the first loss per epoch, and has fallen to 0.8 "
    text += "of it. *Change* is its value when it fired. A switch costs virtual milliseconds: every server takes its "
    text += "part of the state from the worker on its own node."
    return f"## When and why it switched\n\n{text}\n\n" + table(head, rows, left=2)


def _others(found: Sequence[Panel], traces: _Traces) -> str:
    """When other rules would have fired, and when such a run would have ended."""
    head = ["setting", "rule", "fired at epoch", "in runs", "after the switch", "would have ended at"]
    head.append("records")
    used = (SWITCH_FP16.name, ALL_REDUCE_FP16.name, ASYNC_FP16.name)
    rows = []
    for panel in found:
        for rule in panel.rules.get(SWITCH_FP16.name, ()):
            if not rule.in_force:
                records = traces.of(panel.setting, *(used if rule.epochs else used[:1]))
                rows.append([panel.title, f"`{rule.rule}`", *_rule_cells(rule, panel), records])
    if not rows:
        return ""
    text = (
        f"Rules that were evaluated beside the one in force, over the runs of `{SWITCH_FP16.name}`. *Would have ended "
    )
    text += (
        "at*: the time, in parts of dense all-reduce's, of a run that switches there, put together from the measured "
    )
    text += "times of all-reduce fp16 and async fp16. A rule that fired after the switch saw the losses of "
    text += "the asynchronous run, so it might have fired elsewhere under all-reduce."
    return f"## When other rules would have fired\n\n{text}\n\n" + table(head, rows, left=2)


def _rule_cells(rule: RuleLine, panel: Panel) -> list[str]:
    if not rule.measured:
        return ["not measured", ABSENT, ABSENT, ABSENT]
    if not rule.epochs:
        return ["never", f"0 of {rule.runs}", ABSENT, ABSENT]
    at = statistics.median(rule.epochs)
    before, after = panel.line(ALL_REDUCE_FP16.name), panel.line(ASYNC_FP16.name)
    ended = None
    if before is not None and after is not None and before.time is not None and after.time is not None:
        share = at / panel.facts["config"]["epochs"]
        ended = share * before.time.mean + (1 - share) * after.time.mean
    fired = between([round(epoch, 1) for epoch in rule.epochs])
    return [fired, f"{len(rule.epochs)} of {rule.runs}", f"{rule.late}", plain(ended, 2)]


def _timed(timed: Sequence[Timing], traces: _Traces) -> str:
    if not timed:
        return ""
    arms = [*dict.fromkeys(arm for one in timed for arm in one.step_ms)]
    first = [traces.runs(one.setting, *one.step_ms)[0] for one in timed]
    titles = [traces.link(one.title, row) for one, row in zip(timed, first, strict=True)]

    def records(arms: Sequence[str]) -> str:
        return traces.links(row for one in timed for row in traces.runs(one.setting, *arms))

    rows = [[f"`{arm}`", *(plain(one.step_ms.get(arm)) for one in timed), records([arm])] for arm in arms]
    shares = to(", ".join(f"{plain(one.share, 2)}" for one in timed), place("When and why it switched"))
    ratios = [[name, *(plain(one.ratio(*which), 2) for one in timed), records(which)] for name, *which in COMPARED]
    steps = ", ".join(traces.link(str(one.steps), row) for one, row in zip(timed, first, strict=True))
    text = f"Short runs for the clock alone: {steps} global steps, one seed. Milliseconds a sample are those of a "
    text += "worker with speed 1: from the task's operations and [the default node's](../../podium/launch/clusters/"
    text += (
        "description.py) rate, or as the run's cluster file has them. Of `equal-finish` the second half of the steps "
    )
    text += "counts: in the first, workers learn how to divide a step."
    more = f"Time of a run that switches where the runs above did (at {shares} of the budget), over that of all-reduce:"
    why = (
        "All-reduce takes the straggler's computing and then the network's time; buckets small enough to leave while "
        "the backward pass goes on hide part of the latter, and fp16 halves it. An asynchronous worker takes its own "
        "computing and the network's time, and nobody waits for the straggler. So the win is the straggler's "
        f"computing: large where computing is large ({titles[0]}), smaller on faster nodes, and small on MNIST, "
        "whose steps are almost all network."
    )
    by_arm = table(["milliseconds per global step", *titles, "records"], rows, left=1)
    switching = table(["a run that switches", *titles, "records"], ratios, left=1)
    return f"## Where the time goes\n\n{text}\n\n{by_arm}\n\n{more}\n\n{switching}\n\n{why}"


def _moments(kept: Sequence[Ablation], traces: _Traces) -> str:
    if not kept:
        return ""
    head = ["setting", "kept, % by seed", "dropped, % by seed", "kept minus dropped, points"]
    head += ["loss after, kept", "loss after, dropped", "kept minus dropped", "loss later, kept minus dropped"]
    head.append("records")
    rows = [
        [
            one.title,
            listed([kept for _, kept, _ in one.accuracies], 2),
            listed([dropped for *_, dropped in one.accuracies], 2),
            signed(one.accuracy),
            listed([kept for _, kept, _ in one.losses], 3),
            listed([dropped for *_, dropped in one.losses], 3),
            signed(one.loss),
            signed(one.loss_later),
            traces.of(one.setting, SWITCH_FP16.name, DROPPED_FP16.name, name=moments_of(one)),
        ]
        for one in kept
    ]
    text = (
        f"`{SWITCH_FP16.name}` with the optimizer's moments kept at the switch and with `keep_moments=false`, paired "
    )
    text += "by seed. *Loss after*: mean training loss over one epoch's worth of samples after the switch, of seeds "
    text += (
        f"whose two runs switched at the same place. *Loss later*: of the [{LATER} whole epochs]({CODE}/moments.py) "
    )
    text += "that follow; it was "
    text += "added after a look at the curves, so its p-value is too favourable. One command: "
    text += "`python studies/switching.py --ablation`."
    for one in kept:
        if one.apart:
            seeds = to(f"seed {' and '.join(map(str, one.apart))}", moments_of(one))
            text += f" {one.title}: the two runs of {seeds} switched at other places."
    return f"## Moments at the switch\n\n{text}\n\n" + table(head, rows, left=1)


def _diloco(panel: Panel, traces: _Traces) -> str:
    head = ["arm", "accuracy, %", "minus all-reduce, points", "exchanges", "bytes", "time", "by seed, %", "records"]
    arms = [line for line in (panel.line(ALL_REDUCE.name), *rounds(panel)) if line is not None]
    rows = [
        [
            f"`{line.arm}`",
            interval(line.accuracy),
            ABSENT if line.arm == ALL_REDUCE.name else signed(line.gap),
            f"{line.exchanges:,}" if line.exchanges is not None else ABSENT,
            plain(line.bytes_ratio),
            part(line.time),
            listed(line.accuracies, 2),
            traces.of(panel.setting, line.arm, name="" if panel.switches else row_of(panel, line.arm)),
        ]
        for line in arms
    ]
    config = panel.facts["config"]
    sizes = f"global batch {config['batch_size']} over {config['workers']} workers, {config['epochs']} epochs"
    text = f"`diloco RATE, MOMENTUM` of the outer step, {SYNC_EVERY} local steps between two of them, "
    text += f"{to(sizes, size_of(panel.setting))}: the inner rate and schedule are all-reduce's. *Exchanges* are steps "
    text += "with one, counted in the records; the mean that closes a last, shorter round comes on top. Every outer "
    text += "step was tried with the first seed, the most accurate with the others."
    missed = best_round(panel).gap
    if missed is not None and missed.mean < -POINT:
        text += _short_ofrounds(panel)
    return f"## DiLoCo, {panel.title}\n\n{text}\n\n" + table(head, rows, left=1)


def _short_ofrounds(panel: Panel) -> str:
    best, base = best_round(panel), panel.line(ALL_REDUCE.name)
    assert base is not None
    ours, theirs = row_of(panel, best.arm), row_of(panel, base.arm)
    return (
        f" The target is missed. DiLoCo's training loss ends at {to(plain(best.train_loss, 2), ours)}, all-reduce's at "
        f"{to(plain(base.train_loss, 2), theirs)}: it is behind in training. A likely reason, not tested, is that "
        f"there are only {to(f'{best.exchanges} rounds', ours)}. Longer runs and other inner rates are not in this "
        "study."
    )


def _setbacks(found: Sequence[Panel], traces: _Traces) -> str:
    head = ["setting", "arm", "runs", "seed: epoch", "records"]
    rows = [
        [
            panel.title,
            f"`{line.arm}`",
            f"{len(line.setbacks)} of {len(line.accuracies)}",
            _places(line),
            traces.of(panel.setting, line.arm, name=place("setbacks", panel.setting, line.arm)),
        ]
        for panel in found
        for line in panel.lines
        if line.setbacks
    ]
    if not rows:
        return ""
    text = f"Runs whose training loss over an epoch rose above [{HIGH:g} of the first epoch's after it had been below "
    text += f"{LOW:g} of it]({CODE}/tables.py). In runs that switch this follows the switch: gradients that are some "
    text += f"{_staleness(found)} are too "
    text += "much for the rate at which all-reduce had settled, with moments kept or dropped, and the loss needs "
    text += "epochs to come back. All-reduce itself is not safe at this rate either. A run that meets a setback near "
    text += "its end has a low final accuracy, which is why means over these seeds are so uncertain."
    return f"## Setbacks\n\n{text}\n\n" + table(head, rows, left=2)


def _staleness(found: Sequence[Panel]) -> str:
    """How old gradients are in runs that switch and meet a setback."""
    for panel in found:
        for line in panel.lines:
            if line.setbacks and line.staleness and line.arm in (SWITCH.name, SWITCH_FP16.name, DROPPED_FP16.name):
                return to(f"{line.staleness:.0f} updates old", row_of(panel, line.arm))
    return "updates old"


def _places(line: Line) -> str:
    return ", ".join(f"{seed}: {epoch:.0f}" for seed, epoch in line.setbacks)


def _failures(rows: Sequence[Row], traces: _Traces) -> str:
    last = [row for name in setting_names(rows) for row in deciding_rows([r for r in rows if r["setting"] == name])]
    said = [
        f"- {TITLES.get(row['setting'], row['setting'])}, `{row['cell']}`, seed {row['seed']}: {row['error']} "
        f"({traces.link('record', row)})"
        for row in last
        if row["status"] == "failed"
    ]
    lost = [row for row in last if row["status"] == "finished" and any(row["audit"].values())]
    said += [
        f"- {row['setting']}, `{row['cell']}`, seed {row['seed']}: samples {row['audit']} "
        f"({traces.link('record', row)})"
        for row in lost
    ]
    if said:
        return "## Runs that failed or did not use every sample once\n\n" + "\n".join(said)
    runs = traces.whole(f"{len(last)} runs")
    return f"In all {runs} every sample was used once per epoch, by the audit of their records."


def _sizes(rows: Sequence[Row], traces: _Traces) -> str:
    head = ["setting", "training images", "test images", "epochs", "global batch", "workers", "task options"]
    head.append("records")
    body = []
    for name in setting_names(rows):
        done = [row for row in rows if row["setting"] == name and row["status"] == "finished"]
        if name in TIMED_FOR or not done:
            continue
        config = done[0]["config"]
        sizes = [done[0]["train"], done[0]["test"], config["epochs"], config["batch_size"], config["workers"]]
        options = ", ".join(f"{option}={value}" for option, value in config["task_options"].items()) or ABSENT
        records = mark(size_of(name)) + traces.links(done[:1])
        body.append([TITLES.get(name, name), *(f"{size:,}" for size in sizes), options, records])
    return "## Sizes\n\n" + table(head, body, left=1)


def _again(rows: Sequence[Row], traces: _Traces) -> str:
    done = [row for row in rows if row["status"] == "finished"]
    where = []
    for device in dict.fromkeys(row["config"]["device"] for row in done):
        mine = [row for row in done if row["config"]["device"] == device]
        known = [", ".join(f"{name} {row['versions'][name]}" for name in ("python", "torch")) for row in mine]
        used = "; ".join(
            version if known.count(version) == len(mine) else f"{version}: {known.count(version)}"
            for version in dict.fromkeys(known)
        )
        place = {"cuda": "one GPU", "cpu": "a CPU core each"}.get(device, device)
        took = statistics.median(row["wall_s"] for row in mine)
        where.append(f"{len(mine)} on {place} ({used}), half of them in less than {took:,.0f} s each")
    commands = "\n".join(_commands(done))
    text = (
        f"{traces.whole(f'{len(done)} runs')}, several at a time: {'; '.join(where)}. The tasks' files are in folders "
        "of DIR, `mnist` and "
    )
    text += (
        "`cifar10`. A study that was cut short goes on when asked for again; `--report-only` makes this page and the "
    )
    text += "figure again from `switching.jsonl`, which holds every number used here. "
    text += (
        f"`{DROPPED_FP16.name}` is `strategy-switch:pull=fp16,keep_moments=false` with `codec=fp16`; each row has its "
    )
    text += "own strategy, codec and cluster file."
    return f"## Make it again\n\n```\n{commands}\n```\n\n{text}"


def _commands(done: Sequence[Row]) -> list[str]:
    start = "python studies/switching.py"
    if {row["setting"] for row in done} == {"digits"}:
        return [f"{start} --quick"]
    devices: dict[str, list[str]] = {}
    for name in setting_names(done):
        device = next(row["config"]["device"] for row in done if row["setting"] == name)
        devices.setdefault(device, []).append(f"--setting {name}")
    return [
        f"{start} --data-dir DIR --jobs N --device {device} {' '.join(settings)}"
        for device, settings in devices.items()
    ]
