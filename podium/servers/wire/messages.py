"""Messages between workers and servers: a type per message, encoded and checked here and nowhere else.

On the wire the facts of a message are one flat JSON object in the frame's header (`podium/comm/real/frames.py` bounds
its size; nothing is unpickled). Keys are the field names; a field at its default is left out. `decode` raises a
`CommError` that names the sender and the message where a field is missing, unknown or of another type.

    worker to server   Seed, Draw, Push, Pull, Leave, Take, Home, Skip, Bye, Retire, Probe, Pending
    answers to it      Done, SeedReply, DrawReply, PushReply (to a pull, too), State
    server to server   Have, Decision, Norm, Hello (updates made together), Which, Edges (leases of unequal length),
                       MirrorSeed, MirrorParcel, Mirror, Mirrored, Replica, ReplicaState (copies)
"""

from __future__ import annotations

import types
import typing
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from podium.comm.base import Message, Meta
from podium.data.order import Slice
from podium.errors import CommError
from podium.servers.leases.lease import NO_LEASE, Lease, NoLease

Name = Sequence[int]
"""Of a segment: the generation, and the segment's number in it. Later segments have larger names."""
Key = tuple[int, int]
"""Identifies a push: its worker and its lease."""
Options = Sequence[Meta]
"""The optimizer's settings of each parameter group."""
M = TypeVar("M", bound=tuple[Any, ...])

VOTES = 3
"""Workers vote with a push or a draw: to stop, to pause, to switch to the next phase."""
NO_VOTES = (False,) * VOTES


# From a worker.


class Seed(NamedTuple):
    """A segment begins. Body: the server's parameters, then its optimizer state; or a parcel of these."""

    workers: Sequence[int]
    servers: Sequence[int]
    addresses: Sequence[Sequence[Any]]
    """Where workers and servers listen: (rank, address)."""
    rules: Meta
    """The consistency model (`gate.Rules`)."""
    samples: int
    """In the training data."""
    position: int
    """The position at which the segment begins, …"""
    end: int
    """… and at which it ends."""
    batch_size: int
    """Samples of a global step."""
    unit_bytes: int
    """Bytes of one message."""
    segment: Name | None = None
    leases: bool = True
    """Whether workers lease samples, rather than divide each global step."""
    parts: int = 1
    """Leases per global step."""
    mitigation: str = "none"
    """Correction of stale gradients, …"""
    strength: float | None = None
    """… and its strength."""
    clip_norm: float | None = None
    codec: str | None = None
    """The codec that workers have chosen for pushes; None: the run's own."""
    weights: Sequence[float] | None = None
    """Each server's part of the parameters; None: equal parts."""
    serving: Sequence[int] | None = None
    """Workers that only serve and do not train."""
    local_steps: int = 1
    """Steps that a lease lasts, …"""
    by_speed: bool = False
    """… for the fastest worker; slower ones get fewer."""
    outer: Meta | None = None
    """Settings of the outer optimizer, where it moves the parameters instead of the task's own."""
    lends_only: bool = False
    """Whether the server only lends samples in this segment, and holds no parameters."""
    state: Meta | None = None
    """Names and kinds of the optimizer state in the body (`moments.pack`)."""
    at: Name | None = None
    """Of a parcel (`parcels.py`): the place of its first tensor, …"""
    units: Sequence[Any] = ()
    """… what it holds, …"""
    next: Name | None = None
    """… and where the next one begins; None: this was the last."""


class Draw(NamedTuple):
    """A worker requests a lease from the first server; usually the answer to its push already carries one."""

    done: int
    """The last lease that all servers have applied."""
    votes: Sequence[bool]
    patience: int = 1
    """Of a serve-only worker: it is answered after this many pushes of other workers at the latest."""


class Push(NamedTuple):
    """One unit of a worker's gradients, which are the body."""

    unit: int
    lease: int
    size: int
    """Samples of the lease, or of the whole global step."""
    version: int
    """Of the unit's parameters that the gradients were computed on."""
    options: Options
    unused: Sequence[int]
    """Parameters without a gradient."""
    early: bool = False
    """Whether backward still runs."""
    last: bool = False
    """Whether this is the last unit of its push for this server. Only the last one has:"""
    done: int = NO_LEASE
    votes: Sequence[bool] = NO_VOTES
    loss: float = 0.0
    samples: int = 0
    weight: float = 0.0
    """The push's weight in its update."""
    lend: bool = True
    """Whether the answer shall hold the next lease."""
    busy: float = 0.0
    """Seconds of computing per sample; 0: not measured."""
    pace: float = 0.0
    """Nanoseconds per local step; 0: not measured."""
    bare: bool = False
    """Whether the answer shall hold no parameters."""
    context: Sequence[Any] | None = None
    """The codec's step context, to unpack the body."""


class Pull(NamedTuple):
    """A worker requests one unit's present parameters."""

    unit: int
    lease: int
    size: int
    version: int
    last: bool = False


class Leave(NamedTuple):
    """A worker has done all its work; the answer is the state (`State`), once all workers have left."""


class Take(NamedTuple):
    """A worker requests the next parcel of the state."""

    at: Name


class Home(NamedTuple):
    """A worker has the whole state: a server that was restored meanwhile need not wait for it to leave."""

    segment: Name


class Skip(NamedTuple):
    """A worker takes no part in this segment or, where it broke out of its loop, not in the rest of it."""

    broke: bool = False
    done: int = NO_LEASE


class Bye(NamedTuple):
    """A worker ends. Its departure follows."""

    generation: int
    workers: Sequence[int]


class Retire(NamedTuple):
    """This server is no longer needed."""


class Probe(NamedTuple):
    """A worker measures a round trip; `back`: the answer has the same body."""

    back: bool = False


class Pending(NamedTuple):
    """A worker has other servers' answers to a push and waits for this server's."""

    lease: int
    dropped: bool = False


# Answers to a worker.


class Done(NamedTuple):
    """An empty answer: to home, skip, retire and probe."""


class SeedReply(NamedTuple):
    expects: Name | None = None
    """Where the next parcel must begin; None: the segment has begun."""


class DrawReply(NamedTuple):
    """A lease; or the position at which the segment ended; or `again`: a serve-only worker shall draw again.

    A long list of cuts is in the body, as a header has no room for it.
    """

    lease: int | None = None
    slice: Sequence[int] = ()
    step: int = 0
    cuts: Sequence[Sequence[int]] = ()
    position: int | None = None
    agreed: Sequence[bool] = NO_VOTES
    again: int | None = None

    def told(self, body: Sequence[Tensor] = ()) -> Lease | NoLease:
        """The lease, or the end of the segment; not for an answer with `again`."""
        lease = lease_of(self, body)
        if lease is None:
            assert self.position is not None
            return NoLease(self.position, self.agreed)
        return lease


class PushReply(NamedTuple):
    """To a push or a pull. Body: the unit's parameters, unless the push was bare."""

    version: int = 0
    lease: int | None = None
    slice: Sequence[int] = ()
    step: int = 0
    cuts: Sequence[Sequence[int]] = ()
    packed: bool = False
    """Whether the body is the packed change since the last answer."""
    dropped: bool = False
    """Whether the push was too stale to count."""
    lost: int | None = None
    """The worker whose loss undid this step; then all other fields are at their defaults."""
    agreed: Sequence[bool] = NO_VOTES
    loss: float | None = None
    """Of the whole global step."""
    busy: Sequence[tuple[int, float]] = ()
    """Workers' seconds of computing per sample, where all are known; for the first worker."""

    def with_lease(self, version: int, lease: Lease | None) -> PushReply:
        number, samples, step, cuts = plain_lease(lease)
        return self._replace(version=version, lease=number, slice=samples, step=step, cuts=cuts)


class State(NamedTuple):
    """The state that a worker collects, or a parcel of it. Body: parameters, then optimizer state."""

    empty: bool = False
    """Whether this server was never seeded: the worker's own state is valid."""
    workers: Sequence[int] = ()
    """Workers that stayed to the end."""
    state: Meta | None = None
    at: Name | None = None
    units: Sequence[Any] = ()
    next: Name | None = None


# Between servers. `segment`: the sender's; messages of a later one wait, those of an earlier one are dropped.


class Have(NamedTuple):
    """A server has all units of a push: that of `source`, over this lease."""

    source: int
    lease: int
    segment: Name | None = None


class Decision(NamedTuple):
    """From the first server: what all servers do next, in the order of its decisions."""

    drop: Sequence[Key] = ()
    """Pushes that do not count."""
    add: Sequence[Key] = ()
    """Pushes to sum."""
    step: Sequence[Key] = ()
    """Pushes that make an update now."""
    answer: Sequence[Key] = ()
    """Pushes whose workers are answered."""
    abort: int | None = None
    """A worker without which the step cannot be made: all workers are answered that the step is undone."""
    forget: int | None = None
    """A lost worker, whose pushes are dropped …"""
    keep: Sequence[int] = ()
    """… except those over these leases."""
    norm: float | None = None
    """The whole gradient's norm: the update that waits for it is made."""
    rest: Sequence[int] | None = None
    """Workers that have no work left: no gate waits for them."""
    settled: bool = False
    """No more decisions follow in this segment."""
    segment: Name | None = None


class Norm(NamedTuple):
    """A server's part of the gradient's norm, for clipping."""

    norm: float
    segment: Name | None = None


class Hello(NamedTuple):
    """This server was restored: other servers must send again what it missed."""

    segment: Name | None = None


class Which(NamedTuple):
    """The restored first server asks which samples are applied; answered once these losses are known, too."""

    question: int
    lost: Sequence[int]
    segment: Name | None = None


class Edges(NamedTuple):
    """The answer to `Which`: positions where applied samples begin and end."""

    question: int
    edges: Sequence[int]
    segment: Name | None = None


class MirrorSeed(NamedTuple):
    """A copy begins. Body: the whole state as bytes; or, where `parcels` follow, all but their tensors."""

    life: int
    number: int = 0
    parcels: bool = False
    segment: Name | None = None


class MirrorParcel(NamedTuple):
    """A part of the state for a copy. Body: its tensors."""

    at: Name
    units: Sequence[Any]
    moved: Sequence[Any]
    """Of each of its units: number, version, recorded updates, applied samples."""
    updates: int
    life: int
    number: int
    next: Name | None = None
    cursor: Meta | None = None
    segment: Name | None = None


class Mirror(NamedTuple):
    """A unit was moved, and the copy must follow. Body: the gradients."""

    unit: int
    options: Options
    unused: Sequence[int]
    spans: Sequence[Sequence[int]]
    version: int
    recorded: int
    updates: int
    life: int
    number: int
    cursor: Meta | None = None
    segment: Name | None = None


class Mirrored(NamedTuple):
    """The copy has followed up to this number."""

    number: int
    life: int
    segment: Name | None = None


class Replica(NamedTuple):
    """A restored server requests its copy, or the parcel of it that begins at `at`."""

    at: Name | None = None


class ReplicaState(NamedTuple):
    """The answer. Body: the state as bytes; with `parcels`, to be requested next, all but tensors; or a parcel."""

    parcels: bool = False
    at: Name | None = None
    units: Sequence[Any] = ()
    next: Name | None = None


# How records and replays identify a message.


def arrival_of(message: Message) -> tuple[int, int]:
    """The lease of a draw, push, pull or have, and its unit (of a have, its worker)."""
    meta = message.meta
    if message.kind == "draw":
        return meta["done"], 0
    return meta["lease"], meta["source" if message.kind == "have" else "unit"]


# Leases in answers.


def plain_lease(lease: Lease | None) -> tuple[int | None, Sequence[int], int, Sequence[Sequence[int]]]:
    """The fields `lease`, `slice`, `step` and `cuts` of an answer."""
    if lease is None:
        return None, (), 0, ()
    return lease.number, list(lease.slice), lease.step, [list(cut) for cut in lease.cuts]


def lease_of(answer: DrawReply | PushReply, body: Sequence[Tensor] = ()) -> Lease | None:
    """The inverse of `plain_lease`; in a `DrawReply`, a long list of cuts is in the body."""
    if answer.lease is None:
        return None
    cuts = tuple((count, step) for count, step in (body[0].tolist() if body else answer.cuts))
    return Lease(answer.lease, Slice(*answer.slice), answer.step, cuts)


# On the wire.

TYPES: dict[str, type[Any]] = {
    "seed": Seed,
    "draw": Draw,
    "push": Push,
    "pull": Pull,
    "leave": Leave,
    "take": Take,
    "home": Home,
    "skip": Skip,
    "bye": Bye,
    "retire": Retire,
    "probe": Probe,
    "pending": Pending,
    "have": Have,
    "decision": Decision,
    "norm": Norm,
    "hello": Hello,
    "which": Which,
    "applied": Edges,
    "mirror_seed": MirrorSeed,
    "mirror_parcel": MirrorParcel,
    "mirror": Mirror,
    "mirrored": Mirrored,
    "replica": Replica,
}
"""Messages that a server accepts, by the kind on the wire."""
KINDS = {kind: name for name, kind in TYPES.items()}

_SEED_ALWAYS = (
    *("segment", "workers", "addresses", "servers", "mitigation", "strength", "clip_norm", "leases", "samples"),
    *("position", "end", "batch_size", "codec", "unit_bytes", "weights", "parts", "rules"),
)


def seed_of_copy(seed: Seed) -> Meta:
    """A seed in a copy: as on the wire, with the fields of `_SEED_ALWAYS` even at their defaults.

    A copy is tensors, whose bytes count in simulated runs: they must not depend on which settings are at defaults.
    """
    return {**{name: getattr(seed, name) for name in _SEED_ALWAYS}, **encode(seed)}


def encode(facts: Any) -> Meta:
    """A message's facts for the header; a field at its default is left out."""
    defaults = facts._field_defaults
    return {
        name: value
        for name, value in zip(facts._fields, facts, strict=True)
        if name not in defaults or value != defaults[name]
    }


def decode(kind: type[M], message: Message) -> M:
    """A message's facts, checked."""
    try:
        facts = kind(**message.meta)
    except TypeError:
        raise CommError(_what_is_wrong(kind, message)) from None
    found = (kind, *map(type, facts))
    if found not in _CHECKED:  # usually it is: one lookup instead of a check per field
        if not all(map(isinstance, facts, _allowed(kind))):
            raise CommError(_what_is_wrong(kind, message))
        _CHECKED.add(found)
    return facts


_ALLOWED: dict[type[Any], tuple[tuple[type, ...], ...]] = {}
_CHECKED: set[tuple[type, ...]] = set()  # a message's type, and types of its fields that passed the check


def _allowed(kind: type[Any]) -> tuple[tuple[type, ...], ...]:
    """The types that each field may have."""
    if kind not in _ALLOWED:
        hints = typing.get_type_hints(kind)
        _ALLOWED[kind] = tuple(tuple(_types_of(hints[name])) for name in kind._fields)
    return _ALLOWED[kind]


def _types_of(hint: Any) -> list[type]:
    if isinstance(hint, types.UnionType):
        return [each for part in typing.get_args(hint) for each in _types_of(part)]
    plain = typing.get_origin(hint) or hint
    if plain is Sequence:
        return [list, tuple]
    return [float, int] if plain is float else [plain]


def _what_is_wrong(kind: type[Any], message: Message) -> str:
    who = f"a {message.kind} of rank {message.source}"
    if unknown := sorted(message.meta.keys() - set(kind._fields)):
        return f"{who} has an unknown {', '.join(unknown)}; it may have {', '.join(kind._fields)}"
    if missing := [f for f in kind._fields if f not in kind._field_defaults and f not in message.meta]:
        return f"{who} must have {', '.join(missing)}, got {', '.join(message.meta) or 'nothing'}"
    for name, allowed in zip(kind._fields, _allowed(kind), strict=True):
        if name in message.meta and not isinstance(message.meta[name], allowed):
            wanted = " or ".join(each.__name__ for each in allowed)
            return f"{who}: its {name} must be {wanted}, got {message.meta[name]!r:.80}"
    raise AssertionError(who)
