"""Means over replicas: by samples, whole or not at all, and of optimizers that have seen different things."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from podium.comm.base import Communicator
from podium.engine.batch import Batch
from podium.engine.gradient_pass import PassOptions
from podium.engine.replica import Replica
from podium.engine.worker import Worker
from podium.errors import Lost
from podium.strategies.averaging import Anchor, mean_moments
from podium.testing.toys import BATCH, CLASSES, FEATURES, OPTIMIZERS, Scaled
from podium.testing.worlds import Memory


def make_worker(comm: Communicator, optimizer: str = "sgd") -> Worker:
    with comm.computing():
        torch.manual_seed(1)
        model = Scaled()
    replica = Replica(model, OPTIMIZERS[optimizer](model.parameters()))
    worker = Worker(replica, comm, PassOptions(loss=cross_entropy))
    worker.generators.fork(numpy_and_python=False)
    worker.progress.train_on(40, BATCH)
    return worker


def batch(seed: int, samples: int, end: int) -> Batch:
    if samples == 0:
        return Batch(None, None, 0, 0.0, end=end)
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, FEATURES, generator=draw)
    return Batch(inputs, torch.randint(CLASSES, (samples,), generator=draw), samples, 1.0, end=end)


def drifted(comm: Communicator, counts: list[list[int]]) -> tuple[list[Tensor], list[Tensor], float]:
    """Each worker's parameters before the mean, after it, and its weight; `counts`: samples by step and worker."""
    worker = make_worker(comm)
    anchor = Anchor(worker, "test")
    for step, row in enumerate(counts):
        end = worker.position + sum(row)
        worker.train_locally(batch(10 * step + comm.rank, row[comm.rank], end))
    before = [flat.clone() for flat in worker.params]
    anchor.to_mean(worker)
    assert anchor.weight is not None
    for mine, flat in zip(anchor.flats, worker.params, strict=True):
        assert torch.equal(mine, flat)
    return before, [flat.clone() for flat in worker.params], anchor.weight


rows = st.lists(st.integers(0, 5), min_size=3, max_size=3).filter(any)


class TestAnchor:
    @given(counts=st.lists(rows, min_size=1, max_size=4))
    @settings(max_examples=12, deadline=None)
    def test_the_mean_is_weighted_by_samples_also_where_some_steps_have_none(self, counts: list[list[int]]) -> None:
        outcomes = Memory().run(partial(drifted, counts=counts), 3)
        totals = [sum(row[i] for row in counts) for i in range(3)]
        assert [weight for _, _, weight in outcomes] == pytest.approx([n / sum(totals) for n in totals])
        for k in range(len(outcomes[0][0])):
            mean = sum(n * before[k].double() for n, (before, _, _) in zip(totals, outcomes, strict=True)) / sum(totals)
            for _, after, _ in outcomes:
                assert torch.equal(after[k], outcomes[0][1][k])
                torch.testing.assert_close(after[k].double(), mean, rtol=1e-5, atol=1e-6)

    def test_a_lost_peer_leaves_the_parameters_as_they_are(self) -> None:
        outcomes = Memory().attempt(_loses_a_peer, 3, deadline_s=5.0)
        assert isinstance(outcomes[1], ZeroDivisionError)
        assert outcomes[0] is outcomes[2] is True

    def test_global_steps_are_counted_by_position(self) -> None:
        Memory().run(_counts_steps, 1)


def _loses_a_peer(comm: Communicator) -> bool:
    worker = make_worker(comm)
    anchor = Anchor(worker, "test")
    worker.train_locally(batch(comm.rank, 4, 12))
    if comm.rank == 1:
        raise ZeroDivisionError
    before = [flat.clone() for flat in worker.params]
    with pytest.raises(Lost):
        anchor.to_mean(worker)
    return all(torch.equal(a, b) for a, b in zip(before, worker.params, strict=True))


def _counts_steps(comm: Communicator) -> None:
    worker = make_worker(comm)  # 40 samples in steps of 12: four to an epoch
    for position, step in ((0, 0), (11, 0), (12, 1), (39, 3), (40, 4), (53, 5), (80, 8)):
        worker.progress.move_to(position)
        assert worker.progress.global_step == step


def moments_of(
    comm: Communicator, optimizer: str, steps: list[int], weights: list[float]
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], list[Tensor]]:
    """The optimizer's state before and after the mean, and the parameters after one more step that all do alike."""
    worker = make_worker(comm, optimizer)
    for step in range(steps[comm.rank]):
        worker.train_locally(batch(10 * step + comm.rank, 4, 12 * (step + 1)))
    before = worker.state()["optimizer"]
    mean_moments(worker, weights[comm.rank])
    after = worker.state()["optimizer"]
    for flat in worker.params:
        flat.zero_()
    worker.train_locally(batch(99, 4, 120))
    return before, after, [flat.clone() for flat in worker.params]


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adamw", "adagrad", "rmsprop"])
@pytest.mark.parametrize("steps", [[2, 2, 2], [4, 1, 1], [3, 0, 2], [0, 2, 0], [0, 0, 0]])
def test_moments_are_averaged_whoever_has_any(optimizer: str, steps: list[int]) -> None:
    weights = [0.5, 0.3, 0.2]
    outcomes = Memory().run(partial(moments_of, optimizer=optimizer, steps=steps, weights=weights), 3)
    befores, afters, params = zip(*outcomes, strict=True)
    for name in afters[0]:
        for key, mean in afters[0][name].items():
            if mean is None:  # momentum that nobody has
                continue
            kept = [torch.as_tensor(before[name][key]) if before.get(name) else torch.zeros(()) for before in befores]
            expected = sum(w * value.double() for w, value in zip(weights, kept, strict=True))
            expected = expected.round() if key == "step" else expected
            torch.testing.assert_close(torch.as_tensor(mean).double(), expected.expand_as(mean), rtol=1e-5, atol=1e-6)
            for after in afters[1:]:
                assert torch.equal(after[name][key], mean)
    for other in params[1:]:  # and the optimizers take it up: from here on all step alike
        for a, b in zip(other, params[0], strict=True):
            assert torch.equal(a, b)


def test_a_worker_alone_keeps_its_moments_in_bits() -> None:
    ((before, after, _),) = Memory().run(partial(moments_of, optimizer="adamw", steps=[3], weights=[0.1]), 1)
    for name, state in before.items():
        for key, value in state.items():
            assert torch.equal(after[name][key], value)


def test_a_parameter_that_only_one_worker_has_stepped_gets_its_state_everywhere() -> None:
    for names in Memory().run(_partly_used, 2):
        assert names == {"used.weight", "used.bias", "rare.weight", "rare.bias"}


def _partly_used(comm: Communicator) -> set[str]:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.rare = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.used(x)
            return out + self.rare(x) if comm.rank == 1 else out

    model = Two()
    replica = Replica(model, OPTIMIZERS["momentum"](model.parameters()))
    worker = Worker(replica, comm, PassOptions(loss=cross_entropy))
    worker.generators.fork(numpy_and_python=False)
    worker.train_locally(batch(1, 4, 8))
    assert len(worker.state()["optimizer"]) == (4 if comm.rank == 1 else 2)
    mean_moments(worker, 0.5)
    return {name for name, state in worker.state()["optimizer"].items() if state}
