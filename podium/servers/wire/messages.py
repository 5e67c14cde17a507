"""What workers and servers say to each other: a type per message, encoded and checked here and nowhere else.

On the wire the facts of a message are one flat JSON object in the frame's header (`podium/comm/frames.py` bounds its
size; nothing is unpickled). Keys are the field names; a field at its default is left out. `decode` raises a `CommError`
that names the sender and the message where a field is missing, unknown or of another type.

    worker to server   Seed, Draw, Push, Pull, Leave, Take, Home, Skip, Bye, Retire, Probe, Pending
    its answers        Done, SeedReply, DrawReply, PushReply (of a pull, too), State
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
"""Of a segment: the generation, and which segment of it. Later segments have larger names."""
Key = tuple[int, int]
"""Names a push: its worker and its lease."""
Options = Sequence[Meta]
"""The optimizer's settings of each parameter group."""
M = TypeVar("M", bound=tuple[Any, ...])

VOTES = 3
"""What workers vote for with a push or a draw: to stop, to pause, to switch to the next phase."""
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
    """Where in the global order the segment begins, …"""
    end: int
    """… and where it ends."""
    batch_size: int
    """Samples of a global step."""
    unit_bytes: int
    """How much travels in one message."""
    segment: Name | None = None
    leases: bool = True
    """Whether workers lease samples, rather than divide each global step."""
    parts: int = 1
    """Into how many leases a global step is cut."""
    mitigation: str = "none"
    """What is done about stale gradients, …"""
    strength: float | None = None
    """… and how strongly."""
    clip_norm: float | None = None
    codec: str | None = None
    """The codec that workers have chosen for pushes; None: the run's own."""
    weights: Sequence[float] | None = None
    """How much of the parameters each server holds; None: equally much."""
    serving: Sequence[int] | None = None
    """Workers that only serve and do not train."""
    local_steps: int = 1
    """Steps that a lease lasts, …"""
    by_speed: bool = False
    """… for the fastest worker; others get fewer."""
    outer: Meta | None = None
    """Settings of the outer optimizer, where that moves the parameters and not the task's own."""
    lends_only: bool = False
    """Whether this segment wants leases of the server, and no parameters."""
    state: Meta | None = None
    """Names and kinds of the optimizer state in the body (`moments.pack`)."""
    at: Name | None = None
    """Of a parcel (`parcels.py`): the place of its first tensor, …"""
    units: Sequence[Any] = ()
    """… what it holds, …"""
    next: Name | None = None
    """… and where the next one begins; None: this was the last."""


class Draw(NamedTuple):
    """A worker asks the first server for a lease; otherwise its next one comes with the answer to its push."""

    done: int
    """The last lease that all servers have applied."""
    votes: Sequence[bool]
    patience: int = 1
    """Of a worker that only serves: after how many pushes of others it is answered at the latest."""


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
    """Whether this is the last unit of its push for this server. Only the last one says:"""
    done: int = NO_LEASE
    votes: Sequence[bool] = NO_VOTES
    loss: float = 0.0
    samples: int = 0
    weight: float = 0.0
    """The push's part of the update that it becomes part of."""
    lend: bool = True
    """Whether the answer is to hold the next lease."""
    busy: float = 0.0
    """Seconds of computing per sample; 0: not measured."""
    pace: float = 0.0
    """Nanoseconds per local step; 0: not measured."""
    bare: bool = False
    """Whether the answer is to hold no parameters."""
    context: Sequence[Any] | None = None
    """What the codec needs to know to unpack the body."""


class Pull(NamedTuple):
    """A worker asks for one unit's parameters as they are."""

    unit: int
    lease: int
    size: int
    version: int
    last: bool = False


class Leave(NamedTuple):
    """A worker has done all its work; it is answered with the state (`State`) once all workers have left."""


class Take(NamedTuple):
    """A worker asks for the next parcel of the state."""

    at: Name


class Home(NamedTuple):
    """A worker has all of the state: a server that was restored meanwhile need not wait for it to leave."""

    segment: Name


class Skip(NamedTuple):
    """A worker takes no part in this segment or, where it broke out of its loop, no part any more."""

    broke: bool = False
    done: int = NO_LEASE


class Bye(NamedTuple):
    """A worker ends. Its departure follows."""

    generation: int
    workers: Sequence[int]


class Retire(NamedTuple):
    """This server is no longer needed."""


class Probe(NamedTuple):
    """A worker measures how long an answer takes; `back`: one with the same body."""

    back: bool = False


class Pending(NamedTuple):
    """A worker has other servers' answers to a push and waits for ours."""

    lease: int
    dropped: bool = False


# Answers to a worker.


class Done(NamedTuple):
    """The answer that says no more than that it was done: to home, skip, retire and probe."""


class SeedReply(NamedTuple):
    expects: Name | None = None
    """Where the next parcel has to begin; None: the segment has begun."""


class DrawReply(NamedTuple):
    """A lease; or that the segment is over; or that a worker which only serves shall ask `again`.

    A long list of cuts is in the body, for which a header has no room.
    """

    lease: int | None = None
    slice: Sequence[int] = ()
    step: int = 0
    cuts: Sequence[Sequence[int]] = ()
    position: int | None = None
    agreed: Sequence[bool] = NO_VOTES
    again: int | None = None

    def told(self, body: Sequence[Tensor] = ()) -> Lease | NoLease:
        """What to do next, where it is not to ask again."""
        lease = lease_of(self, body)
        if lease is None:
            assert self.position is not None
            return NoLease(self.position, self.agreed)
        return lease


class PushReply(NamedTuple):
    """Of a push or a pull. Body: the unit's parameters, unless the push was bare."""

    version: int = 0
    lease: int | None = None
    slice: Sequence[int] = ()
    step: int = 0
    cuts: Sequence[Sequence[int]] = ()
    packed: bool = False
    """Whether the body is what has changed since the last answer, packed."""
    dropped: bool = False
    """Whether the push was too stale to count."""
    lost: int | None = None
    """The worker whose loss undid this step; then nothing else is said."""
    agreed: Sequence[bool] = NO_VOTES
    loss: float | None = None
    """Of the whole global step."""
    busy: Sequence[tuple[int, float]] = ()
    """Workers' seconds of computing per sample, where all are known; for the first worker."""

    def with_lease(self, version: int, lease: Lease | None) -> PushReply:
        number, samples, step, cuts = plain_lease(lease)
        return self._replace(version=version, lease=number, slice=samples, step=step, cuts=cuts)


class State(NamedTuple):
    """All that a worker takes home, or a parcel of it. Body: parameters, then optimizer state."""

    empty: bool = False
    """Whether this server was never seeded: what the worker has is the truth."""
    workers: Sequence[int] = ()
    """Who was there to the end."""
    state: Meta | None = None
    at: Name | None = None
    units: Sequence[Any] = ()
    next: Name | None = None


# Between servers. `segment`: which one the sender is in; what is of another waits, or is too late.


class Have(NamedTuple):
    """A server has the whole of a push: that of `source`, over this lease."""

    source: int
    lease: int
    segment: Name | None = None


class Decision(NamedTuple):
    """From the first server: what all servers do next, in the order of its decisions."""

    drop: Sequence[Key] = ()
    """Pushes that do not count."""
    add: Sequence[Key] = ()
    """Pushes to add up."""
    step: Sequence[Key] = ()
    """Pushes that make an update now."""
    answer: Sequence[Key] = ()
    """Pushes whose workers are answered."""
    abort: int | None = None
    """A worker without which the step cannot be: all are told that it did not happen."""
    forget: int | None = None
    """A lost worker, of whose pushes all are forgotten …"""
    keep: Sequence[int] = ()
    """… but those over these leases."""
    norm: float | None = None
    """The whole gradient's norm: the update that waits for it is made."""
    rest: Sequence[int] | None = None
    """Workers for whom there is nothing left to do: no gate waits for them."""
    settled: bool = False
    """No more decisions follow in this segment."""
    segment: Name | None = None


class Norm(NamedTuple):
    """A server's part of the gradient's norm, where it is to be clipped."""

    norm: float
    segment: Name | None = None


class Hello(NamedTuple):
    """This server was restored: what it missed has to be told again."""

    segment: Name | None = None


class Which(NamedTuple):
    """The restored first server asks what is applied, once the other server knows of these losses, too."""

    question: int
    lost: Sequence[int]
    segment: Name | None = None


class Edges(NamedTuple):
    """The answer: where applied samples begin and end."""

    question: int
    edges: Sequence[int]
    segment: Name | None = None


class MirrorSeed(NamedTuple):
    """A copy begins. Body: the whole state as bytes; or, where `parcels` follow, what they do not hold."""

    life: int
    number: int = 0
    parcels: bool = False
    segment: Name | None = None


class MirrorParcel(NamedTuple):
    """A part of the state of which a copy is made. Body: its tensors."""

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
    """A unit was moved, and the copy is to follow. Body: the gradients."""

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
    """A restored server asks for what was kept of it, or for the parcel that begins here."""

    at: Name | None = None


class ReplicaState(NamedTuple):
    """The answer. Body: the state as bytes; where `parcels` are to be asked for, what they do not hold; or a parcel."""

    parcels: bool = False
    at: Name | None = None
    units: Sequence[Any] = ()
    next: Name | None = None


# What records and replays know a message by.


def arrival_of(message: Message) -> tuple[int, int]:
    """The lease that a draw, push, pull or have speaks of, and its unit (of a have, its worker)."""
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
    """The inverse of `plain_lease`; of a draw, a long list of cuts comes in the body."""
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
"""What a server may be sent, by the kind on the wire."""
KINDS = {kind: name for name, kind in TYPES.items()}

_SEED_ALWAYS = (
    *("segment", "workers", "addresses", "servers", "mitigation", "strength", "clip_norm", "leases", "samples"),
    *("position", "end", "batch_size", "codec", "unit_bytes", "weights", "parts", "rules"),
)


def seed_of_copy(seed: Seed) -> Meta:
    """A seed as a copy keeps it: as on the wire, with these fields also where they are at their defaults.

    A copy is tensors, whose bytes count in simulated runs: they must not depend on which settings are defaults.
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
    if found not in _CHECKED:  # nearly always it is: one look, in place of one per field
        if not all(map(isinstance, facts, _allowed(kind))):
            raise CommError(_what_is_wrong(kind, message))
        _CHECKED.add(found)
    return facts


_ALLOWED: dict[type[Any], tuple[tuple[type, ...], ...]] = {}
_CHECKED: set[tuple[type, ...]] = set()  # a message's type, and types of its fields that were found to fit


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
