"""The page as Markdown: the answer, its limits, design, tables, figures, how to make it again.

Every number stands in a line that links to the record it comes from.
"""

from __future__ import annotations

from collections.abc import Sequence

from podium.lab.published.one_gpu.answers import answer, answers, limits
from podium.lab.published.one_gpu.design import LEVELS, PARTS, Design, design
from podium.lab.published.one_gpu.figures import find_bars, find_curves
from podium.lab.published.one_gpu.rows import numbered
from podium.lab.published.one_gpu.tables import (
    Figures,
    Judgement,
    Line,
    Panel,
    Race,
    Runner,
    cells_of,
    judgements,
    main_panels,
    missing,
    panel,
    races,
    spent,
    spread,
)
from podium.lab.published.switching.text import table
from podium.lab.report.format import ABSENT, plain
from podium.lab.report.links import INTERVALS, Records, place, to
from podium.lab.study.store import Row


def page(rows: Sequence[Row], stem: str = "one-gpu") -> str:
    """All of it, from the records alone; `stem` is what the files beside it are called."""
    rows = numbered(rows)
    link = _Links(stem, rows)
    panels = main_panels(rows)
    parts = ["# Many trainings on one GPU: driver, runtime, framework", answer(panels)]
    parts += ["\n".join(f"- {text}" for text in answers(panels, rows, link)), limits(rows, panels), _design(rows, link)]
    parts += [_cell(one, link) for one in panels]
    parts += [_over_trials(rows, link, stem), _joules(rows, link, stem)]
    parts += [_others(rows, panels, link), _races(rows, link), _auto(judgements(rows), link)]
    parts += [_left_out(rows), _machines(rows, link), _again(rows, stem)]
    return "\n\n".join(filter(None, parts)) + "\n"


class _Links:
    """Points at a record's line."""

    def __init__(self, stem: str, rows: Sequence[Row]) -> None:
        self.stem, self.records = stem, Records(f"{stem}.jsonl", rows)

    def __call__(self, text: str, line: int) -> str:
        return f"[{text}]({self.stem}.jsonl#L{line})"


class _Reasons:
    """Letters for the reasons why figures of one table are absent."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}

    def __call__(self, text: str, why: str) -> str:
        """The text, or where there is none, a dash with the letter of its reason."""
        if text != ABSENT:
            return text
        letter = self.known.setdefault(why or "not measured", chr(ord("a") + len(self.known)))
        return f"{ABSENT} ({letter})"

    def told(self) -> str:
        return "".join(f"\n\n({letter}) {why}" for why, letter in self.known.items())


def _figure_cells(figures: Figures, reasons: _Reasons) -> list[str]:
    mark = "~" if figures.j_is_hint else ""
    gib = None if figures.memory_bytes is None else figures.memory_bytes / 2**30
    told = {
        "sm": plain(figures.sm, 2),
        "dram": plain(figures.dram, 2),
        "memory_bytes": plain(gib),
        "cores": plain(figures.cores, 2),
        "power_w": plain(figures.power_w),
        "j": ABSENT if figures.j is None else mark + plain(figures.j),
        "j_over_idle": ABSENT if figures.j_over_idle is None else mark + plain(figures.j_over_idle),
    }
    return [reasons(text, figures.absent.get(name, "")) for name, text in told.items()]


_FIGURE_HEAD = ["SM, %", "DRAM, %", "memory, GiB", "host cores", "W", "J per trial", "over idle"]


def _cell(one: Panel, link: _Links) -> str:
    reasons = _Reasons()
    head = ["arm", "level", "at a time", "µs per model-step", "± %", "× fused", *_FIGURE_HEAD, "start-up, s"]
    rows = [_cell_row(line, one, link, reasons) for line in one.lines]
    text = "The fastest first. *± %*: half of what lies between the slowest and the fastest round. *× fused*: over the "
    text += "best fused arm. *Memory* is the device's over what it held before. *~*: a window too short for energy."
    if one.steps is not None:
        text += f" A trial is one of ten epochs, {link(f'{one.steps:,} steps', one.lines[0].line)}."
    return f"## {one.where}\n\n{text}\n\n{table(head, rows, left=2)}{reasons.told()}"


def _cell_row(line: Line, one: Panel, link: _Links, reasons: _Reasons) -> list[str]:
    name = link(f"`{line.arm}`", line.line)
    if line.from_trials != one.trials:
        name += f", as at {line.from_trials}"
    half = spread(line)
    return [
        name,
        line.level,
        f"{line.width}" if line.width else ABSENT,
        reasons(plain(line.us), line.why),
        ABSENT if half is None else plain(100 * half, 2),
        plain(line.ratio),
        *_figure_cells(line.figures, reasons),
        reasons(plain(line.start_s, 2), line.why),
    ]


def _over_trials(rows: Sequence[Row], link: _Links, stem: str) -> str:
    """The first figure, and its numbers."""
    found = find_curves(rows)
    if not found:
        return ""
    parts = ["## Over the number of trials"]
    parts.append(f"![Microseconds per model-step over the number of trials, by arm]({stem}-times.svg)")
    parts.append("A hollow mark was not measured at that number, since the measurement would be the same one.")
    for one in found:
        counts = sorted({spot.trials for spots in one.arms.values() for spot in spots})
        lines = []
        for arm, spots in one.arms.items():
            by_count = {s.trials: link(plain(s.us), s.line) + ("" if s.measured else " ○") for s in spots}
            lines.append([f"`{arm}`", *(by_count.get(count, ABSENT) for count in counts)])
        first = {spot.trials: spot.line for spots in one.arms.values() for spot in spots if spot.measured}
        told = [link(f"{count} trials", first[count]) if count in first else f"{count} trials" for count in counts]
        head = [f"{one.title}, {one.precision}: µs per model-step", *told]
        parts.append(table(head, lines, left=1))
    return "\n\n".join(parts)


def _joules(rows: Sequence[Row], link: _Links, stem: str) -> str:
    """The second figure, and its numbers."""
    found = find_bars(rows)
    if not found:
        reasons = {line.figures.absent.get("j", "") for one in main_panels(rows) for line in one.timed}
        return f"## Joules per trial\n\nNo figure: {'; '.join(sorted(filter(None, reasons))) or 'nothing was read'}."
    text = "A bar is the board's energy for one trial of ten epochs, its black stroke the same over idle. Hatched bars "
    text += "come from windows too short for energy."
    told = [
        f"{one.title}: "
        + ", ".join(link(f"`{bar.arm}` {'~' * bar.is_hint}{plain(bar.j)}", bar.line) for bar in one.bars)
        for one in found
    ]
    image = f"![Joules per trial, by arm]({stem}-joules.svg)"
    return "\n\n".join(["## Joules per trial", image, text, "\n".join(f"- {line}" for line in told)])


def _others(rows: Sequence[Row], panels: Sequence[Panel], link: _Links) -> str:
    """Cells in another precision, which no figure shows."""
    shown = {(one.task, one.precision) for one in panels}
    found = [cell for cell in cells_of(rows) if (cell[0], cell[2]) not in shown]
    if not found:
        return ""
    reasons = _Reasons()
    head = ["cell", "arm", "µs per model-step", "× the same arm, other precision", *_FIGURE_HEAD]
    lines = []
    for cell in found:
        one = panel(rows, *cell)
        base = next((p for p in panels if p.task == one.task), None)
        other = {} if base is None or base.trials != one.trials else {line.arm: line.us for line in base.timed}
        for line in one.lines:
            before = other.get(line.arm)
            ratio = line.us / before if line.us and before else None
            name, time = link(f"`{line.arm}`", line.line), reasons(plain(line.us), line.why)
            lines.append([one.where, name, time, plain(ratio), *_figure_cells(line.figures, reasons)])
    return f"## Other precisions\n\n{table(head, lines, left=2)}{reasons.told()}"


def _races(rows: Sequence[Row], link: _Links) -> str:
    found = races(rows)
    if not found:
        return ""
    text = "Whole sweeps, each in a process of its own with empty caches of compiled kernels. *Makespan*: from the "
    text += "first trial's preparation to the last one's end, with probing, choosing, captures, compilations, starting "
    text += "processes and evaluation. *Best*: of the point that came out best, with half of its "
    text += f"[95 % interval]({INTERVALS}) over folds; the same trials, so differences between executors are rounding "
    text += "(in a search, also the order in which trials were judged)."
    return "\n\n".join(["## From end to end", text, *(_race(race, link) for race in found)])


def _race(race: Race, link: _Links) -> str:
    reasons = _Reasons()
    head = ["arm", "makespan, s", "× fused", "trials/s", f"best {race.metric}", "trials ended", *_FIGURE_HEAD]
    rows = [_race_row(runner, link, reasons) for runner in race.runners]
    name = "5 folds × 12 points" if race.part == "folds" and race.trials == 60 else f"{race.trials} trials"
    name = link(name, race.runners[0].line)
    lead = f"**{race.title}, {'k-fold' if race.part == 'folds' else 'search with ASHA'}, {name}**"
    refused = {why: runner.arm for runner in race.runners for why in runner.not_fused}
    said = "".join(f"\n\n`{arm}` could not fuse all trials: {why}" for why, arm in refused.items())
    return f"{lead}\n\n{table(head, rows, left=1)}{reasons.told()}{said}"


def _race_row(runner: Runner, link: _Links, reasons: _Reasons) -> list[str]:
    rate = runner.trials / runner.seconds if runner.seconds else None
    ended = ", ".join(f"{count} {status}" for status, count in runner.statuses.items())
    return [
        link(f"`{runner.arm}`", runner.line),
        reasons(plain(runner.seconds), runner.why),
        plain(runner.ratio),
        plain(rate),
        _best(runner),
        ended or ABSENT,
        *_figure_cells(runner.figures, reasons),
    ]


def _best(runner: Runner) -> str:
    best = runner.best
    if best is None:
        return ABSENT
    half = "" if best["low"] is None else f" ± {plain((best['high'] - best['low']) / 2, 2)}"
    return f"{plain(best['mean'], 4)}{half} ({best['name']})"


def _auto(found: Sequence[Judgement], link: _Links) -> str:
    if not found:
        return ""
    head = ["where", "`auto` chose", "fastest", "regret", "calibration, s"]
    rows = [
        [
            one.where,
            link(f"`{one.chosen}`", one.line),
            f"`{one.fastest}`",
            "not measured" if one.regret is None else f"{100 * one.regret:+.0f} %".replace("-", "−"),
            plain(one.calibration_s, 2),
        ]
        for one in found
    ]
    regrets = [one.regret for one in found if one.regret is not None]
    within = sum(regret <= 0.1 for regret in regrets)
    text = "*Regret*: how much longer the choice takes than the fastest arm measured there; in whole sweeps timing the "
    text += f"candidates counts. Within 10 % in {to(f'{within} of {len(regrets)}', place('What auto chose'))}."
    return f"## What `auto` chose\n\n{text}\n\n{table(head, rows, left=3)}"


# The study itself.


def _of_rows(rows: Sequence[Row]) -> Design:
    small = any(row["kind"] == "session" and row["size"] == "small" for row in rows)
    return design("small" if small else "full")


def _design(rows: Sequence[Row], link: _Links) -> str:
    session: Row = next((row for row in rows if row["kind"] == "session" and row["settings"]), {})
    settings: Row = session.get("settings", {})
    arms = "\n".join(
        f"- {level}: {', '.join(f'`{a}`' for a in _of_level(level))}" for level in dict.fromkeys(LEVELS.values())
    )
    text = "Every arm trains the same trials (seeds, samples, batches, precision; other rates), with the data on the "
    text += "device. `-graph` captures each process's step in a CUDA graph, `streams` has one graph with a branch per "
    text += "model, `fused` trains models as rows of one array in one graph, `fused-compiled` lets Inductor make its "
    text += "kernels."
    if settings:
        processes = link(f"{settings['most_processes']} processes", session["line"])
        rounds = link(f"{settings['rounds']} rounds of {settings['seconds']:g} s", session["line"])
        text += f" A time is the median of {rounds} at least (2 s for processes); power and utilisation are read in a "
        text += f"window behind them, of {settings['energy_s']:g} s for energy, of {settings['reading_s']:g} s "
        text += f"elsewhere in a task's main cell and of 1 s in others. At most {processes} run at a time."
    small = _of_rows(rows).size == "small"
    if not small:
        text += " Device time was limited to about [25 minutes](#design), so windows long enough for energy went "
        text += f"{_long_windows(rows, link)}, and some cells were left out; see *What was left out*."
    took = spent(rows)
    planned = design("small" if small else "core").estimates_s
    used = {part: link.records.links(row for row in rows if row.get("part") == part) for part in PARTS}
    lines = [
        [part, plain(planned[part], 3), plain(round(took[part], 1), 3), used[part]] for part in PARTS if used[part]
    ]
    spent_table = table(["part", "estimated, s", "took, s", "records"], lines, left=1)
    return f"## Design\n\n{text}\n\n{arms}\n\n{spent_table}"


def _long_windows(rows: Sequence[Row], link: _Links) -> str:
    """To which arms they went: those whose energy is a result."""
    found = {
        one.title: [link(f"`{line.arm}`", line.line) for line in one.lines if not line.figures.j_is_hint]
        for one in main_panels(rows)
    }
    told = "; ".join(f"{', '.join(arms)} ({title})" for title, arms in found.items() if arms)
    return f"only to {told}" if told else "to no arm"


def _of_level(level: str) -> list[str]:
    return [arm for arm, name in LEVELS.items() if name == level]


def _left_out(rows: Sequence[Row]) -> str:
    gone = missing(_of_rows(rows), rows)
    if not gone:
        return ""
    by_cell: dict[str, list[str]] = {}
    for cell in gone:
        part, task, trials, precision, arm = cell.key
        by_cell.setdefault(f"`{part}: {task}, {trials} trials, {precision}`", []).append(f"`{arm}`")
    seconds = sum(cell.estimate_s for cell in gone)
    text = f"Not measured for lack of device time: [{len(gone)} arms in cells, some {seconds / 60:.0f} minutes]"
    text += "(../../podium/lab/published/one_gpu/design.py). "
    text += "`--size full` measures them."
    return f"## What was left out\n\n{text}\n\n" + "\n".join(
        f"- {name}: {', '.join(arms)}" for name, arms in by_cell.items()
    )


def _machines(rows: Sequence[Row], link: _Links) -> str:
    head = ["session", "device", "driver", "power limit, W", "idle, W", "°C", "host", "versions", "commit"]
    lines = []
    for row in rows:
        if row["kind"] == "session":
            device, host = row["device"] or {}, row["hardware"] or {}
            versions = ", ".join(f"{k} {v}" for k, v in (row["versions"] or {}).items())
            lines.append([
                link(f"{row['session']}, {row['at'] or 'from a bench document'}", row["line"]),
                str(device.get("name") or device.get("type")), str(device.get("driver") or ABSENT),
                plain(device.get("power_limit_w")), plain(device.get("idle_w")), plain(device.get("temperature_c"), 2),
                f"{host.get('cores')} cores, {host.get('cpu')}", versions, str(row["commit"] or ABSENT),
            ])  # fmt: skip
    read = [row for row in rows if "temperature_after_c" in (row.get("reading") or {})]
    text = f"\n\nThe board was at {_coldest_and_hottest(read, link)} at the ends of windows." if read else ""
    return "## Machines\n\n" + table(head, lines, left=1) + text


def _coldest_and_hottest(read: Sequence[Row], link: _Links) -> str:
    by_heat = sorted(read, key=lambda row: row["reading"]["temperature_after_c"])
    ends = [(plain(row["reading"]["temperature_after_c"], 2), row["line"]) for row in (by_heat[0], by_heat[-1])]
    return " to ".join(link(f"{celsius} °C", line) for celsius, line in ends)


def _again(rows: Sequence[Row], stem: str) -> str:
    small = _of_rows(rows).size == "small"
    commands = ["python studies/one_gpu.py --size small --out runs/one-gpu/one-gpu.jsonl"]
    if not small:
        commands = [f"python studies/one_gpu.py --data-dir DIR --part {part} --budget-s 560" for part in PARTS]
    text = "The same command goes on with what is missing; a line is on disk before the next cell begins. `--again` "
    text += "tries what failed once more, `--report` makes this page and its figures again from "
    text += (
        f"`{stem}.jsonl`, which holds every number used here. DIR holds the folders `mnist` and `cifar10`; `ray` needs "
    )
    text += "`podium[ray]`, the figures `podium[study]`."
    return "## Make it again\n\n```\n" + "\n".join(commands) + f"\n```\n\n{text}"
