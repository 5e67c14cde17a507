"""The executors on a GPU: captured, branched, compiled, and still the same trials."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from podium.sweeps.executors.auto import Auto
from podium.sweeps.executors.fused import Fused
from podium.sweeps.executors.sequential import Sequential
from podium.sweeps.executors.streams import Streams
from podium.sweeps.fused import slots
from podium.sweeps.fused.captured_step import CapturedStep
from podium.sweeps.fused.probe import probe
from podium.sweeps.trial import Trial
from tests.shared_data import shared_data
from tests.sweeps import nets
from tests.sweeps.nets import Queue, apart, array_of, recipe_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),
]

TRIALS = [
    Trial(number=i, seed=i, options={"lr": 0.02 * (i + 1), "dropout": 0.1 * (i % 4), "epochs": 1 + i % 3})
    for i in range(9)
]


def on_gpu(task: Any, **settings: Any) -> Any:
    return recipe_of(task, **{"device": "cuda", **settings})


@pytest.mark.parametrize(
    "executor",
    [Fused(width=4), Fused(width=4, captured=False), Streams(width=4), Sequential(mode="graph"), Auto(seconds=0.05)],
    ids=["fused", "fused-eager", "streams", "graph", "auto"],
)
def test_nine_trials_are_the_same_nine_trials(executor: Any) -> None:
    recipe = on_gpu(nets.toy, eval_every=1)
    queue, alone = Queue(TRIALS), Queue(TRIALS)
    executor.run(recipe, queue, lambda event: None)
    Sequential().run(recipe, alone, lambda event: None)
    for trial in TRIALS:
        mine, theirs = queue.outcomes[trial.number], alone.outcomes[trial.number]
        assert (mine.status, mine.steps, mine.why) == ("finished", theirs.steps, "")
        assert apart(queue.states[trial.number], alone.states[trial.number]) < 1e-9


@pytest.mark.parametrize("executor", [Fused(width=8), Streams(width=8)], ids=["fused", "streams"])
def test_trials_move_into_a_narrower_graph(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "_NARROW_S", -1e9)  # whatever it costs
    options = [{"lr": 0.02 * (i + 1), "momentum": 0.9, "dropout": 0.1, "epochs": 1 + i} for i in range(8)]
    trials = [Trial(number=i, seed=i, options=one) for i, one in enumerate(options)]
    recipe, heard = on_gpu(nets.toy, eval_every=1), []
    queue, alone = Queue(trials), Queue(trials)
    executor.run(recipe, queue, heard.append)
    Sequential().run(recipe, alone, lambda event: None)
    assert len([event for event in heard if event["event"] == "narrowed"]) >= 2
    assert not any(event["event"] in ("fell back", "not narrowed") for event in heard)
    assert all(apart(queue.states[i], alone.states[i]) < 1e-9 for i in range(8))


def test_a_poisoned_row_changes_no_bit_of_the_others_in_a_captured_graph() -> None:
    recipe = on_gpu(nets.toy, dtype="float32")
    trials = [Trial(number=i, seed=i, options={"lr": 0.1, "momentum": 0.9, "clip_norm": 1.0}) for i in range(3)]
    arrays = [array_of(recipe, trials), array_of(recipe, trials)]
    arrays[1].flat[1, ::7] = float("nan")
    for array in arrays:
        CapturedStep([array]).run(6)
    clean, poisoned = arrays
    for row in (0, 2):
        assert torch.equal(clean.flat[row], poisoned.flat[row])
    assert poisoned.loss[1].isnan()


def test_two_structures_side_by_side_in_one_graph() -> None:
    recipe = on_gpu(nets.toy)
    narrow = [Trial(number=i, seed=i, options={"width": 8, "lr": 0.1}) for i in range(3)]
    wide = [Trial(number=3 + i, seed=i, options={"width": 32, "lr": 0.1}) for i in range(3)]
    queues, alone = [Queue(narrow), Queue(wide)], Queue([*narrow, *wide])
    Fused().run_groups(recipe, queues, lambda event: None)
    Sequential().run(recipe, alone, lambda event: None)
    for queue in queues:
        for number, state in queue.states.items():
            assert apart(state, alone.states[number]) < 1e-9


@pytest.mark.parametrize(
    ("task", "folder"),
    [("digits-cnn", None), ("mnist-cnn", "mnist"), ("cifar10-resnet20", "cifar10"), ("recommend", None)],
)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
def test_built_in_tasks_fuse_on_a_gpu(task: str, folder: str | None, precision: str) -> None:
    data_dir = None if folder is None else str(shared_data(folder))
    recipe = on_gpu(task, dtype="float32", precision=precision, data_dir=data_dir)
    trials = [Trial(number=i, seed=i, options={"lr": 0.01 * (i + 1)}) for i in range(2)]
    found = probe(recipe, trials, nets.device_data_of(recipe, trials[0]))
    assert found.fuses, found.why


@pytest.mark.parametrize("rows", [1, 3])
def test_a_compiled_step_is_the_same_step(rows: int) -> None:
    recipe = on_gpu("digits-cnn", dtype="float32")
    trials = [Trial(number=i, seed=i, options={"lr": 0.05, "momentum": 0.9}) for i in range(rows)]
    plain, compiled = array_of(recipe, trials), array_of(recipe, trials, compiled=True)
    CapturedStep([plain]).run(5)
    CapturedStep([compiled]).run(5)
    for row in range(rows):
        assert apart(plain.save(row), compiled.save(row)) < 1e-3
