"""What is compared: models, batches, nodes, links, and how often gradients are exchanged."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from podium.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from podium.lab.published.accumulation.profile import Profile

EPOCH = 100_000
"""Training images of TinyImageNet: what an epoch is here, whatever was trained on."""

STAND_IN = "podium.tasks.images64:stand_in"

Size = Literal["small", "core"]


@dataclass(frozen=True, kw_only=True)
class Network:
    """A model: the task that trains it, and the options of its stand-in."""

    name: str
    title: str
    task: str
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the task's function, and of the stand-in's."""


RESNET = Network(name="resnet50", title="ResNet-50", task="tiny-imagenet-resnet50")
EFFICIENTNET = Network(name="efficientnet-b0", title="EfficientNet-B0", task="tiny-imagenet-efficientnet-b0")


class Cell(NamedTuple):
    """One configuration. `every`: batches of each node per exchange."""

    model: str
    batch: int
    nodes: int
    every: int
    mbit: int

    @property
    def name(self) -> str:
        nodes = "1 node" if self.nodes == 1 else f"{self.nodes} nodes"
        return f"{self.model}, {self.mbit} Mbit/s, {nodes}, batch {self.batch}, every {self.every}"

    @property
    def levels(self) -> dict[str, Any]:
        return self._asdict()


@dataclass(frozen=True, kw_only=True)
class Study:
    """The design: every combination of levels with every seed, in virtual time, and some of them for real."""

    size: Size
    networks: tuple[Network, ...]
    batches: tuple[int, ...]
    nodes: tuple[int, ...]
    every: tuple[int, ...]
    mbits: tuple[int, ...]
    seeds: tuple[int, ...]
    passes: int = 8
    """Batches that each node goes through in a run."""
    latency_us: float = 50.0
    strategy: str = "all-reduce"
    collective: str = "ring"
    profile_batches: tuple[int, ...] = (8, 16, 32, 64, 100)
    profile_repeats: int = 6
    real: tuple[Cell, ...] = ()
    real_seeds: tuple[int, ...] = (0, 1, 2)
    runs_per_process: int = 5
    """Virtual ones, one after another; a study that is ended loses those of the process at work."""
    deadline_s: float = 900.0
    """A run that takes longer is ended, and has failed."""

    def __post_init__(self) -> None:
        for name in ("networks", "batches", "nodes", "every", "mbits", "seeds"):
            if not getattr(self, name):
                raise ConfigError(f"accumulation: {name} must name at least one, got none")
        for every in {*self.every, *(cell.every for cell in self.real)}:
            if every < 1 or self.passes % every:
                raise ConfigError(f"accumulation: every must divide {self.passes} batches, got {every}")

    @property
    def factors(self) -> dict[str, list[Any]]:
        return {
            "model": [network.name for network in self.networks],
            "batch": list(self.batches),
            "nodes": list(self.nodes),
            "every": list(self.every),
            "mbit": list(self.mbits),
        }

    def cells(self) -> list[Cell]:
        """All of them, link by link."""
        models = [network.name for network in self.networks]
        return [
            Cell(model, batch, nodes, every, mbit)
            for mbit, model, nodes, batch, every in product(self.mbits, models, self.nodes, self.batches, self.every)
        ]

    def runs(self) -> list[tuple[Cell, int]]:
        """All virtual runs, cell by cell: on a clock that nobody can disturb the order does not matter."""
        return [(cell, seed) for cell in self.cells() for seed in self.seeds]

    def real_runs(self) -> list[tuple[Cell, int]]:
        """Each seed is a block, its cells in an order drawn for it: what drifts on the machine meets all alike."""
        found = []
        for seed in self.real_seeds:
            block = list(self.real)
            random.Random(seed).shuffle(block)
            found += [(cell, seed) for cell in block]
        return found

    def network(self, name: str) -> Network:
        known = {network.name: network for network in self.networks}
        if name not in known:
            raise UnknownName("model of the study", name, known)
        return known[name]

    def options(self, cell: Cell, seed: int, *, real: bool) -> dict[str, Any]:
        """The arguments of `podium.train` for one run, but for the cluster file."""
        network, samples = self.network(cell.model), self.passes * cell.batch * cell.nodes
        own = dict(network.options) if real else {**network.options, "model": network.name}
        return {
            "task": network.task if real else STAND_IN,
            "task_options": {**own, "samples": samples},
            "strategy": self.strategy,
            "collective": self.collective,
            "workers": cell.nodes,
            "batch_size": cell.every * cell.batch * cell.nodes,
            "accumulate": cell.every,
            "epochs": 1,
            "eval_every": 0,
            "threads": 1,
            "seed": seed,
            "launcher": "shaped" if real else "virtual",
        }

    def cluster(self, cell: Cell, profile: Profile, *, real: bool) -> str:
        """The cluster file: the nodes compute as the profile says, and have a core each where they are real."""
        cpus = "cpus = 1.0\n" if real else ""
        return (
            f"[cluster]\njitter = {profile.cv:.6g}\nseconds_per_sample = {profile.per_sample_s.value:.6g}\n"
            f"seconds_per_step = {profile.per_pass_s.value:.6g}\n\n"
            f'[[node]]\nname = "node"\ncount = {cell.nodes}\n{cpus}up_mbit = {cell.mbit}\ndown_mbit = {cell.mbit}\n'
            f"latency_us = {self.latency_us}\nmemory_gbs = {profile.memory_gbs:.6g}\n"
        )


CORE = Study(
    size="core",
    networks=(RESNET, EFFICIENTNET),
    batches=(32, 64, 100),
    nodes=(1, 2, 3),
    every=(1, 4),
    mbits=(1000, 100),
    seeds=(0, 1, 2, 3, 4),
    real=(
        Cell("resnet50", 32, 2, 1, 100),
        Cell("resnet50", 32, 2, 4, 100),
        Cell("resnet50", 32, 2, 1, 1000),
        Cell("efficientnet-b0", 32, 2, 1, 100),
        Cell("efficientnet-b0", 32, 2, 4, 100),
        Cell("efficientnet-b0", 32, 1, 1, 100),
    ),
)
"""The source's 36 cells on each of two links, 5 seeds: 360 virtual runs, and six cells for real."""

SMALL = Study(
    size="small",
    networks=(
        Network(name="resnet50", title="ResNet-50, an eighth as wide", task=RESNET.task, options={"width": 8}),
        EFFICIENTNET,
    ),
    batches=(4, 8, 12),
    nodes=(1, 2, 3),
    every=(1, 4),
    mbits=(100,),
    seeds=(0, 1),
    profile_batches=(4, 8, 12),
    profile_repeats=3,
    real=(Cell("resnet50", 8, 2, 1, 100), Cell("resnet50", 8, 2, 4, 100), Cell("efficientnet-b0", 8, 2, 1, 100)),
    real_seeds=(0,),
    runs_per_process=12,
)
"""Shows in a few minutes that everything works, and nothing else."""


def design(size: Size) -> Study:
    return SMALL if size == "small" else CORE
