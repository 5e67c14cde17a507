"""What is measured: arms in cells (task, number of trials, precision), in the order in which they matter.

Times are estimated for one H200, so that a call can stop before its budget is used up and all that is `core` fits into
25 minutes of it. What is only in `full` comes when there is time left. Arms that are measured in a long window for
their energy are timed in the same run, so `times` leaves them out where that was done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from podium.errors import ConfigError, UnknownName
from podium.records.window import ENERGY_WINDOW_S

Part = Literal["energy", "times", "folds", "search"]
PARTS: tuple[Part, ...] = ("energy", "times", "folds", "search")
Size = Literal["small", "core", "full"]
SIZES: tuple[Size, ...] = ("small", "core", "full")

TITLES = {
    "mnist-mlp": "MNIST, MLP",
    "mnist-cnn": "MNIST, CNN",
    "cifar10-resnet20": "CIFAR-10, ResNet-20",
    "digits-mlp": "Digits, MLP",
    "digits-cnn": "Digits, CNN",
}

LEVELS = {
    "eager": "one at a time",
    "graph": "one at a time",
    "compiled": "one at a time",
    "processes": "driver, time slices",
    "processes-graph": "driver, time slices",
    "mps": "driver, MPS",
    "mps-graph": "driver, MPS",
    "ray": "runtime, Ray",
    "ray-mps": "runtime and driver, Ray on MPS",
    "streams": "framework, branches",
    "fused": "framework, fused",
    "fused-compiled": "framework, fused",
    "auto": "framework, chosen",
}
"""At which level each arm lets trainings share the device, in the order in which they are listed."""
FUSED = ("fused", "fused-compiled")
ALONE = ("eager", "graph", "compiled")
"""One model at a time: the number of trials does not change a step."""
APART = ("processes", "processes-graph", "mps", "mps-graph", "ray", "ray-mps")

MOST_PROCESSES = 16
"""Of which each has one of the machine's 16 cores: more would wait for each other."""
MOST_BRANCHES = 32
"""In one graph, as `podium bench sweep` has it."""

CALL_S = 12.0
"""What a call takes before its first cell: imports, a context, the idle board."""


class Key(NamedTuple):
    """What one record is for."""

    part: str
    task: str
    trials: int
    precision: str
    arm: str


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One arm in one cell, and how long that is expected to take."""

    key: Key
    estimate_s: float
    core: bool = True
    unless: Key | None = None
    """A longer measurement of the same; where it was made, this one is not needed."""

    @property
    def name(self) -> str:
        part, task, trials, precision, arm = self.key
        return f"{part}: {task}, {trials} trials, {precision}, {arm}"


@dataclass(frozen=True, kw_only=True)
class Design:
    """All cells of a study, and the settings they share."""

    size: Size
    device: str
    cells: tuple[Cell, ...]
    seconds: float = 0.4
    """Of a round."""
    rounds: int = 3
    energy_s: float = ENERGY_WINDOW_S
    reading_s: float = 3.0
    """Of the window in which power and utilisation are read where energy is not the question."""
    most_processes: int = MOST_PROCESSES
    sweeps: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    """By part and task: what `podium.sweeps.sweep.sweep` is asked for."""

    @property
    def settings(self) -> dict[str, Any]:
        """What a session writes down; another file must not be mixed with it."""
        names = ("seconds", "rounds", "energy_s", "reading_s", "most_processes")
        return {"device": self.device, **{name: getattr(self, name) for name in names}}

    @property
    def estimate_s(self) -> float:
        """Of all cells, what longer measurements make superfluous left out."""
        return sum(self.estimates_s.values())

    @property
    def estimates_s(self) -> dict[str, float]:
        """The same by part."""
        keys, found = {cell.key for cell in self.cells}, dict.fromkeys(map(str, PARTS), 0.0)
        for cell in self.cells:
            if cell.unless not in keys:
                found[cell.key.part] += cell.estimate_s
        return found

    def only(self, parts: Sequence[str] = (), tasks: Sequence[str] = (), arms: Sequence[str] = ()) -> Design:
        """The cells of these parts, tasks and arms; of all where none are named."""
        known = list(dict.fromkeys(cell.key.task for cell in self.cells))
        asked = (("part", parts, PARTS), ("task of the study", tasks, known), ("arm of the study", arms, tuple(LEVELS)))
        for what, names, possible in asked:
            for name in names:
                if name not in possible:
                    raise UnknownName(what, name, possible)
        kept = [c for c in self.cells if c.key.part in (parts or PARTS) and c.key.task in (tasks or known)]
        return dataclasses.replace(self, cells=tuple(c for c in kept if c.key.arm in (arms or LEVELS)))

    def executor(self, arm: str) -> str:
        """An arm, as a sweep's executor."""
        count = f"count={self.most_processes}"
        return {
            "auto": "auto",
            "eager": "sequential",
            "graph": "sequential:mode=graph",
            "compiled": "sequential:mode=compiled",
            "streams": "streams",
            "fused": "fused",
            "fused-compiled": "fused:compiled=true",
            "processes": f"processes:{count}",
            "processes-graph": f"processes:{count},mode=graph",
            "mps": f"mps:{count}",
            "mps-graph": f"mps:{count},mode=graph",
            "ray": f"ray:{count}",
            "ray-mps": f"ray:{count},mps=true",
        }[arm]


def design(size: Size) -> Design:
    if size not in SIZES:
        raise UnknownName("size", size, SIZES)
    if size == "small":
        return _small()
    cells = [*_energy(), *_times(), *_sweeps("folds"), *_sweeps("search")]
    kept = cells if size == "full" else [cell for cell in cells if cell.core]
    keys = [cell.key for cell in kept]
    if len(set(keys)) < len(keys):
        raise ConfigError("one_gpu: a cell must be asked for once, got one twice")
    return Design(size=size, device="cuda", cells=tuple(kept), sweeps=_SWEEPS)


MAIN = {"mnist-mlp": 64, "mnist-cnn": 64, "cifar10-resnet20": 16, "digits-mlp": 8, "digits-cnn": 8}
"""The number of trials at which a task's arms are all compared."""
_PRECISION = "tf32"

# Seconds until an arm has taken its first step and ended again, beyond its rounds, from what an H200 took.
_START = {
    "mnist-mlp": {"compiled": 12.0, "fused-compiled": 17.0, "streams": 6.0, "fused": 1.0},
    "mnist-cnn": {"compiled": 15.0, "fused-compiled": 34.0, "streams": 9.0, "fused": 9.0},
    "cifar10-resnet20": {"compiled": 40.0, "fused-compiled": 64.0, "streams": 18.0, "fused": 15.0},
}
_START_APART = {"processes": 14.0, "processes-graph": 9.0, "mps": 6.0, "mps-graph": 7.0, "ray": 13.0, "ray-mps": 14.0}


def _estimate(task: str, trials: int, arm: str, window_s: float) -> float:
    if arm in APART:
        return _START_APART[arm] + 3 * 2.0 + window_s
    making = 0.0 if task == "mnist-mlp" else trials / 64  # every trial's model is made on the CPU first
    return _START[task].get(arm, 1.0) + making + 2.0 + window_s


_ENERGY = {
    "mnist-mlp": ("fused-compiled", "mps-graph"),
    "mnist-cnn": ("fused-compiled", "mps-graph"),
    "cifar10-resnet20": ("fused-compiled", "mps-graph"),
}
"""The best of each level: a baseline that is not the best of its level would flatter what is held against it."""
_ENERGY_THEN = {"mnist-mlp": ("ray",)}
_ENERGY_MORE = {
    "mnist-mlp": ("mps", "graph", "fused", "streams", "eager", "ray-mps", "processes", "processes-graph",
                  "compiled"),
    "mnist-cnn": ("mps", "graph", "ray", "eager"),
    "cifar10-resnet20": ("mps", "graph", "ray", "eager"),
}  # fmt: skip


def _energy() -> list[Cell]:
    """One arm of each level for each task first, then the others."""
    found = []
    for core, arms in ((True, _ENERGY), (True, _ENERGY_THEN), (False, _ENERGY_MORE)):
        for task, names in arms.items():
            for arm in names:
                key = Key("energy", task, MAIN[task], _PRECISION, arm)
                found.append(Cell(key=key, estimate_s=_estimate(task, MAIN[task], arm, ENERGY_WINDOW_S), core=core))
    return found


_TIMED: tuple[tuple[str, str, Mapping[int, Sequence[str]]], ...] = (
    ("mnist-mlp", _PRECISION, {64: ("fused", "streams", "mps", "graph", "eager", "processes", "ray-mps")}),
    ("mnist-cnn", _PRECISION, {64: ("fused", "streams", "graph", "mps", "ray", "processes", "eager")}),
    ("cifar10-resnet20", _PRECISION, {16: ("fused", "streams", "graph", "mps", "ray", "processes", "eager")}),
    ("mnist-mlp", _PRECISION, {4: ("fused", "streams"), 16: ("fused", "streams"), 256: ("fused", "fused-compiled")}),
    ("mnist-cnn", _PRECISION, {4: ("fused", "streams"), 16: ("fused", "streams"), 256: ("fused",)}),
    ("cifar10-resnet20", _PRECISION, {64: ("fused",)}),
    ("mnist-mlp", _PRECISION, {64: ("auto",)}),
    ("mnist-cnn", "bf16", {64: ("fused-compiled",)}),
    ("cifar10-resnet20", "bf16", {16: ("fused-compiled",)}),
)
_ALL_ARMS = tuple(arm for arm in LEVELS)
_COUNTS = (4, 16, 64, 256)


def _times() -> list[Cell]:
    """The main cells first, then other numbers of trials and precisions; then whatever else the device may do."""
    found: dict[Key, Cell] = {}
    for task, precision, by_count in _TIMED:
        for trials, arms in by_count.items():
            for arm in arms:
                cell = _timed(task, trials, precision, arm, core=True)
                found[cell.key] = cell
    for task, names in _ENERGY.items():
        for arm in (*names, *_ENERGY_THEN.get(task, ())):
            cell = _timed(task, MAIN[task], _PRECISION, arm, core=True)
            longer = cell.key._replace(part="energy")
            found[cell.key] = dataclasses.replace(cell, unless=longer)
    for task, count in ((task, count) for count in _COUNTS for task in _ENERGY):
        for arm in _ALL_ARMS:
            repeats = arm in ALONE and count != MAIN[task]
            repeats |= arm in APART and count > MOST_PROCESSES and count != MAIN[task]
            repeats |= arm in APART and count == MOST_PROCESSES and MAIN[task] > count
            repeats |= arm == "streams" and count > max(MAIN[task], MOST_BRANCHES)
            if not repeats:
                cell = _timed(task, count, _PRECISION, arm, core=False)
                found.setdefault(cell.key, cell)
    for task in ("mnist-cnn", "cifar10-resnet20"):
        for arm in ("fused", "streams", "graph", "mps"):
            cell = _timed(task, MAIN[task], "bf16", arm, core=False)
            found.setdefault(cell.key, cell)
    return list(found.values())


def _timed(task: str, trials: int, precision: str, arm: str, *, core: bool) -> Cell:
    if arm == "auto":
        estimate = {"mnist-mlp": 14.0, "mnist-cnn": 45.0}.get(task, 90.0)
    else:
        estimate = _estimate(task, trials, arm, 3.0)
    return Cell(key=Key("times", task, trials, precision, arm), estimate_s=estimate, core=core)


_GRID = {"lr": [0.1, 0.05, 0.02, 0.01], "weight_decay": [0.0, 1e-4, 1e-3]}
_SPACE = {"lr": "1e-3..3e-1:log", "weight_decay": "1e-6..1e-2:log", "momentum": "0.5..0.95"}
_FOLDS = {"grid": _GRID, "folds": 5, "eval_every": 0, "trials": 60}
_SEARCH = {"space": _SPACE, "random": 64, "trials": 64}
_SWEEPS: dict[tuple[str, str], Mapping[str, Any]] = {
    ("folds", "mnist-mlp"): {**_FOLDS, "epochs": 30},
    ("folds", "mnist-cnn"): {**_FOLDS, "epochs": 10},
    ("folds", "cifar10-resnet20"): {**_FOLDS, "epochs": 4},
    ("search", "mnist-mlp"): {**_SEARCH, "epochs": 81, "eval_every": 3, "stopping": "asha:grace=3,factor=3"},
    ("search", "mnist-cnn"): {**_SEARCH, "epochs": 27, "eval_every": 1, "stopping": "asha:grace=1,factor=3"},
    ("search", "cifar10-resnet20"): {**_SEARCH, "epochs": 9, "eval_every": 1, "stopping": "asha:grace=1,factor=3"},
}
"""`trials` is how many there are: points by folds."""

# Seconds of a whole process on an H200: imports, the sweep, its end.
_SWEPT: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "folds": {
        "mnist-mlp": {"fused": 10, "mps-graph": 18, "mps": 24, "ray": 33, "graph": 30, "auto": 12},
        "mnist-cnn": {"fused": 24, "mps-graph": 22, "graph": 27, "auto": 30},
    },
    "search": {
        "mnist-mlp": {"fused": 10, "mps-graph": 18, "graph": 18, "auto": 12},
    },
}
_SWEPT_MORE: Mapping[str, Mapping[str, Mapping[str, float]]] = {
    "folds": {
        "mnist-mlp": {"streams": 16, "ray-mps": 33, "fused-compiled": 28},
        "mnist-cnn": {"mps": 27, "ray": 36, "fused-compiled": 50, "streams": 24},
        "cifar10-resnet20": {"fused": 45, "mps-graph": 45, "mps": 45, "auto": 80, "graph": 85},
    },
    "search": {
        "mnist-mlp": {"mps": 20, "ray": 28, "streams": 14, "ray-mps": 28},
        "mnist-cnn": {"fused": 22, "mps-graph": 20, "mps": 20, "graph": 20, "auto": 26, "ray": 32},
        "cifar10-resnet20": {"fused": 60, "mps-graph": 60, "mps": 60},
    },
}


def _sweeps(part: Literal["folds", "search"]) -> list[Cell]:
    found = []
    for core, planned in ((True, _SWEPT), (False, _SWEPT_MORE)):
        for task, arms in planned[part].items():
            trials = _SWEEPS[part, task]["trials"]
            for arm, seconds in arms.items():
                key = Key(part, task, trials, _PRECISION, arm)
                found.append(Cell(key=key, estimate_s=float(seconds), core=core))
    return found


def _small() -> Design:
    """The same on a CPU with scikit-learn's digits, to see that it works: minutes on two cores."""
    tasks = ("digits-mlp", "digits-cnn")
    cells = []
    for task in tasks:
        for trials in (2, 8):
            arms = ("fused", "eager", "processes") if trials == MAIN[task] else ("fused",)
            cells += [Cell(key=Key("times", task, trials, "fp32", arm), estimate_s=4.0) for arm in arms]
    cells.append(Cell(key=Key("energy", "digits-mlp", 8, "fp32", "fused"), estimate_s=4.0))
    cells.append(Cell(key=Key("times", "digits-mlp", 8, "fp32", "fused-compiled"), estimate_s=1.0))
    cells.append(Cell(key=Key("times", "digits-mlp", 8, "fp32", "auto"), estimate_s=6.0))
    for part in ("folds", "search"):
        cells += [
            Cell(key=Key(part, "digits-mlp", 12 if part == "folds" else 8, "fp32", arm), estimate_s=10.0)
            for arm in ("fused", "eager", "processes", "auto")
        ]
    grid = {"lr": [0.3, 0.1], "weight_decay": [0.0, 1e-3]}
    rule = {"epochs": 4, "eval_every": 1, "stopping": "asha:grace=1,factor=2"}
    sweeps: dict[tuple[str, str], Mapping[str, Any]] = {
        ("folds", "digits-mlp"): {"grid": grid, "folds": 3, "epochs": 3, "eval_every": 0, "trials": 12},
        ("search", "digits-mlp"): {"space": {"lr": "1e-2..5e-1:log"}, "random": 8, **rule, "trials": 8},
    }
    cells.sort(key=lambda cell: PARTS.index(cell.key.part))
    return Design(
        size="small", device="cpu", cells=tuple(cells), seconds=0.1, rounds=3, energy_s=1.0, reading_s=1.0,
        most_processes=2, sweeps=sweeps,
    )  # fmt: skip
