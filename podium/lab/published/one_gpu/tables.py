"""From records to what is told of them: pure, and read by page and figures alike.

A number of trials at which an arm was not measured is filled in only where the measurement would be the same one: an
arm that trains one model at a time does not know how many there are, and processes and branches beyond as many as run
at a time wait their turn. Such lines say from where they come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podium.lab.published.one_gpu.design import (
    ALONE,
    APART,
    FUSED,
    LEVELS,
    MAIN,
    MOST_BRANCHES,
    MOST_PROCESSES,
    PARTS,
    TITLES,
    Design,
)
from podium.lab.published.one_gpu.design import Cell as Planned
from podium.lab.published.one_gpu.rows import key_of
from podium.lab.study.store import Row

GROUPS = {
    "one after another": ALONE,
    "driver": ("processes", "processes-graph", "mps", "mps-graph"),
    "runtime": ("ray", "ray-mps"),
    "framework": ("streams", *FUSED),
}
"""The levels that are held against each other, and what each consists of."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a window read, ready to be told; None is absent, and `absent` says why by field."""

    sm: float | None = None
    dram: float | None = None
    memory_bytes: float | None = None
    power_w: float | None = None
    cores: float | None = None
    """Of the host, busy."""
    j: float | None = None
    """Per trial."""
    j_over_idle: float | None = None
    j_is_hint: bool = True
    """The window was too short for its energy to be a result."""
    absent: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One arm in one cell."""

    arm: str
    us: float | None
    low: float | None
    high: float | None
    """The fastest and the slowest round."""
    ratio: float | None
    """Over the best fused arm's time in this cell."""
    width: int
    start_s: float | None
    figures: Figures
    why: str
    line: int
    """Of the record."""
    from_trials: int
    """At how many it was measured."""

    @property
    def level(self) -> str:
        return LEVELS.get(self.arm, "another")


@dataclass(frozen=True, kw_only=True)
class Panel:
    """All arms of one cell, the fastest first, those without a time last."""

    task: str
    trials: int
    precision: str
    lines: tuple[Line, ...]
    steps: int | None
    """Of a trial of ten epochs, whose joules are told."""

    @property
    def title(self) -> str:
        return TITLES.get(self.task, self.task)

    @property
    def where(self) -> str:
        """Which cell, in words."""
        return f"{self.title}, {self.trials} trials, {self.precision}"

    @property
    def timed(self) -> list[Line]:
        return [line for line in self.lines if line.us is not None]

    def best(self, arms: Sequence[str]) -> Line | None:
        """The fastest of these."""
        return next((line for line in self.timed if line.arm in arms), None)

    def thriftiest(self, arms: Sequence[str]) -> Line | None:
        """The one with the least joules per trial, in whatever window: its level at its best."""
        found = [line for line in self.lines if line.arm in arms and line.figures.j is not None]
        return min(found, key=lambda line: line.figures.j or 0.0, default=None)


@dataclass(frozen=True, kw_only=True)
class Runner:
    """One executor in a race of whole sweeps."""

    arm: str
    seconds: float | None
    ratio: float | None
    """Over the makespan of the fastest fused arm."""
    trials: int
    best: Mapping[str, Any] | None
    statuses: Mapping[str, int]
    chosen: tuple[str, ...]
    not_fused: tuple[str, ...]
    """Why trials could not be fused, where it was tried."""
    figures: Figures
    why: str
    line: int


@dataclass(frozen=True, kw_only=True)
class Race:
    """The same sweep by several executors, the fastest first."""

    part: str
    task: str
    trials: int
    metric: str
    runners: tuple[Runner, ...]

    @property
    def title(self) -> str:
        return TITLES.get(self.task, self.task)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What `auto` chose, beside what was fastest."""

    where: str
    chosen: str
    fastest: str
    regret: float | None
    """How much longer the choice took than the fastest."""
    calibration_s: float | None
    said: str
    line: int


# One cell.


def tasks_of(rows: Sequence[Row]) -> list[str]:
    """Those that have a measurement, in the design's order."""
    names = {row["task"] for row in rows if row["kind"] != "session"}
    known = list(TITLES)
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def cells_of(rows: Sequence[Row]) -> list[tuple[str, int, str]]:
    """Task, trials, precision of everything that was timed, in the order of tasks, precisions and numbers."""
    found = {(row["task"], row["trials"], row["precision"]) for row in rows if row["kind"] == "row"}
    order = tasks_of(rows)
    return sorted(found, key=lambda cell: (order.index(cell[0]), cell[2] == "bf16", cell[2], cell[1]))


def main_panels(rows: Sequence[Row]) -> list[Panel]:
    """For each task, the cell in which its arms are all compared."""
    found = []
    for task in tasks_of(rows):
        mine = [cell for cell in cells_of(rows) if cell[0] == task]
        if mine:
            arms = {cell: len(panel(rows, *cell).timed) for cell in mine}
            wanted = [cell for cell in mine if cell[1] == MAIN.get(task) and cell[2] != "bf16"]
            found.append(panel(rows, *(wanted[0] if wanted else max(mine, key=lambda cell: arms[cell]))))
    return found


def panel(rows: Sequence[Row], task: str, trials: int, precision: str) -> Panel:
    mine = [row for row in rows if row["kind"] == "row" and (row["task"], row["precision"]) == (task, precision)]
    chosen = [found for arm in LEVELS if (found := _record(rows, mine, trials, arm)) is not None]
    fused = [row["us"] for row in chosen if row["arm"] in FUSED and row.get("us")]
    least = min(fused, default=None)
    lines = [_line(row, least) for row in chosen]
    steps = next((row["steps_per_trial"] for row in chosen if row.get("steps_per_trial")), None)
    lines.sort(key=lambda line: (line.us is None, line.us or 0.0))
    return Panel(task=task, trials=trials, precision=precision, lines=tuple(lines), steps=steps)


def _record(rows: Sequence[Row], mine: Sequence[Row], trials: int, arm: str) -> Row | None:
    """The best measurement of an arm at this number of trials: in a long window, then the last one."""
    of_arm = [row for row in mine if row["arm"] == arm]
    exact = [row for row in of_arm if row["trials"] == trials]
    same = [row for row in of_arm if row["trials"] != trials and row.get("us") and _is_same(row, trials, rows)]
    timed = [row for row in exact if row.get("us")]
    choice = timed or same or exact
    return max(choice, key=lambda row: (row["part"] == "energy", row["line"])) if choice else None


def _is_same(row: Row, trials: int, rows: Sequence[Row]) -> bool:
    """Whether measuring the arm at this number of trials would be the same measurement."""
    if row["arm"] in ALONE:
        return True
    if row["arm"] in APART:
        settings = _session(rows, row)["settings"] if _session(rows, row) else {}
        return bool(row["width"] == min(trials, settings.get("most_processes", MOST_PROCESSES)))
    return row["arm"] == "streams" and bool(row["width"] == min(trials, MOST_BRANCHES))


def _session(rows: Sequence[Row], row: Row) -> Row:
    return next((one for one in rows if one["kind"] == "session" and one["session"] == row["session"]), {})


def _line(row: Row, least: float | None) -> Line:
    us, rounds = row.get("us"), row.get("rounds_us") or []
    return Line(
        arm=row["arm"],
        us=us,
        low=min(rounds, default=None),
        high=max(rounds, default=None),
        ratio=us / least if us and least else None,
        width=row.get("width") or 0,
        start_s=row.get("start_s"),
        figures=_step_figures(row),
        why=row["why"],
        line=row["line"],
        from_trials=row["trials"],
    )


def _step_figures(row: Row) -> Figures:
    reading = row.get("reading") or {}
    us, steps, watts = row.get("us"), row.get("steps_per_trial"), reading.get("power_w")
    over = reading.get("power_over_idle_w")
    j, j_over = row.get("j"), row.get("j_over_idle")
    seconds = us * steps / 1e6 if us and steps else None
    if j is None and watts is not None and seconds is not None:
        j, j_over = watts * seconds, None if over is None else over * seconds
    absent = _absent(reading, row["why"])
    if j is None:
        absent["j"] = absent.get("power_w") or "how many steps a trial takes was not written down"
    if j_over is None:
        absent["j_over_idle"] = absent.get("power_over_idle_w") or absent.get("j") or "no idle power is known"
    return _figures(reading, j, j_over, absent)


def _figures(reading: Mapping[str, Any], j: float | None, j_over: float | None, absent: Mapping[str, str]) -> Figures:
    seconds, cpu = reading.get("seconds"), reading.get("cpu_s")
    return Figures(
        sm=reading.get("sm_util"),
        dram=reading.get("dram_bw_util"),
        memory_bytes=reading.get("memory_bytes"),
        power_w=reading.get("power_w"),
        cores=cpu / seconds if cpu is not None and seconds else None,
        j=j,
        j_over_idle=j_over,
        j_is_hint=bool(reading.get("energy_is_short", True)),
        absent=absent,
    )


_FIELDS = {
    "sm_util": "sm",
    "dram_bw_util": "dram",
    "memory_bytes": "memory_bytes",
    "power_w": "power_w",
    "power_over_idle_w": "power_over_idle_w",
    "cpu_s": "cores",
}


def _absent(reading: Mapping[str, Any], why: str) -> dict[str, str]:
    said = reading.get("absent", {})
    found = {}
    for name, field_name in _FIELDS.items():
        if reading.get(name) is None:
            found[field_name] = said.get(name) or why or "nothing was read"
    return found


# Over the number of trials.


@dataclass(frozen=True)
class Spot:
    """One point of a curve."""

    trials: int
    us: float
    line: int
    measured: bool
    """At this number of trials, or filled in from another."""


def curves(rows: Sequence[Row], task: str, precision: str) -> dict[str, list[Spot]]:
    """By arm: microseconds per model-step at every number of trials that the task was timed with."""
    counts = [trials for name, trials, kind in cells_of(rows) if (name, kind) == (task, precision)]
    found: dict[str, list[Spot]] = {}
    for trials in counts:
        for line in panel(rows, task, trials, precision).timed:
            assert line.us is not None
            spot = Spot(trials, line.us, line.line, line.from_trials == trials)
            found.setdefault(line.arm, []).append(spot)
    return {arm: found[arm] for arm in LEVELS if arm in found}


# Whole sweeps.


def races(rows: Sequence[Row]) -> list[Race]:
    """One per part and task that was run from end to end."""
    found = []
    for part in PARTS:
        for task in tasks_of(rows):
            mine = [r for r in rows if r["kind"] == "sweep" and (r["part"], r["task"]) == (part, task)]
            last = {row["arm"]: row for row in sorted(mine, key=lambda r: (not r["why"], r["line"]))}
            if last:
                found.append(_race(rows, part, task, list(last.values())))
    return found


def _race(rows: Sequence[Row], part: str, task: str, mine: Sequence[Row]) -> Race:
    fused = [row["seconds"] for row in mine if row["arm"] in FUSED and not row["why"]]
    least = min(fused, default=None)
    runners = [_runner(rows, row, least) for row in mine]
    runners.sort(key=lambda runner: (runner.seconds is None, runner.seconds or 0.0))
    metric = next((row["metric"] for row in mine if row.get("metric")), "score")
    return Race(part=part, task=task, trials=mine[0]["trials"], metric=metric, runners=tuple(runners))


def _runner(rows: Sequence[Row], row: Row, least: float | None) -> Runner:
    seconds = None if row["why"] else row["seconds"]
    reading, trained = row.get("reading") or {}, row.get("trained") or 0
    watts, idle = reading.get("power_w"), (_session(rows, row).get("device") or {}).get("idle_w")
    absent = _absent(reading, row["why"])
    j = watts * seconds / trained if watts is not None and seconds and trained else None
    j_over = (watts - idle) * seconds / trained if j is not None and idle is not None else None
    if j is None:
        absent["j"] = absent.get("power_w") or row["why"] or "nothing was read"
    if j_over is None:
        absent["j_over_idle"] = absent.get("power_w") or row["why"] or "no idle power is known"
    return Runner(
        arm=row["arm"],
        seconds=seconds,
        ratio=seconds / least if seconds and least else None,
        trials=trained,
        best=row.get("best"),
        statuses=row.get("statuses") or {},
        chosen=tuple(row.get("chosen") or ()),
        not_fused=tuple(row.get("not_fused") or ()),
        figures=_figures(reading, j, j_over, absent),
        why=row["why"],
        line=row["line"],
    )


# What `auto` did.


def judgements(rows: Sequence[Row]) -> list[Judgement]:
    found = []
    for row in rows:
        if row["kind"] == "auto" and not row["why"]:
            one = panel(rows, row["task"], row["trials"], row["precision"])
            fastest, chosen = one.best(tuple(LEVELS)), one.best((row["chosen_arm"],))
            if fastest is not None:
                found.append(_judged(row, one, fastest, chosen))
    return found + [judged for race in races(rows) if (judged := _raced(race)) is not None]


def _judged(row: Row, one: Panel, fastest: Line, chosen: Line | None) -> Judgement:
    regret = chosen.us / fastest.us - 1 if chosen is not None and chosen.us and fastest.us else None
    return Judgement(
        where=f"{one.title}, {one.trials} trials, {one.precision}, steady state",
        chosen=row["chosen"],
        fastest=fastest.arm,
        regret=regret,
        calibration_s=row["calibration_s"],
        said=row["said"],
        line=row["line"],
    )


def _raced(race: Race) -> Judgement | None:
    """A whole sweep by `auto` against the fastest of the others: timing them is part of its time."""
    own = next((runner for runner in race.runners if runner.arm == "auto" and runner.seconds), None)
    others = [runner for runner in race.runners if runner.arm != "auto" and runner.seconds]
    if own is None or own.seconds is None or not others:
        return None
    fastest = others[0]
    assert fastest.seconds is not None
    return Judgement(
        where=f"{race.title}, {race.part}, from end to end",
        chosen=", ".join(dict.fromkeys(own.chosen)) or "–",
        fastest=fastest.arm,
        regret=own.seconds / fastest.seconds - 1,
        calibration_s=None,
        said="",
        line=own.line,
    )


# The study itself.


def missing(design: Design, rows: Sequence[Row]) -> list[Planned]:
    """Cells that the design has and the records have not."""
    done = {key_of(row) for row in rows if row["kind"] != "session"}
    return [cell for cell in design.cells if cell.key not in done and cell.unless not in done]


def spent(rows: Iterable[Row]) -> dict[str, float]:
    """Seconds by part."""
    found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for row in rows:
        if row["kind"] != "session":
            found[row["part"]] += row["took_s"]
    return found


def spread(line: Line) -> float | None:
    """Half of what lies between the slowest and the fastest round, over the median; None with one round."""
    if line.us is None or line.low is None or line.high is None or line.low == line.high:
        return None
    return (line.high - line.low) / 2 / line.us
