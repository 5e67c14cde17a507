"""Podium's all-reduce with a codec, on ranks as `podium train` has them; the codec is given anew for each round."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from podium.allocator import keep_freed_memory
from podium.bench.peers.podium_ps import Place
from podium.bench.peers.podium_sums import connect
from podium.bench.peers.stepping import Stepping, Steps, in_turn, run_steps, share_of_data
from podium.bench.peers.team import Team, answer
from podium.building import Job, build_worker
from podium.cluster.netns import enter_namespace
from podium.comm.real import RealCommunicator
from podium.config import RunConfig
from podium.reducing import make_packing
from podium.strategies.all_reduce import AllReduce
from podium.task import load_task
from podium.worker import Batch, Worker

_TASK = "wide-mlp"
_EPOCHS_DONE = 100  # by then every codec's warm-up is over


class PodiumSteps(Stepping):
    """One worker per place. A contender's name is its codec, as `podium train --codec` takes it."""

    def __init__(
        self, payload: Mapping[str, Any], folder: Path, places: tuple[Place, ...], interfaces: Sequence[str] = ()
    ) -> None:
        """`payload`: options of the task `wide-mlp`."""
        size = len(places)
        ranks = enumerate(zip(places, in_turn(interfaces, size), strict=True))
        members = [partial(_rank, rank, size, dict(payload), folder, *where) for rank, where in ranks]
        super().__init__(Team("podium", members), size)


def _rank(
    rank: int, size: int, payload: dict[str, Any], folder: Path, place: Place, interface: str, pipe: Connection
) -> None:
    keep_freed_memory()
    if place.namespace is not None:
        enter_namespace(place.namespace)
    comm = connect(rank, size, folder, place)
    replica = _Replica(comm, payload, interface)
    answer(pipe, {"ready": replica.ready, "steps": replica.steps, "chosen": replica.chosen})
    comm.close()


class _Replica:
    """One rank's worker, with the codec that was last asked for."""

    def __init__(self, comm: RealCommunicator, payload: dict[str, Any], interface: str) -> None:
        self._comm, self._payload, self._interface = comm, payload, interface
        self._worker: Worker | None = None
        self._step: Callable[[], object] | None = None

    def ready(self, codec: str) -> None:
        """A new replica, from the same start as all others."""
        self._worker = self._step = None
        gc.collect()  # the last one's memory, before more is asked for
        comm, strategy = self._comm, AllReduce()
        config = RunConfig(task=_TASK, task_options=self._payload, workers=comm.size, codec=codec, threads=1)
        task = load_task(_TASK, self._payload)
        worker = build_worker(Job(config, task, strategy), comm, 1, torch.device("cpu"))
        worker.samples, worker.batch_size = len(task.data().train), task.batch_size
        worker.position = end = _EPOCHS_DONE * worker.samples
        worker.prepare_exchanges(make_packing)
        state = strategy.init(worker)  # type: ignore[func-returns-value]  # None is its state
        inputs, targets = share_of_data(task, comm.index, comm.size)
        batch = Batch(inputs, targets, len(targets), 1 / comm.size, end=end)
        self._worker, self._step = worker, lambda: strategy.step(worker, state, batch)

    def steps(self, _codec: str, count: int) -> Steps:
        assert self._step is not None
        return run_steps(count, self._step, self._comm.barrier, self._interface, lambda: self._comm.traffic.sent)

    def chosen(self) -> dict[str, Any]:
        """What `auto` has come to: the codecs that are in use now, and its reasons."""
        assert self._worker is not None
        packs = any(not packing.codec.exact for packing in self._worker.packings)
        news = {fact["kind"]: fact for fact in self._worker.news}
        decided, checked = news["codec"], news.get("codec_check", {})
        return {
            "codec": "+".join(decided["chosen"]) if packs else "dense",
            "why": decided.get("why", ""),
            "predicted_ms": decided.get("predicted_ms", {}),
            "check": {key: value for key, value in checked.items() if key != "kind"},
        }
