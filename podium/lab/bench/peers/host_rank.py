"""One rank of a contender of `podium bench hosts`: a process on a host, with requests and answers as JSON lines.

Run as a module with one argument, a `Rank` as JSON. Podium's ranks are set up as its launchers set them up: Unix
sockets and shared memory inside the host, TCP between hosts. DDP's are set up as in a plain script.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from podium.comm.clocks import WallClock
from podium.comm.real.arena import Arena
from podium.comm.real.channel import Channel
from podium.comm.real.communicator import RealCommunicator
from podium.comm.real.process_group import Group, client_store, look_up, publish
from podium.comm.real.tls import Tls
from podium.engine.allocator import keep_freed_memory
from podium.engine.files import save_tensors
from podium.lab.bench.peers.ddp import DDP_OPTIONS, DDP_TUNED, Batches, ddp_step, plain_step
from podium.lab.bench.peers.work import DEADLINE_S
from podium.lab.bench.step import Contender, batches_of, podium_step
from podium.task import Task, load_task

BARRIER_ONLY, PODIUM_TLS = "barrier_only", "podium_tls"


class Rank(NamedTuple):
    """One rank of one contender."""

    contender: str
    """`podium`, `podium:COLLECTIVE` or `podium_tls`; `ddp`, `ddp_bucket_views` or `ddp_tuned`; or `barrier_only`."""
    rank: int
    ranks: int
    host: str
    address: str
    """Of this rank's host."""
    meeting: str
    """The address of the first rank's host."""
    port: int
    """Where the ranks of this contender meet."""
    task: str
    data_dir: str
    keys: tuple[str, str, str] | None
    """Paths of a certificate, its key and the authority, where what leaves the host is encrypted."""


def main() -> None:
    """Answer requests until stdin is closed. Only answers go to stdout; what libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    me = Rank(**json.loads(sys.argv[1]))
    step, barrier, model = _contender(me)

    def measure(steps: int) -> float:
        barrier()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - began) / steps

    def save(path: str) -> None:
        save_tensors(Path(path), dict(model.named_parameters()))

    answers: dict[str, Callable[..., Any]] = {"ready": lambda: None, "round": measure, "save": save}
    for line in sys.stdin:
        request = json.loads(line)
        out.write(json.dumps(answers[request.pop("do")](**request)) + "\n")
    os._exit(0)  # other ranks may have ended already, and a group is not left in order


def _contender(me: Rank) -> Contender:
    task = load_task(me.task, data_dir=me.data_dir)
    batches = itertools.cycle(batches_of(task, me.rank, me.ranks))
    if me.contender.startswith("ddp"):
        return _ddp(me, task, batches)
    keep_freed_memory()
    collective = me.contender.partition(":")[2] or "default"
    comm = _communicator(me, over_channel=collective not in ("backend", "auto"))
    if me.contender == BARRIER_ONLY:
        return _barrier_only(comm, task, batches)
    return podium_step(comm, task, {}, batches, collective)


def _communicator(me: Rank, *, over_channel: bool) -> RealCommunicator:
    arena, name, ranks = Arena(), f"{me.contender.replace(':', '-')}-{me.rank}", range(me.ranks)
    listen = f"host:{me.host};unix:/tmp/{name};tcp:{me.address}:0"
    tls = None if me.keys is None else Tls(*me.keys)
    channel = Channel(me.rank, secret=b"of this bench", listen=listen, deadline_s=DEADLINE_S, arena=arena, tls=tls)
    store = client_store(me.meeting, me.port, DEADLINE_S, is_host=me.rank == 0, world_size=me.ranks)
    publish(store, f"listens-{me.rank}", channel.address)
    channel.introduce({rank: look_up(store, f"listens-{rank}", DEADLINE_S) for rank in ranks})
    return RealCommunicator(
        me.rank,
        ranks,
        (),
        WallClock(),
        group=Group(store, host=me.address, deadline_s=DEADLINE_S),
        channel=channel,
        deadline_s=DEADLINE_S,
        over_channel=over_channel,
    )


def _barrier_only(comm: RealCommunicator, task: Task, batches: Batches) -> Contender:
    """A plain step on every rank alone, and a barrier: synchronous training without its exchange."""
    torch.manual_seed(0)
    model = task.model()
    plain = plain_step(task, model, batches)

    def step() -> None:
        plain()
        comm.barrier()

    return step, comm.barrier, model


def _ddp(me: Rank, task: Task, batches: Batches) -> Contender:
    import torch.distributed as dist

    if me.contender == DDP_TUNED:
        keep_freed_memory()
    where = f"tcp://{me.meeting}:{me.port}"
    dist.init_process_group("gloo", init_method=where, rank=me.rank, world_size=me.ranks)
    step, model = ddp_step(task, batches, **DDP_OPTIONS[me.contender])
    return step, dist.barrier, model


if __name__ == "__main__":
    main()
