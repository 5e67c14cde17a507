"""Makes a server of a job, with its ranges, codec and copies."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from podium.comm.base import Communicator, Meta
from podium.engine.build import Job
from podium.engine.flat import Flat
from podium.engine.generators import seed_generators, undrawn
from podium.engine.parts import check_parts
from podium.records.recorder import Recorder, read_records
from podium.servers.replay import AsRecorded, AsTheyCome
from podium.servers.server import CopyOptions, Server, ServerOptions

_MOST_APPLY_THREADS = 4
"""Threads that move a server's parameters: with more, memory bandwidth is the limit."""


def make_server(
    job: Job,
    comm: Communicator,
    recorder: Recorder,
    *,
    replaces: bool = False,
    tell_awaits: Callable[[Meta], None] | None = None,
) -> Server:
    """A server with its ranges; `replaces`: restored in the place of a lost one.

    `tell_awaits`: see `ServerOptions`.
    """
    with comm.computing(), undrawn():
        seed_generators(job.config.seed)
        model = job.task.model()
        optimizer = job.task.optimizer(model)
        check_parts(job.task.name, model, optimizer, None)
        flat = Flat(model, optimizer, job.strategy.bucket_bytes, rows=job.sends_rows)  # laid out as the workers' is
    replay, spec = job.config.replay, job.strategy.server_spec
    options = ServerOptions(
        arrivals=AsTheyCome() if replay is None else AsRecorded(read_records(Path(replay)), comm.rank),
        copies=_copies(job, comm),
        codec=job.packing.codec,
        pull=spec.pull_codec,
        apply_threads=0 if comm.shares_process else min(_MOST_APPLY_THREADS, len(os.sched_getaffinity(0))),
        takes_gradients=spec.role == "optimizer",
        tell_awaits=tell_awaits,
    )
    server = Server(comm, flat, optimizer, recorder=recorder, options=options)
    if replaces:
        server.restore()
    return server


def _copies(job: Job, comm: Communicator) -> CopyOptions:
    """Snapshots only where ranks are separate processes: ranks that share one are lost together."""
    spec = job.strategy.server_spec
    if job.run_dir is None or comm.shares_process:
        return CopyOptions(replicas=spec.replicas)
    path = job.run_dir / "servers" / f"rank-{comm.rank}.safetensors"
    return CopyOptions(replicas=spec.replicas, snapshot=path, every=spec.snapshot_every)
