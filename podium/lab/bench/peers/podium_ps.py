"""Podium itself: the server's own loop, workers and strategy, in processes as `podium train` has them.

Left out of a step, because no contender has it here: the backward pass. Left out of the server, for the same reason:
snapshots. Leases and records are as in any run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import torch

from podium.comm.arena import Arena
from podium.comm.channel import Channel
from podium.comm.memory import WallClock
from podium.comm.real import RealCommunicator
from podium.comm.torch_dist import Group, file_store, look_up, publish
from podium.config import RunConfig
from podium.engine.allocator import keep_freed_memory
from podium.engine.build import Job, build_worker, make_server
from podium.engine.worker import Batch, Worker
from podium.lab.bench.peers.team import Team, answer
from podium.lab.bench.peers.work import DEADLINE_S, LR, WORKERS, Contender, Pulled, Tally, pattern, run_for, units
from podium.launch.clusters.namespaces import enter_namespace
from podium.records.recorder import Recorder
from podium.strategies.parameter_server import ParameterServer, PSState
from podium.task import load_task

_NEVER = 1 << 40  # a position in the order that no bench gets to


class Place(NamedTuple):
    """Where a rank lives: in a namespace, at an address; without one, beside the others on this machine."""

    namespace: str | None = None
    host: str | None = None


@final
class Podium(Contender):
    """Two workers and a server."""

    variants = ("podium",)

    def __init__(self, payload: Mapping[str, Any], folder: Path, places: tuple[Place, ...] = ()) -> None:
        """`payload` are the options of the task `wide-mlp`; `places` one per rank, the server's last."""
        places = places or (Place(),) * (WORKERS + 1)
        members = [partial(_podium_rank, rank, dict(payload), folder, place) for rank, place in enumerate(places)]
        self._team = Team("Podium", members)

    def measure(self, variant: str, seconds: float) -> float:
        took = self._team.ask("round", seconds, members=range(WORKERS))
        return float(sum(count / elapsed for count, elapsed in took))

    def tally(self, variant: str) -> Tally:
        pulled = self._team.ask("pulled", members=range(WORKERS))
        servers = self._team.ask("finish", members=range(WORKERS))
        return Tally(sum(own for own, *_ in pulled), servers[0], tuple(pulled))

    def end(self) -> None:
        self._team.end()


def _podium_rank(rank: int, payload: dict[str, Any], folder: Path, place: Place, pipe: Connection) -> None:
    """One rank, from its first line to its last."""
    keep_freed_memory()
    if place.namespace is not None:
        enter_namespace(place.namespace)
    comm = _connect(rank, folder, place)
    task = load_task("wide-mlp", {**payload, "lr": LR, "momentum": 0.0})
    strategy = ParameterServer(mode="async", lr_scale=1.0)
    job = Job(RunConfig(task=task.name, workers=WORKERS), task, strategy)
    if rank == WORKERS:
        server = make_server(job, comm, Recorder(rank, folder / "records" / f"rank-{rank}.jsonl"))
        pipe.send((None, None))
        server.serve()
    else:
        pusher = _Pusher(job, strategy, build_worker(job, comm, 1, torch.device("cpu")))
        answer(pipe, {"round": pusher.run, "pulled": pusher.pulled, "finish": pusher.finish})
    comm.close()


def _connect(rank: int, folder: Path, place: Place) -> RealCommunicator:
    """Over Unix sockets and shared memory beside one another, over TCP between namespaces."""
    listen, arena = (f"unix:{folder}/c{rank}", Arena()) if place.host is None else (f"tcp:{place.host}:0", None)
    channel = Channel(rank, secret=b"of this bench", listen=listen, deadline_s=DEADLINE_S, arena=arena)
    store = file_store(folder / "store")
    publish(store, f"listens-{rank}", channel.address)
    channel.introduce({r: look_up(store, f"listens-{r}", DEADLINE_S) for r in range(WORKERS + 1)})
    host = place.host or "127.0.0.1"
    group = Group(store, host=host, deadline_s=DEADLINE_S) if rank < WORKERS else None
    return RealCommunicator(
        rank, range(WORKERS), [WORKERS], WallClock(), group=group, channel=channel, deadline_s=DEADLINE_S
    )


class _Pusher:
    """A worker whose gradient is its number, everywhere and always."""

    def __init__(self, job: Job, strategy: ParameterServer, worker: Worker) -> None:
        self._strategy, self._worker, self._pushed = strategy, worker, 0.0
        self._number = float(worker.comm.rank + 1)
        worker.samples, worker.horizon, worker.batch_size = 1 << 20, _NEVER, WORKERS
        inputs, targets = job.task.data().train.gather(np.arange(1))
        self._batch = Batch(inputs, targets, 1, 1.0, lease=_NEVER + worker.comm.rank)
        worker.backward(self._batch)  # once, so that every parameter counts as used
        first = 0
        for p in worker.model.parameters():
            p.data.view(-1).copy_(pattern(first + p.numel())[first:])
            first += p.numel()
        for view in worker.flat.views:
            view.fill_(self._number)
        self._state: PSState = strategy.init(worker)

    def run(self, seconds: float) -> tuple[int, float]:
        return run_for(seconds, self._round_trip)

    def _round_trip(self) -> None:
        self._strategy.exchange(self._worker, self._state, self._batch)
        self._pushed += self._number
        lent = self._worker.next_lease  # it came with the answer; a server applies one only once
        assert lent is not None
        self._batch = self._batch._replace(lease=lent["lease"])

    def pulled(self) -> Pulled:
        return Pulled(self._pushed, *self._units())

    def finish(self) -> tuple[float, float]:
        """Units in the server's parameters, which come home once all workers are through."""
        self._strategy.finish(self._worker, self._state)
        return self._units()

    def _units(self) -> tuple[float, float]:
        return units(torch.cat([p.detach().view(-1) for p in self._worker.model.parameters()]))
