"""The memory world: ranks are threads of one process, messages are passed in memory, time is wall time.

It is for testing races and protocols, not speed: torch's generator is global, so one rank computes at a time. Sums run
in rank order, so a collective gives the same bits however the threads race.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

from torch import Tensor

from podium.comm.base import DEPARTED, Communicator, Counters, Handle, Message, Meta, nbytes_of
from podium.comm.clocks import Clock, WallClock
from podium.comm.inprocess import Exchanges, Number, Pending, Round, Watch, gathered, land, sum_in_order, taken
from podium.comm.schedule import Chain, Key, Running
from podium.engine.generators import several_in_one_process
from podium.errors import DeadlineExceeded, Lost

Parcel = tuple[Number, int, Key, Tensor]
"""Part of an exchange: the exchange's number, the sending member, the message's key, its elements."""


_LOOK_S = 0.25
"""How often a world of threads looks for ranks that hang."""


class MemoryWorld:
    """Threads that pass tensors to each other."""

    def __init__(self, workers: int, servers: int = 0, deadline_s: float = 60.0) -> None:
        self.changed = threading.Condition()
        self.compute_lock = threading.Lock()
        self.clock = WallClock()
        self.members = tuple(range(workers))
        self.servers = tuple(range(workers, workers + servers))
        self.inboxes: dict[int, deque[Message]] = {r: deque() for r in self.members + self.servers}
        self.calls: dict[int, tuple[Pending, int]] = {}  # call -> its handle, the rank that was called
        self.rounds: dict[tuple[int, int], Round] = {}
        self.exchanges = Exchanges()  # used without `changed`: each rank uses its own entries
        self.parcels: dict[int, deque[Parcel]] = {r: deque() for r in self.members}
        self.departed: set[int] = set()
        self.counters = Counters()
        self.watch = Watch(deadline_s)
        self._waiting: Counter[int] = Counter()  # ranks that wait for other ranks, or for the compute lock
        self._calls_made = 0
        self.ranks = [
            MemoryCommunicator(self, rank, self.members, self.servers, self.clock, deadline_s=deadline_s)
            for rank in self.members + self.servers
        ]

    def run(self, mains: Sequence[Callable[[], None]]) -> list[BaseException | None]:
        """Run one function per rank to its end, each in its own thread; returns what each raised."""
        errors: list[BaseException | None] = [None] * len(mains)

        def body(rank: int) -> None:
            try:
                mains[rank]()
            except BaseException as error:  # stored for the caller of `run`
                errors[rank] = error
            finally:
                self.depart(rank, failed=errors[rank] is not None)

        threads = [threading.Thread(target=body, args=(r,), name=f"rank-{r}", daemon=True) for r in range(len(mains))]
        with several_in_one_process():
            for thread in threads:
                thread.start()
            for thread in threads:
                while thread.is_alive():
                    thread.join(min(_LOOK_S, self.watch.deadline_s / 8))
                    hung = self._hung(threads, errors)
                    if hung:
                        return self._give_up(hung, threads, errors)
        return errors

    def _hung(self, threads: Sequence[threading.Thread], errors: Sequence[BaseException | None]) -> list[int]:
        """Ranks that make no progress, where other ranks wait for them or have given up waiting."""
        alive = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        running = [rank for rank in alive if not self._waiting[rank]]
        are_waited_for = len(running) < len(alive) or any(error is not None for error in errors)
        return running if are_waited_for and self.watch.hung(running) else []

    def _give_up(
        self, hung: Sequence[int], threads: Sequence[threading.Thread], errors: Sequence[BaseException | None]
    ) -> list[BaseException | None]:
        """End the other ranks without these."""
        self.watch.give_up({rank: threads[rank] for rank in hung})
        for rank in hung:
            self.depart(rank, failed=True)
        return self.watch.end(threads, hung, errors)

    @contextmanager
    def waits(self, rank: int) -> Iterator[None]:
        """Around a wait of this rank; when the wait ends, the run has made progress."""
        self._waiting[rank] += 1
        try:
            yield
            self.watch.moved = time.monotonic()
        finally:
            self._waiting[rank] -= 1

    @contextmanager
    def computing(self, rank: int) -> Iterator[None]:
        """Hold the compute lock; raises Lost where the rank that holds it hangs."""
        with self.waits(rank):
            while not self.compute_lock.acquire(timeout=_LOOK_S):
                if self.watch.failure is not None:
                    raise Lost(f"rank {rank}: {self.watch.failure}")
        try:
            yield
        finally:
            self.compute_lock.release()

    def depart(self, rank: int, failed: bool) -> None:
        """This rank is gone: fail what other ranks wait for, and send them its departure."""
        with self.changed:
            self.departed.add(rank)
            for other, inbox in self.inboxes.items():
                if other != rank:
                    inbox.append(Message(rank, DEPARTED, {"failed": failed}))
            for handle, peer in self.calls.values():
                if peer == rank and not handle.finished:
                    self._fail(handle, rank)
            for round_ in self.rounds.values():
                if rank in round_.members and rank not in round_.tensors:
                    for handle in round_.handles:
                        self._fail(handle, rank)
            for handle in self.exchanges.without(rank):
                self._fail(handle, rank)
            self.changed.notify_all()

    def new_call(self, handle: Pending, to: int) -> int:
        self._calls_made += 1
        self.calls[self._calls_made] = (handle, to)
        return self._calls_made

    @staticmethod
    def _fail(handle: Pending, rank: int) -> None:
        handle.error, handle.finished = Lost(f"rank {rank} is gone ({handle.what})"), True


@final
class MemoryCommunicator(Communicator):
    """One thread's view of the other ranks."""

    shares_process = True

    def __init__(
        self,
        world: MemoryWorld,
        rank: int,
        workers: tuple[int, ...],
        servers: tuple[int, ...],
        clock: Clock,
        deadline_s: float,
    ) -> None:
        super().__init__(rank, workers, servers, clock, deadline_s=deadline_s)
        self._world, self._issued, self._exchanged = world, 0, 0

    def all_reduce(self, tensor: Tensor) -> Handle:
        self.traffic.count_all_reduce(nbytes_of([tensor]), self.size)
        return self._collective(tensor, "all-reduce", sum_in_order)

    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        self.traffic.count_broadcast(nbytes_of([tensor]), self.rank == source, self.size)
        place = self.workers.index(source)
        return self._collective(tensor, "broadcast", lambda tensors: tensors[place].clone())

    def all_gather(self, tensor: Tensor, into: Tensor) -> Handle:
        self.traffic.count_all_gather(nbytes_of([tensor]), self.size)
        return self._collective(tensor, "all-gather", gathered, into)

    def exchange(self, chains: Sequence[Chain], tensor: Tensor, near: Sequence[int] = ()) -> Handle:
        assert not near, "hosts are known in the real world only"
        world, number, members = self._world, (self.generation, self._exchanged), self.workers
        self._exchanged += 1
        handle = Pending(self.rank, f"exchange {number[1]} of generation {number[0]}")

        def post(peer: int, name: Key, part: Tensor) -> None:
            self.traffic.sent += part.nbytes
            with world.changed:
                world.parcels[members[peer]].append((number, self.index, name, part.clone()))
                world.changed.notify_all()
            running.sent()

        def finished() -> None:
            with world.changed:
                handle.finished = True
                world.exchanges.end(self.rank, number)
                world.changed.notify_all()

        running = Running(chains, tensor, post, finished)
        with world.changed:
            gone = world.exchanges.missing(number, members, world.departed)
            if gone:
                world._fail(handle, gone[0])
                return handle
            world.exchanges.register(self.rank, number, members, handle, running)
        world.exchanges.begin(self.rank, number)
        return handle

    def _take_parcels(self) -> bool:
        """Process what other ranks have sent for exchanges; returns whether there was anything."""
        parcels = self._world.parcels.get(self.rank, deque())
        for n in itertools.count():
            with self._world.changed:
                if not parcels:
                    return n > 0
                number, peer, name, part = parcels.popleft()
            if number[0] == self.generation:
                self.traffic.received += part.nbytes
                self._world.exchanges.bring(self.rank, number, peer, name, part)
        raise AssertionError("unreachable")

    def _collective(
        self, tensor: Tensor, what: str, combine: Callable[[list[Tensor]], Tensor], into: Tensor | None = None
    ) -> Handle:
        world, key = self._world, (self.generation, self._issued)
        self._issued += 1
        handle = Pending(self.rank, f"{what} {key[1]} of generation {key[0]}")
        with world.changed:
            round_ = world.rounds.setdefault(key, Round(self.workers))
            round_.join(self.rank, tensor, into, handle)
            if len(round_.tensors) == self.size:
                result = combine([round_.tensors[r] for r in self.workers])
                for mine in round_.into.values():
                    mine.copy_(result)
                for waiting in round_.handles:
                    waiting.finished = True
                del world.rounds[key]
                world.changed.notify_all()
            else:
                gone = world.departed.intersection(self.workers) - round_.tensors.keys()
                if gone:
                    world._fail(handle, min(gone))
        return handle

    def _draw(self, turn: int, count: int) -> int:
        first = self.workers[0]  # its loss is the counter's loss, as in the virtual world
        with self._world.changed:
            if first in self._world.departed:
                raise Lost(f"rank {first} is gone (draw of turn {turn})")
            return self._world.counters.draw(self.generation, turn, count)

    def send(self, to: int, kind: str, meta: Meta, body: Sequence[Tensor] = ()) -> None:
        self._deliver(to, Message(self.rank, kind, meta, taken(body)))

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
        with self._world.changed:
            number = self._world.new_call(handle, to)
            if to in self._world.departed:
                self._world._fail(handle, to)
                return handle
        self._deliver(to, Message(self.rank, kind, meta, taken(body), number))
        return handle

    def reply(self, to: Message, meta: Meta, body: Sequence[Tensor] = (), more: bool = False) -> None:
        self.traffic.sent += nbytes_of(body)
        with self._world.changed:
            handle, _ = self._world.calls.pop(to.call)
            handle.result = Message(self.rank, to.kind, meta, land(body, handle.into), to.call)
            handle.finished = True
            self._world.changed.notify_all()

    def _deliver(self, to: int, message: Message) -> None:
        self.traffic.sent += nbytes_of(message.body)
        with self._world.changed:
            self._world.inboxes[to].append(message)
            self._world.changed.notify_all()

    def recv(self, deadline_s: float | None = None) -> Message:
        world, limit = self._world, self.deadline_s if deadline_s is None else deadline_s
        inbox = world.inboxes[self.rank]
        with world.waits(self.rank), world.changed:
            if not world.changed.wait_for(lambda: bool(inbox), limit):
                raise DeadlineExceeded(f"rank {self.rank}: no message from anyone in {limit:g} s")
            message = inbox.popleft()
        self.traffic.received += nbytes_of(message.body)
        return message

    def _poll(self, calls: Sequence[Handle], deadline_s: float) -> Message | None:
        world, inbox = self._world, self._world.inboxes[self.rank]
        pending = [h for h in calls if isinstance(h, Pending)]

        def over() -> bool:
            return bool(inbox) or all(h.finished for h in pending) or any(h.error is not None for h in pending)

        with world.waits(self.rank), world.changed:
            if not world.changed.wait_for(over, deadline_s):
                late = next(h for h in pending if not h.finished)
                raise DeadlineExceeded(
                    f"rank {self.rank}: no message, and {late.what} did not end, in {deadline_s:g} s"
                )
            if not inbox:
                return None
            message = inbox.popleft()
        self.traffic.received += nbytes_of(message.body)
        return message

    def _wait(self, handles: Sequence[Handle], deadline_s: float) -> list[Message | None]:
        pending = [h for h in handles if isinstance(h, Pending)]
        world, began = self._world, time.monotonic()
        parcels = world.parcels.get(self.rank, deque())
        with world.waits(self.rank):
            while not all(h.finished for h in pending):
                left_s = began + world.watch.patience * deadline_s - time.monotonic()
                if left_s <= 0:
                    break
                if not self._take_parcels():
                    with world.changed:
                        over = lambda: bool(parcels) or all(h.finished for h in pending)  # noqa: E731
                        world.changed.wait_for(over, left_s)
            with world.changed:
                if not all(h.finished for h in pending):
                    late = next(h for h in pending if not h.finished)
                    raise DeadlineExceeded(f"rank {self.rank}: {late.what} did not end in {deadline_s:g} s")
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

    @contextmanager
    def computing(self) -> Iterator[None]:
        with self._world.computing(self.rank):
            yield
