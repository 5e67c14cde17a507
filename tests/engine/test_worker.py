"""The worker: what buffers promise, and what it refuses or undoes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from podium.comm.memory import MemoryWorld
from podium.engine.batch import Batch
from podium.engine.files import load_tensors
from podium.engine.gradient_pass import PassOptions
from podium.engine.replica import Replica
from podium.engine.rollback import Rollback
from podium.engine.worker import Worker
from podium.errors import ConfigError, TrainingError
from podium.strategies.all_reduce import AllReduce
from podium.strategies.parameter_server import ParameterServer
from podium.testing.toys import (
    CLASSES,
    FEATURES,
    Trained,
    batch_norm_model,
    everything_model,
    plain_model,
    toy,
    train,
)

STATISTICS = ("1.running_mean", "1.running_var")
MOMENTUM = 0.1  # of BatchNorm


def trained_with(buffers: Any, steps: int, strategy: Any = None, **options: Any) -> list[Trained]:
    task = toy(model=batch_norm_model, buffers=buffers, samples=48)
    return train(task, strategy or AllReduce(), 3, steps=steps, **options)


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer()], ids=lambda s: s.name)
class TestBuffers:
    def test_mean_buffers_are_the_mean_of_what_each_worker_kept(self, strategy: Any) -> None:
        mean, local = trained_with("mean", 5, strategy), trained_with("local", 5, strategy)
        for name in STATISTICS:
            expected = sum(worker.state[name] for worker in local) / 3
            assert not torch.equal(local[0].state[name], local[1].state[name])
            for worker in mean:
                torch.testing.assert_close(worker.state[name], expected)
                assert torch.equal(worker.state[name], mean[0].state[name])

    def test_local_buffers_are_never_exchanged(self, strategy: Any) -> None:
        """Each worker's are those of the samples it saw, starting from zero mean."""
        first = trained_with("local", 1, strategy)
        assert len({worker.state["1.running_mean"][0].item() for worker in first}) == 3

    def test_broadcast_buffers_begin_every_step_as_the_first_worker_has_them(self, strategy: Any) -> None:
        """A worker's are then one update away from the first worker's of the step before."""
        last, before = trained_with("local", 4, strategy), trained_with("local", 3, strategy)
        broadcast = trained_with("broadcast", 4, strategy)
        for name in STATISTICS:
            first = before[0].state[name]
            for rank in range(3):
                update = last[rank].state[name] - (1 - MOMENTUM) * before[rank].state[name]
                expected = (1 - MOMENTUM) * first + update
                torch.testing.assert_close(broadcast[rank].state[name], expected, rtol=1e-5, atol=1e-6)

    def test_the_policy_does_not_touch_parameters(self, strategy: Any) -> None:
        hashes = {trained_with(b, 4, strategy)[0].report.param_hash for b in ("mean", "broadcast", "local")}
        assert len(hashes) == 1


def test_local_buffers_that_are_saved_are_the_first_workers(tmp_path: Path) -> None:
    local = trained_with("local", 3, run_dir=tmp_path)
    saved = load_tensors(tmp_path / "model.safetensors")
    assert torch.equal(saved["1.running_mean"], local[0].state["1.running_mean"])


def test_counts_of_batches_are_left_alone() -> None:
    assert trained_with("mean", 5)[1].state["1.num_batches_tracked"].item() == 5


# One worker, by hand.


def worker_of(model: nn.Module, workers: int = 1, accumulate: int = 1, **options: Any) -> Worker:
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    replica, passes = Replica(model, optimizer, **options), PassOptions(loss=cross_entropy, accumulate=accumulate)
    worker = Worker(replica, MemoryWorld(workers).ranks[0], passes)
    worker.generators.fork(numpy_and_python=False)
    return worker


def a_batch(samples: int = 6) -> Batch:
    return Batch(torch.randn(samples, FEATURES), torch.arange(samples) % CLASSES, samples, 1.0)


def test_a_step_that_did_not_happen_leaves_no_trace() -> None:
    torch.manual_seed(0)
    worker, batch = worker_of(everything_model()), a_batch()
    rollback = Rollback(worker)
    rollback.before_step()
    first = worker.backward(batch)
    moved = {k: v.clone() for k, v in worker.model.state_dict().items()}
    rollback.undo_step()
    before = {k: v for k, v in worker.model.state_dict().items() if "running" in k}
    assert any(not torch.equal(v, moved[k]) for k, v in before.items()), "BatchNorm must have moved in between"
    again = worker.backward(batch)
    assert torch.equal(first, again), "dropout must draw the same again"
    assert torch.equal(worker.model.state_dict()["1.running_mean"], moved["1.running_mean"])


def test_gradients_are_weighted_by_the_part_of_the_step() -> None:
    torch.manual_seed(0)
    worker, batch = worker_of(plain_model()), a_batch()
    worker.backward(batch)
    whole = worker.bucket(0).clone()
    worker.backward(batch._replace(weight=0.25))
    torch.testing.assert_close(worker.bucket(0), whole * 0.25)


def test_a_worker_without_samples_contributes_zeros() -> None:
    worker = worker_of(plain_model())
    worker.backward(a_batch())
    assert worker.bucket(0).abs().max() > 0
    loss = worker.backward(Batch(None, None, 0, 0.0))
    assert worker.bucket(0).abs().max() == 0
    assert loss.item() == 0


def test_micro_batches_divide_samples_and_weight() -> None:
    parts = a_batch(7)._replace(weight=0.5).split(3)
    assert [p.samples for p in parts] == [2, 2, 3]
    assert [len(p.inputs) for p in parts] == [2, 2, 3]
    assert sum(p.weight for p in parts) == pytest.approx(0.5)
    assert [p.samples for p in a_batch(2).split(5)] == [1, 1]
    assert len(a_batch(1).split(5)) == 1


def test_a_gradient_that_lands_twice_is_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = checkpoint(self.layer, x, use_reentrant=True)
            return self.head(x)

    worker = worker_of(Twice())
    batch = a_batch()
    with pytest.raises(TrainingError, match=r"layer\.\w+ got its gradient twice"):
        worker.backward(batch._replace(inputs=batch.inputs.requires_grad_()))


def test_state_by_name_survives_another_layout() -> None:
    torch.manual_seed(0)
    a = worker_of(plain_model(), bucket_bytes=1)
    a.backward(a_batch())
    a.apply(a_batch())
    b = worker_of(plain_model(), bucket_bytes=1 << 20)
    b.load_state(a.state())
    assert b.replica.hash() == a.replica.hash()
    assert b.steps_done == 1
    b.flat.check()


def test_saved_state_is_a_copy() -> None:
    worker = worker_of(plain_model())
    kept = worker.state()
    worker.backward(a_batch())
    worker.apply(a_batch())
    assert not torch.equal(kept["model"]["0.weight"], worker.model.state_dict()["0.weight"])


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = plain_model().requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter to train"):
        Replica(model, SGD([torch.zeros(1)], lr=0.1))


def test_a_hash_depends_on_every_parameter_and_on_nothing_else() -> None:
    torch.manual_seed(0)
    a = worker_of(plain_model(), bucket_bytes=1)
    torch.manual_seed(0)
    b = worker_of(plain_model())
    assert a.replica.hash() == b.replica.hash()
    with torch.no_grad():
        b.model[2].bias[0] += 1e-7
    assert a.replica.hash() != b.replica.hash()


def test_the_loss_of_the_step_travels_with_the_gradients() -> None:
    """All workers know the loss of the whole step without another exchange."""
    worker, batch = worker_of(plain_model()), a_batch()
    loss = worker.backward(batch)
    worker.apply(batch)
    assert worker.votes.mean_loss == pytest.approx(loss.item())


# Buffers that a step has changed in more than their values.


class Restless(nn.Module):
    """Each pass assigns a buffer anew, grows another, adds one and removes one."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.passes = nn.Linear(FEATURES, CLASSES), 0
        self.register_buffer("ema", torch.zeros(FEATURES))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.register_buffer("grows", torch.zeros(1))
        self.register_buffer("spare", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema + 0.1 * x.mean(0)
        self.hidden.add_(1)
        self.hidden = self.hidden.double()
        self.grows = torch.cat([self.grows, self.grows])
        if hasattr(self, "spare"):
            del self.spare
            self.register_buffer("late", torch.ones(3), persistent=False)
        return self.head(x)


@pytest.mark.parametrize("by_rounds", [False, True])
def test_a_step_or_round_that_did_not_happen_leaves_no_trace_in_buffers_that_were_replaced(by_rounds: bool) -> None:
    worker = worker_of(Restless())
    before = {name: (b, b.clone()) for name, b in worker.model.named_buffers()}
    saved = {name: b.clone() for name, b in worker.model.state_dict().items()}
    rollback = Rollback(worker)
    (rollback.before_round if by_rounds else rollback.before_step)()
    worker.backward(a_batch())
    assert {name for name, _ in worker.model.named_buffers()} != before.keys()
    (rollback.undo_round if by_rounds else rollback.undo_step)()
    after = dict(worker.model.named_buffers())
    assert after.keys() == before.keys()
    for name, (tensor, value) in before.items():
        assert after[name] is tensor
        assert torch.equal(tensor, value)
    assert worker.model.state_dict().keys() == saved.keys()


def test_an_embedding_that_rescales_its_rows_is_refused_where_workers_would_come_apart() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(9, FEATURES, max_norm=1.0), nn.Linear(FEATURES, CLASSES))

    worker_of(make())
    with pytest.raises(ConfigError, match="module 0: max_norm rescales the rows"):
        worker_of(make(), workers=2)


def test_optimizer_hooks_are_called_once_a_step_as_in_plain_pytorch() -> None:
    worker, calls = worker_of(plain_model()), []
    worker.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    worker.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    for _ in range(3):
        worker.backward(a_batch())
        worker.apply(a_batch())
    assert calls == ["before", "after"] * 3


def test_a_hook_on_all_optimizers_is_called_once_a_step_too() -> None:
    seen: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        worker = worker_of(plain_model())
        worker.backward(a_batch())
        worker.apply(a_batch())
    finally:
        handle.remove()
    assert seen == [worker.optimizer]
