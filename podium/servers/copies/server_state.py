"""A server's state as plain values and tensors, for copies and snapshots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from podium.engine.files import tree_to_bytes
from podium.servers.wire.messages import seed_of_copy

if TYPE_CHECKING:
    from podium.comm.base import Meta
    from podium.servers.segment import Segment
    from podium.servers.shard import Shard

FORMAT = 4
"""Version of a snapshot's format. All ranks of a run use one version: a snapshot of another is from before the run was
resumed, and its server will be seeded."""


def counts_of(segment: Segment) -> Meta:
    """Facts that change with every update."""
    cursor = None if segment.lending is None else segment.lending.cursor.state()
    return {"updates": segment.store.updates, "cursor": cursor}


def facts_of(segment: Segment) -> Meta:
    """The state without tensors."""
    store = segment.store
    counts = {"versions": list(store.versions), "recorded": dict(store.recorded)}
    return {**counts_of(segment), **counts, "once": [applied.plain() for applied in store.applied]}


def head_of(segment: Segment) -> Meta:
    """The seed and the state without tensors, which are sent before parcels."""
    return {"seed": seed_of_copy(segment.seed), "facts": facts_of(segment)}


def state_of(segment: Segment) -> dict[str, Any]:
    """The whole state, tensors copied."""
    segment.store.threads.settle()
    return {"format": FORMAT, **head_of(segment), **dump(segment.store.shard)}


def dump(shard: Shard) -> dict[str, Any]:
    keys, state = shard.dump()
    return {"params": [p.clone() for p in shard.params], "keys": keys, "state": [t.clone() for t in state]}


def load(shard: Shard, state: Mapping[str, Any]) -> None:
    """The inverse of `dump`."""
    shard.load(state["params"], state["keys"], state["state"])


def as_tensor(state: Mapping[str, Any]) -> Tensor:
    """A state as the bytes of one tensor, for a message's body."""
    return torch.frombuffer(bytearray(tree_to_bytes(state)), dtype=torch.uint8)
