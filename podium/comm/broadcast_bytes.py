"""Broadcasts bytes of any length over a communicator."""

from __future__ import annotations

import torch

from podium.comm.base import Communicator


def share_bytes(comm: Communicator, source: int, mine: bytes) -> bytes:
    """Return `mine` of rank `source` on every worker. Collective."""
    length = torch.tensor([len(mine)], dtype=torch.int64)
    comm.wait(comm.broadcast(length, source))
    data = torch.empty(int(length.item()), dtype=torch.uint8)
    if comm.rank == source:
        data.copy_(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
    comm.wait(comm.broadcast(data, source))
    return mine if comm.rank == source else data.numpy().tobytes()
