"""All-reduce: the synchronous contract, with buckets and without overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import SGD

from podium.comm.base import Communicator
from podium.engine.batch import Batch
from podium.engine.gradient_pass import PassOptions
from podium.engine.replica import Replica
from podium.engine.worker import Worker
from podium.errors import CommError, ConfigError
from podium.launch.clusters.description import uniform
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.testing.strategies import SynchronousClippingContract, SynchronousContract
from podium.testing.toys import (
    CLASSES,
    FEATURES,
    assert_close,
    assert_same_bits,
    hashes,
    plain_model,
    toy,
    train,
    train_in,
    train_plainly,
)
from podium.testing.worlds import Memory, Real, Virtual


class TestAllReduce(SynchronousContract, SynchronousClippingContract):
    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return AllReduce()


class TestAllReduceInManyBuckets(SynchronousContract, SynchronousClippingContract):
    """A bucket per tensor, issued from within backward."""

    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return AllReduce(bucket_bytes=1)


@pytest.mark.parametrize("workers", [2, 3])
def test_buckets_and_overlap_do_not_change_the_bits(workers: int) -> None:
    strategies = [AllReduce(), AllReduce(bucket_bytes=1), AllReduce(bucket_bytes=100), AllReduce(overlap=False)]
    results = [hashes(train(toy(), strategy, workers)) for strategy in strategies]
    assert len(set.union(*results)) == 1


def test_three_real_processes_agree_with_one_process() -> None:
    task = toy()
    trained = train_in(Real(), task, AllReduce(bucket_bytes=64), 3)
    assert len(hashes(trained)) == 1
    assert_close(trained[0].state, train_plainly(task).state)


def test_buckets_travel_in_index_order_on_every_rank() -> None:
    """Ranks whose gradients come in different order would otherwise add up different parameters."""
    orders = Memory().run(_bucket_order, workers=2)
    assert orders[0] == orders[1] == sorted(orders[0])
    assert len(orders[0]) > 2


def test_waiting_in_the_callback_is_refused() -> None:
    with pytest.raises(CommError, match="inside a backward pass"):
        train(toy(), _Hasty())


def test_bucket_bytes_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="bucket_bytes"):
        AllReduce(bucket_bytes=0)


def test_jitter_changes_times_and_not_results() -> None:
    def run(jitter: float) -> Any:
        return train_in(Virtual(uniform(3, seconds_per_sample=1e-3, jitter=jitter)), toy(), AllReduce(), 3)

    steady, shaken = run(0.0), run(0.5)
    assert steady[0].step_times != shaken[0].step_times
    for a, b in zip(steady, shaken, strict=True):
        assert_same_bits(a.state, b.state)


class _Hasty(Strategy[None]):
    """Does what no strategy may: it waits while backward is still running."""

    bucket_bytes = 1

    def init(self, worker: Any) -> None:
        return None

    def step(self, worker: Any, state: None, batch: Any) -> Any:
        return worker.backward(batch, on_ready=lambda b: worker.comm.wait(worker.comm.all_reduce(worker.bucket(b))))


def _bucket_order(comm: Communicator) -> list[int]:
    with comm.computing():
        torch.manual_seed(0)
        model = plain_model()
        replica = Replica(model, SGD(model.parameters(), lr=0.1), bucket_bytes=1)
        worker = Worker(replica, comm, PassOptions(loss=cross_entropy))
        worker.generators.fork(numpy_and_python=False)
    announced: list[int] = []
    samples = 4 if comm.rank == 0 else 0  # a rank without samples announces the same buckets, all at once
    inputs, targets = torch.ones(samples, FEATURES), torch.arange(samples) % CLASSES
    worker.backward(Batch(inputs, targets, samples, samples / 4), announced.append)
    return announced
