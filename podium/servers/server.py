"""A parameter server: it holds ranges of the parameters, and only it changes them.

One loop, one message at a time, so updates cannot race. `wire/messages.py` has a type for each message; `requests.py`
handles those of workers, `peers.py` those of other servers. A seed begins a segment (`segments.py`): it names the rules
and the optimizer that moves the parameters, the task's own or the outer one (`outer.py`). So servers can change with a
phase. In a segment

    pushes/             how pushes become updates: immediate.py (each on arrival), gathered.py (several together)
    leases/lending.py   which worker gets which samples next, from the cursor; on the first server
    store.py            parameters, their versions, what was applied; pushes/answers.py sends them to workers
    members.py          the workers of the segment
    transfer.py         receives the state with a seed, and returns it when all workers have left
    copies/             replicas and snapshots, from which a lost server is restored

A lost worker does not end the run. Where workers lease samples, its open leases are lent to other workers and training
continues. Where they divide global steps, the step is answered with `lost`: the survivors collect the state, divide the
work again, and seed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from podium.comm.base import DEPARTED, Communicator, Message, Meta
from podium.errors import CommError, DeadlineExceeded
from podium.exchange.codecs.dense import Dense
from podium.servers.copies.recovery import Recovery
from podium.servers.copies.replica_keeper import ReplicaKeeper
from podium.servers.copies.replicas import Replicas
from podium.servers.copies.snapshots import Snapshots
from podium.servers.leases.late_workers import LateWorkers
from podium.servers.leases.lease import PATIENCE
from podium.servers.leases.paces import Paces
from podium.servers.members import Members
from podium.servers.outbox import Outbox
from podium.servers.peers import PeerWords
from podium.servers.pushes.answers import Answers
from podium.servers.pushes.apply_threads import ApplyThreads
from podium.servers.replay import Arrivals, AsTheyCome
from podium.servers.requests import WorkerRequests
from podium.servers.segment import Parts, Segment
from podium.servers.segments import Segments
from podium.servers.server_records import ServerRecords
from podium.servers.store import Store
from podium.servers.transfer import StateTransfer
from podium.servers.wire.long_settings import unfold
from podium.servers.wire.messages import TYPES, Done, Retire, decode
from podium.servers.wire.push_codec import PushCodec

if TYPE_CHECKING:
    from podium.engine.flat import Flat
    from podium.exchange.codecs.base import Codec
    from podium.records.recorder import Recorder


@dataclass(frozen=True, kw_only=True)
class CopyOptions:
    """How a server is copied."""

    replicas: int = 1
    """Number of servers that hold each range."""
    snapshot: Path | None = None
    """The file of its snapshots, …"""
    every: int = 0
    """… and the updates between two of them; 0: none is written."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server."""

    arrivals: Arrivals = field(default_factory=AsTheyCome)
    """The order in which messages are processed."""
    copies: CopyOptions = field(default_factory=CopyOptions)
    apply_threads: int = 0
    """Threads that move units, beside the loop; with none, the loop moves them itself."""
    codec: Codec = field(default_factory=Dense)
    """How pushes are packed, …"""
    pull: Codec = field(default_factory=Dense)
    """… and how answers to them are."""
    takes_gradients: bool = True
    """Whether the task's optimizer will run here in some segment: raise at once where it cannot."""
    tell_awaits: Callable[[Meta], None] | None = None
    """Called at intervals with the workers this server waits for, once it has waited for half the deadline."""


class Server:
    """One server's loop."""

    def __init__(
        self,
        comm: Communicator,
        flat: Flat,
        optimizer: Optimizer,
        *,
        recorder: Recorder,
        options: ServerOptions | None = None,
    ) -> None:
        options = options or ServerOptions()
        self.comm, self.recorder, self._arrivals = comm, recorder, options.arrivals
        self.parts = _parts(comm, flat, optimizer, recorder, options)
        self.segments = Segments(comm, self.parts, takes_gradients=options.takes_gradients)
        self.keeper = ReplicaKeeper(self.parts.outbox, self.parts.store)
        transfer = StateTransfer(self.segments, self._segment_begun)
        self.peers = PeerWords(self.segments, transfer)
        self._recovery = Recovery(comm, self.segments, self.keeper)
        self._late = LateWorkers(comm.rank, comm.deadline_s, options.tell_awaits)
        self._retired = False
        workers, peers, keeper = WorkerRequests(self.segments, transfer), self.peers, self.keeper
        self._departed = workers.departed
        self._does: dict[str, Callable[[Message, Any], None]] = {
            "seed": transfer.seed,
            "draw": workers.draw,
            "push": workers.push,
            "pull": workers.pull,
            "leave": workers.leave,
            "take": transfer.take,
            "home": workers.home,
            "skip": workers.skip,
            "bye": workers.bye,
            "retire": self._retire,
            "probe": workers.probe,
            **dict.fromkeys(("have", "norm", "decision", "pending"), peers.word),
            "hello": peers.hello,
            "which": peers.which,
            "applied": peers.edges,
            "mirror_seed": keeper.seed,
            "mirror_parcel": keeper.parcel,
            "mirror": keeper.follow,
            "mirrored": self.parts.replicas.mirrored,
            "replica": keeper.give,
        }

    @property
    def store(self) -> Store:
        return self.parts.store

    @property
    def segment(self) -> Segment:
        return self.segments.present

    def restore(self) -> None:
        """Replace a lost server, from the nearest copy of it. Raises `Lost` where there is none."""
        source = self._recovery.restore()
        self.parts.records.restored(source, self.store.updates, self.store.recorded.items())

    def serve(self) -> None:
        """Serve until every worker has departed, or this server is retired."""
        while not self._retired and not self.parts.members.all_gone:
            self.take_up(self._next())
        self.store.threads.close()
        self.parts.snapshots.wait()

    def take_up(self, message: Message) -> None:
        """Check one message, and process it."""
        if message.kind == DEPARTED:
            return self._departed(message.source)
        kind = TYPES.get(message.kind)
        if kind is None:
            raise CommError(f"server {self.comm.rank}: rank {message.source} sent an unknown {message.kind!r}")
        message = unfold(message)
        self._does[message.kind](message, decode(kind, message))

    def _next(self) -> Message:
        if self._recovery.early:
            return self._recovery.early.popleft()
        silences, deadline_s = 0.0, self.comm.deadline_s
        while True:
            if self._late.is_due:
                self._late.look(*self._waits())
            try:
                message = self._arrivals.next(self.comm, self._late.look_s)
            except DeadlineExceeded:
                # Between segments no message is due; the launcher watches the ranks and ends this server with them.
                silences += 0 if self.segments.is_idle else (self._late.look_s or deadline_s) / deadline_s
                if silences >= PATIENCE:
                    raise DeadlineExceeded(self._silence(PATIENCE * deadline_s)) from None
            else:
                self._late.heard(message.source)
                return message

    def _waits(self) -> tuple[set[int], set[int]]:
        """Workers for which this server waits, and those that wait for it."""
        awaited, waiting = self.segment.waits()
        return set() if self.segments.is_idle else awaited, waiting

    def _silence(self, seconds: float) -> str:
        late = sorted(self._waits()[0])
        who = f"; it waits for {name_workers(late)}" if late else ""
        return f"server {self.comm.rank}: no message from anyone for {seconds:g} s{who}"

    def _segment_begun(self) -> None:
        self.peers.segment_begun(self.take_up)

    def _retire(self, message: Message, _: Retire) -> None:
        self._retired = True
        self.parts.outbox.answer(message, Done())


def _parts(comm: Communicator, flat: Flat, optimizer: Optimizer, recorder: Recorder, options: ServerOptions) -> Parts:
    outbox, members, paces, copies = Outbox(comm), Members(comm.workers), Paces(), options.copies
    threads = ApplyThreads(options.apply_threads, comm.deadline_s)
    store = Store(flat, optimizer, comm.clock, threads, PushCodec(flat, options.codec, options.pull))
    return Parts(
        comm.clock,
        outbox,
        members,
        store,
        Answers(outbox, store, members, paces),
        ServerRecords(recorder, comm.clock),
        paces,
        Replicas(outbox, copies.replicas),
        Snapshots(comm.rank, copies.snapshot, copies.every),
    )


def name_workers(ranks: Sequence[int]) -> str:
    """`worker 2`, or `workers 2, 3`."""
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
