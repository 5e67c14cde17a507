"""The page as Markdown: the answer, its limits, the tables, how to make it again.

Rows of tables link to their lines of `rates.jsonl`; numbers in sentences link to those rows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from podium.lab.published.rates.design import QUICK, TITLES
from podium.lab.published.rates.tables import POINT, Line, Panel, task_names
from podium.lab.report.format import ABSENT, plain, spread
from podium.lab.report.links import INTERVALS, Records, mark, place, to
from podium.lab.stats.statistics import Mean
from podium.lab.study.rows import deciding_rows, finished
from podium.lab.study.store import Row
from podium.lab.study.subsets import origin

FULL_SETS = {"mnist-lenet5": 60_000, "cifar10-resnet20": 50_000}
"""Training images of the whole data sets: with fewer, accuracies are not those of the literature."""


def page(panels: Sequence[Panel], rows: Sequence[Row]) -> str:
    """The page as Markdown: the answer, its limits, the figure, the tables, how to make it again."""
    records = Records("rates.jsonl", rows)
    parts = ["# What codecs cost in accuracy for the bytes they save", answer(panels), _limits(panels)]
    parts += ["![Bytes sent against accuracy, one panel per task](rates.svg)", _LEGEND]
    parts += [_table(panel, rows, records) for panel in panels]
    parts += filter(None, [_worth(panels, rows, records), _failures(rows, records), _unequal(rows, records)])
    parts += [_sizes(panels, records), _again(panels, rows, records)]
    return "\n\n".join(parts) + "\n"


def answer(panels: Sequence[Panel]) -> str:
    """Which codecs are close to dense and at what ratio, and which are not: a sentence for all, then one per task."""
    return "\n\n".join([_cheapest(panels), *map(_verdict, panels)])


def _cheapest(panels: Sequence[Panel]) -> str:
    """The codec that sends least among those close to dense on every task; by its largest ratio."""
    where = "on every task" if len(panels) > 1 else f"on {panels[0].title}"
    found: dict[str, list[tuple[Panel, Line]]] = {}
    for panel in panels:
        for line in panel.lines[1:]:
            if line.close and line.ratio is not None:
                found.setdefault(line.codec, []).append((panel, line))
    everywhere = {codec: places for codec, places in found.items() if len(places) == len(panels)}
    if not everywhere:
        return f"**No codec stays within one point of dense {where}.**"
    best = min(everywhere, key=lambda codec: max(line.ratio or 0.0 for _, line in everywhere[codec]))
    told = [
        f"{plain(line.ratio)} ({panel.title}, {to(f'{_signed(line.gap)} points', _row(panel, line))})"
        for panel, line in everywhere[best]
    ]
    lead = f"Within one point of dense accuracy {where}, by the mean over seeds, `{best}` sends least: "
    return f"**{lead}{' and '.join(told)} of dense's bytes.**{_doubt(best, everywhere)}"


def _doubt(best: str, everywhere: Mapping[str, Sequence[tuple[Panel, Line]]]) -> str:
    """Where the interval does not bear the mean out, and which codec's intervals do."""
    open_on = [panel.title for panel, line in everywhere[best] if not line.settled]
    if not open_on:
        return ""
    text = f" These seeds do not settle that: on {' and '.join(open_on)} its interval reaches more than a point below."
    sure = [codec for codec, places in everywhere.items() if all(line.settled for _, line in places)]
    if not sure:
        return text + " No codec's interval stays above that line everywhere."
    return text + f" Intervals that stay above that line everywhere: {_join([f'`{codec}`' for codec in sure])}."


def _verdict(panel: Panel) -> str:
    others = sorted(panel.lines[1:], key=lambda line: line.ratio if line.ratio is not None else math.inf)
    close = [_placed(panel, line) for line in others if line.close]
    below = [_placed(panel, line) for line in others if line.gap is not None and line.gap.mean < -POINT]
    failed = [f"{_named(panel, line)} ({line.failed} of {line.tried} seeds)" for line in others if line.failed]
    dense = to(_percent(panel.dense.accuracy), _row(panel, panel.dense))
    text = f"*{panel.title}*, dense {dense}. Within one point (ratio, points above or below "
    text += f"dense): {_join(close)}. Further below: {_join(below)}."
    return f"{text} Failed to train: {_join(failed)}." if failed else text


def _row(panel: Panel, line: Line) -> str:
    """The place of a codec's row."""
    return place(panel.task, line.codec)


def _size(panel: Panel) -> str:
    """The place of a task's row in the table of sizes."""
    return place("sizes", panel.task)


def _named(panel: Panel, line: Line) -> str:
    return to(f"`{line.codec}`", _row(panel, line))


def _placed(panel: Panel, line: Line) -> str:
    """Where a codec lies; with a question mark where that is not settled."""
    assert line.gap is not None
    gap = f"{round(line.gap.mean, 1) + 0.0:+.1f}".replace("-", "−")
    return f"{_named(panel, line)} ({plain(line.ratio, 2)}, {gap}{'' if line.settled else '?'})"


_LEGEND = (
    f"Points are means over seeds, bars [95 % t intervals]({INTERVALS}), cut at the frame. Hollow points have no error "
    "feedback. Accuracy is spaced by "
    "the logarithm of the error, so that both a tenth of a point at the top and half the test set at the bottom show."
)


def _limits(panels: Sequence[Panel]) -> str:
    seeds = max(line.tried for panel in panels for line in panel.lines)
    workers = panels[0].facts["workers"]
    others = max(len(panel.lines) for panel in panels) - 1
    tried, size = to(f"{seeds} seeds", _row(panels[0], panels[0].dense)), _size(panels[0])
    said = [
        "A question mark: the interval of the difference reaches over the line of one point, so these seeds do not "
        "settle on which side of it the codec lies.",
        f"{tried} show large differences only. Each interval is of its codec alone; among "
        f"{to(str(others), place(panels[0].title))} of them, one in twenty misses by chance.",
        "All codecs use the learning rate and the schedule that suit dense. A codec that does badly here may do better "
        "with its own.",
        f"Ratios hold for {to(f'{workers} workers', size)}. Gathered wires reach every other worker, so with p workers "
        f"their ratio is `p/2` times that of one wire ({to(f'{workers / 2:g} here', size)}); summed wires have the "
        "same ratio with any number.",
        "Ratios count all that workers send: also the first parameters and buffers such as BatchNorm's statistics, "
        "which no codec packs. Bytes are not time: whether fewer make a run faster depends on the network.",
    ]
    said += filter(None, map(_sampling, panels))
    return "What may not be concluded:\n\n" + "\n".join(f"- {line}" for line in said)


def _sampling(panel: Panel) -> str:
    """How small the data are, and what that does to one accuracy."""
    facts, mean = panel.facts, panel.dense.accuracy
    assert mean is not None
    p = min(1.0, mean.mean / 100)
    error = 196 * math.sqrt(p * (1 - p) / facts["test"])
    test = to(f"{facts['test']:,} test images", _size(panel))
    text = f"{panel.title}: {test} leave an accuracy uncertain by ±{plain(error, 2)} points, "
    text += "the same images for all codecs."
    whole = FULL_SETS.get(panel.task)
    if whole is not None and facts["train"] < whole:
        amount = to(f"{facts['train']:,} images for {facts['epochs']} epochs", _size(panel))
        text += f" It was trained on {amount}; the whole set has {whole:,}. "
        text += "So it is not to be compared with published accuracies."
    source = origin(panel.task, facts["train"], facts["test"])
    return f"{text} The images: {to(source, _size(panel))}." if source else text


def _table(panel: Panel, all_rows: Sequence[Row], records: Records) -> str:
    head = ["codec", "feedback", "wires are", "ratio", "accuracy, %", "minus dense, points", "seeds", "records"]
    ways = {"sum": "summed", "gather": "gathered"}
    rows = [
        [
            f"`{line.codec}`",
            line.feedback,
            ways.get(line.reduction, line.reduction),
            plain(line.ratio) if line.ratio != 1 else "1",
            _percent(line.accuracy, unit="") if line.accuracy else "failed",
            ABSENT if line.codec == "dense" else _signed(line.gap),
            f"{line.finished} of {line.tried}" if line.failed else f"{line.finished}",
            mark(_row(panel, line)) + records.links(_runs(all_rows, panel, [line.codec])),
        ]
        for line in panel.lines
    ]
    text = f"*Ratio* and *minus dense* hold each run against that of {_named(panel, panel.dense)} with the same seed. "
    text += f"*Records* are lines of {records.whole('`rates.jsonl`')}, one per run."
    return f"## {panel.title}\n\n{text}\n\n" + _markdown(head, rows, left=3)


def _runs(rows: Sequence[Row], panel: Panel, codecs: Sequence[str]) -> list[Row]:
    """The rows of these codecs that count, failures among them."""
    mine = deciding_rows([row for row in rows if row["task"] == panel.task])
    return [row for row in mine if row["cell"] in codecs]


def _worth(panels: Sequence[Panel], all_rows: Sequence[Row], records: Records) -> str:
    rows = [
        [p.title, f"`{on}`", f"`{off}`", _signed(gap), records.links(finished(_runs(all_rows, p, [on, off])))]
        for p in panels
        for on, off, gap in p.feedback
    ]
    if not rows:
        return ""
    head = ["task", "with feedback", "without", "with minus without, points", "records"]
    text = "What error feedback is worth, paired by seed, where both trained:"
    return f"## Error feedback\n\n{text}\n\n" + _markdown(head, rows, left=3)


def _failures(rows: Sequence[Row], records: Records) -> str:
    """All of them, also of a task that no panel shows because dense itself did not train."""
    last = [row for task in task_names(rows) for row in deciding_rows([row for row in rows if row["task"] == task])]
    said = [
        f"- {TITLES.get(row['task'], row['task'])}, `{row['cell']}`, seed {row['seed']}: {row['error']} "
        f"({records.link('record', row)})"
        for row in last
        if row["status"] == "failed"
    ]
    return "## Runs that failed\n\n" + "\n".join(said) if said else ""


def _unequal(rows: Sequence[Row], records: Records) -> str:
    """Replicas of a synchronous run must end equal; where they did not, the numbers are of the first worker's."""
    bad = [row for row in rows if row["status"] == "finished" and not row["replicas_equal"]]
    said = [
        f"- {TITLES.get(row['task'], row['task'])}, `{row['cell']}`, seed {row['seed']} ({records.link('record', row)})"
        for row in bad
    ]
    return "## Runs whose replicas did not end equal\n\n" + "\n".join(said) if said else ""


def _sizes(panels: Sequence[Panel], records: Records) -> str:
    head = ["task", "parameters", "training images", "test images", "epochs", "steps", "global batch", "workers"]
    head.append("records")
    names = ("parameters", "train", "test", "epochs", "steps", "batch_size", "workers")
    rows = [
        [
            panel.title,
            *(f"{panel.facts[name]:,}" for name in names),
            mark(_size(panel)) + records.links([panel.facts]),
        ]
        for panel in panels
    ]
    return "## Sizes\n\n" + _markdown(head, rows, left=1)


def _again(panels: Sequence[Panel], rows: Sequence[Row], records: Records) -> str:
    done = [row for row in rows if row["status"] == "finished"]
    text = (
        f"{records.whole(f'{len(done)} runs')}, several at a time: "
        f"{'; '.join(_where(panel, done) for panel in panels)}. The workers of a "
    )
    text += "run are simulated: their gradients are real, the network is not. The tasks' files are in folders of "
    text += "DIR, `mnist` and `cifar10`. A study that was cut short goes on when asked for again; `--draw` only makes "
    text += "this page again from `rates.jsonl`."
    return f"## Make it again\n\n```\n{_commands(panels)}\n```\n\n{text}"


def _where(panel: Panel, done: Sequence[Row]) -> str:
    facts, walls = panel.facts, [row["wall_s"] for row in done if row["task"] == panel.task]
    where = {"cuda": "one GPU", "cpu": "a CPU core each"}.get(facts["device"], facts["device"])
    used = ", ".join(f"{name} {facts['versions'][name]}" for name in ("python", "torch"))
    return f"{panel.title} on {where} ({used}), half of the runs took less than {statistics.median(walls):,.0f} s each"


def _commands(panels: Sequence[Panel]) -> str:
    """One command for all tasks, or one for each where devices differ."""
    if {panel.task for panel in panels} <= {load.task for load in QUICK.workloads}:
        return "python studies/rates.py --quick"
    start = "python studies/rates.py --data-dir DIR --jobs N"
    devices = {panel.facts["device"] for panel in panels}
    if len(devices) == 1:
        return f"{start} --device {devices.pop()}"
    return "\n".join(f"{start} --device {panel.facts['device']} --task {panel.task}" for panel in panels)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """A table; all but the first columns are set to the right."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *rows])


def _percent(mean: Mean | None, unit: str = " %") -> str:
    return ABSENT if mean is None else spread(mean.mean, mean.low, mean.high) + unit


def _signed(mean: Mean | None) -> str:
    """A difference, with its sign."""
    if mean is None:
        return ABSENT
    text = spread(mean.mean, mean.low, mean.high)
    if not text.partition(" ")[0].strip("-0."):  # rounds to zero, which has no sign
        return text.lstrip("-")
    return f"+{text}" if mean.mean > 0 else text.replace("-", "−")


def _join(parts: Sequence[str]) -> str:
    return ", ".join(parts) if parts else "none"
