"""Torch, numpy and Python's `random` are seeded by (seed, rank), under every launcher, and go on after a resume."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import podium
from podium.config import RunResult
from podium.data.order import GlobalOrder
from podium.engine.generators import (
    Others,
    held_generators,
    others_state,
    set_others_state,
    several_in_one_process,
    undrawn,
)
from tests.integration import drawing
from tests.integration.processes import document, settings, torchrun
from tests.integration.runs import FIELDS
from tests.integration.shaping import CLUSTER, needs_root
from tests.integration.test_own_loops import said_by

SHAPED = pytest.param("shaped", marks=[pytest.mark.root, needs_root])


def train(tmp_path: Path, launcher: str = "local", log: Path | None = None, **options: Any) -> RunResult:
    if launcher == "shaped":
        (tmp_path / "cluster.toml").write_text(CLUSTER)
        options["cluster"] = str(tmp_path / "cluster.toml")
    chosen = {"task_options": {"log": str(log)} if log else {}, "workers": 2, **options}
    return podium.train(drawing.TASK, **{**FIELDS, "out": tmp_path / "out", "launcher": launcher, **chosen})


def numbers(tmp_path: Path, launcher: str, **options: Any) -> list[list[list[float]]]:
    """What each rank has drawn in its forward passes."""
    log = tmp_path / f"log-{len(list(tmp_path.iterdir()))}"
    log.mkdir()
    train(tmp_path, launcher, log, **options)
    files = [[list(map(float, line.split())) for line in path.read_text().splitlines()] for path in log.iterdir()]
    return sorted(rows for rows in files if len(rows) > 1)  # virtual time counts a pass's operations beforehand


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> list[list[list[float]]]:
    return numbers(tmp_path_factory.mktemp("local"), "local")


def test_ranks_draw_different_numbers(local: list[list[list[float]]]) -> None:
    first, second = local
    assert len(first) == len(second) == 3 * 4, "two ranks, twelve steps"
    for generator in range(3):
        assert not {row[generator] for row in first} & {row[generator] for row in second}
        assert len({row[generator] for row in first + second}) == 2 * len(first), "no number comes twice"


@pytest.mark.parametrize("launcher", ["local", "threads", "virtual", SHAPED])
def test_the_same_seed_draws_the_same_numbers_under_every_launcher(
    launcher: str, local: list[list[list[float]]], tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(2**32)  # what the launcher's own generators do is no matter
    print(f"generators of the launcher are seeded with {seed}")
    np.random.seed(seed)
    random.seed(seed)
    assert numbers(tmp_path, launcher) == local


@pytest.mark.slow
def test_under_torchrun_too(tmp_path: Path) -> None:
    code, out, err = torchrun(2, "--task", drawing.TASK, *settings({**FIELDS, "out": tmp_path / "torchrun"}))
    assert code == 0, err
    assert document(out)["param_hash"] == train(tmp_path).param_hash


def test_another_seed_draws_others(local: list[list[list[float]]], tmp_path: Path) -> None:
    for other, mine in zip(numbers(tmp_path, "threads", seed=1), local, strict=True):
        for generator in range(3):
            assert not {row[generator] for row in other} & {row[generator] for row in mine}


@pytest.mark.parametrize("launcher", ["local", "threads"])
def test_a_resumed_run_equals_the_unbroken_one(launcher: str, tmp_path: Path) -> None:
    whole = train(tmp_path, launcher)
    first = train(tmp_path, launcher, steps=5)
    rest = train(tmp_path, launcher, resume=first.run_dir)
    assert rest.param_hash == whole.param_hash


def test_rank_0_draws_as_a_plain_script_would_that_seeds_all_three(local: list[list[list[float]]]) -> None:
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    model = drawing.Model("")
    items = drawing.Augmented()
    order, seen = GlobalOrder(96, 0), []
    for step in range(3):
        piece = order.slice_at(24 * step, 24)
        [items[int(i)] for i in order.indices(piece)[:12]]  # the first worker's part
        seen.append(drawing.drawn())
    assert model.training
    assert seen in [rank[:3] for rank in local]


def test_loops_of_ones_own_draw_by_rank(tmp_path: Path) -> None:
    once, again = (
        [row["drawn"] for row in said_by(tmp_path, "numbers") if "drawn" in row],
        [row["drawn"] for row in said_by(tmp_path, "numbers") if "drawn" in row],
    )
    assert once == again
    assert all(a != b for a, b in zip(*once, strict=True)), "each rank its own, of each generator"
    other = [row["drawn"] for row in said_by(tmp_path, "numbers", seed=3) if "drawn" in row]
    assert [row[1:] for row in other] != [row[1:] for row in once], "numpy and Python follow the run's seed"


# The pieces.


def test_workers_of_one_process_keep_their_streams_apart() -> None:
    """Whoever draws how much of normal numbers in between."""

    def alone(seed: int) -> list[float]:
        np.random.seed(seed), random.seed(seed)
        return [value for _ in range(5) for value in (np.random.randn(), random.gauss(), np.random.rand())]

    expected = {seed: alone(seed) for seed in (1, 2, 3)}
    np.random.seed(9), random.seed(9)
    outside = [*np.random.randn(3).tolist(), random.random()]
    np.random.seed(9), random.seed(9)
    begun = np.random.randn()
    with several_in_one_process():
        held = {}
        for seed in expected:
            np.random.seed(seed), random.seed(seed)
            held[seed] = Others()
        seen: dict[int, list[float]] = {seed: [] for seed in expected}
        for _ in range(5):
            for seed, others in held.items():
                others.put_in_place()
                seen[seed].append(np.random.randn())
            for seed, others in held.items():
                others.put_in_place()
                seen[seed] += [random.gauss(), np.random.rand()]
    assert seen == expected
    assert [begun, *np.random.randn(2).tolist(), random.random()] == outside, "and the process's own goes on"


def test_a_state_comes_back_from_plain_values() -> None:
    np.random.seed(4), random.seed(4)
    np.random.randn(), random.gauss()
    kept = others_state()
    before = [np.random.randn(), np.random.rand(), random.gauss(), random.random()]
    set_others_state(kept)
    assert [np.random.randn(), np.random.rand(), random.gauss(), random.random()] == before


RNG = np.random.default_rng(0)


def test_generators_are_found_wherever_a_data_set_holds_them() -> None:
    class Holder:
        shared = random.Random(1)

        def __init__(self) -> None:
            own = torch.Generator()
            self.steps = [lambda x: x + float(torch.rand((), generator=own)), {"deep": (np.random.RandomState(1),)}]

        def __getitem__(self, index: int) -> float:
            return index + RNG.normal()

    kinds = {type(found) for found in held_generators(Holder())}
    assert kinds == {random.Random, torch.Generator, np.random.RandomState, np.random.Generator}
    holder = Holder()
    with undrawn(holder):
        first = [holder[0], Holder.shared.random()]
    assert [holder[0], Holder.shared.random()] == first
