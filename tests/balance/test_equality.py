"""However a global step is divided, and however often the division changes: the parameters are those of one process.

Everything here is in double precision, so that what is left of a difference is rounding and nothing else.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from podium.config import lift, parse_spec
from podium.data.base import ArrayDataset, Data
from podium.data.order import GlobalOrder, share_of
from podium.launch.clusters.description import Cluster, Node
from podium.records.audit import audit
from podium.strategies import make_strategy
from podium.task import Task
from podium.testing.toys import (
    BATCH,
    CLASSES,
    FEATURES,
    SAMPLES,
    Trained,
    hashes,
    make_optimizer,
    toy,
    train_in,
    train_plainly,
)
from podium.testing.worlds import Memory, Virtual, World

WORKERS, EPOCHS = 4, 5
LONGEST, PAD = 9, -100
"""Words of the longest sentence; what stands where there is none."""
TOLERANCE = 1e-9

UNEVEN = Cluster(
    nodes=tuple(Node(name=f"n{i}", speed=speed) for i, speed in enumerate((4.0, 2.0, 1.0, 1.0))),
    seconds_per_sample=1e-3,
    seconds_per_step=1e-4,
)
"""Four workers of which the fastest does as much as all others together."""


# Tasks in double precision.


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


@cache
def vectors() -> Data:
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES + 8, FEATURES, generator=draw, dtype=torch.float64)
    targets = torch.randint(CLASSES, (SAMPLES + 8,), generator=draw)
    return Data(ArrayDataset(inputs[:SAMPLES], targets[:SAMPLES]), ArrayDataset(inputs[SAMPLES:], targets[SAMPLES:]))


@cache
def sentences() -> Data:
    """Of very unequal lengths: most are one word long, some nothing but padding, a few are full."""
    draw = torch.Generator().manual_seed(5)
    inputs = torch.randn(SAMPLES + 8, LONGEST, FEATURES, generator=draw, dtype=torch.float64)
    targets = torch.randint(CLASSES, (SAMPLES + 8, LONGEST), generator=draw)
    lengths = torch.tensor([0, 0, 1, LONGEST])[torch.randint(4, (SAMPLES + 8,), generator=draw)]
    targets[torch.arange(LONGEST)[None] >= lengths[:, None]] = PAD
    return Data(ArrayDataset(inputs[:SAMPLES], targets[:SAMPLES]), ArrayDataset(inputs[SAMPLES:], targets[SAMPLES:]))


def mean_over_words(outputs: Tensor, targets: Tensor) -> Tensor:
    """Not a number where there is no word, as PyTorch has it."""
    return cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=PAD)


def words(targets: Tensor) -> float:
    return float((targets != PAD).sum())


def task(optimizer: str = "momentum", *, masked: bool = False, **fields: Any) -> Task:
    own: dict[str, Any] = {"loss": mean_over_words, "weigh": words} if masked else {"loss": cross_entropy}
    return Task(
        name="sentences" if masked else "vectors",
        model=model,
        data=sentences if masked else vectors,
        optimizer=partial(make_optimizer, kind=optimizer),
        batch_size=BATCH,
        epochs=EPOCHS,
        **own,
        **fields,
    )


TASKS: dict[str, dict[str, Any]] = {
    "momentum": {},
    "adamw": {"optimizer": "adamw"},
    "clipped": {"optimizer": "adamw", "clip_norm": 0.05},
    "in micro-batches": {"accumulate": 3},
    "in more micro-batches than samples": {"accumulate": 50},
    "masked": {"masked": True},
    "masked, clipped, in micro-batches": {"masked": True, "accumulate": 3, "clip_norm": 0.05, "optimizer": "adamw"},
}

DIVISIONS: dict[str, dict[str, Any]] = {
    "shares": {"shares": (5, 1, 1, 3)},
    "shares with a 0": {"shares": (1, 0, 4, 0.5)},
    "equal-finish": {"balance": "equal-finish:every=1"},
    "proportional": {"balance": "proportional:every=1"},
}

SOME = ("shares with a 0", "equal-finish")

STRATEGIES = [
    "all-reduce",
    "all-reduce:overlap=false;bucket_bytes=64",
    "parameter-server",
    "parameter-server:servers=3",
    "parameter-server:servers=4;placement=colocated",
    "parameter-server:servers=2;overlap=false;unit_bytes=64",
    "phases:run=all-reduce until step:at=3 # parameter-server:servers=2 until epoch:at=2 # all-reduce",
    "strategy-switch:latest=1;window=99",
    "sync-switch:share=0.99",
]


COLLECTIVES = ["ring", "halving-doubling", "tree", "hierarchical", "reduce-to-one", "butterfly", "task-graph", "auto"]

HARDEST = "masked, clipped, in micro-batches"


def cases() -> list[Any]:
    """All-reduce in every way; the others in those that have caught something."""
    found = [("all-reduce", of, division) for of in TASKS for division in DIVISIONS]
    found += [("parameter-server:servers=3", of, "equal-finish") for of in TASKS]
    found += [(spec, "adamw", "equal-finish") for spec in STRATEGIES]
    found += [(spec, HARDEST, division) for spec in STRATEGIES for division in SOME]
    return [pytest.param(*case, id=", ".join(case)) for case in dict.fromkeys(found)]


class Run(NamedTuple):
    """What the workers came to."""

    trained: list[Trained]

    def rows(self, kind: str) -> list[dict[str, Any]]:
        return [row for one in self.trained for row in one.records if row["kind"] == kind]

    @property
    def divisions(self) -> list[tuple[int, ...]]:
        """Of every global step, the workers' samples by rank."""
        by_rank = [[row["samples"] for row in one.records if row["kind"] == "step"] for one in self.trained]
        return list(zip(*by_rank, strict=True))


def strategy_of(spec: str) -> tuple[Any, dict[str, Any]]:
    """A strategy and what of it belongs to the run; `#` stands for the bar between phases."""
    name, options = parse_spec(spec, "strategy")
    own, lifted = lift(options)
    return make_strategy(name, {k: str(v).replace("#", "|") for k, v in own.items()}, WORKERS), lifted


def run(world: World | None, spec: str, of: Task, **config: Any) -> Run:
    strategy, lifted = strategy_of(spec)
    where = world or Virtual(UNEVEN, colocated=strategy.server_spec.colocated)
    return Run(train_in(where, of, strategy, WORKERS, **lifted, **config))


@cache
def alone(name: str) -> dict[str, Tensor]:
    """What one process makes of it, with neither parts nor micro-batches."""
    return train_plainly(task(**{k: v for k, v in TASKS[name].items() if k != "accumulate"})).state


def check(found: Run, expected: dict[str, Tensor], tolerance: float = TOLERANCE) -> None:
    assert len(hashes(found.trained)) == 1
    for name, value in expected.items():
        off = float((found.trained[-1].state[name] - value).abs().max() / value.abs().max())
        assert off < tolerance, f"{name} is off by {off:g} of its largest element"
    assert audit([row for one in found.trained for row in one.records]) == (0, 0)
    assert [sum(step) for step in found.divisions] == [BATCH, BATCH, BATCH, SAMPLES - 3 * BATCH] * EPOCHS


def check_that_it_changed(found: Run) -> None:
    rows = found.rows("balance")
    assert rows and all(row["before"] != row["after"] for row in rows)
    first, *_, last = (sum(of_rank) for of_rank in zip(*found.divisions[-4:], strict=True))
    assert first > 1.5 * last, f"the first is four times as fast, and did {first} samples to {last} in the last epoch"


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "of", "division"), cases())
def test_unequal_parts_give_the_parameters_of_one_process(spec: str, of: str, division: str) -> None:
    found = run(None, spec, task(**TASKS[of]), **DIVISIONS[division])
    check(found, alone(of))
    if "balance" in DIVISIONS[division]:
        check_that_it_changed(found)


def test_in_the_masked_tasks_some_parts_weigh_nothing() -> None:
    """Or the tests above would not show that such parts do no harm."""
    train, order = sentences().train, GlobalOrder(SAMPLES, 0)
    steps = [order.slice_at(position, BATCH) for position in range(0, SAMPLES, BATCH)]
    parts = [share_of(step, DIVISIONS["shares"]["shares"], i) for step in steps for i in range(WORKERS)]
    weights = [words(train.gather(order.indices(part))[1]) for part in parts]
    assert 0.0 in weights
    assert max(weights) > 2 * LONGEST
    assert all(words(train.gather(order.indices(step))[1]) > 0 for step in steps)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_no_collective_minds_unequal_parts(collective: str) -> None:
    found = run(
        None, f"all-reduce:collective={collective};bucket_bytes=64", task(**TASKS[HARDEST]), **DIVISIONS[SOME[1]]
    )
    check(found, alone(HARDEST))
    check_that_it_changed(found)


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("spec", ["local-sgd:period=1", "diloco:sync_every=1;outer_lr=1;outer_momentum=0"])
def test_plain_steps_that_are_averaged_at_once_give_the_parameters_of_one_process(spec: str, division: str) -> None:
    found = run(None, spec, task("sgd", accumulate=3), **DIVISIONS[division])
    check(found, train_plainly(task("sgd")).state)
    if "balance" in DIVISIONS[division]:
        check_that_it_changed(found)


def test_moments_that_are_averaged_with_the_parameters_are_those_of_one_process() -> None:
    found = run(None, "local-sgd:period=1;average=parameters+moments", task("momentum"), **DIVISIONS["equal-finish"])
    check(found, alone("momentum"))
    check_that_it_changed(found)


def test_inside_a_round_of_local_steps_the_division_stays() -> None:
    found = run(None, "local-sgd:period=2", task("momentum"), **DIVISIONS["equal-finish"])
    assert len(hashes(found.trained)) == 1
    assert audit([row for one in found.trained for row in one.records]) == (0, 0)
    assert {row["step"] % 2 for row in found.rows("balance")} == {0}


@pytest.mark.parametrize("division", ["shares with a 0", "equal-finish"])
def test_threads_that_race_come_to_the_same(division: str) -> None:
    """Their speeds are whatever they are: the division may change at any time, or never."""
    for spec in ("all-reduce:bucket_bytes=64", "parameter-server:servers=2"):
        check(run(Memory(), spec, task(**TASKS[HARDEST]), **DIVISIONS[division]), alone(HARDEST))


@pytest.mark.parametrize("spec", ["all-reduce", "parameter-server:servers=3"])
def test_in_single_precision_rounding_is_all_that_is_left(spec: str) -> None:
    found = run(None, spec, toy(epochs=EPOCHS), **DIVISIONS["equal-finish"])
    check(found, train_plainly(toy(epochs=EPOCHS)).state, tolerance=2e-6)
    check_that_it_changed(found)
