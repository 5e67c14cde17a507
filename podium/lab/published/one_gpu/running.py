"""Measure what is missing, in order, as long as the budget lasts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from podium.errors import ConfigError, PodiumError
from podium.lab.published.one_gpu.design import MAIN, Cell, Design, Key
from podium.lab.published.one_gpu.one import sweep_row
from podium.lab.published.one_gpu.rows import (
    auto_row,
    check_same,
    done_keys,
    failed_row,
    open_store,
    rounded,
    session_row,
    timed_row,
    told,
)
from podium.lab.study.store import Row
from podium.records.manifest import git_commit, hardware, versions

_EPOCHS = 10
"""Of a trial whose joules are told, as `podium bench sweep` has it."""
_FOR_EVER = 1_000_000
_DEADLINE = 4.0
"""A sweep that takes so many times what was expected, and a minute, is given up."""


@dataclass
class Ended:
    """How far a call came."""

    measured: int = 0
    failed: int = 0
    left: list[Cell] = field(default_factory=list)
    why: str = ""
    """Why it ended before everything was measured."""


def waiting(design: Design, rows: Sequence[Row], *, again: bool = False) -> list[Cell]:
    """What is still to be measured, in order."""
    done = done_keys(rows, again=again)
    whole = done_keys(rows, again=True)
    return [c for c in design.cells if c.key not in done and (c.unless is None or c.unless not in whole)]


def run(
    design: Design,
    out: Path,
    *,
    data_dir: str = "",
    budget_s: float | None = None,
    again: bool = False,
    commit: str | None = None,
    say: Callable[[str], None] = print,
    measure: Callable[[Cell, int], Row] | None = None,
) -> Ended:
    """Measure what `out` does not hold yet; each record is on disk before the next cell begins.

    A cell is begun only where its estimate fits into what is left of `budget_s`, so short ones may overtake long ones.
    `again` tries what failed once more. `commit` is the code's, where git cannot be asked. `measure` stands in for the
    device in tests of the order.
    """
    began = time.perf_counter()
    store = open_store(out)
    rows = store.rows()
    check_same(rows, design, out)
    cells = waiting(design, rows, again=again)
    ended = Ended()
    if not cells:
        return ended
    number = 1 + max((row["session"] for row in rows if row["kind"] == "session"), default=-1)
    bench: _Measuring | None = None
    if measure is None:
        bench = _Measuring(design, data_dir)
        measure = bench.measure
    facts: dict[str, Any] = {"device": {"type": design.device}} if bench is None else {"device": bench.device_facts()}
    commit = git_commit(Path(__file__).parent) or commit
    store.append(session_row(number, design, **facts, versions=versions(), hardware=hardware(), commit=commit))
    measured: set[Key] = set()
    for place, cell in enumerate(cells):
        if cell.unless in measured:
            continue
        spent = time.perf_counter() - began
        if budget_s is not None and spent + cell.estimate_s > budget_s:
            ended.left.append(cell)
            ended.why = f"{budget_s:.0f} s are the budget"
            continue
        row = rounded(measure(cell, number))
        store.append(row)
        say(f"[{time.perf_counter() - began:6.1f} s] {told(row)}")
        ended.measured += 1
        ended.failed += bool(row["why"])
        if not row["why"]:
            measured.add(cell.key)
        if bench is not None and (trouble := bench.trouble()):
            ended.left += cells[place + 1 :]
            ended.why = f"the device must be opened anew by another call: {trouble}"
            break
    return ended


class _Measuring:
    """The device, with what is known of it once."""

    def __init__(self, design: Design, data_dir: str) -> None:
        from podium.lab.bench import sweep as bench

        self.design = design
        self.data_dir = str(Path(data_dir).resolve()) if data_dir else ""  # other processes may stand elsewhere
        if design.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("one_gpu: needs a GPU, and torch finds none; --size small runs on a CPU")
        if design.device == "cuda" and not data_dir:
            raise ConfigError("one_gpu: --data-dir must hold the folders mnist and cifar10, got none")
        self._module = bench
        self._recipe_of = bench.Recipes(self.data_dir, design.device)
        self._bench: Any = None
        self._steps: dict[str, int] = {}

    def device_facts(self) -> dict[str, Any]:
        """Also opens the board, and looks at it while nothing runs."""
        facts: dict[str, Any] = self._open().device_facts()
        board = self._open().board
        temperature = None if board is None else board.temperature_c()
        idle = self._open().idle
        return {**facts, "temperature_c": temperature, "idle_s": None if idle is None else idle.seconds}

    def measure(self, cell: Cell, session: int) -> Row:
        began = time.perf_counter()
        try:
            if cell.key.part in ("folds", "search"):
                return self._sweep(cell, session)
            row = self._auto(cell.key) if cell.key.arm == "auto" else self._timed(cell.key)
        except (PodiumError, RuntimeError, OSError, ImportError) as error:
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
            return failed_row(session, cell.key, why, time.perf_counter() - began)
        return {**row, "session": session, "took_s": time.perf_counter() - began}

    def trouble(self) -> str:
        """Why nothing more can be measured in this process; an error of the device stays with its context."""
        if self.design.device != "cuda" or not torch.cuda.is_initialized():
            return ""
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error).partition("\n")[0]
        return ""

    def _open(self) -> Any:
        if self._bench is None:
            # One for all cells: it reads memory before this process has a context, and that can be read but once.
            d = self.design
            shuffle = random.Random(1)
            self._bench = self._module.Bench(
                self._recipe_of, (), d.rounds, d.seconds, d.energy_s, d.most_processes, shuffle
            )
        return self._bench

    def _timed(self, key: Key) -> Row:
        bench = self._open()
        main = key.trials == MAIN[key.task]
        bench.arms = (key.arm,)
        bench.energy_s = self.design.energy_s if key.part == "energy" else self.design.reading_s if main else 0.0
        bench.apart.clear()
        try:
            (row,) = bench.measure(self._module.Cell(key.task, key.trials, key.precision))
        finally:
            torch.compiler.reset()  # so that no arm finds another one's code, nor runs into a limit on how often
        return timed_row(0, key, asdict(row), steps_per_trial=self._steps_of(key), took_s=0.0)

    def _steps_of(self, key: Key) -> int:
        if key.task not in self._steps:
            recipe = self._recipe_of(key.task, key.precision)
            self._steps[key.task] = _EPOCHS * recipe.make(self._module.trials_of(1)[0]).steps_per_epoch
        return self._steps[key.task]

    def _auto(self, key: Key) -> Row:
        """What it would choose for trials so long that starting counts for nothing: the question of steady state."""
        from podium.sweeps.executors.auto import Auto, describe

        recipe = self._recipe_of(key.task, key.precision, options={"epochs": _FOR_EVER})
        parts = [recipe.make(trial) for trial in self._module.trials_of(key.trials)]
        began = time.perf_counter()
        choice = Auto().choose(recipe, parts)
        torch.compiler.reset()
        facts = {"auto": describe(choice.executor), "auto_arm": self._module.arm_of(choice.executor)}
        took = time.perf_counter() - began
        return auto_row(0, key, {**facts, "why": choice.why, "calibration_s": took}, took_s=took)

    def _sweep(self, cell: Cell, session: int) -> Row:
        part, task, _, precision, arm = cell.key
        asked = dict(self.design.sweeps[part, task])
        folder = None if task.startswith("digits") else str(Path(self.data_dir) / task.partition("-")[0])
        asked |= {"task": task, "data_dir": folder, "device": self.design.device, "precision": precision}
        asked |= {"executor": self.design.executor(arm)}
        return sweep_row(session, cell.key, asked, deadline_s=60 + _DEADLINE * cell.estimate_s)
