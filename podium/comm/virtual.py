"""The virtual world: real gradients, a simulated clock and network, and the same bits every time.

Ranks are threads that pass a baton: one runs at a time, and a rank that blocks runs the event loop until some rank,
perhaps itself, can continue. A rank's own clock runs ahead while it computes; a message becomes an event at the time at
which it was sent, and events are processed in the order (time, class, rank, number). So hundreds of ranks need one
core, tracebacks are ordinary, and nothing depends on how the operating system schedules threads.

Measured wall time never enters the clock. The cluster description gives the cost of work: a pass over b samples takes
(seconds_per_step + b * seconds per sample) / speed, a third of it forward; a bucket is ready when its fraction of the
backward pass is done. The speed is the one at the moment when the pass begins. Messages queue at the sender's and the
receiver's network card, first come first served; a collective takes the time of the cluster's ring formula and follows
the one before it.

Not modelled: collectives and messages do not slow each other down, and validation is free.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from podium.comm.base import DEPARTED, Communicator, Counters, Handle, Message, Meta, nbytes_of
from podium.comm.clocks import Clock
from podium.comm.inprocess import Exchanges, Number, Pending, Round, Watch, gathered, land, sum_in_order, taken
from podium.comm.network import Network, Terrain, make_network
from podium.comm.schedule import Chain, Key, Running
from podium.engine.generators import several_in_one_process
from podium.errors import CommError, DeadlineExceeded, Lost

_LOOK_S = 0.25
"""How often a virtual world looks for a rank that hangs, in wall time."""
HEADER_BYTES = 256
"""Size of a message without its tensors."""


class Event(NamedTuple):
    time: int
    order: int  # 0: something arrives or is done; 1: a rank continues
    rank: int
    number: int
    action: Callable[[], None] | None  # None: the rank continues


@dataclass(eq=False)
class _Parcel:
    """A message under way between two ranks."""

    arrive: Callable[[], None]
    here: bool = False


@dataclass
class _Seat:
    """The event loop's state of one rank."""

    gate: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    waits_for: set[Pending] | None = None  # None: not waiting for handles
    wants_message: bool = False
    waiting_for: str = ""
    alive: bool = True
    error: CommError | None = None  # to raise when the rank continues


class VirtualWorld:
    """The event loop, the network and the ranks of one simulated run."""

    def __init__(
        self,
        cluster: Terrain,
        workers: int,
        servers: int = 0,
        *,
        colocated: bool = False,
        hosts: Sequence[int] = (),
        seed: int = 0,
        deadline_s: float = 300.0,
    ) -> None:
        """`colocated`: servers run on the workers' nodes; `hosts`: only on those of these workers.

        `deadline_s`: how long, in wall time, the other ranks wait for a rank that computes.
        """
        self.cluster, self.seed = cluster, seed
        self.now = 0
        self.members = tuple(range(workers))
        self.servers = tuple(range(workers, workers + servers))
        self.node_of = cluster.place(workers, servers, colocated, hosts)
        self.network: Network = make_network(cluster, self)
        self.inboxes: dict[int, deque[Message]] = {r: deque() for r in self.members + self.servers}
        self.calls: dict[int, tuple[Pending, int]] = {}
        self.rounds: dict[tuple[int, int], Round] = {}
        self.exchanges = Exchanges()
        self.collective_free = 0
        self.counters = Counters()
        self.departed: set[int] = set()
        self._lanes: dict[tuple[int, int], deque[_Parcel]] = defaultdict(deque)
        self._calls_made = 0
        self._events: list[Event] = []
        self._numbers = 0
        self._seats = {r: _Seat() for r in self.members + self.servers}
        self._over = threading.Event()
        self.watch = Watch(deadline_s)
        self._runs: int | None = None  # the rank that has the baton
        self.ranks = [VirtualCommunicator(self, rank) for rank in self.members + self.servers]

    def at(self, time: int, rank: int, action: Callable[[], None] | None, order: int = 0) -> None:
        """Schedule an event; `action` None: the rank continues."""
        self._numbers += 1
        heapq.heappush(self._events, Event(time, order, rank, self._numbers, action))

    def run(self, mains: Sequence[Callable[[], None]]) -> list[BaseException | None]:
        """Run one function per rank to its end in virtual time; returns what each raised."""
        errors: list[BaseException | None] = [None] * len(mains)
        before = os.sched_getaffinity(0)
        # The baton passes 3 times faster on one core, which new threads inherit. Other processes take other cores.
        os.sched_setaffinity(0, {sorted(before)[os.getpid() % len(before)]})
        threads = [
            threading.Thread(target=self._body, args=(r, main, errors), name=f"rank-{r}", daemon=True)
            for r, main in enumerate(mains)
        ]
        try:
            with several_in_one_process():
                for rank, thread in enumerate(threads):
                    thread.start()
                    self.at(0, rank, None, order=1)
                self._next()
                while not self._over.wait(min(_LOOK_S, self.watch.deadline_s / 8)):
                    if self._runs is not None and len(threads) > 1 and self.watch.hung([self._runs]):
                        return self._give_up(self._runs, threads, errors)
                for thread in threads:
                    thread.join()
        finally:
            os.sched_setaffinity(0, before)
        return errors

    def _give_up(
        self, rank: int, threads: Sequence[threading.Thread], errors: Sequence[BaseException | None]
    ) -> list[BaseException | None]:
        """This rank has had the baton for too long: end the other ranks without it."""
        self.watch.give_up({rank: threads[rank]})
        for other, seat in self._seats.items():
            if other != rank:
                seat.gate.release()
        return self.watch.end(threads, [rank], errors)

    def _check_whole(self, rank: int) -> None:
        if self.watch.failure is not None:
            raise Lost(f"rank {rank}: {self.watch.failure}")

    def _body(self, rank: int, main: Callable[[], None], errors: list[BaseException | None]) -> None:
        self._seats[rank].gate.acquire()
        try:
            self._check_whole(rank)
            main()
        except BaseException as error:  # stored for the caller of `run`
            errors[rank] = error
        if self.watch.failure is None:
            self._leave(rank, failed=errors[rank] is not None)

    def _leave(self, rank: int, failed: bool) -> None:
        """A rank ended: announce it to the other ranks, and pass the baton for the last time."""
        self._seats[rank].alive = False
        leaving_at = self.ranks[rank].virtual_clock.local
        self.at(max(self.now, leaving_at), rank, lambda: self._announce_departure(rank, failed))
        self._next()

    def _announce_departure(self, rank: int, failed: bool) -> None:
        self.departed.add(rank)
        for other in self._seats:
            if other != rank:
                told = partial(self._tell_departure, other, rank, failed)
                self.arrived(rank, other, self.dispatch(rank, other, told))
        for round_ in self.rounds.values():
            if rank in round_.members and rank not in round_.tensors:
                for handle in round_.handles:
                    self.finish(handle, Lost(f"rank {rank} is gone ({handle.what})"))
        for handle in self.exchanges.without(rank):
            self.finish(handle, Lost(f"rank {rank} is gone ({handle.what})"))

    def _tell_departure(self, to: int, rank: int, failed: bool) -> None:
        if self._seats[to].alive:
            self.deliver(to, Message(rank, DEPARTED, {"failed": failed}))
        for handle, peer in list(self.calls.values()):
            if peer == rank and handle.owner == to:
                self.finish(handle, Lost(f"rank {rank} is gone ({handle.what})"))

    # Two ranks share one connection: a message that arrives early waits for those sent before it.

    def dispatch(self, source: int, to: int, arrive: Callable[[], None]) -> _Parcel:
        parcel = _Parcel(arrive)
        self._lanes[source, to].append(parcel)
        return parcel

    def arrived(self, source: int, to: int, parcel: _Parcel) -> None:
        parcel.here = True
        lane = self._lanes[source, to]
        while lane and lane[0].here:
            lane.popleft().arrive()

    # The baton.

    def block(self, rank: int) -> None:
        """Run other ranks until this rank can continue."""
        seat = self._seats[rank]
        self._check_whole(rank)
        if self._next(rank) != rank:
            seat.gate.acquire()
            self._check_whole(rank)
        error, seat.error = seat.error, None
        if error is not None:
            raise error

    def _next(self, me: int | None = None) -> int | None:
        """Run events until a rank can continue, and hand it the baton (unless it is `me`)."""
        while self._events or self._break_deadlock():
            event = heapq.heappop(self._events)
            assert event.time >= self.now, "time ran backwards"
            self.now = event.time
            if event.action is not None:
                event.action()
            elif self._seats[event.rank].alive:
                self.ranks[event.rank].virtual_clock.catch_up(event.time)
                self._runs, self.watch.moved = event.rank, time.monotonic()
                if event.rank != me:
                    self._seats[event.rank].gate.release()
                return event.rank
        self._over.set()
        return None

    def _break_deadlock(self) -> bool:
        """No event is left, yet ranks wait: raise DeadlineExceeded on the first of them."""
        for rank, seat in self._seats.items():
            if seat.alive and (seat.waits_for is not None or seat.wants_message):
                seat.error = DeadlineExceeded(f"rank {rank} waits for ever in virtual time: {seat.waiting_for}")
                seat.waits_for, seat.wants_message = None, False
                self.at(self.now, rank, None, order=1)
                return True
        return False

    def wait_for(self, rank: int, handles: Sequence[Pending]) -> None:
        open_ = {h for h in handles if not h.finished}
        if open_:
            seat = self._seats[rank]
            seat.waits_for, seat.waiting_for = open_, "; ".join(sorted(h.what for h in open_)[:3])
            self.block(rank)

    def wait_for_message_or(self, rank: int, handles: Sequence[Pending]) -> None:
        seat, open_ = self._seats[rank], {h for h in handles if not h.finished}
        if open_ and not any(h.error is not None for h in handles):
            seat.waits_for, seat.wants_message = open_, True
            seat.waiting_for = "a message from anyone, or " + "; ".join(sorted(h.what for h in open_)[:3])
            self.block(rank)

    def come_to_now(self, rank: int) -> None:
        """Process all events up to this rank's own time."""
        self._go_on(rank)
        self.block(rank)

    def wait_for_message(self, rank: int) -> None:
        seat = self._seats[rank]
        seat.wants_message, seat.waiting_for = True, "a message from anyone"
        self.block(rank)

    # Called by events.

    def finish(self, handle: Pending, error: CommError | None = None) -> None:
        """An exchange ended; its owner continues if it waited for nothing else."""
        if handle.finished:
            return
        handle.finished, handle.error = True, error
        seat = self._seats[handle.owner]
        if seat.waits_for is not None and handle in seat.waits_for:
            seat.waits_for.discard(handle)
            if not seat.waits_for or error is not None:
                seat.waits_for, seat.wants_message = None, False
                self._go_on(handle.owner)

    def deliver(self, to: int, message: Message) -> None:
        self.inboxes[to].append(message)
        seat = self._seats[to]
        if seat.wants_message:
            seat.waits_for, seat.wants_message = None, False
            self._go_on(to)

    def _go_on(self, rank: int) -> None:
        self.at(max(self.now, self.ranks[rank].virtual_clock.local), rank, None, order=1)

    def new_call(self, handle: Pending, to: int) -> int:
        self._calls_made += 1
        self.calls[self._calls_made] = (handle, to)
        return self._calls_made


@final
class VirtualClock(Clock):
    """One rank's clock: it runs ahead of the world's clock while the rank computes."""

    is_simulated = True

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        self.local = 0
        self._node = world.node_of[rank]
        node = world.cluster.nodes[self._node]
        self._cluster, self._rank, self._seed = world.cluster, rank, world.seed
        self._memory_bytes_per_s = node.memory_gbs * 1e9
        self._flops = node.flops
        self._passes = 0
        self._backward_from = self._backward_ns = 0
        self.flops_per_sample = 0.0
        """Set by the worker's builder; used where the cluster gives no `seconds_per_sample`."""

    def now_ns(self) -> int:
        return self.local

    def catch_up(self, time: int) -> None:
        self.local = max(self.local, time)

    def begin_pass(self, samples: int) -> None:
        per_sample = self._cluster.seconds_per_sample
        if per_sample is None:
            per_sample = self.flops_per_sample / self._flops
        speed = self._cluster.speed_at(self._node, self.local)
        seconds = (self._cluster.seconds_per_step + samples * per_sample) / speed * self._jitter()
        total = round(seconds * 1e9)
        self._backward_ns = total * 2 // 3
        self._backward_from = self.local + total - self._backward_ns
        self._passes += 1

    def reach(self, fraction: float) -> None:
        self.catch_up(self._backward_from + round(self._backward_ns * fraction))

    def touch(self, nbytes: int) -> None:
        self.local += self.moving_ns(nbytes)

    def moving_ns(self, nbytes: int) -> int:
        """Time to read or write this many bytes of memory."""
        return round(nbytes / self._memory_bytes_per_s * 1e9)

    def _jitter(self) -> float:
        """Lognormal with mean 1, drawn from (seed, rank, pass): adding a rank does not change other ranks' draws."""
        cv = self._cluster.jitter
        if cv == 0:
            return 1.0
        sigma = float(np.sqrt(np.log1p(cv**2)))
        draw = np.random.Generator(np.random.Philox(key=[self._seed, self._rank << 40 | self._passes]))
        return float(np.exp(draw.normal(-(sigma**2) / 2, sigma)))


@final
class VirtualCommunicator(Communicator):
    """One simulated rank's view of the other ranks."""

    shares_process = True
    shares_disk = True  # an exchange to find out would take simulated time

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        self.virtual_clock = VirtualClock(world, rank)
        super().__init__(rank, world.members, world.servers, self.virtual_clock)
        self._world, self._issued, self._exchanged = world, 0, 0

    def all_reduce(self, tensor: Tensor) -> Handle:
        nbytes = nbytes_of([tensor])
        self.traffic.count_all_reduce(nbytes, self.size)
        nodes = [self._world.node_of[r] for r in self.workers]
        cost = round(self._world.cluster.ring_seconds(nbytes, nodes) * 1e9)
        return self._collective(tensor, "all-reduce", sum_in_order, cost)

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        nbytes = nbytes_of([tensor])
        self.traffic.count_broadcast(nbytes, self.rank == source, self.size)
        nodes = [self._world.node_of[r] for r in self.workers]
        cost = round(self._world.cluster.ring_seconds(nbytes, nodes) * 1e9 / 2)  # half a ring: gather only
        place = self.workers.index(source)
        return self._collective(tensor, "broadcast", lambda tensors: tensors[place].clone(), cost)

    def all_gather(self, tensor: Tensor, into: Tensor) -> Handle:
        self.traffic.count_all_gather(nbytes_of([tensor]), self.size)
        nodes = [self._world.node_of[r] for r in self.workers]
        cost = round(self._world.cluster.ring_seconds(nbytes_of([into]), nodes) * 1e9 / 2)  # half a ring: gather only
        return self._collective(tensor, "all-gather", gathered, cost, into)

    def _gather_aside(self, tensor: Tensor, into: Tensor) -> Handle:
        return self._collective(tensor, "comparison", gathered, 0, into)

    def exchange(self, chains: Sequence[Chain], tensor: Tensor, near: Sequence[int] = ()) -> Handle:
        assert not near, "hosts are known in the real world only"
        world, number, members = self._world, (self.generation, self._exchanged), self.workers
        self._exchanged += 1
        handle = Pending(self.rank, f"exchange {number[1]} of generation {number[0]}")

        def post(peer: int, name: Key, part: Tensor) -> None:
            self._post(members[peer], number, members.index(self.rank), name, part.clone())
            running.sent()

        def finished() -> None:
            world.exchanges.end(self.rank, number)
            world.finish(handle)

        def start() -> None:
            gone = world.exchanges.missing(number, members, world.departed)
            if gone:
                world.finish(handle, Lost(f"rank {gone[0]} is gone ({handle.what})"))
            else:
                world.exchanges.register(self.rank, number, members, handle, running)
                world.exchanges.begin(self.rank, number)

        running = Running(chains, tensor, post, finished)
        world.at(self.virtual_clock.local, self.rank, start)
        return handle

    def _post(self, to: int, number: Number, index: int, name: Key, part: Tensor) -> None:
        """Send part of an exchange at the world's time: the network card sends also while this rank computes."""
        world, receiver = self._world, self._world.ranks[to]
        self.traffic.sent += part.nbytes

        def bring() -> None:
            receiver.traffic.received += part.nbytes
            if number[0] == receiver.generation:
                world.exchanges.bring(to, number, index, name, part)

        def arrive() -> None:
            world.at(world.now + receiver.virtual_clock.moving_ns(part.nbytes), to, bring)

        landed = partial(world.arrived, self.rank, to, world.dispatch(self.rank, to, arrive))
        a, b = world.node_of[self.rank], world.node_of[to]
        world.network.start(a, b, part.nbytes + HEADER_BYTES, self.rank, landed)

    def _collective(
        self,
        tensor: Tensor,
        what: str,
        combine: Callable[[list[Tensor]], Tensor],
        cost_ns: int,
        into: Tensor | None = None,
    ) -> Handle:
        world, key = self._world, (self.generation, self._issued)
        self._issued += 1
        handle = Pending(self.rank, f"{what} {key[1]} of generation {key[0]}")
        members = self.workers

        def join() -> None:
            round_ = world.rounds.setdefault(key, Round(members))
            round_.join(self.rank, tensor, into, handle)
            gone = [r for r in members if r in world.departed and r not in round_.tensors]
            if gone:
                world.finish(handle, Lost(f"rank {gone[0]} is gone ({handle.what})"))
            elif len(round_.tensors) == len(members):
                world.collective_free = max(world.now, world.collective_free) + cost_ns
                world.at(world.collective_free, self.rank, lambda: complete(round_))

        def complete(round_: Round) -> None:
            del world.rounds[key]
            result = combine([round_.tensors[r] for r in members])
            for mine in round_.into.values():
                mine.copy_(result)
            for waiting in round_.handles:
                world.finish(waiting)

        world.at(self.virtual_clock.local, self.rank, join)
        return handle

    def _draw(self, turn: int, count: int) -> int:
        """A small message to the first worker's node, and one back; first come, first served."""
        world, first, generation = self._world, self.workers[0], self.generation
        here, there = world.node_of[self.rank], world.node_of[first]
        handle = Pending(self.rank, f"draw of turn {turn} from rank {first}")
        drawn: list[int] = []

        def arrive() -> None:
            if first in world.departed:
                return world.finish(handle, Lost(f"rank {first} is gone ({handle.what})"))
            try:
                drawn.append(world.counters.draw(generation, turn, count))
            except Lost as error:
                return world.finish(handle, error)
            if self.rank == first:
                return world.finish(handle)
            return world.network.start(there, here, HEADER_BYTES, first, lambda: world.finish(handle))

        def ask() -> None:
            if self.rank == first:
                arrive()
            else:
                world.network.start(here, there, HEADER_BYTES, self.rank, arrive)

        world.at(self.virtual_clock.local, self.rank, ask)
        world.wait_for(self.rank, [handle])
        if handle.error is not None:
            raise handle.error
        return drawn[0]

    def send(self, to: int, kind: str, meta: Meta, body: Sequence[Tensor] = ()) -> None:
        message = Message(self.rank, kind, meta, taken(body))
        self._transfer(to, message.body, lambda: self._world.deliver(to, message))

    def call(
        self,
        to: int,
        kind: str,
        meta: Meta,
        body: Sequence[Tensor] = (),
        into: Sequence[Tensor] | None = None,
        more: bool = False,
    ) -> Handle:
        handle = Pending(self.rank, f"call {kind!r} to rank {to}", into)
        number = self._world.new_call(handle, to)
        message = Message(self.rank, kind, meta, taken(body), number)

        def arrive() -> None:
            if to in self._world.departed:
                self._world.finish(handle, Lost(f"rank {to} is gone ({handle.what})"))
            else:
                self._world.deliver(to, message)

        self._transfer(to, message.body, arrive)
        return handle

    def reply(self, to: Message, meta: Meta, body: Sequence[Tensor] = (), more: bool = False) -> None:
        handle, _ = self._world.calls[to.call]
        message = Message(self.rank, to.kind, meta, taken(body), to.call)

        def arrive() -> None:
            del self._world.calls[to.call]
            handle.result = message._replace(body=land(message.body, handle.into))
            self._world.finish(handle)

        self._transfer(to.source, message.body, arrive)

    def _transfer(self, to: int, body: Sequence[Tensor], arrive: Callable[[], None]) -> None:
        nbytes = nbytes_of(body)
        self.traffic.sent += nbytes
        world = self._world
        a, b = world.node_of[self.rank], world.node_of[to]
        landed = partial(world.arrived, self.rank, to, world.dispatch(self.rank, to, arrive))
        world.at(
            self.virtual_clock.local,
            self.rank,
            lambda: world.network.start(a, b, nbytes + HEADER_BYTES, self.rank, landed),
        )

    def recv(self, deadline_s: float | None = None) -> Message:
        inbox = self._world.inboxes[self.rank]
        if not inbox:
            self._world.wait_for_message(self.rank)
        message = inbox.popleft()
        self.traffic.received += nbytes_of(message.body)
        return message

    def _poll(self, calls: Sequence[Handle], deadline_s: float) -> Message | None:
        world, inbox = self._world, self._world.inboxes[self.rank]
        world.come_to_now(self.rank)
        if not inbox:
            world.wait_for_message_or(self.rank, [h for h in calls if isinstance(h, Pending)])
        if not inbox:
            return None
        message = inbox.popleft()
        self.traffic.received += nbytes_of(message.body)
        return message

    def _wait(self, handles: Sequence[Handle], deadline_s: float) -> list[Message | None]:
        pending = [h for h in handles if isinstance(h, Pending)]
        self._world.wait_for(self.rank, pending)
        for handle in pending:
            if handle.error is not None:
                raise handle.error
            if handle.result is not None:
                self.traffic.received += nbytes_of(handle.result.body)
        return [h.result for h in pending]

    def regroup(
        self,
        generation: int,
        members: Sequence[int],
        servers: Sequence[int] | None = None,
        addresses: Mapping[int, str] | None = None,
    ) -> None:
        self.generation, self.workers, self._issued, self._exchanged = generation, tuple(members), 0, 0
        self.servers = self.servers if servers is None else tuple(servers)


def count_flops(model: torch.nn.Module, loss: Callable[..., Tensor], inputs: object, targets: object) -> float:
    """Floating-point operations of one forward and backward pass over this batch, counted, not timed."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        loss(model(inputs), targets).backward()
    for p in model.parameters():
        p.grad = None
    return float(counter.get_total_flops())
