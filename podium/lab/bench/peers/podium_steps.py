"""Podium's all-reduce with a codec, on ranks as `podium train` has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import torch

from podium.comm.real import RealCommunicator
from podium.config import RunConfig
from podium.engine.allocator import keep_freed_memory
from podium.engine.build import Job, build_worker
from podium.engine.worker import Batch, Worker
from podium.lab.bench.peers.podium_ps import Place
from podium.lab.bench.peers.podium_sums import connect
from podium.lab.bench.peers.stepping import Ranks, Stepping, Steps, in_turn, run_steps, share_of_data
from podium.lab.bench.peers.team import Team, answer
from podium.launch.clusters.namespaces import enter_namespace
from podium.strategies.all_reduce import AllReduce
from podium.task import load_task

_TASK = "wide-mlp"
_EPOCHS_DONE = 100  # by then every codec's warm-up is over


@final
class PodiumSteps(Stepping):
    """One worker per place. A contender's name is its codec, as `podium train --codec` takes it.

    Each round has processes of its own, since a replica with its codec's memory takes half a gigabyte or more.
    """

    def __init__(
        self, payload: Mapping[str, Any], folder: Path, places: tuple[Place, ...], interfaces: Sequence[str] = ()
    ) -> None:
        """`payload`: options of the task `wide-mlp`."""
        self._payload, self._folder = dict(payload), folder
        self._where = list(zip(places, in_turn(interfaces, len(places)), strict=True))
        self._started = 0

    def measure(self, how: str, seconds: float, most: int, warmup: int = 0) -> Steps:
        folder, size = self._folder / str(self._started), len(self._where)
        folder.mkdir()
        self._started += 1
        ranks = [partial(_rank, rank, size, self._payload, folder, *where) for rank, where in enumerate(self._where)]
        workers = Ranks(Team("podium", ranks), size)
        try:
            steps = workers.measure(how, seconds, most, warmup)
            self.chosen = workers.ask_first("chosen")
            return steps
        finally:
            workers.end()

    def end(self) -> None:
        """Every round has ended its own."""


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
    """One rank's worker."""

    def __init__(self, comm: RealCommunicator, payload: dict[str, Any], interface: str) -> None:
        self._comm, self._payload, self._interface = comm, payload, interface
        self._worker: Worker | None = None
        self._step: Callable[[], object] | None = None

    def ready(self, codec: str) -> None:
        comm, strategy = self._comm, AllReduce()
        config = RunConfig(task=_TASK, task_options=self._payload, workers=comm.size, codec=codec, threads=1)
        task = load_task(_TASK, self._payload)
        worker = build_worker(Job(config, task, strategy), comm, 1, torch.device("cpu"))
        worker.samples, worker.batch_size = len(task.data().train), task.batch_size
        worker.position = end = _EPOCHS_DONE * worker.samples
        worker.outgoing.prepare()
        state = strategy.init(worker)  # type: ignore[func-returns-value]  # None is its state
        inputs, targets = share_of_data(task, comm.index, comm.size)
        batch = Batch(inputs, targets, len(targets), 1 / comm.size, end=end)
        self._worker, self._step = worker, lambda: strategy.step(worker, state, batch)

    def steps(self, _codec: str, count: int) -> Steps:
        assert self._step is not None
        return run_steps(count, self._step, self._comm.barrier, self._interface, lambda: self._comm.traffic.sent)

    def chosen(self) -> dict[str, Any]:
        """What `auto` has come to: the codecs that are in use now, and its reasons; nothing for any other."""
        assert self._worker is not None
        news = {fact["kind"]: fact for fact in self._worker.outgoing.news}
        if "codec" not in news:
            return {}
        decided, checked = news["codec"], news.get("codec_check", {})
        packs = any(not packing.codec.exact for packing in self._worker.outgoing.packings)
        return {
            "codec": "+".join(decided["chosen"]) if packs else "dense",
            "why": decided.get("why", ""),
            "predicted_ms": decided.get("predicted_ms", {}),
            "check": {key: value for key, value in checked.items() if key != "kind"},
        }
