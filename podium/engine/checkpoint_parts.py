"""How workers agree on a checkpoint: which files each rank wrote, and which checkpoint all resume from.

Hosts need not share a disk. A worker whose file the first worker does not see sends the file to it, so that a
checkpoint is complete in one place. On a shared disk this costs two small exchanges, not counted as training's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from podium.comm.base import Communicator
from podium.comm.broadcast_bytes import share_bytes
from podium.engine import checkpoint
from podium.engine.files import Checksum
from podium.errors import CheckpointError

_CHUNK_BYTES = 64 << 20
"""Bytes sent at once, and so the memory that workers which only listen need."""


class Parts(NamedTuple):
    """The members' own files of a checkpoint."""

    by_rank: Mapping[int, Checksum] | None
    """None where all ranks share a disk: nothing was exchanged."""
    sent: tuple[int, ...] = ()
    """The ranks that sent their files to the first worker."""


def gather_parts(comm: Communicator, run_dir: Path, step: int, mine: Checksum) -> Parts:
    """Bring all members' files into the first worker's folder. Collective."""
    if comm.size == 1:
        return Parts({comm.rank: mine})
    comm.barrier()
    if comm.shares_disk:
        return Parts(None)
    with _uncounted(comm):
        parts, sent = _ask(comm, run_dir, step, mine)
    for rank in sent:
        _send_part(comm, run_dir, step, rank, parts[rank].size_bytes)
    return Parts(parts, sent)


@contextmanager
def _uncounted(comm: Communicator) -> Iterator[None]:
    """Leave these exchanges out of the run's traffic, which is the same number of bytes in every world."""
    traffic = comm.traffic
    before = traffic.sent, traffic.received
    try:
        yield
    finally:
        traffic.sent, traffic.received = before


def _ask(comm: Communicator, run_dir: Path, step: int, mine: Checksum) -> tuple[dict[int, Checksum], tuple[int, ...]]:
    """Each member's checksum, and the ranks whose files the first worker does not see. Collective."""
    row = torch.tensor([mine.size_bytes, *np.frombuffer(bytes.fromhex(mine.sha256), "<i8").tolist()])
    rows = torch.empty(comm.size * row.numel(), dtype=torch.int64)
    comm.wait(comm.all_gather(row, rows))
    parts = {
        rank: Checksum(int(told[0]), told[1:].numpy().astype("<i8").tobytes().hex())
        for rank, told in zip(comm.workers, rows.view(comm.size, -1), strict=True)
    }
    unseen = torch.zeros(comm.size, dtype=torch.int64)
    if comm.index == 0:
        for rank in checkpoint.unseen(run_dir, step, parts):
            unseen[comm.workers.index(rank)] = 1
    comm.wait(comm.broadcast(unseen, comm.workers[0]))
    return parts, tuple(rank for rank, is_unseen in zip(comm.workers, unseen.tolist(), strict=True) if is_unseen)


def _send_part(comm: Communicator, run_dir: Path, step: int, rank: int, size_bytes: int) -> None:
    """Send this rank's file to the first worker. All workers take part: it is a broadcast."""
    data = checkpoint.read_own(run_dir, step, rank) if comm.rank == rank else b""
    got = bytearray()
    for start in range(0, size_bytes, _CHUNK_BYTES):
        chunk = share_bytes(comm, rank, data[start : start + _CHUNK_BYTES])
        if comm.index == 0:
            got += chunk
    if comm.index == 0:
        checkpoint.take_own(run_dir, step, rank, bytes(got))


def agree_on_checkpoint(comm: Communicator, found: checkpoint.Checkpoint) -> None:
    """Raise where workers would resume from different checkpoints, as hosts without a shared disk may. Collective."""
    if comm.size == 1 or comm.shares_disk:
        return
    mine = f"{found.step}:{found.files.get('shared.safetensors', Checksum(0, '')).sha256}"
    with _uncounted(comm):
        first = share_bytes(comm, comm.workers[0], mine.encode()).decode()
    if first != mine:
        raise CheckpointError(
            f"rank {comm.rank}: all workers must resume from one checkpoint, got step {found.step} ({found.path}) here "
            f"and step {first.partition(':')[0]} on rank {comm.workers[0]}; copy one checkpoint's folder to all hosts, "
            "and name it"
        )
