"""Launchers that need no processes: threads (the memory world) and virtual time."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, final

import numpy as np
import torch

from podium.comm.base import Communicator, Ground
from podium.comm.inprocess import Watch, raise_first
from podium.comm.memory import MemoryWorld
from podium.comm.virtual import VirtualWorld, count_flops
from podium.data.base import read_pair
from podium.engine.build import Job, open_data
from podium.engine.fingerprints import digests_of
from podium.engine.generators import undrawn
from podium.engine.recovery import Control
from podium.engine.report import Report
from podium.engine.training import Training, run_server
from podium.launch.base import LaunchResult, hosts_of
from podium.launch.clusters.description import Cluster, read_cluster, uniform
from podium.launch.event import Event
from podium.records.recorder import Recorder
from podium.servers.build import make_server


@final
class InProcessControl(Control):
    """Stop by an event, progress by a function; progress is rate-limited, so that it does not slow a fast run."""

    def __init__(
        self,
        on_event: Callable[[Event], None] | None,
        stop: threading.Event | None,
        *,
        is_first: bool = True,
        watch: tuple[Watch, int] | None = None,
    ) -> None:
        """Not `is_first`: warnings are passed on, but no progress.

        `watch`: the watch to notify when a rank is busy, and the number of this rank.
        """
        self._on_event, self._stop, self._is_first, self._watch = on_event, stop, is_first, watch
        self._last = 0.0

    def stop_requested(self) -> bool:
        return self._stop is not None and self._stop.is_set()

    def busy(self, what: str | None) -> None:
        if self._watch is not None:
            watch, rank = self._watch
            watch.busy(rank, what)

    def progress(self, facts: dict[str, Any]) -> None:
        if self._watch is not None:
            self._watch[0].has_begun = True
        if self._on_event is None or not (self._is_first or facts["event"] == "warning"):
            return
        now = time.monotonic()
        if facts["event"] != "progress" or now - self._last > 0.1:
            self._last = now
            self._on_event(facts)


def run_threads(job: Job, on_event: Callable[[Event], None] | None, stop: threading.Event | None) -> LaunchResult:
    """All ranks as threads of this process."""
    servers = job.strategy.server_spec.count
    world = MemoryWorld(job.config.workers, servers, deadline_s=job.config.deadline_s)
    return _run(world, world.ranks, job, on_event, stop)


def run_virtual(job: Job, on_event: Callable[[Event], None] | None, stop: threading.Event | None) -> LaunchResult:
    """All ranks in simulated time."""
    cluster = cluster_for(job)
    servers = job.strategy.server_spec.count
    workers, strategy = job.config.workers, job.strategy
    hosts, limit_s = hosts_of(strategy, workers), job.config.deadline_s
    world = VirtualWorld(
        cluster,
        workers,
        servers,
        colocated=strategy.server_spec.colocated,
        hosts=hosts,
        seed=job.config.seed,
        deadline_s=limit_s,
    )
    for comm in world.ranks:
        comm.ground = Ground(cluster, world.node_of, world.node_of[comm.rank])
    if cluster.seconds_per_sample is None:
        per_sample = flops_per_sample(job)
        for rank in world.ranks:
            rank.virtual_clock.flops_per_sample = per_sample
    return _run(world, world.ranks, job, on_event, stop)._replace(facts={"cluster": cluster.to_dict()})


def cluster_for(job: Job) -> Cluster:
    """The cluster of the file, or equal nodes: one per worker and per dedicated server."""
    if job.config.cluster is not None:
        return read_cluster(Path(job.config.cluster))
    servers = job.strategy.server_spec.processes
    return uniform(job.config.workers + servers)


def flops_per_sample(job: Job) -> float:
    """Counted on a copy of the model, over a few samples, without changing any random stream."""
    data = open_data(job.task, 1, job.batch_size)
    count = min(4, len(data.train))
    inputs, targets = read_pair(data.train, np.arange(count))
    with undrawn():
        return count_flops(deepcopy(job.task.model()), job.task.loss, inputs, targets) / count


def _run(
    world: MemoryWorld | VirtualWorld,
    comms: Sequence[Communicator],
    job: Job,
    on_event: Callable[[Event], None] | None,
    stop: threading.Event | None,
) -> LaunchResult:
    world.watch.start_deadline_s = job.config.start_deadline_s
    data = job.task.data()  # once for all ranks: none writes to it
    task = dataclasses.replace(job.task, data=lambda: data)
    job = dataclasses.replace(job, task=task, digests=digests_of(data))
    reports: list[Report] = []
    recorders = [Recorder(c.rank, job.run_dir and job.run_dir / "records" / f"rank-{c.rank}.jsonl") for c in comms]

    def main(comm: Communicator, recorder: Recorder) -> Callable[[], None]:
        def run() -> None:
            if comm.rank in comm.servers:
                run_server(make_server(job, comm, recorder))
            else:
                watch = (world.watch, comm.rank)
                control = InProcessControl(on_event, stop, is_first=comm.rank == 0, watch=watch)
                reports.append(Training(job, comm, recorder, control).run())

        return run

    threads = torch.get_num_threads()
    torch.set_num_threads(job.config.threads or 1)
    try:
        errors = world.run([main(c, r) for c, r in zip(comms, recorders, strict=True)])
    finally:
        torch.set_num_threads(threads)
        for recorder in recorders:
            recorder.close()
    raise_first(errors)
    kept = [row for recorder in recorders for row in recorder.kept]
    return LaunchResult(sorted(reports), sorted(kept, key=lambda row: (row["t_ns"], row["rank"])), {})
