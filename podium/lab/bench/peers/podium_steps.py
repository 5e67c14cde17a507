"""Podium's all-reduce with a codec, on ranks set up as by `podium train`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import torch

from podium.comm.real.communicator import RealCommunicator
from podium.config import RunConfig
from podium.engine.batch import Batch
from podium.engine.build import Job, build_worker
from podium.engine.worker import Worker
from podium.lab.bench.peers.place import Place, connect
from podium.lab.bench.peers.stepping import Ranks, Stepping, Steps, run_steps, share_of_data
from podium.lab.bench.peers.team import Team, answer
from podium.strategies.all_reduce import AllReduce
from podium.task import load_task

_TASK = "wide-mlp"
_EPOCHS_DONE = 100  # by then every codec's warm-up is over


@final
class PodiumSteps(Stepping):
    """One worker per place. A contender's name is its codec, in the syntax of `podium train --codec`.

    Each round starts new processes, since a replica with its codec's memory takes half a gigabyte or more.
    """

    def __init__(self, payload: Mapping[str, Any], folder: Path, places: tuple[Place, ...]) -> None:
        """`payload`: options of the task `wide-mlp`."""
        self._payload, self._folder, self._places = dict(payload), folder, places
        self._started = 0

    def measure(self, how: str, seconds: float, most: int, warmup: int = 0) -> Steps:
        folder, size = self._folder / str(self._started), len(self._places)
        folder.mkdir()
        self._started += 1
        ranks = [partial(_rank, rank, size, self._payload, folder, place) for rank, place in enumerate(self._places)]
        workers = Ranks(Team("podium", ranks), size)
        try:
            steps = workers.measure(how, seconds, most, warmup)
            self.chosen = workers.ask_first("chosen")
            return steps
        finally:
            workers.end()

    def end(self) -> None:
        """Nothing to end: every round ends its own processes."""


def _rank(rank: int, size: int, payload: dict[str, Any], folder: Path, place: Place, pipe: Connection) -> None:
    place.enter()
    comm = connect(rank, size, folder, place)
    replica = _Replica(comm, payload, place.interface)
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
        samples = len(task.data().train)
        worker.progress.train_on(samples, task.batch_size)
        end = _EPOCHS_DONE * samples
        worker.progress.move_to(end)
        worker.sender.prepare()
        state = strategy.init(worker)  # type: ignore[func-returns-value]  # None is its state
        inputs, targets = share_of_data(task, comm.index, comm.size)
        batch = Batch(inputs, targets, len(targets), 1 / comm.size, end=end)
        self._worker, self._step = worker, lambda: strategy.step(worker, state, batch)

    def steps(self, _codec: str, count: int) -> Steps:
        assert self._step is not None
        return run_steps(count, self._step, self._comm.barrier, self._interface, lambda: self._comm.traffic.sent)

    def chosen(self) -> dict[str, Any]:
        """The codecs that `auto` uses now, and its reasons; empty for any other codec."""
        assert self._worker is not None
        news = {fact["kind"]: fact for fact in self._worker.sender.news}
        if "codec" not in news:
            return {}
        decided, checked = news["codec"], news.get("codec_check", {})
        packs = any(not packing.codec.exact for packing in self._worker.sender.packings)
        return {
            "codec": "+".join(decided["chosen"]) if packs else "dense",
            "why": decided.get("why", ""),
            "predicted_ms": decided.get("predicted_ms", {}),
            "check": {key: value for key, value in checked.items() if key != "kind"},
        }
