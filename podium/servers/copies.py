"""Copies of a server, for the day it is lost: replicas on its neighbours, and snapshots on disk.

Replication comes after aggregation: what moved a unit is sent on once, and the neighbour moves its copy the same way,
to the same bits (Li et al., OSDI 2014). A worker is answered when the copies are there, so nothing that it was told of
can be lost with one server. Server m is copied to the `replicas - 1` servers after it, in a ring.

With one replica, a snapshot is written every so many updates. What came after it is lost with the server, from its
ranges only; the restored server says in its records how many updates that were, as the workers know it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from podium.comm.base import Message, Meta
from podium.engine.files import bytes_to_tree, save_tree, tree_to_bytes
from podium.errors import CheckpointError, CommError, Lost
from podium.servers.applied import Applied, Span, joined
from podium.servers.folding import fold, unfold
from podium.servers.parcels import START, Assembly, Place, cut, parcel_bytes, place_of
from podium.servers.shard import Shard

if TYPE_CHECKING:
    from podium.servers.server import Server


_FORMAT = 3
"""Of a snapshot. All ranks of a run are of one version: one of another was left by a run that was resumed since, and
will be seeded."""
_WRITE_S = 300.0
"""How long a snapshot may take to be written."""


class _Twin:
    """Another server's shard, kept in step with it."""

    def __init__(self, shard: Shard, seed: Meta, facts: Meta) -> None:
        self.shard, self.seed, self.facts = shard, seed, facts
        self.assembly: Assembly | None = None
        """Where it comes in parcels: what has come so far. Until all is here, it is no copy."""


class Copies:
    """What this server does so that it, and its neighbours, can be restored."""

    server: Server

    def __init__(self, *, replicas: int = 1, snapshot: Path | None = None, every: int = 0) -> None:
        """`snapshot`: the file, written every so many updates where `every` is above 0."""
        self.replicas, self._path, self._every = replicas, snapshot, every
        self.restored = False
        """Whether this server took another's place."""
        self.sent = self.acknowledged = self._whole_at = 0
        self._acks: dict[int, int] = {}
        self._twins: dict[int, _Twin] = {}
        self._life = int.from_bytes(os.urandom(6))
        """Tells this server from the one whose place it took: acknowledgements to that one are not for this one."""
        self._place: Place | None = None  # where the next parcel to the copies begins; None: they have all
        self._later: list[tuple[Meta, list[Tensor], int]] = []  # what moved since in units that they have, numbered
        self._parcel_acks: set[int] = set()  # holders from which the last parcel's acknowledgement is missing
        self._writer: threading.Thread | None = None
        self._trouble: Exception | None = None
        self._saved_at = 0
        self.does: dict[str, Callable[[Message], None]] = {
            "mirror": self._mirror,
            "mirror_seed": self._mirror_seed,
            "mirror_parcel": self._mirror_parcel,
            "mirrored": self._mirrored,
            "replica": self._replica,
        }

    @property
    def holders(self) -> list[int]:
        """Who keeps copies of this server, as it is now."""
        servers, rank = self.server.servers, self.server.comm.rank
        if self.replicas < 2 or rank not in servers:
            return []
        at = servers.index(rank)
        return [servers[(at + n) % len(servers)] for n in range(1, min(self.replicas, len(servers)))]

    # Being copied.

    def begin(self) -> None:
        """A stretch begins: copies start from here."""
        if self.holders:
            self._seed_copies()
        self._save()
        self._join()  # before anybody is told that the stretch has begun

    def moved(
        self, unit: int, grads: Sequence[Tensor], options: Sequence[Meta], unused: Sequence[int], spans: Sequence[Span]
    ) -> None:
        """A unit was moved by gradients over these samples: let the copies follow."""
        if self.holders:
            meta = {"unit": unit, "options": list(options), "unused": list(unused), "spans": joined(spans)}
            counts = {"version": self.server.versions[unit], "recorded": self.server.recorded[unit]}
            self._follow(unit, *fold({**meta, **counts, **self._facts()}, grads))
        whole = unit == len(self.server.shard.units) - 1  # before it, the units of one update are of two versions
        if self._every and whole and self.server.updates - self._saved_at >= self._every:
            self._save()

    def _tell(self, kind: str, meta: Meta, body: Sequence[Tensor]) -> None:
        self.sent += 1
        self._send(kind, {**meta, "number": self.sent}, body)

    def _send(self, kind: str, meta: Meta, body: Sequence[Tensor]) -> None:
        meta = {**meta, "stretch": self.server.stretch, "life": self._life}
        for holder in self.holders:
            try:
                self.server.comm.send(holder, kind, meta, body)
            except Lost:  # it is being replaced, and will have to begin anew
                self._acks[holder] = self.sent
                self._parcel_acks.discard(holder)
        self._count()

    def _seed_copies(self) -> None:
        """Bring the copies to where this server is: in one message, or in parcels, one at a time.

        Were all parcels sent at once, two servers that copy each other could fill each other's inbox and stand still.
        """
        self._place, self._later, self._parcel_acks = None, [], set()
        if self.server.shard.fits(parcel_bytes(self.server.comm)):
            return self._tell("mirror_seed", {}, [_as_tensor(self._state())])
        self.sent += 1  # the number of the last parcel: whoever waits for it has to wait for all of them
        self._whole_at, self._place = self.sent, START
        facts = {"seed": self.server.seed_meta, "facts": self._all_facts()}
        self._send("mirror_seed", {"parcels": True}, [_as_tensor(facts)])
        self._send_parcel()

    def _send_parcel(self) -> None:
        server = self.server
        assert self._place is not None
        server.lanes.settle()
        parcel = cut(server.shard.dump_unit, len(server.shard.units), self._place, parcel_bytes(server.comm))
        units = [unit for unit, *_ in parcel.meta["units"]]
        facts = [[u, server.versions[u], server.recorded[u], server.intake.once[u].plain()] for u in units]
        self._place, self._parcel_acks = parcel.next, set(self.holders)
        number = self._whole_at if parcel.next is None else 0
        self._send("mirror_parcel", {**parcel.meta, **self._facts(), "moved": facts, "number": number}, parcel.body)
        if self._place is None:
            later, self._later = self._later, []
            for meta, grads, number in later:
                self._send("mirror", {**meta, "number": number}, grads)

    def _follow(self, unit: int, meta: Meta, grads: Sequence[Tensor]) -> None:
        """Let the copies move a unit as this server has."""
        if self._place is None:
            return self._tell("mirror", meta, grads)
        at, tensor = self._place
        if unit < at:  # they have it: once they have all
            self.sent += 1
            self._later.append((meta, [g.clone() for g in grads], self.sent))
        elif unit == at and tensor > 0:  # they have the half of it, from before: it has to come once more
            self._place = unit, 0

    def _mirrored(self, message: Message) -> None:
        if message.meta["life"] != self._life:
            return  # it speaks of what the lost one has sent whose place this server took
        self._parcel_acks.discard(message.source)
        self._acks[message.source] = max(self._acks.get(message.source, 0), message.meta["number"])
        self._go_on()

    def _go_on(self) -> None:
        """An acknowledgement has come, or will not come any more."""
        while self._place is not None and not self._parcel_acks:
            self._send_parcel()
        self._count()
        self.server.intake.acknowledged()

    def _count(self) -> None:
        self.acknowledged = min((self._acks.get(h, 0) for h in self.holders), default=self.sent)

    def departed(self, server: int) -> None:
        """A neighbour is gone: nobody waits for its copy."""
        if server in self.holders:
            self._acks[server] = self.sent
            self._parcel_acks.discard(server)
            self._go_on()

    def renew(self, server: int) -> None:
        """A neighbour was restored: if it keeps a copy of us, it has to begin anew."""
        if server in self.holders and self.server.seed_meta:
            self._seed_copies()

    # Keeping others' copies.

    def _mirror_seed(self, message: Message) -> None:
        state = bytes_to_tree(message.body[0].numpy().tobytes(), f"state of server {message.source}")
        seed = state["seed"]
        asked = (tuple(seed["servers"]), seed["unit_bytes"], seed.get("outer"), seed.get("weights"))
        shard = self.server.make_shard(message.source, *asked)
        facts = {**state["facts"], "once": [Applied.of(plain) for plain in state["facts"]["once"]]}
        twin = self._twins[message.source] = _Twin(shard, state["seed"], facts)
        if message.meta.get("parcels"):
            twin.assembly = Assembly()
            return
        _load(shard, state)
        self._acknowledge(message)

    def _acknowledge(self, message: Message) -> None:
        meta = {"number": message.meta["number"], "life": message.meta["life"]}
        self.server.tell(message.source, "mirrored", meta)

    def _twin_of(self, message: Message) -> _Twin | None:
        """The copy that a message speaks of; none where that is of another stretch."""
        twin = self._twins.get(message.source)
        return twin if twin is not None and twin.seed.get("stretch") == message.meta["stretch"] else None

    def _mirror_parcel(self, message: Message) -> None:
        twin, meta = self._twin_of(message), message.meta
        if twin is not None and twin.assembly is not None:
            for unit, kept in twin.assembly.take(meta, message.body):
                twin.shard.load_unit(unit, kept)
            for unit, version, recorded, once in meta["moved"]:
                twin.facts["versions"][unit], twin.facts["recorded"][unit] = version, recorded
                twin.facts["once"][unit] = Applied.of(once)
            twin.facts.update({key: meta[key] for key in ("updates", "cursor")})
            if twin.assembly.expects is None:
                twin.assembly = None
        self._acknowledge(message)

    def _mirror(self, message: Message) -> None:
        message = unfold(message)
        twin, meta = self._twin_of(message), message.meta
        if twin is not None:
            unit, version = meta["unit"], meta["version"]
            twin.shard.step(unit, message.body, meta["options"], meta["unused"], version)
            twin.facts["versions"][unit], twin.facts["recorded"][unit] = version, meta["recorded"]
            twin.facts.update({key: meta[key] for key in ("updates", "cursor")})
            for start, stop in meta["spans"]:
                twin.facts["once"][unit].add((start, stop))
        self._acknowledge(message)

    def _replica(self, message: Message) -> None:
        """A neighbour was replaced and asks for what we kept of it."""
        twin, server = self._twins.get(message.source), self.server
        if twin is None or twin.assembly is not None:
            return server.answer(message, {})
        most, at = parcel_bytes(server.comm), place_of(message.meta.get("at"))
        if at is not None:
            parcel = cut(twin.shard.dump_unit, len(twin.shard.units), at, most)
            return server.answer(message, parcel.meta, parcel.body)
        facts = {**twin.facts, "once": [once.plain() for once in twin.facts["once"]]}
        state = {"seed": twin.seed, "facts": facts}
        if twin.shard.fits(most):
            return server.answer(message, {}, [_as_tensor({**state, **_dump(twin.shard)})])
        server.answer(message, {"parcels": True}, [_as_tensor(state)])

    # Snapshots.

    def _save(self) -> None:
        """Write a snapshot beside the loop; one that is still being written is waited for."""
        if self._path is None or not self._every:
            return
        self._join()
        self._saved_at = self.server.updates
        state = self._state()
        self._writer = threading.Thread(target=self._write, args=(self._path, state), name="snapshot", daemon=True)
        self._writer.start()

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_tree(path, state, durable=False)  # against a lost process: a lost machine takes the run with it
        except (OSError, CheckpointError) as error:
            self._trouble = error

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join(_WRITE_S)
            if self._writer.is_alive():
                rank = self.server.comm.rank
                raise CheckpointError(
                    f"server {rank}: its snapshot was not written in {_WRITE_S:g} s; is the disk stuck?"
                )
            self._writer = None
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise CheckpointError(f"server {self.server.comm.rank}: its snapshot could not be written: {trouble}")

    def close(self) -> None:
        """The run is over."""
        self._join()

    # Being restored.

    def restore(self) -> str:
        """Become what was lost, from the nearest copy; says which. Raises `Lost` where there is none."""
        server = self.server
        state, where, holder = self._find()
        if state is None:
            server.comm.watch(server.workers)  # they know the address of the lost one only, and may end without a word
            return where
        server.begin(state["seed"])
        if holder is None:
            _load(server.shard, state)
        else:
            self._fetch(holder)
        facts = state["facts"]
        server.versions, server.updates = list(facts["versions"]), facts["updates"]
        server.recorded = Counter(facts["recorded"])
        self._saved_at = server.updates
        server.shard.all_rows_changed(server.versions)
        server.intake.once = [Applied.of(plain) for plain in facts["once"]]
        if server.cursor is not None and facts["cursor"] is not None:
            server.cursor.load(facts["cursor"])
        self.restored = server.is_new = True
        for other in server.servers:
            if other != server.comm.rank:
                server.tell(other, "hello", {})
        server.inquire()
        self.begin()
        return where

    def _fetch(self, holder: int) -> None:
        """A neighbour's copy of this server, parcel by parcel."""
        comm, assembly = self.server.comm, Assembly()
        while assembly.expects is not None:
            answer = self._ask(holder, assembly.expects)
            if answer is None or "at" not in answer.meta:
                raise Lost(f"server {comm.rank}: its copy at server {holder} was lost before all of it was here")
            for unit, kept in assembly.take(answer.meta, answer.body):
                self.server.shard.load_unit(unit, kept)

    def _find(self) -> tuple[Any | None, str, int | None]:
        """A copy, where it was, and who has the tensors where they are still to come.

        None where nobody had brought anything here yet.
        """
        comm = self.server.comm
        for holder in self.holders:
            try:
                answer = self._ask(holder)
            except CommError:  # it was lost too, and whatever takes its place has no copy
                continue
            if answer is not None and answer.body:
                where = f"replica at {holder}"
                state = bytes_to_tree(answer.body[0].numpy().data, where)
                return state, where, holder if answer.meta.get("parcels") else None
        if self._path is not None and self._path.exists():
            state = _read(self._path)
            if state.get("format") == _FORMAT:
                return state, "snapshot", None
        if self._path is not None and self._every:  # a stretch begins with a snapshot
            return None, "nothing: it was not in use yet", None
        who = ", ".join(map(str, self.holders))
        why = f"server {who}, which kept a replica, was lost too" if who else "replicas is 1"
        raise Lost(f"server {comm.rank} was lost and there is no copy of it: {why}, and snapshot_every is 0")

    def _ask(self, holder: int, place: Place | None = None) -> Message | None:
        """Ask for our replica, or for the parcel of it that begins at this place.

        Meanwhile others may ask for theirs: two that were lost together must not wait in turn.
        All other messages wait until this server is what it was.
        """
        server, comm = self.server, self.server.comm
        call = comm.call(holder, "replica", {} if place is None else {"at": list(place)})
        until = time.monotonic() + comm.deadline_s
        while not call.done:
            message = comm.poll(call, deadline_s=max(0.0, until - time.monotonic()))
            if message is not None and message.kind == "replica":
                self._replica(message)
            elif message is not None:
                server.early.append(message)
        (answer,) = comm.wait(call)
        return answer

    def _state(self) -> dict[str, Any]:
        self.server.lanes.settle()
        state = {"format": _FORMAT, "seed": self.server.seed_meta, "facts": self._all_facts()}
        return {**state, **_dump(self.server.shard)}

    def _facts(self) -> Meta:
        server = self.server
        cursor = None if server.cursor is None else server.cursor.state()
        return {"updates": server.updates, "cursor": cursor}

    def _all_facts(self) -> Meta:
        server = self.server
        once = [once.plain() for once in server.intake.once]
        counts = {"versions": list(server.versions), "recorded": dict(server.recorded)}
        return {**self._facts(), **counts, "once": once}


def _dump(shard: Shard) -> dict[str, Any]:
    keys, state = shard.dump()
    return {"params": [p.clone() for p in shard.params], "keys": keys, "state": [t.clone() for t in state]}


def _load(shard: Shard, state: Mapping[str, Any]) -> None:
    shard.load(state["params"], state["keys"], state["state"])


def _read(path: Path) -> Any:
    """A snapshot, whose tensors are copied from the file and not from memory that holds all of it."""
    data = np.memmap(path, dtype=np.uint8, mode="r").data if path.stat().st_size else b""
    return bytes_to_tree(data, str(path))


def _as_tensor(state: Mapping[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(tree_to_bytes(state)), dtype=torch.uint8)
