"""What is compared: settings, the arms of each, seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from podium.errors import ConfigError, UnknownName

BUCKET_BYTES = 131_072
"""Small enough that a small model's exchange overlaps its backward pass."""


@dataclass(frozen=True, kw_only=True)
class Machines:
    """Equal workers but for the last, in virtual time."""

    workers: int = 8
    slow: float = 0.25
    """Speed of the last worker; the others have 1."""
    mbit: float = 100.0
    latency_us: float = 100.0
    jitter: float = 0.05
    seconds_per_sample: float | None = None
    """At speed 1; from the task's operations and the default node's rate when not given."""

    def as_toml(self) -> str:
        """The cluster file."""
        link = f"up_mbit = {self.mbit}\ndown_mbit = {self.mbit}\nlatency_us = {self.latency_us}\n"
        per_sample = "" if self.seconds_per_sample is None else f"seconds_per_sample = {self.seconds_per_sample}\n"
        fast = f'[[node]]\nname = "fast"\ncount = {self.workers - 1}\n{link}'
        slow = f'[[node]]\nname = "last"\nspeed = {self.slow}\n{link}'
        return f"[cluster]\njitter = {self.jitter}\n{per_sample}\n{fast}\n{slow}"


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train."""

    name: str
    strategy: str
    codec: str = "dense"
    balance: str = "equal"


ALL_REDUCE = Arm(name="all-reduce", strategy="all-reduce")
ALL_REDUCE_FP16 = Arm(name="all-reduce fp16", strategy="all-reduce", codec="fp16")
SMALL = Arm(name="all-reduce, small buckets", strategy=f"all-reduce:bucket_bytes={BUCKET_BYTES}")
SMALL_FP16 = Arm(
    name="all-reduce fp16, small buckets", strategy=f"all-reduce:bucket_bytes={BUCKET_BYTES}", codec="fp16"
)
BALANCED = Arm(name="all-reduce, equal-finish", strategy="all-reduce", balance="equal-finish")
BALANCED_SMALL = Arm(
    name="all-reduce, equal-finish, small buckets",
    strategy=f"all-reduce:bucket_bytes={BUCKET_BYTES}",
    balance="equal-finish",
)
SWITCH = Arm(name="strategy-switch", strategy="strategy-switch")
SWITCH_FP16 = Arm(name="strategy-switch fp16", strategy="strategy-switch:pull=fp16", codec="fp16")
DROPPED_FP16 = Arm(
    name="strategy-switch fp16, moments dropped",
    strategy="strategy-switch:pull=fp16,keep_moments=false",
    codec="fp16",
)
ASYNC = Arm(name="async", strategy="parameter-server:mode=async,servers=8,placement=colocated")
ASYNC_FP16 = Arm(
    name="async fp16", strategy="parameter-server:mode=async,servers=8,placement=colocated,pull=fp16", codec="fp16"
)

OUTER = ((0.7, 0.9), (0.7, 0.7), (0.7, 0.5), (1.0, 0.5), (1.0, 0.0))
"""Outer rate and momentum of DiLoCo, explored with the first seed."""

SYNC_EVERY = 50


def diloco(lr: float, momentum: float) -> Arm:
    options = f"sync_every={SYNC_EVERY},outer_lr={lr},outer_momentum={momentum}"
    return Arm(name=f"diloco {lr:g}, {momentum:g}", strategy=f"diloco:{options}")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is trained, on which machines, for how long."""

    name: str
    title: str
    task: str
    epochs: int
    batch_size: int
    folder: str | None = None
    """Of its files, inside the folder that holds all data."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the task's function."""
    machines: Machines = Machines()
    steps: int | None = None
    """Ends a run that is only timed after so many global steps."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """A setting, arms, seeds: every arm with every seed."""

    setting: Setting
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...] = (0, 1, 2)
    best_of: bool = False
    """Whether only the first seed tries every arm, and the others the most accurate one alone."""


class Cell(NamedTuple):
    """One run."""

    setting: Setting
    arm: Arm
    seed: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.setting.name, self.arm.name, self.seed


CIFAR = Setting(
    name="cifar", title="CIFAR-10, ResNet-20", task="cifar10-resnet20", epochs=30, batch_size=128, folder="cifar10"
)
MNIST = Setting(
    name="mnist",
    title="MNIST, LeNet-5",
    task="mnist-lenet5",
    epochs=45,
    batch_size=512,
    folder="mnist",
    options={"lr": 0.1},
)
MNIST_ADAM = replace(MNIST, name="mnist-adam", title="MNIST, LeNet-5, Adam", options={"optimizer": "adam", "lr": 0.001})
DIGITS_MOMENTUM = Setting(
    name="digits-momentum",
    title="Digits, two layers, momentum 0.9",
    task="digits-mlp",
    epochs=20,
    batch_size=64,
    options={"lr": 0.05, "momentum": 0.9},
)
CIFAR_EQUAL = replace(
    CIFAR, name="cifar-equal", title="CIFAR-10, ResNet-20, four equal workers", machines=Machines(workers=4, slow=1.0)
)
ONE_CORE = 3.5e-3
"""Seconds for a sample of ResNet-20, forward and backward, measured on one CPU core at 16 samples a pass."""
TIMED_CIFAR = replace(CIFAR, name="timed-cifar", steps=40)
TIMED_CIFAR_CORE = replace(
    TIMED_CIFAR,
    name="timed-cifar-core",
    machines=Machines(seconds_per_sample=ONE_CORE),
)
TIMED_MNIST = replace(MNIST, name="timed-mnist", steps=160)

MAIN = (ALL_REDUCE, ALL_REDUCE_FP16, SWITCH, SWITCH_FP16, ASYNC_FP16)
TIMED = (ALL_REDUCE, SMALL, ALL_REDUCE_FP16, SMALL_FP16, ASYNC, ASYNC_FP16)
DIVIDED = (BALANCED, BALANCED_SMALL)
"""Timed, too: all-reduce with steps divided by the workers' speeds."""
ABLATION = (SWITCH_FP16, DROPPED_FP16)

SWITCHING = (
    Part(setting=CIFAR, arms=MAIN),
    Part(setting=MNIST, arms=MAIN, seeds=tuple(range(6))),
)
ABLATIONS = (
    Part(setting=DIGITS_MOMENTUM, arms=ABLATION, seeds=tuple(range(12))),
    Part(setting=MNIST, arms=ABLATION, seeds=tuple(range(6))),
    Part(setting=CIFAR, arms=ABLATION),
    Part(setting=MNIST_ADAM, arms=ABLATION, seeds=tuple(range(6))),
)
DILOCO = (
    Part(setting=CIFAR_EQUAL, arms=(ALL_REDUCE,)),
    Part(setting=CIFAR_EQUAL, arms=tuple(diloco(*outer) for outer in OUTER), best_of=True),
)
TIMED_FOR = {TIMED_CIFAR.name: CIFAR.name, TIMED_CIFAR_CORE.name: CIFAR.name, TIMED_MNIST.name: MNIST.name}
"""The setting whose switches a timed one is to be read with."""
TIMINGS = tuple(
    Part(setting=one, arms=(*TIMED, *DIVIDED), seeds=(0,)) for one in (TIMED_CIFAR, TIMED_CIFAR_CORE, TIMED_MNIST)
)

DIGITS = Setting(name="digits", title="Digits, two layers", task="digits-mlp", epochs=8, batch_size=128)
TITLES = {one.name: one.title for one in (CIFAR, MNIST, MNIST_ADAM, CIFAR_EQUAL, DIGITS_MOMENTUM, DIGITS)} | {
    TIMED_CIFAR.name: "CIFAR-10, 8.1 ms a sample",
    TIMED_CIFAR_CORE.name: "CIFAR-10, 3.5 ms a sample (a CPU core)",
    TIMED_MNIST.name: "MNIST, 0.075 ms a sample",
}
"""By setting, in the order of the tables."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """The design."""

    parts: tuple[Part, ...] = (*SWITCHING, *ABLATIONS, *DILOCO, *TIMINGS)
    device: str = "cpu"
    data_dir: str = "data"
    """Holds a folder for each task that reads files."""
    deadline_s: float = 3600.0
    """A run that takes longer is ended, and has failed."""

    def __post_init__(self) -> None:
        if not self.parts or not all(part.arms and part.seeds for part in self.parts):
            raise ConfigError("switching: parts must have at least one arm and seed each, got none")
        if self.deadline_s <= 0:
            raise ConfigError(f"switching: deadline_s must be above 0, got {self.deadline_s}")

    def only(self, settings: Sequence[str]) -> Study:
        """The study of these settings alone; of all of them where none is named."""
        known = {part.setting.name for part in self.parts}
        for name in settings:
            if name not in known:
                raise UnknownName("setting of the study", name, sorted(known))
        return replace(self, parts=tuple(p for p in self.parts if p.setting.name in settings)) if settings else self

    def cells(self, accuracy: Mapping[tuple[str, str, int], float]) -> list[Cell]:
        """All runs that can be named so far, seed by seed, each once.

        `accuracy` is that of runs that have ended: where the best of several arms goes on, it must be known first.
        """
        found = [Cell(p.setting, arm, seed) for p in self.parts for seed in p.seeds for arm in _arms(p, seed, accuracy)]
        by_key = {cell.key: cell for cell in found}
        return sorted(by_key.values(), key=lambda cell: cell.seed)

    def options(self, cell: Cell) -> dict[str, Any]:
        """The arguments of `podium.train` for one run, but for the cluster file."""
        setting = cell.setting
        # Rows that were written before steps could be divided otherwise do not name the balancer.
        divided = {} if cell.arm.balance == "equal" else {"balance": cell.arm.balance}
        return {
            **divided,
            "task": setting.task,
            "task_options": dict(setting.options),
            "data_dir": str(Path(self.data_dir) / setting.folder) if setting.folder else None,
            "epochs": setting.epochs,
            "steps": setting.steps,
            "batch_size": setting.batch_size,
            "strategy": cell.arm.strategy,
            "codec": cell.arm.codec,
            "seed": cell.seed,
            "workers": setting.machines.workers,
            "device": self.device,
            "eval_every": 0 if setting.steps else 1,
        }


def _arms(part: Part, seed: int, accuracy: Mapping[tuple[str, str, int], float]) -> Sequence[Arm]:
    if not part.best_of or seed == part.seeds[0]:
        return part.arms
    tried = {(part.setting.name, arm.name, part.seeds[0]): arm for arm in part.arms}
    if not tried.keys() <= accuracy.keys():
        return ()
    return (tried[max(tried, key=lambda key: accuracy[key])],)


QUICK = Study(parts=(Part(setting=DIGITS, arms=(*MAIN, DROPPED_FP16), seeds=(0, 1)),))
"""Shows in a minute that everything works, and nothing else."""
