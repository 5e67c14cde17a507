"""A server's protocol: real servers in the memory world, driven by workers written by hand, who die where they like.

The model begins with zeros and moves by plain SGD with a rate of 1; the gradient over slice k is 2**k everywhere. So
each parameter tells, bit by bit, which slices have moved it: once all is done it is -(2**slices - 1), on every server,
or else a slice was lost, used twice, or used on one server and not on another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from podium.comm.base import DEPARTED, Communicator, Handle, Message, Meta
from podium.engine.flat import Flat
from podium.errors import CommError, DeadlineExceeded
from podium.records.recorder import Record, Recorder
from podium.servers.gate import Rules
from podium.servers.ranges import lay_out
from podium.servers.server import CopyOptions, Server, ServerOptions
from podium.servers.wire.messages import State, decode
from podium.servers.wire.optimizer_settings import options_of
from podium.servers.wire.parcels import Assembly
from podium.testing.worlds import Memory

WAIT_S = 20.0
SLICE = 2
"""Samples of a slice."""
UNIT_BYTES = 40

STREAM = Rules()
IN_STEP = Rules(bound=0, all_workers=True, wait=True)
MODES: dict[str, Rules] = {
    "async": STREAM,
    "ssp(1)": Rules(bound=1),
    "dssp": Rules(bound=1, bound_high=3),
    "in step": IN_STEP,
    "softsync": Rules(pushes=2),
    "softsync, dropping": Rules(pushes=2, freshest=1),
    "backup": Rules(pushes=2, wait=True, freshest=0),
    "gba": Rules(samples=4, freshest=2),
    "async, dropping": Rules(wait=True, freshest=1),
}


A_MODE, SERVERS = st.sampled_from(sorted(MODES)), st.sampled_from([1, 2])


def a_few(examples: int) -> settings:
    """Each example plays real threads: few of them, and an example that failed is not made smaller."""
    return settings(deadline=None, max_examples=examples, phases=[Phase.explicit, Phase.reuse, Phase.generate])


class Died(Exception):
    """A worker has come to where it dies."""


def make_flat() -> tuple[Flat, SGD]:
    model = nn.Linear(5, 4)
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer = SGD(model.parameters(), lr=1.0)
    return Flat(model, optimizer, bucket_bytes=1 << 20), optimizer


@dataclass
class Served:
    """What a server came to."""

    records: list[Record]
    params: list[float]
    server: Server

    def of(self, kind: str) -> list[Record]:
        return [row for row in self.records if row["kind"] == kind]


@dataclass
class Fake:
    """A worker that says what it is told to say."""

    comm: Communicator
    wait_s: float = WAIT_S
    dies_after: float = float("inf")
    """Units that it pushes before it dies, …"""
    dies_waiting: bool = False
    """… before the answer to the last of them where that ends a push."""
    votes: list[bool] = field(default_factory=lambda: [False, False, False])
    ending: Meta = field(default_factory=dict)
    """What it was told when nothing was left."""
    versions: dict[tuple[int, int], int] = field(default_factory=dict)
    power: float = 2.0
    """The gradient over slice k is this to the power of k."""

    def __post_init__(self) -> None:
        self.flat, self.optimizer = make_flat()
        self.layouts = lay_out(self.flat, len(self.comm.servers), UNIT_BYTES)
        self.units = [(m, u) for m, layout in enumerate(self.layouts) for u in range(len(layout.units))]

    def wait(self, *handles: Handle) -> list[Message]:
        return [answer for answer in self.comm.wait(*handles, deadline_s=self.wait_s) if answer is not None]

    def seed(self, rules: Rules, slices: int, workers: Sequence[int] | None = None, **other: Any) -> None:
        self.wait(*self.send_seed(rules, slices, workers, **other))

    def send_seed(self, rules: Rules, slices: int, workers: Sequence[int] | None = None, **other: Any) -> list[Handle]:
        self.versions.clear()
        work = {
            "workers": list(self.comm.workers if workers is None else workers),
            "servers": list(self.comm.servers),
            "addresses": [],
            "rules": rules.to_dict(),
            "mitigation": "none",
            "strength": None,
            "clip_norm": None,
            "leases": True,
            "samples": 1000,
            "position": 0,
            "end": slices * SLICE,
            "batch_size": 2 * SLICE,
            "unit_bytes": UNIT_BYTES,
            "parts": 2,
            "state": {},
        }
        calls = []
        for server, layout in zip(self.comm.servers, self.layouts, strict=True):
            body = [r.of(self.flat.params) for r in layout.ranges]
            calls.append(self.comm.call(server, "seed", {**work, **other}, body))
        return calls

    def draw(self, done: int = -1) -> Meta:
        return self.wait(self.comm.call(self.comm.servers[0], "draw", {"done": done, "votes": self.votes}))[0].meta

    def push_unit(self, m: int, u: int, lease: int, done: int = -1) -> Handle:
        if self.dies_after <= 0:
            raise Died
        self.dies_after -= 1
        layout = self.layouts[m]
        last = u == len(layout.units) - 1
        meta = {
            "unit": u,
            "lease": lease,
            "size": SLICE if lease >= 0 else 0,
            "version": self.versions.get((m, u), 0),
            "options": options_of(self.optimizer),
            "unused": [],
            "early": False,
            "last": last,
        }
        if last:
            facts = {"loss": 0.0, "samples": SLICE if lease >= 0 else 0, "weight": 0.0, "lend": True}
            meta.update({"done": done, "votes": self.votes, **facts})
        value = self.power ** (lease // SLICE) if lease >= 0 else 0.0
        body = [torch.full((r.stop - r.start,), value) for r in layout.units[u].of(layout.ranges)]
        return self.comm.call(self.comm.servers[m], "push", meta, body)

    def push(self, lease: int, done: int = -1) -> Meta:
        """All units; what the last of the first server is answered."""
        handles = [self.push_unit(m, u, lease, done) for m, u in self.units]
        if self.dies_waiting and self.dies_after <= 0:
            raise Died
        answers = self.wait(*handles)
        for unit, answer in zip(self.units, answers, strict=True):
            if "version" in answer.meta:
                self.versions[unit] = answer.meta["version"]
        facts = next(a for (m, u), a in zip(self.units, answers, strict=True) if (m, u) == self.last_of(0)).meta
        return {**facts, "dropped": any(a.meta.get("dropped") for a in answers)}

    def last_of(self, m: int) -> tuple[int, int]:
        return m, len(self.layouts[m].units) - 1

    def work(self, lease: Meta | None = None, done: int = -1) -> list[int]:
        """Lease, push and lease again until nothing is left; the slices that were done."""
        mine: list[int] = []
        while True:
            if lease is None or "lease" not in lease:
                lease, done = self.draw(done), -1
                if "lease" not in lease:
                    self.ending = lease
                    return mine
            number = lease["lease"]
            lease = self.push(number, done)
            done = -1 if lease["dropped"] else number
            if done != -1:
                mine.append(number)

    def outlive(self) -> None:
        """Wait until another has died. What is sent from now on, servers get after they have heard of it."""
        assert self.comm.recv(self.wait_s).kind == DEPARTED

    def leave(self) -> list[Message]:
        return self.wait(*[self.comm.call(server, "leave", {}) for server in self.comm.servers])

    def home(self) -> list[float]:
        """Leave; the parameters taken home, all servers' together."""
        flats = [torch.full_like(p, float("nan")) for p in self.flat.params]
        for server, layout, answer in zip(self.comm.servers, self.layouts, self.leave(), strict=True):
            if "at" not in answer.meta:
                for r, tensor in zip(layout.ranges, answer.body, strict=False):
                    r.of(flats).copy_(tensor)
                continue
            assembly = Assembly()
            while True:
                for unit, kept in assembly.take(decode(State, answer), answer.body):
                    for r, tensor in zip(layout.units[unit].of(layout.ranges), kept.params, strict=True):
                        r.of(flats).copy_(tensor)
                if assembly.expects is None:
                    break
                (answer,) = self.wait(self.comm.call(server, "take", {"at": list(assembly.expects)}))
        return _used(self.flat, flats)


def _used(flat: Flat, flats: Sequence[Tensor]) -> list[float]:
    return [x for piece in flat.pieces for x in piece.view(flats[piece.buffer]).flatten().tolist()]


def serve(comm: Communicator, replicas: int) -> Served:
    flat, optimizer = make_flat()
    recorder = Recorder(comm.rank)
    copies = CopyOptions(replicas=replicas)
    server = Server(comm, flat, optimizer, recorder=recorder, options=ServerOptions(copies=copies))
    server.serve()
    return Served(recorder.kept, [x for p in server.store.shard.params for x in p.tolist()], server)


def play(
    *scripts: Callable[[Fake], Any],
    servers: int = 1,
    wait_s: float = WAIT_S,
    replicas: int = 1,
    message_bytes: int | None = None,
) -> tuple[list[Any], list[Served]]:
    """One worker per script; what they returned, and the servers. One that raises `Died` has died."""

    def main(comm: Communicator) -> Any:
        comm.message_bytes = message_bytes
        if comm.rank in comm.servers:
            return serve(comm, replicas)
        return scripts[comm.rank](Fake(comm, wait_s))

    outcomes = Memory().attempt(main, len(scripts), servers, deadline_s=wait_s)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, Died):
            raise outcome
    return outcomes[: len(scripts)], outcomes[len(scripts) :]


def all_of(slices: int) -> set[float]:
    """What every parameter is once every slice has moved it once."""
    return {-float(2**slices - 1)}


# A slice is applied once.


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("mode", ["async", "ssp(1)", "in step", "softsync", "backup"])
def test_a_lease_that_is_pushed_twice_is_applied_once(mode: str, servers: int) -> None:
    """Its worker does not know whether it was applied before the answer was lost."""

    def worker(fake: Fake) -> list[float]:
        fake.seed(MODES[mode], slices=4)
        done = fake.draw()["lease"]
        lent = [fake.push(done), fake.push(done)]
        while lent:
            lease = lent.pop(0)
            if "lease" in lease:
                lent.append(fake.push(lease["lease"], done))
                done = lease["lease"]
        fake.work(done=done)
        return fake.home()

    (params,), served = play(worker, servers=servers)
    assert set(params) == all_of(4)
    for server in served:
        done = [(row["lease"], row["range"]) for row in server.of("update")]
        assert len(done) == len(set(done)) == 4 * len(server.server.store.shard.units)


@a_few(30)
@given(mode=A_MODE, servers=SERVERS, units=st.integers(1, 3))
def test_a_worker_dies_after_some_units_of_its_push(mode: str, servers: int, units: int) -> None:
    """Whoever does its slice again moves only what it had not yet moved, or all of it: every unit once."""
    drawn = threading.Event()

    def survivor(fake: Fake) -> list[float]:
        fake.seed(MODES[mode], slices=6)
        fake.comm.barrier()
        lease = fake.draw()
        assert drawn.wait(WAIT_S)  # or all slices may be done before the other has one
        fake.work(lease)
        return fake.home()

    def victim(fake: Fake) -> None:
        assert units <= len(fake.units), "it is to die in its first push"
        fake.comm.barrier()
        lease = fake.draw()
        drawn.set()
        fake.dies_after, fake.dies_waiting = units, True
        fake.work(lease)

    (params, death), served = play(survivor, victim, servers=servers)
    assert isinstance(death, Died)
    assert set(params) == all_of(6)
    assert all(set(server.params) == all_of(6) for server in served)


@pytest.mark.parametrize("m", [0, 1])
@pytest.mark.parametrize("mode", ["in step", "softsync", "backup", "gba", "async, dropping"])
def test_an_update_happens_on_both_servers_or_on_none(mode: str, m: int) -> None:
    """A worker dies when one server has the whole of its push, and the other nothing."""

    def survivor(fake: Fake) -> list[float]:
        fake.seed(MODES[mode], slices=6)
        fake.comm.barrier()
        lease = fake.draw()
        fake.outlive()
        fake.work(lease)
        return fake.home()

    def victim(fake: Fake) -> None:
        fake.comm.barrier()
        lease = fake.draw()["lease"]
        for server, u in fake.units:
            if server == m:
                fake.push_unit(server, u, lease)
        raise Died

    (params, _), served = play(survivor, victim, servers=2)
    assert set(params) == all_of(6)
    versions = [server.server.store.versions for server in served]
    assert len({v for each in versions for v in each}) == 1, "servers differ in how often they were moved"
    for server in served:
        assert len(server.of("worker_lost")) == 1


def test_a_push_that_waits_is_not_taken_up_again_when_a_server_says_once_more_that_it_has_it() -> None:
    """As one does that heard of the slice before the first server was restored; the push must wait, and count."""

    def first(fake: Fake) -> list[float]:
        fake.seed(MODES["in step"], slices=4)
        fake.comm.barrier()
        lease = fake.draw()["lease"]
        handles = [fake.push_unit(m, u, lease) for m, u in fake.units]
        fake.comm.send(fake.comm.servers[0], "have", {"source": fake.comm.rank, "lease": lease})
        fake.comm.barrier()
        answer = fake.wait(*handles)[len(fake.layouts[0].units) - 1].meta
        fake.versions = dict.fromkeys(fake.units, 1)
        fake.work(answer, done=lease)
        return fake.home()

    def second(fake: Fake) -> list[float]:
        fake.comm.barrier()
        lease = fake.draw()
        fake.comm.barrier()
        fake.work(lease)
        return fake.home()

    (params, _), _ = play(first, second)
    assert set(params) == all_of(4)


def dies_waiting(fake: Fake) -> None:
    """All servers have the whole of its push."""
    fake.comm.barrier()
    lease = fake.draw()["lease"]
    for m, u in fake.units:
        fake.push_unit(m, u, lease)
    raise Died


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("mode", sorted(set(MODES) - {"in step", "backup"}))
def test_the_push_of_a_worker_that_dies_before_its_answer_counts_once(mode: str, servers: int) -> None:
    def survivor(fake: Fake) -> list[float]:
        fake.seed(MODES[mode], slices=6)
        fake.comm.barrier()
        lease = fake.draw()
        fake.outlive()
        fake.work(lease)
        return fake.home()

    (params, _), served = play(survivor, dies_waiting, servers=servers)
    assert set(params) == all_of(6)
    assert all(set(server.params) == all_of(6) for server in served)


@pytest.mark.parametrize("mode", ["in step", "backup"])
def test_nothing_is_lent_to_the_dead(mode: str) -> None:
    """Its push waits for the survivor's and counts; were it lent another slice then, nobody would ever do that."""

    def survivor(fake: Fake) -> None:
        fake.seed(MODES[mode], slices=6)
        fake.comm.barrier()
        lease = fake.draw()["lease"]
        fake.outlive()
        fake.push(lease)

    _, (served,) = play(survivor, dies_waiting)
    assert [row["worker"] for row in served.of("update") if row["range"] == 0] == [0, 1]
    assert served.server.segment.lending is not None
    assert served.server.segment.lending.cursor.held_by(1) == []


@a_few(60)
@given(mode=A_MODE, servers=SERVERS, units=st.tuples(*[st.integers(-1, 13)] * 3))
def test_whoever_dies_and_when_every_slice_moves_every_parameter_once(
    mode: str, servers: int, units: tuple[int, int, int]
) -> None:
    """`units`: after how many pushed units each of the other workers dies; -1: before it has begun."""
    deaths = [float("inf"), *units]

    def worker(fake: Fake) -> list[float]:
        if fake.comm.rank == 0:
            fake.seed(MODES[mode], slices=16)
        fake.comm.barrier()
        fake.dies_after = deaths[fake.comm.rank]
        if fake.dies_after < 0:
            raise Died
        fake.dies_waiting = True
        fake.work()
        return fake.home()

    outcomes, served = play(*[worker] * 4, servers=servers)
    assert set(outcomes[0]) == all_of(16)
    assert all(set(server.params) == all_of(16) for server in served)


@a_few(18)
@given(mode=A_MODE, message_bytes=st.sampled_from([None, 100, 16]))  # in one message, in parcels, a tensor each
def test_a_copy_is_what_it_is_a_copy_of(mode: str, message_bytes: int | None) -> None:
    """Also of what a worker did that dies on the way; and nobody is answered before the copy is there."""

    def worker(fake: Fake) -> list[float]:
        if fake.comm.rank == 0:
            fake.seed(MODES[mode], slices=10)
        fake.comm.barrier()
        fake.dies_after = 9 if fake.comm.rank == 1 else float("inf")
        fake.work()
        return fake.home()

    (params, _, other), served = play(*[worker] * 3, servers=3, replicas=2, message_bytes=message_bytes)
    assert set(params) == set(other) == all_of(10)
    for n, copied in enumerate(served):
        keeper, mine = served[(n + 1) % 3].server.keeper, copied.server
        copy = keeper.copies[mine.comm.rank]
        assert copy.is_whole
        assert all(torch.equal(p, q) for p, q in zip(copy.shard.params, mine.store.shard.params, strict=True))
        assert copy.facts["versions"] == mine.store.versions
        assert copy.facts["once"] == mine.store.applied


@pytest.mark.parametrize("message_bytes", [None, 100], ids=["one message", "parcels"])
@pytest.mark.parametrize("mode", ["async", "in step"])
def test_a_server_in_a_lost_ones_place_becomes_what_its_neighbour_kept(mode: str, message_bytes: int | None) -> None:
    ended = threading.Event()
    before: list[Server] = []
    after: list[Server] = []

    def main(comm: Communicator) -> Any:
        comm.message_bytes = message_bytes
        if comm.rank == comm.servers[1]:
            return serve(comm, replicas=2)
        if comm.rank == comm.servers[0]:
            before.append(serve(comm, replicas=2).server)
            flat, optimizer = make_flat()
            after.append(
                Server(
                    comm,
                    flat,
                    optimizer,
                    recorder=Recorder(comm.rank),
                    options=ServerOptions(copies=CopyOptions(replicas=2)),
                )
            )
            after[0].restore()
            (record,) = [row for row in after[0].recorder.kept if row["kind"] == "restored"]
            assert record["source"] == f"replica at {comm.servers[1]}"
            return ended.set()
        fake = Fake(comm)
        fake.seed(MODES[mode], slices=10)
        fake.work()
        fake.wait(comm.call(comm.servers[0], "retire", {}))
        assert ended.wait(WAIT_S)

    Memory().run(main, 1, 2)
    lost, restored = before[0].store, after[0].store
    assert {x for p in lost.shard.params for x in p.tolist()} == all_of(10)
    assert all(torch.equal(p, q) for p, q in zip(lost.shard.params, restored.shard.params, strict=True))
    assert lost.versions == restored.versions and lost.updates == restored.updates
    assert lost.applied == restored.applied


def test_a_seed_waits_until_all_have_taken_the_last_segments_state_home() -> None:
    """Where that takes several messages: otherwise the slower one would take home what the faster one has brought."""
    seeded = threading.Event()

    def fast(fake: Fake) -> list[float]:
        fake.seed(STREAM, slices=2)
        fake.comm.barrier()
        fake.work()
        first = fake.home()
        for p in fake.flat.params:
            p.fill_(77.0)
        seeding = fake.send_seed(STREAM, slices=2)
        fake.wait(fake.comm.call(fake.comm.servers[0], "probe", {}))  # what comes after the seed is answered, …
        assert not any(call.done for call in seeding), "… and the seed is not"
        seeded.set()
        fake.wait(*seeding)
        return first

    def slow(fake: Fake) -> list[float]:
        fake.comm.barrier()
        fake.work()
        answers = fake.leave()
        assert seeded.wait(WAIT_S)
        fake.leave = lambda: answers  # type: ignore[method-assign]  # go on from there
        return fake.home()

    (first, second), _ = play(fast, slow, message_bytes=40)
    assert set(first) == set(second) == all_of(2)


# What is remembered.


@pytest.mark.parametrize("mode", ["async", "ssp(1)", "in step", "softsync, dropping", "gba"])
def test_what_a_server_remembers_does_not_grow_with_the_pushes(tmp_path: Path, mode: str) -> None:
    """Nor does its copy on the neighbour, nor its snapshot on disk."""
    grown: dict[int, list[int]] = {}

    def main(comm: Communicator) -> Any:
        if comm.rank in comm.servers:
            flat, optimizer = make_flat()
            copies = CopyOptions(replicas=2, snapshot=tmp_path / str(comm.rank), every=2)
            server = Server(comm, flat, optimizer, recorder=Recorder(comm.rank), options=ServerOptions(copies=copies))
            sizes = grown.setdefault(comm.rank, [])
            snapshots = server.parts.snapshots
            write = snapshots._write

            def written(path: Path, state: Any) -> None:
                write(path, state)
                sizes.append(path.stat().st_size)

            snapshots._write = written  # type: ignore[method-assign]  # to see how large each one is
            return server.serve()
        fake = Fake(comm)
        if comm.rank == 0:
            fake.seed(MODES[mode], slices=240)
        comm.barrier()
        fake.power = 0.0
        fake.work()
        return fake.leave()[0].meta

    Memory().run(main, 2, 2)
    for sizes in grown.values():
        assert len(sizes) > 40
        early, late = sizes[len(sizes) // 10 : len(sizes) // 4], sizes[-len(sizes) // 4 :]
        assert max(late) <= max(early) + 160, "positions grow by a digit or two; nothing else does"


# Gates.


def test_a_worker_at_the_gate_goes_on_when_the_slowest_dies() -> None:
    waiting = threading.Event()

    def fast(fake: Fake) -> list[float]:
        fake.seed(Rules(bound=0), slices=6)
        fake.comm.barrier()
        lease = fake.draw()["lease"]
        handles = [fake.push_unit(m, u, lease) for m, u in fake.units]
        waiting.set()
        answers = fake.wait(*handles)
        fake.work(answers[-1].meta, done=lease)
        return fake.home()

    def slow(fake: Fake) -> None:
        fake.comm.barrier()
        fake.draw()
        waiting.wait(WAIT_S)
        raise Died

    (params, _), (served,) = play(fast, slow)
    assert set(params) == all_of(6)
    assert max(row["lead"] for row in served.of("update") if row["worker"] == 0) == 0


@pytest.mark.parametrize("bound", [0, 1, 3])
@pytest.mark.parametrize("servers", [1, 2])
def test_recorded_leads_stay_within_the_bound(bound: int, servers: int) -> None:
    rules = Rules(bound=bound)

    def worker(fake: Fake) -> list[float]:
        if fake.comm.rank == 0:
            fake.seed(rules, slices=16)
        fake.comm.barrier()
        fake.work()
        return fake.home()

    outcomes, served = play(*[worker] * 3, servers=servers)
    assert all(set(params) == all_of(16) for params in outcomes)
    assert max(row["lead"] for server in served for row in server.of("update")) <= bound


# Ends.


def test_leaving_waits_for_all_and_all_take_the_same_home() -> None:
    left = threading.Event()

    def early(fake: Fake) -> list[float]:
        fake.seed(STREAM, slices=2)
        fake.comm.barrier()
        call = fake.comm.call(fake.comm.servers[0], "leave", {})
        left.set()
        (answer,) = fake.wait(call)
        return [x for t in answer.body for x in t.tolist()]

    def late(fake: Fake) -> list[float]:
        fake.comm.barrier()
        left.wait(WAIT_S)
        fake.push(0)
        fake.push(2)
        (answer,) = fake.leave()
        return [x for t in answer.body for x in t.tolist()]

    (first, second), _ = play(early, late)
    assert first == second
    assert set(first) == all_of(2), "what the later one did is in what the earlier one takes home"


@a_few(12)
@given(mode=A_MODE, servers=SERVERS)
def test_one_that_dies_before_it_leaves_keeps_nobody(mode: str, servers: int) -> None:
    def survivor(fake: Fake) -> list[float]:
        fake.seed(MODES[mode], slices=4)
        fake.comm.barrier()
        fake.work()
        return fake.home()

    def victim(fake: Fake) -> None:
        fake.comm.barrier()
        fake.work()
        raise Died

    (params, _), _ = play(survivor, victim, servers=servers)
    assert set(params) == all_of(4)


def test_servers_that_were_never_seeded_say_so() -> None:
    (facts,), _ = play(lambda fake: [answer.meta for answer in fake.leave()], servers=2)
    assert facts == [{"empty": True}, {"empty": True}]


@a_few(12)
@given(mode=st.sampled_from(["async", "ssp(1)", "in step", "softsync"]), servers=SERVERS, named=st.booleans())
def test_a_worker_departs_between_two_segments(mode: str, servers: int, named: bool) -> None:
    """Whether or not the one who seeds the next has heard of it."""

    def stays(fake: Fake) -> tuple[list[float], list[float], Any]:
        fake.seed(MODES[mode], slices=4)
        fake.comm.barrier()
        fake.work()
        first = fake.home()
        fake.seed(MODES[mode], slices=6, workers=[0, 1] if named else [0])
        fake.work()
        return first, fake.home(), fake.leave()[0].meta["workers"]

    def goes(fake: Fake) -> list[float]:
        fake.comm.barrier()
        fake.work()
        return fake.home()

    ((first, second, live), other), _ = play(stays, goes, servers=servers)
    assert first == other
    assert set(first) == all_of(4)
    assert set(second) == all_of(6)
    assert live == [0]


@pytest.mark.parametrize("servers", [1, 2])
def test_a_step_that_lost_a_worker_did_not_happen(servers: int) -> None:
    """Fed by shares of global steps: the survivors are told, take everything home and seed again without it."""
    halfway = threading.Event()

    def survivor(fake: Fake) -> tuple[Meta, list[float], list[float]]:
        fake.seed(IN_STEP, slices=4, leases=False)
        fake.comm.barrier()
        fake.push(0)
        halfway.wait(WAIT_S)
        answer = fake.push(2)
        before = fake.home()
        fake.seed(IN_STEP, slices=4, leases=False, workers=[0])
        fake.push(2)
        return answer, before, fake.home()

    def victim(fake: Fake) -> None:
        fake.comm.barrier()
        fake.push(0)
        fake.push_unit(0, 0, 2)
        halfway.set()
        raise Died

    ((answer, before, after), _), _ = play(survivor, victim, servers=servers)
    assert answer["lost"] == 1
    assert set(before) == {-2.0}, "the first step, of two shares, and nothing of the second"
    assert set(after) == {-2.0}, "alone: the seed's parameters are the worker's own, which this one never moved"


@pytest.mark.parametrize("kind", range(3), ids=["stop", "pause", "switch"])
@pytest.mark.parametrize("mode", ["async", "in step", "softsync"])
def test_a_vote_to_end_closes_the_cursor_and_reaches_all(mode: str, kind: int) -> None:
    def votes(fake: Fake) -> Meta:
        fake.seed(MODES[mode], slices=16)
        fake.comm.barrier()
        lease = fake.draw()["lease"]
        fake.votes[kind] = True
        fake.work(fake.push(lease), done=lease)
        return fake.ending

    def goes_on(fake: Fake) -> Meta:
        fake.comm.barrier()
        fake.work()
        return fake.ending

    facts, (served,) = play(votes, goes_on)
    assert facts[0] == facts[1]
    assert facts[0]["agreed"] == [i == kind for i in range(3)]
    slices = facts[0]["position"] // SLICE
    assert set(served.params) == all_of(slices), "all before the position is done, and nothing after it"


def test_fakes_that_wait_in_vain_are_noticed() -> None:
    """Otherwise these tests could not fail."""

    gave_up = threading.Event()

    def stuck(fake: Fake) -> None:
        fake.seed(IN_STEP, slices=4)
        fake.comm.barrier()
        try:
            fake.draw()
        finally:
            gave_up.set()

    def idle(fake: Fake) -> None:
        fake.comm.barrier()
        assert gave_up.wait(WAIT_S)

    with pytest.raises(DeadlineExceeded):
        play(stuck, idle, wait_s=0.1)


def test_a_server_answers_or_refuses_every_kind_of_message_by_name() -> None:
    """What it does not know, and what lacks a field, names the sender."""

    def strange(fake: Fake) -> None:
        fake.comm.send(fake.comm.servers[0], "gossip", {})
        fake.outlive()

    def broken(fake: Fake) -> None:
        fake.comm.send(fake.comm.servers[0], "take", {})
        fake.outlive()

    for script, said in ((strange, "rank 0 sent an unknown 'gossip'"), (broken, "a take of rank 0 must have at")):
        with pytest.raises(CommError, match=said):
            play(script, wait_s=0.5)
