"""What is compared: codecs, tasks, seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from podium.errors import ConfigError, UnknownName

CODECS = (
    "dense",
    "fp16",
    "bf16",
    "int8",
    "sign",
    "ef-sign",
    "vote",
    "one-bit",
    "top-k:ratio=0.1",
    "top-k:ratio=0.01",
    "top-k:ratio=0.001",
    "top-k:ratio=0.01;feedback=false",
    "random-k:ratio=0.1",
    "random-k:ratio=0.01",
    "dgc",
    "power-sgd:rank=1",
    "power-sgd:rank=2",
    "power-sgd:rank=4",
    "power-sgd:rank=1;feedback=false",
)
"""What is compared with `dense`, in the order of the tables."""

PAIRS = (
    ("top-k:ratio=0.01", "top-k:ratio=0.01;feedback=false"),
    ("power-sgd:rank=1", "power-sgd:rank=1;feedback=false"),
    ("ef-sign", "sign"),
)
"""The same wire with error feedback and without."""

TITLES = {
    "mnist-lenet5": "MNIST, LeNet-5",
    "cifar10-resnet20": "CIFAR-10, ResNet-20",
    "digits-cnn": "Digits, two convolutions",
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What is trained, and for how long."""

    task: str
    epochs: int
    folder: str | None = None
    """Of its files, inside the folder that holds all data."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the task's function."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The design: every codec on every task with every seed."""

    workloads: tuple[Workload, ...] = (
        Workload(task="mnist-lenet5", epochs=10, folder="mnist"),
        Workload(task="cifar10-resnet20", epochs=10, folder="cifar10"),
    )
    codecs: tuple[str, ...] = CODECS
    seeds: tuple[int, ...] = (0, 1, 2)
    workers: int = 4
    device: str = "cpu"
    data_dir: str = "data"
    """Holds a folder for each task that reads files."""
    deadline_s: float = 3600.0
    """A run that takes longer is ended, and has failed."""

    def __post_init__(self) -> None:
        if "dense" not in self.codecs:
            raise ConfigError(f"rates: codecs must hold dense, which the others are held against, got {self.codecs}")
        if not self.seeds or not self.workloads:
            raise ConfigError("rates: seeds and workloads must name at least one each, got none")
        if self.deadline_s <= 0:
            raise ConfigError(f"rates: deadline_s must be above 0, got {self.deadline_s}")

    def only(self, tasks: Sequence[str]) -> Rates:
        """The study of these tasks alone; of all of them where none is named."""
        known = {load.task: load for load in self.workloads}
        for task in tasks:
            if task not in known:
                raise UnknownName("task of the study", task, known)
        return replace(self, workloads=tuple(known[task] for task in tasks)) if tasks else self

    def cells(self) -> list[Cell]:
        """All runs, seed by seed, so that a study that was cut short has some of everything."""
        return [Cell(load, codec, seed) for seed in self.seeds for load in self.workloads for codec in self.codecs]

    def options(self, cell: Cell) -> dict[str, Any]:
        """The arguments of `podium.train` for one run."""
        return {
            "task": cell.load.task,
            "task_options": dict(cell.load.options),
            "data_dir": str(Path(self.data_dir) / cell.load.folder) if cell.load.folder else None,
            "epochs": cell.load.epochs,
            "codec": cell.codec,
            "seed": cell.seed,
            "workers": self.workers,
            "device": self.device,
        }


QUICK = Rates(
    workloads=(Workload(task="digits-cnn", epochs=1),),
    codecs=("dense", "fp16", "ef-sign", "sign", "top-k:ratio=0.01", "power-sgd:rank=1"),
    seeds=(0, 1),
)
"""Shows in half a minute that everything works, and nothing else."""


class Cell(NamedTuple):
    """One run of the design."""

    load: Workload
    codec: str
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.load.task, self.codec, self.seed
