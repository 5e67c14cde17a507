"""What a worker says to servers: it seeds them, pushes, pulls, and takes everything home.

All strategies with servers speak through here, whatever it is that they push. `server.py` is the other side.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from podium.balance.ranges import Parcel, Way, exposed_s, ways_from
from podium.errors import ConfigError, Lost
from podium.exchange.codecs.base import Codec, Span, Turn
from podium.exchange.reducing import span_of
from podium.servers.folding import fold
from podium.servers.moments import pack, parts_of, unpack
from podium.servers.parcels import MOST_TENSORS, START, Assembly, Kept, Place, cut, parcel_bytes, place_of
from podium.servers.ranges import Layout, Range, groups_of, lay_out
from podium.servers.server import PATIENCE
from podium.servers.units import per_step, per_update

if TYPE_CHECKING:
    from podium.comm.base import Handle, Message, Meta
    from podium.engine.flat import Piece
    from podium.engine.worker import Batch, Worker

UNIT_BYTES, SHARED_UNIT_BYTES = 8 << 20, 32 << 20
"""How much travels in one message: over a network, and in shared memory."""

_ROOM = 4
"""How many times larger than its elements a unit may be on its way: as rows and their numbers, or packed badly."""
_BACKWARD = 2 / 3
"""Of a pass, as in virtual time: backward takes about twice as long as forward."""
_PASSES = 8
"""What hides an exchange is judged by so many passes."""
_PROBE_BYTES, _PROBES = 256 << 10, 3
"""How much is sent, and how often, to see how fast a link is: 20 ms each over 100 Mbit/s."""

States = Callable[[Sequence[Range]], Sequence[Mapping[str, Any]]]
"""The optimizer's state of some ranges, one mapping per part."""


@dataclass
class Served:
    """What a worker knows of its servers, for one stretch."""

    layouts: list[Layout]  # by server
    versions: list[list[int]]  # of the parameters this worker holds, by server and unit
    spans: list[list[Span]]  # of each server's ranges, for a codec

    @property
    def units(self) -> list[tuple[int, int]]:
        """All (server, unit)."""
        return [(m, u) for m, layout in enumerate(self.layouts) for u in range(len(layout.units))]


def unit_bytes_for(worker: Worker) -> int:
    most = SHARED_UNIT_BYTES if worker.comm.shares_memory else UNIT_BYTES
    return most if worker.comm.message_bytes is None else min(most, max(1, worker.comm.message_bytes // _ROOM))


def _check_units(worker: Worker, layouts: Sequence[Layout]) -> None:
    """Refuse before training what would not go into a message in its course."""
    limit = worker.comm.message_bytes
    if limit is None:
        return
    for layout in layouts:
        for unit in layout.units:
            ranges = unit.of(layout.ranges)
            size = sum(r.of(worker.params).nbytes for r in ranges)
            if size * _ROOM > limit:
                name = worker.flat.pieces[ranges[0].parts[0].piece].name
                raise ConfigError(
                    f"parameter servers: what travels at once must be at most {limit // _ROOM} bytes (a quarter of the "
                    f"largest message, so that it also fits as a codec packs it), got {size} (from {name} on); set a "
                    "smaller unit_bytes"
                )


def meet(worker: Worker, unit_bytes: int, weights: Sequence[float] | None = None) -> Served:
    """How the parameters lie on the servers, which hold equally much, or as the weights say; nothing is sent yet."""
    layouts = lay_out(worker.flat, len(worker.comm.servers), unit_bytes, weights)
    _check_units(worker, layouts)
    versions = [[0] * len(layout.units) for layout in layouts]
    worker.outgoing.memory.forget()
    worker.next_lease, worker.lease_done = None, -1
    generation, number = worker.stretch  # all members begin a generation together, and each of its stretches
    now = worker.comm.generation
    worker.stretch = (now, number + 1 if generation == now else 0)
    return Served(layouts, versions, [[span_of(worker.flat, r) for r in layout.ranges] for layout in layouts])


# A stretch begins.


def common_work(worker: Worker, unit_bytes: int, weights: Sequence[float] | None = None) -> Meta:
    """What servers need to know of a stretch, whatever the strategy."""
    comm = worker.comm
    return {
        "stretch": list(worker.stretch),
        "workers": list(comm.workers),
        "addresses": list(comm.addresses.items()),
        "servers": list(comm.servers),
        "mitigation": "none",
        "strength": None,
        "clip_norm": None,
        "leases": True,
        "samples": worker.samples,
        "position": worker.position,
        "end": worker.horizon,
        "batch_size": worker.batch_size,
        "codec": worker.outgoing.push[0],
        "unit_bytes": unit_bytes,
        "weights": None if weights is None else list(weights),
    }


def seeded_here(worker: Worker, colocated: bool, hosts: int = 0) -> list[int]:
    """Which servers this worker seeds, by their places: those beside it, where they live with workers.

    All replicas are alike when a stretch begins, so a switch of strategy moves no model over the network. A server
    whose worker is gone is somebody's all the same. Workers share dedicated servers out, so that no link has to carry
    the whole model. `hosts`: only the last so many workers have servers beside them; none: all have.
    """
    comm = worker.comm
    if not colocated:
        return [m for m in range(len(comm.servers)) if m % comm.size == comm.index]
    first = min(comm.servers)  # the run began with this many workers, numbered before the servers
    hosts = min(hosts or first, first)
    seeders = []
    for m, server in enumerate(comm.servers):
        beside = first - hosts + (server - first) % hosts
        seeders.append(beside if beside in comm.workers else comm.workers[m % comm.size])
    return [m for m, rank in enumerate(seeders) if rank == comm.rank]


def seed_together(worker: Worker, served: Served, places: Collection[int], work: Meta, states: States) -> None:
    """Seed the servers at these places, and wait until everybody has seeded theirs. Collective."""
    comm = worker.comm
    try:
        seeds = [_Seed(worker, comm.servers[m], served.layouts[m], work, states) for m in places]
        while under_way := [seed for seed in seeds if not seed.over]:
            answers = comm.wait(*[seed.call() for seed in under_way])
            for seed, answer in zip(under_way, answers, strict=True):
                assert answer is not None
                seed.heard(answer)
        comm.barrier()
    except Lost:
        # The others may be at it already: they shall not wait for us.
        comm.wait(*(comm.call(server, "skip", {}) for server in comm.servers))
        raise


class _Seed:
    """One server's parameters and optimizer state on their way to it: in one message, or in several."""

    def __init__(self, worker: Worker, server: int, layout: Layout, work: Meta, states: States) -> None:
        self._worker, self._server, self._layout, self._work, self._states = worker, server, layout, work, states
        self._dtypes = [p.dtype for p in worker.params]
        self._most = parcel_bytes(worker.comm)
        self._place: Place | None = START
        self._in_parts = False

    @property
    def over(self) -> bool:
        return self._place is None

    def call(self) -> Handle:
        """Send the next message."""
        whole = None if self._in_parts else self._whole()
        if whole is not None:
            return self._worker.comm.call(self._server, "seed", {**whole[0], **self._work}, whole[1])
        assert self._place is not None
        self._in_parts = True
        parcel = cut(self._unit, len(self._layout.units), self._place, self._most)
        return self._worker.comm.call(self._server, "seed", {**parcel.meta, **self._work}, parcel.body)

    def heard(self, answer: Message) -> None:
        """A server that was replaced meanwhile has nothing of it, and says so."""
        self._place = place_of(answer.meta.get("expects"))

    def _whole(self) -> tuple[Meta, list[Tensor]] | None:
        """All of it, where it goes into one message."""
        ranges = self._layout.ranges
        params = [r.of(self._worker.params) for r in ranges]
        if sum(p.nbytes for p in params) > self._most:
            return None
        names, state = pack(ranges, self._states(ranges), self._dtypes)
        body = [*params, *state]
        fits = sum(t.nbytes for t in body) <= self._most and len(body) <= MOST_TENSORS
        return (names, body) if fits else None

    def _unit(self, unit: int) -> Kept:
        ranges = self._layout.units[unit].of(self._layout.ranges)
        kinds, state = pack(ranges, self._states(ranges), self._dtypes)
        return Kept([r.of(self._worker.params) for r in ranges], kinds, state)


def own_states(worker: Worker, share: float) -> States:
    """The state of the worker's own optimizer, for updates of that share of a global step."""

    def whole(i: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = worker.optimizer.state.get(worker.flat.parameters[i], {})
        return found

    def of(ranges: Sequence[Range]) -> list[dict[str, Any]]:
        cut = parts_of(ranges, whole, lambda i, tensor: _in_memory_order(worker, i, tensor))
        pieces = [worker.flat.pieces[part.piece] for r in ranges for part in r.parts]
        return [per_update(state, _momentum_of(worker, p), share) for state, p in zip(cut, pieces, strict=True)]

    return of


def take_states_home(worker: Worker, by_name: Mapping[str, Mapping[str, Any]], share: float) -> None:
    """The inverse: the worker's optimizer goes on with what the servers' has come to."""
    worker.follow_schedule(worker.global_step)  # each has followed its own leases, and momentum may be scheduled
    pieces = {piece.name: piece for piece in worker.flat.pieces}
    home = {n: per_step(state, _momentum_of(worker, pieces[n]), share) for n, state in by_name.items()}
    worker.load_optimizer_state(home)


def _momentum_of(worker: Worker, piece: Piece) -> float:
    return float(worker.optimizer.param_groups[piece.group].get("momentum", 0.0))


# What an exchange takes.


class Exposure:
    """Says what of an exchange this worker's own link takes, beyond what its computing hides; for one stretch."""

    def __init__(self, worker: Worker, served: Served, *, early: bool, pull: Codec) -> None:
        """`early`: gradients leave while backward still runs."""
        self._worker, self._served, self._early, self._pull = worker, served, early, pull
        self._ways: list[Way] | None = None
        self._passes: deque[tuple[int, int]] = deque(maxlen=_PASSES)

    def saw_pass(self, samples: int) -> None:
        """The worker has made a pass over so many."""
        self._passes.append((samples, self._worker.pass_ns))

    def seconds(self) -> float:
        """For a pass such as the last ones. Measures the ways to servers the first time, where nobody knows them."""
        if self._ways is None:
            self._ways = _ways(self._worker)
        last = self._passes[-1][0] if self._passes else 0
        pass_ns = statistics.median(ns for samples, ns in self._passes if samples == last) if self._passes else 0
        backward_s = _BACKWARD * pass_ns / self._worker.accumulate / 1e9
        return exposed_s(self._pushed(), self._pulled(), self._ways, backward_s)

    def _pushed(self) -> list[Parcel]:
        """In the order in which they leave; a server's last unit stays back until the pass is through."""
        flat, codec = self._worker.flat, self._worker.outgoing.push[1].codec
        done = list(itertools.accumulate(bucket.nbytes for bucket in flat.buckets))
        found = []
        for m, u in self._served.units:
            layout = self._served.layouts[m]
            bucket, is_last = layout.units[u].bucket, u == len(layout.units) - 1
            ready = 1.0 if is_last or not self._early or bucket == len(done) - 1 else done[bucket] / done[-1]
            found.append((is_last, bucket, Parcel(m, self._nbytes(m, u, codec), ready)))
        return [parcel for *_, parcel in sorted(found, key=lambda each: each[:2])]

    def _pulled(self) -> list[Parcel]:
        return [Parcel(m, self._nbytes(m, u, self._pull), 1.0) for m, u in self._served.units]

    def _nbytes(self, m: int, u: int, codec: Codec) -> int:
        """What a unit weighs on the wire; how many rows will be touched nobody knows, and they are few."""
        layout, total = self._served.layouts[m], 0
        unit = layout.units[u]
        for r, span in zip(unit.of(layout.ranges), unit.of(self._served.spans[m]), strict=True):
            dtype = self._worker.params[r.buffer].dtype
            if codec.exact:
                total += 0 if r.row else (r.stop - r.start) * dtype.itemsize
            elif not r.row:
                numel, packed = codec.wire_like(span, self._worker.turn, dtype)
                total += numel * packed.itemsize
        return total


def _ways(worker: Worker) -> list[Way]:
    """To each server, as the launcher knows them, or measured; none where messages move no bytes."""
    comm = worker.comm
    if comm.ground is not None:
        return ways_from(comm.ground, comm.servers)
    if comm.shares_memory or comm.shares_process:
        return []
    return [_measured(worker, server) for server in comm.servers]


def _measured(worker: Worker, server: int) -> Way:
    """A few bytes there and back, many bytes there, and many there and back: the best of a few times each.

    Others measure at the same time, as they will push at the same time.
    """
    comm, small, large = worker.comm, torch.zeros(1), torch.zeros(_PROBE_BYTES // 4)

    def seconds(body: Tensor, back: bool) -> float:
        times = []
        for _ in range(_PROBES):
            began = comm.clock.now_ns()
            comm.wait(comm.call(server, "probe", {"back": back}, [body]))
            times.append(comm.clock.now_ns() - began)
        return min(times) / 1e9

    empty, there = seconds(small, back=False), seconds(large, back=False)
    both = seconds(large, back=True)
    up, down = _PROBE_BYTES / max(1e-9, there - empty), _PROBE_BYTES / max(1e-9, both - there)
    return Way(up, up, down, down, empty / 2)


# It ends.


def break_out(worker: Worker) -> None:
    """Give back what this worker was lent and will not train on; it takes no more, and is not waited for."""
    comm = worker.comm
    done, worker.lease_done = worker.lease_done, -1
    comm.wait(*(comm.call(server, "skip", {"broke": True, "done": done}) for server in comm.servers))


Keep = Callable[[Sequence[Range], list[dict[str, Any]]], None]
"""Takes some ranges' optimizer state, one mapping per part, to keep."""


def leave(worker: Worker, served: Served, keep: Keep) -> set[int] | None:
    """Wait until all workers are through, then take the parameters home; None where the servers were never seeded.

    The optimizer's state is given to `keep`, some ranges at a time. Returns who was there to the end: where somebody is
    gone, all hear of it here, and will regroup.
    """
    live = _take_home(worker, served, keep)
    _say_home(worker)
    return live


def _say_home(worker: Worker) -> None:
    """Tell the servers that this worker has left them, and has what it wanted.

    One that is lost after it has answered some workers' `leave` is restored without knowing of these: the others would
    wait for them. In simulated time no server is lost.
    """
    comm = worker.comm
    if not comm.clock.is_simulated:
        comm.wait(*[comm.call(server, "home", {"stretch": list(worker.stretch)}) for server in comm.servers])


def _take_home(worker: Worker, served: Served, keep: Keep) -> set[int] | None:
    comm = worker.comm
    calls = [comm.call(server, "leave", {}) for server in comm.servers]
    answers = [a for a in comm.wait(*calls, deadline_s=PATIENCE * comm.deadline_s) if a is not None]
    if any("empty" in answer.meta for answer in answers):
        return None
    live = set(answers[0].meta["workers"])
    homes = [_Home(worker, server, layout, keep) for server, layout in zip(comm.servers, served.layouts, strict=True)]
    for home, answer in zip(homes, answers, strict=True):
        home.heard(answer)
    while under_way := [home for home in homes if home.next is not None]:
        more = comm.wait(*[home.call() for home in under_way])
        for home, part in zip(under_way, more, strict=True):
            assert part is not None
            home.heard(part)
    if live != set(comm.workers):
        worker.pause_agreed = True
    return live


class _Home:
    """One server's parameters and optimizer state on their way home: in one message, or in several."""

    def __init__(self, worker: Worker, server: int, layout: Layout, keep: Keep) -> None:
        self._worker, self._server, self._layout, self._keep = worker, server, layout, keep
        self._assembly = Assembly()
        self.next: Place | None = None
        """What is still to come begins here."""

    def call(self) -> Handle:
        assert self.next is not None
        return self._worker.comm.call(self._server, "take", {"at": list(self.next)})

    def heard(self, answer: Message) -> None:
        ranges, units = self._layout.ranges, self._layout.units
        if "at" not in answer.meta:  # all at once
            count = len(ranges)
            return self._take(ranges, Kept(answer.body[:count], answer.meta, answer.body[count:]))
        for unit, kept in self._assembly.take(answer.meta, answer.body):
            self._take(units[unit].of(ranges), kept)
        self.next = self._assembly.expects

    def _take(self, ranges: Sequence[Range], kept: Kept) -> None:
        for r, tensor in zip(ranges, kept.params, strict=True):
            r.of(self._worker.params).copy_(tensor)
        self._keep(ranges, unpack(ranges, kept.kinds, kept.state))


def collect(worker: Worker, ranges: Sequence[Range], states: list[dict[str, Tensor]], moments: dict[str, Any]) -> None:
    """Put one server's parts of the optimizer state back into whole parameters."""
    parts = [part for r in ranges for part in r.parts]
    for part, state in zip(parts, states, strict=True):
        piece = worker.flat.pieces[part.piece]
        whole = moments.setdefault(piece.name, {})
        for key, value in state.items():
            if value.dim() == 0:
                whole[key] = value
                continue
            if key not in whole:
                whole[key] = torch.empty_strided(piece.shape, piece.stride, dtype=value.dtype, device=value.device)
            flat = whole[key].as_strided((piece.stop - piece.start,), (1,))
            flat[part.start : part.stop] = value


def _in_memory_order(worker: Worker, index: int, tensor: Tensor) -> Tensor:
    """A tensor shaped like a parameter, as one flat run in the order its elements lie in the buffer."""
    piece = worker.flat.pieces[index]
    if tensor.shape == piece.shape and tensor.stride() == piece.stride:
        return tensor.as_strided((piece.stop - piece.start,), (1,))
    flat = torch.empty(piece.stop - piece.start, dtype=tensor.dtype, device=tensor.device)
    flat.as_strided(piece.shape, piece.stride).copy_(tensor)
    return flat


# In between.


class Pushes:
    """The units of one push: sent as they become ready, in the order of the buckets."""

    def __init__(
        self,
        worker: Worker,
        served: Served,
        batch: Batch,
        *,
        lease: int,
        options: Sequence[Meta],
        pull: Codec,
        whole: bool = False,
        lend: bool = True,
        bare: bool = False,
        size: int,
        facts: Meta | None = None,
    ) -> None:
        """`whole`: it was made by several steps, so no parameter counts as unused. `lend`: the answer is to hold the
        next lease; `bare`: but no parameters. `size`: samples of the lease, or of the whole step. `facts` go with it.
        """
        self.worker, self.served, self.lease = worker, served, lease
        self.calls: list[Handle] = []
        self.units: list[tuple[int, int]] = []  # (server, unit) of each call
        self._options, self._pull, self._whole, self._lend, self._bare = options, pull, whole, lend, bare
        self._turn, self._batch, self._size, self._more_facts = worker.turn, batch, size, facts or {}
        self._grads, self._params = worker.flat.grads, worker.params
        self._versions = [list(versions) for versions in served.versions]
        self._sent = 0  # buckets

    def go_from(self, outbox: list[Tensor], inbox: list[Tensor]) -> None:
        """Send copies, so that the next gradients may be computed meanwhile; parameters come to the inbox."""
        for copy, grads in zip(outbox, self._grads, strict=True):
            copy.copy_(grads)
        self._grads, self._params = outbox, inbox

    def bucket_ready(self, bucket: int) -> None:
        """Issue this bucket's units; never waits. A server's last unit stays back: it tells what the step came to."""
        self._sent = bucket + 1
        for m, layout in enumerate(self.served.layouts):
            for u, unit in enumerate(layout.units[:-1]):
                if unit.bucket == bucket:
                    early = self.worker.comm.in_backward
                    self._call(m, u, {"early": early, "last": False}, more=not early)

    def finish(self, loss: float) -> None:
        """Send what is left."""
        worker, batch = self.worker, self._batch
        for bucket in range(self._sent, worker.buckets):
            self.bucket_ready(bucket)
        facts = {
            "early": False,
            "last": True,
            "done": worker.lease_done,
            "wishes": list(worker.wishes),
            "loss": loss * batch.weight,
            "samples": batch.samples,
            "weight": batch.weight,
            "lend": self._lend,
            **self._more_facts,
        }
        for m, layout in enumerate(self.served.layouts):
            self._call(m, len(layout.units) - 1, facts)

    def _call(self, m: int, u: int, facts: Meta, more: bool = False) -> None:
        worker, layout = self.worker, self.served.layouts[m]
        ranges = layout.units[u].of(layout.ranges)
        unused = [] if self._whole else worker.unused_among(part.piece for r in ranges for part in r.parts)
        meta = {
            "unit": u,
            "lease": self.lease,
            "size": self._size,
            "version": self._versions[m][u],
            "options": self._options_of(ranges),
            "unused": unused,
            **facts,
        }
        if self._bare:
            meta["bare"] = True
        body, into = [r.of(self._grads) for r in ranges], [r.of(self._params) for r in ranges]
        rows, (_, packing) = bool(ranges) and ranges[0].row > 0, worker.outgoing.push
        if rows:
            body = self._rows(ranges[0])
        elif packing.codec.exact:
            for grad, span in zip(body, layout.units[u].of(self.served.spans[m]), strict=True):
                worker.outgoing.add_leftover(grad, span)
        else:
            spans = layout.units[u].of(self.served.spans[m])
            body = [packing.pack(g, s, self._turn, worker.outgoing.memory) for g, s in zip(body, spans, strict=True)]
            worker.comm.clock.touch(round(packing.codec.passes * sum(span.numel for span in spans) * 4))
            meta["turn"] = list(self._turn)
        lands = not rows and self._pull.exact and not self._bare
        self.units.append((m, u))
        server = worker.comm.servers[m]
        meta, sent = fold(meta, body)
        self.calls.append(worker.comm.call(server, "push", meta, sent, into if lands else None, more))

    def _options_of(self, ranges: Sequence[Range]) -> Sequence[Meta]:
        """The settings of the groups that these ranges belong to."""
        return self._options if len(self._options) == 1 else [self._options[g] for g in groups_of(ranges)]

    def _rows(self, r: Range) -> list[Tensor]:
        """The touched rows of a range, numbered from its own first."""
        (part,) = r.parts
        index, values = self.worker.touched_rows(part.piece)
        first, stop = part.start // r.row, part.stop // r.row
        mine = (index >= first) & (index < stop)
        return [index[mine] - first, values[mine]]

    def take(self) -> tuple[list[Message], Meta]:
        """Wait for all answers, put the parameters where they belong; the answers, and what the first server says."""
        worker = self.worker
        came = worker.comm.wait(*self.calls, deadline_s=PATIENCE * worker.comm.deadline_s)
        answers = [answer for answer in came if answer is not None]
        lost = [answer.meta["lost"] for answer in answers if "lost" in answer.meta]
        if lost:
            raise Lost(f"rank {worker.comm.rank}: worker {lost[0]} was lost; this step did not happen")
        for (m, u), answer in zip(self.units, answers, strict=True):
            self.served.versions[m][u] = answer.meta["version"]
            if not self._bare:
                _scatter(worker, self.served, m, u, answer, self._params, self._pull)
        return answers, answers[max(n for n, (m, _) in enumerate(self.units) if m == 0)].meta


def pull(worker: Worker, served: Served, into: Sequence[Tensor], codec: Codec, *, lease: int, size: int) -> None:
    """The parameters as the servers have them now, into flat buffers that hold what was pulled before."""
    calls, units = [], served.units
    for m, u in units:
        layout = served.layouts[m]
        landing = [r.of(into) for r in layout.units[u].of(layout.ranges)] if codec.exact else None
        last, version = u == len(layout.units) - 1, served.versions[m][u]
        meta = {"unit": u, "lease": lease, "size": size, "version": version, "last": last}
        calls.append(worker.comm.call(worker.comm.servers[m], "pull", meta, (), landing, not last))
    came = worker.comm.wait(*calls, deadline_s=PATIENCE * worker.comm.deadline_s)
    for (m, u), answer in zip(units, came, strict=True):
        assert answer is not None
        served.versions[m][u] = answer.meta["version"]
        _scatter(worker, served, m, u, answer, into, codec)


def _scatter(
    worker: Worker, served: Served, m: int, u: int, answer: Message, params: Sequence[Tensor], codec: Codec
) -> None:
    """Put what came back where it belongs; whole ranges have landed by themselves."""
    layout = served.layouts[m]
    ranges = layout.units[u].of(layout.ranges)
    if ranges and ranges[0].row:
        index, rows = answer.body
        table = ranges[0].of(params).view(-1, ranges[0].row)
        table.index_copy_(0, index.to(table.device), rows.to(table.device))
    elif not codec.exact:
        turn = Turn(step=answer.meta["version"], rank=worker.comm.rank)
        spans = layout.units[u].of(served.spans[m])
        for r, span, tensor in zip(ranges, spans, answer.body, strict=True):
            mine = r.of(params)
            if answer.meta["packed"]:
                codec.decode_add(tensor.to(mine.device), mine, span, turn)
            else:
                mine.copy_(tensor)
