"""Podium: its server loop, workers and strategy, in processes as in `podium train`.

Steps have no backward pass and servers write no snapshots, since no contender does either here. Leases and records are
as in any run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from podium.config import RunConfig
from podium.engine.batch import Batch
from podium.engine.build import Job, build_worker
from podium.engine.worker import Worker
from podium.lab.bench.peers.place import Place, connect
from podium.lab.bench.peers.team import TeamContender, answer
from podium.lab.bench.peers.work import LR, WORKERS, Pulled, Tally, pattern, run_for, units
from podium.records.recorder import Recorder
from podium.servers.build import make_server
from podium.servers.leases.lease import Lease
from podium.strategies.parameter_server import ParameterServer, PSState
from podium.task import load_task

_NEVER = 1 << 40  # a position in the order that no bench reaches


@final
class Podium(TeamContender):
    """Two workers and a server."""

    variants = ("podium",)

    def __init__(self, payload: Mapping[str, Any], folder: Path, places: tuple[Place, ...] = ()) -> None:
        """`payload` are the options of the task `wide-mlp`; `places` one per rank, the server's last."""
        places = places or (Place(),) * (WORKERS + 1)
        members = [partial(_podium_rank, rank, dict(payload), folder, place) for rank, place in enumerate(places)]
        super().__init__("Podium", members, WORKERS)

    def tally(self, variant: str) -> Tally:
        pulled = self.team.ask("pulled", members=self.workers)
        servers = self.team.ask("finish", members=self.workers)
        return Tally(sum(own for own, *_ in pulled), servers[0], tuple(pulled))


def _podium_rank(rank: int, payload: dict[str, Any], folder: Path, place: Place, pipe: Connection) -> None:
    """The main function of one rank."""
    place.enter()
    comm = connect(rank, WORKERS, folder, place, servers=[WORKERS], shares_tensors=False)
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


class _Pusher:
    """A worker whose gradient always has its number in every element."""

    def __init__(self, job: Job, strategy: ParameterServer, worker: Worker) -> None:
        self._strategy, self._worker, self._pushed = strategy, worker, 0.0
        self._number = float(worker.comm.rank + 1)
        worker.progress.train_on(1 << 20, WORKERS)
        worker.progress.run_until(_NEVER)
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

    def run(self, variant: str, seconds: float) -> tuple[int, float]:
        return run_for(seconds, self._round_trip)

    def _round_trip(self) -> None:
        self._strategy.exchange(self._worker, self._state, self._batch)
        self._pushed += self._number
        lease = self._worker.leases.next  # it came with the answer; a server applies each lease only once
        assert isinstance(lease, Lease)
        self._batch = self._batch._replace(lease=lease.number)

    def pulled(self) -> Pulled:
        return Pulled(self._pushed, *self._units())

    def finish(self) -> tuple[float, float]:
        """Units in the server's parameters, which `finish` fetches when all workers are done."""
        self._strategy.finish(self._worker, self._state)
        return self._units()

    def _units(self) -> tuple[float, float]:
        return units(torch.cat([p.detach().view(-1) for p in self._worker.model.parameters()]))
