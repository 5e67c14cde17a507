"""A parameter server: it holds ranges of the parameters, and only it changes them.

One loop, one message at a time, so updates cannot race. What workers ask of it:

    seed    a worker brings parameters, optimizer state and the work to be done; a stretch of training begins
    draw    a worker wants a lease (first server only); otherwise its next one comes with the answer to its push
    push    one unit of a worker's gradients; the answer is that unit's parameters, now or when the gate opens
    pull    a worker wants one unit's parameters as they are
    leave   a worker is through; once all are, each gets parameters and optimizer state to take home, …
    take    … and asks for the rest of it, where there is more than goes into one message
    home    a worker has all of it: one that was restored in between shall not wait for it to leave
    skip    a worker takes no part in this stretch
    bye     a worker ends, or was retired; its departure follows
    retire  this server is no longer needed
    probe   a worker measures how long it takes to be answered
    pending a worker waits for our answer to a push that other servers have answered

The seed says which optimizer moves the parameters in this stretch: the task's own, which takes gradients, or the outer
one (`outer.py`), which takes what workers bring home from many local steps. So servers can change with a phase.

Workers may sit: their processes serve and do not train. A sitting worker's draw is answered with `again` now and then,
so that it need not know how long a stretch lasts. Where all others are lost, those who sat go on in their place.

How pushes become updates is the intake's part (`streams.py`, `gathers.py`), who may go on the gate's, leases the
cursor's, copies for the day this server is lost `copies.py`'s.

A lost worker does not end anything. Fed by leases, its open ones are lent to others and training goes on. Fed by shares
of global steps, the step that it belonged to is answered with `lost`: the survivors take everything home, divide the
work anew, and seed again.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from podium.comm.base import DEPARTED, Communicator, Message, Meta
from podium.data.order import GlobalOrder
from podium.engine.flat import Flat
from podium.errors import CommError, DeadlineExceeded, Lost
from podium.exchange.codecs.base import Codec
from podium.exchange.codecs.dense import Dense
from podium.records.recorder import Recorder
from podium.servers.applied import Span
from podium.servers.apply_threads import Lanes
from podium.servers.copies import Copies
from podium.servers.cursor import Cursor
from podium.servers.folding import unfold
from podium.servers.gate import Rules
from podium.servers.gathers import Gathers
from podium.servers.inquiry import Inquiry
from podium.servers.intake import WISHES, Intake
from podium.servers.mitigation import make_mitigation
from podium.servers.outer import make_outer
from podium.servers.parcels import START, Assembly, Parcel, Place, cut, parcel_bytes, place_of
from podium.servers.push_codec import Wires
from podium.servers.ranges import Layout, Unit, lay_out
from podium.servers.replay import Arrivals, AsTheyCome
from podium.servers.shard import Shard, unit_of
from podium.servers.streams import Streams

PATIENCE = 12
"""How many deadlines of silence a server, or a worker at its gate, puts up with: somebody may be validating."""
_MOST_CUTS = 1024
"""A lease of more slices than this is only given to a worker that draws it."""
_LOOK_S = 1.0
"""How often a server looks for whom it waits."""
_LANE_BYTES = 16 << 20
"""A server with fewer bytes of parameters moves them itself."""


_AT_WORK = ("draw", "push", "pull", "leave")
"""What workers ask while a stretch is under way."""


class Server:
    """One server's loop."""

    def __init__(
        self,
        comm: Communicator,
        flat: Flat,
        optimizer: Optimizer,
        *,
        recorder: Recorder,
        arrivals: Arrivals | None = None,
        copies: Copies | None = None,
        lanes: int = 0,
        codec: Codec | None = None,
        pull: Codec | None = None,
        takes_gradients: bool = True,
        tell_awaits: Callable[[Meta], None] | None = None,
    ) -> None:
        """`lanes`: threads that move units, beside this loop; with none, the loop does it itself.

        `codec`: how pushes are packed; `pull`: how answers to them are. `takes_gradients`: in some stretch the task's
        optimizer is to run here, so it is refused at once where it cannot. `tell_awaits` is told now and then for
        which workers this server waits and for how long, once that is longer than half the deadline.
        """
        self.comm, self.recorder = comm, recorder
        self.lanes = Lanes(lanes, comm.deadline_s)
        self.copies = copies or Copies()
        self.copies.server = self
        self._flat, self._optimizer, self._unit_bytes = flat, optimizer, 8 << 20
        self._outer: Meta | None = None if takes_gradients else {}
        self._weights: list[float] | None = None  # how much of the whole each server holds; None: equally much
        self.wires = Wires(flat, codec or Dense(), pull or Dense())
        self._arrivals = arrivals or AsTheyCome()
        self.servers = comm.servers
        self.shard = self.make_shard(comm.rank, comm.servers, self._unit_bytes, self._outer, self._weights)
        self.seed_meta: Meta = {}
        self.rules = Rules()
        self.mitigation = make_mitigation("none")
        self.workers: tuple[int, ...] = comm.workers
        self.versions = [0] * len(self.shard.units)
        """Updates of each unit since the present stretch began: what a push names as its origin."""
        self.updates = 0
        """Updates of the first unit in all."""
        self.recorded: Counter[int] = Counter()
        """By unit: updates in all that have a record, which those of shares of global steps have not."""
        self.cursor: Cursor | None = None
        self.sitting: set[int] = set()
        """Workers of this stretch that do not train."""
        self._sits_until: dict[int, int] = {}  # by parked worker that sits: pushes until it hears from us
        self.busy: dict[int, float] = {}
        """Seconds of computing per sample, as workers say; the first worker is told, who judges phases."""
        self._paces: dict[int, float] = {}  # nanoseconds per local step, as workers say
        self.gone: set[int] = set()
        self._skipped: set[int] = set()
        self._broke: set[int] = set()
        self._acquainted: set[tuple[int, int]] = set()  # (worker, unit) that a restored server has answered
        self.agreed = [False] * WISHES
        self.early: deque[Message] = deque()
        """What came while this server was being restored."""
        self._parked: dict[int, Message] = {}
        self._left: dict[int, Message] = {}
        self._through: set[int] = set()
        self._fresh: set[tuple[int, int]] = set()  # (worker, unit) without a push since the last seed
        self._tell_awaits, self._told_awaits = tell_awaits, False
        self._look_s = None if tell_awaits is None else min(_LOOK_S, comm.deadline_s / 8)
        self._look_at = 0.0
        self._late: dict[int, float] = {}  # since when this server waits for a worker, in vain so far
        self._not_yet: list[Message] = []  # of other servers, where the stretch has begun that is to begin here
        self._taking: set[int] = set()
        """Workers that are taking this server's state home, part by part."""
        self._seeds: list[Message] = []  # those that wait for them
        self._assembly: Assembly | None = None  # of a seed that is coming in parts
        self.is_new = False
        """Whether this server was restored and no worker has wanted anything since: its stretch may be over."""
        self._retired = False
        self._inquiry: Inquiry | None = None  # after a restart: what must be known before leases are lent
        self._questions: list[Message] = []  # of a restored first server: they wait until this one knows of its losses
        self._generation = 0  # of the workers, as one that ended said
        self._ahead: dict[int, int] = {}  # by unit: how far beyond its copy a restored server was, as workers know
        self.intake: Intake = Streams(self)
        self._does: dict[str, Callable[[Message], None]] = {
            DEPARTED: self._departed,
            "seed": self._seed,
            "draw": self._draw,
            "push": self._push,
            "pull": self._pull,
            "leave": self._leave,
            "take": self._take,
            "home": self._home,
            "skip": self._skip,
            "bye": self._bye,
            "retire": self._retire,
            "probe": self._probe,
            **self.copies.does,
            "have": self._word,
            "norm": self._word,
            "decision": self._word,
            "hello": self._hello,
            "which": self._which,
            "applied": self._applied,
            "pending": self._word,
        }

    # The loop.

    def serve(self) -> None:
        """Until every worker has departed, or this server is retired."""
        while not self._retired and not self.gone >= set(self.workers):
            self.take_up(self._next())
        self.lanes.close()
        self.copies.close()

    @property
    def stretch(self) -> list[int] | None:
        """Names the present stretch; stretches come in the order of their names. None where the seed has no name."""
        named: list[int] | None = self.seed_meta.get("stretch")
        return named

    def _is_of_another_stretch(self, message: Message) -> bool:
        """Whether another server speaks of a stretch that is over here, or has not begun here yet."""
        theirs, mine = message.meta.get("stretch"), self.stretch
        if theirs is None or mine is None or theirs == mine:
            return False
        if theirs > mine:
            self._not_yet.append(message)
        return True

    def take_up(self, message: Message) -> None:
        """Do what one message asks for."""
        if message.kind not in self._does:
            raise CommError(f"server {self.comm.rank}: rank {message.source} sent an unknown {message.kind!r}")
        if self.is_new and message.kind in _AT_WORK:
            self.is_new = False
        self._does[message.kind](message)

    def _next(self) -> Message:
        if self.early:
            return self.early.popleft()
        silences = 0.0
        while True:
            self._look_after_workers()
            try:
                message = self._arrivals.next(self.comm, self._look_s)
            except DeadlineExceeded:
                # Between stretches nobody owes us a word; whoever watches over the ranks ends us with them.
                deadline_s = self.comm.deadline_s
                silences += 0 if self._is_idle else (self._look_s or deadline_s) / deadline_s
                if silences >= PATIENCE:
                    raise DeadlineExceeded(self._silence(PATIENCE * deadline_s)) from None
            else:
                self._late.pop(message.source, None)
                return message

    def _silence(self, seconds: float) -> str:
        late = sorted(self.awaited())
        who = f"; it waits for {name_workers(late)}" if late else ""
        return f"server {self.comm.rank}: no message from anyone for {seconds:g} s{who}"

    # Whom this server waits for.

    def _look_after_workers(self) -> None:
        """Now and then, tell whoever can end a process for how long this server waits for which worker.

        A worker that hangs in its own code goes on beating, so nobody else can tell that it is waited for in vain.
        """
        if self._tell_awaits is None or self._look_s is None or time.monotonic() < self._look_at:
            return
        now = time.monotonic()
        self._look_at = now + self._look_s
        self._late = {worker: self._late.get(worker, now) for worker in self.awaited()}
        late_s = {worker: now - since for worker, since in self._late.items()}
        if self._told_awaits or max(late_s.values(), default=0.0) > self.comm.deadline_s / 2:
            self._told_awaits = bool(late_s)
            waiting = sorted(self._waiting)
            self._tell_awaits({"server": self.comm.rank, "late": sorted(late_s.items()), "waiting": waiting})

    def awaited(self) -> set[int]:
        """Workers without whom others of this stretch cannot go on, as far as this server knows."""
        if self._is_idle:
            return set()
        found, parked = self.intake.awaited(), set(self._parked) - self.sitting
        if self._left:
            found |= set(self.live) - self._through
        if self.cursor is not None and parked:
            if self._inquiry is not None:
                found |= self._inquiry.unheard
            elif self.rules.wait and not self._may_lend():
                found |= set(self.training)
            elif self.cursor.drained:
                found |= set(self.live)
            elif self.cursor.exhausted:
                found |= self.cursor.owners
        return (found & set(self.live)) - self._waiting

    @property
    def _waiting(self) -> set[int]:
        """Workers that wait for an answer of this server."""
        return set(self._parked) | set(self._left) | self.intake.waiting

    @property
    def _is_idle(self) -> bool:
        """Whether no stretch of training is under way here."""
        return not self.seed_meta or self.is_new or self._through >= set(self.present)

    @property
    def present(self) -> list[int]:
        """Workers of this stretch that are still there, and will take its result home."""
        return [w for w in self.workers if w not in self.gone and w not in self._skipped]

    @property
    def live(self) -> list[int]:
        """Those of them who take part: not those that have broken out of it."""
        return [w for w in self.present if w not in self._broke]

    @property
    def training(self) -> list[int]:
        """Those of them who train."""
        return [w for w in self.live if w not in self.sitting]

    @property
    def is_first(self) -> bool:
        """Whether this server holds the cursor and decides for all."""
        return self.comm.rank == self.servers[0]

    def tell(self, server: int, kind: str, meta: Meta, body: Sequence[Tensor] = ()) -> None:
        """One way, to another server; one that is being replaced hears it no more, and asks when it is back."""
        with contextlib.suppress(Lost):
            self.comm.send(server, kind, {**meta, "stretch": self.stretch}, body)

    def answer(self, message: Message, meta: Meta, body: Sequence[Tensor] = (), more: bool = False) -> None:
        """Reply, to one that may be gone by now."""
        with contextlib.suppress(Lost):
            self.comm.reply(message, meta, body, more)

    # A stretch begins.

    def _seed(self, message: Message) -> None:
        named, mine = message.meta.get("stretch"), self.stretch
        if named is not None and mine is not None and named[0] != mine[0]:
            self._taking.clear()  # all regrouped meanwhile: nobody takes the rest
        self._taking.discard(message.source)
        if self._taking:  # others still take the last stretch's state home
            self._seeds.append(message)
            return
        if "at" in message.meta:
            return self._seed_by_parcels(message)
        self.begin(message.meta)
        if not self._lends_only:
            ranges = len(self.shard.ranges)
            self.shard.load(message.body[:ranges], message.meta, message.body[ranges:])
        self._has_begun(message, {})

    def _has_begun(self, message: Message, facts: Meta) -> None:
        self.copies.begin()
        self.answer(message, facts)
        self._departures_before()
        waiting, self._not_yet = self._not_yet, []
        for word in waiting:
            self.take_up(word)

    def _seed_by_parcels(self, message: Message) -> None:
        """A part of a seed. Where it does not go on with what is here, the worker is told from where to go on."""
        meta, at = message.meta, place_of(message.meta["at"])
        if at == START:
            self.begin({k: v for k, v in meta.items() if k not in ("at", "units", "next")})
            self._assembly = Assembly()
        if self._assembly is None or self._assembly.expects != at:  # this server is new in its lost predecessor's place
            return self.answer(message, {"expects": list(START)})
        for unit, kept in self._assembly.take(meta, message.body):
            self.shard.load_unit(unit, kept)
        expects = self._assembly.expects
        if expects is not None:
            return self.answer(message, {"expects": list(expects)})
        self._assembly = None
        self._has_begun(message, {"expects": None})

    def begin(self, meta: Meta) -> None:
        """Make ready for what a seed says; parameters and optimizer state come separately."""
        self.lanes.settle()
        self._assembly, self.is_new = None, False
        self.seed_meta = {k: v for k, v in meta.items() if k != "state"}
        asked = (tuple(meta["servers"]), meta["unit_bytes"], meta.get("outer"), meta.get("weights"))
        if asked != (self.servers, self._unit_bytes, self._outer, self._weights):
            self.servers, self._unit_bytes, self._outer, self._weights = asked
            self.shard = self.make_shard(self.comm.rank, *asked)
        self.rules = Rules.from_dict(meta["rules"])
        self.mitigation = make_mitigation(meta["mitigation"], meta["strength"])
        self.wires.begin(meta.get("codec"))
        self.workers = tuple(meta["workers"])
        self.versions = [0] * len(self.shard.units)
        self._left.clear()
        self._through.clear()
        self._skipped.clear()
        self._broke.clear()
        self._parked.clear()
        self._sits_until.clear()
        self.sitting = set(meta.get("sitting", ()))
        self._fresh = {(w, u) for w in self.workers for u in range(len(self.shard.units))}
        self.agreed = [False] * WISHES
        self.cursor, self._inquiry = None, None
        self._questions.clear()
        if meta["leases"] and self.is_first:
            order = GlobalOrder(meta["samples"], seed=0)  # lends positions only: its permutation does not matter
            position, end, batch_size = meta["position"], meta["end"], meta["batch_size"]
            self.cursor = Cursor(order, position, end, batch_size, meta["parts"], empty=self.rules.all_workers)
        self.intake = Streams(self) if self.rules.streams else Gathers(self, fed_by_steps=not meta["leases"])
        # A worker, or a copy of this server, may know where another server was before it was replaced: that server has
        # told us itself where it is, or will.
        known = self.comm.addresses
        told = {rank: where for rank, where in meta["addresses"] if rank not in self.servers or rank not in known}
        self.comm.introduce(told)
        self.comm.watch(self.present)  # also those that may be gone before they have said a word to us

    @property
    def _lends_only(self) -> bool:
        """Whether this stretch wants leases of this server, and no parameters."""
        return bool(self.seed_meta.get("lends_only"))

    def _departures_before(self) -> None:
        """Whoever the seed counts on and is gone already is lost to this stretch too."""
        for worker in sorted(self.gone.intersection(self.workers)):
            self._lose(worker)

    def make_shard(
        self,
        rank: int,
        servers: Sequence[int],
        unit_bytes: int,
        outer: Meta | None = None,
        weights: Sequence[float] | None = None,
    ) -> Shard:
        """The shard of one of these servers; of one that is not among them yet, an empty one.

        `outer`: the outer optimizer's settings, where it is not the task's optimizer that moves the parameters.
        `weights`: how much of the whole each server holds, where that is not the same.
        """
        layouts = lay_out(self._flat, len(servers), unit_bytes, weights)
        layout = layouts[servers.index(rank)] if rank in servers else Layout([], [Unit(0, 0, 0)])
        groups = len(self._optimizer.param_groups)
        return Shard(self._flat, self._optimizer if outer is None else make_outer(groups, outer), layout)

    # Leases.

    def _draw(self, message: Message) -> None:
        self.note(message)
        self._heard(message, ())
        self._need_seed()
        assert self.cursor is not None
        self.cursor.applied(message.meta["done"], message.source)
        if self.copies.restored:
            self._take_back(message.source)
        self.wishes(message.meta)
        self._parked[message.source] = message
        self._sits_until[message.source] = min(message.meta.get("patience", 1), max(1, len(self.training)))
        self.serve_parked()

    def _take_back(self, worker: int) -> None:
        """A worker that draws has no lease. After a restart some may be in its name: their answers never reached it."""
        assert self.cursor is not None
        for number in self.cursor.held_by(worker):
            lent = self.cursor.open.get(number)
            if lent is not None and self.intake.counts(number, lent[1].piece.count):
                self.cursor.applied(number)
            else:
                self.cursor.give_back(number)

    def _need_seed(self) -> None:
        if not self.seed_meta:
            raise Lost(f"server {self.comm.rank} was lost before there was a copy of it")

    def wishes(self, meta: Meta) -> None:
        """Note a worker's wish to stop, to pause for others to join or leave, or to go on to the next phase."""
        self.agreed = [before or wished for before, wished in zip(self.agreed, meta["wishes"], strict=True)]
        if self.cursor is not None and any(self.agreed):
            stop, pause, _ = self.agreed
            self.cursor.close(at_once=stop or pause)

    def serve_parked(self) -> None:
        """Give workers that wait for a lease one, or let them go when all is done."""
        cursor = self.cursor
        if cursor is None or self._inquires or (self.rules.wait and not self._may_lend()):
            return
        if self.sitting and not self.training:
            self.sitting.clear()  # nobody else is left
        for source in sorted(set(self._parked) - self.sitting):
            lease = self.lend(source, with_push=False)
            if lease:
                self._hand_over(self._parked.pop(source), lease)
        if cursor.exhausted and set(self._parked) - self.sitting:
            self.intake.rest(set(self._parked) - self.sitting)
        if cursor.drained and set(self._parked) | set(self._left) >= set(self.live):
            for message in self._parked.values():
                meta = {"position": cursor.position, "agreed": self.agreed}
                self.answer(message, meta)
            self._parked.clear()

    def _may_lend(self) -> bool:
        """Where workers go in step, the first leases are lent in order of rank, once all have come for them."""
        begun = any(self.versions) or bool(self.cursor and self.cursor.open)
        return begun or set(self._parked) >= set(self.training)

    def _hand_over(self, draw: Message, lease: Meta) -> None:
        """Answer a draw; a long list of slices goes in the body, for which a header has no room."""
        cuts = lease.get("cuts", ())
        if len(cuts) <= _MOST_CUTS:
            return self.answer(draw, lease)
        self.answer(draw, {**lease, "cuts": []}, [torch.tensor(cuts, dtype=torch.int64)])

    def lend(self, worker: int, *, with_push: bool = True) -> Meta:
        """The facts of a new lease; none when there is nothing to lend.

        `with_push`: it goes with a push's answer, which has no room for a very long one: the worker then draws it.
        """
        assert self.cursor is not None
        if self._inquires:
            return {}
        lease = self.cursor.draw(worker, self._slices_for(worker))
        if lease is None:
            return {}
        if with_push and len(lease.cuts) > _MOST_CUTS:
            self.cursor.not_yet(lease)
            return {}
        self.intake.wake(worker)
        facts = {"lease": lease.number, "piece": list(lease.piece), "of": lease.step}
        return {**facts, "cuts": [list(cut) for cut in lease.cuts]} if lease.cuts else facts

    def _slices_for(self, worker: int) -> int:
        """How many local steps a lease is to last: as told or, by speed, as many as the fastest does in the same time.

        Of one whose pace is not known yet, one step will show it.
        """
        steps: int = self.seed_meta.get("local_steps", 1)
        if not self.seed_meta.get("by_speed"):
            return steps
        paces = {w: self._paces[w] for w in self.training if w in self._paces}
        return max(1, round(steps * min(paces.values()) / paces[worker])) if worker in paces else 1

    def _hear_sitters(self) -> None:
        """Let workers that sit ask again, one round of pushes after they last did: so none of them waits too long."""
        for source in sorted(self.sitting.intersection(self._parked)):
            self._sits_until[source] -= 1
            if self._sits_until[source] <= 0:
                self.answer(self._parked.pop(source), {"again": max(1, len(self.training))})

    # Gradients.

    def _push(self, message: Message) -> None:
        self._need_seed()
        message = unfold(message)
        unit = unit_of(self.shard.units, message.meta["unit"])
        if not self.shard.by_rows(unit):
            message = self.wires.unpack(message, self.shard.units[unit].of(self.shard.ranges))
        if self.seed_meta["leases"]:
            self._heard(message, (message.meta["lease"],))
        if message.meta.get("busy", 0) > 0:
            self.busy[message.source] = message.meta["busy"]
        if message.meta.get("pace", 0) > 0:
            self._paces[message.source] = message.meta["pace"]
        self._notice_loss(message)
        self.intake.push(message)
        if message.meta["last"] and self.cursor is not None:
            self._hear_sitters()

    def _pull(self, message: Message) -> None:
        self.note(message)
        unit_of(self.shard.units, message.meta["unit"])
        self._heard(message, (message.meta["lease"],))
        self.give(message, {})

    def _heard(self, message: Message, holds: tuple[int, ...]) -> None:
        if self.cursor is not None and self.copies.restored:
            self.cursor.heard_of(message.source, holds, message.meta.get("size", 0))
            if self._inquiry is not None:
                self._inquiry.heard(message.source)
                self._learn()

    # What a restored first server asks, where leases are of unequal length.

    def inquire(self) -> None:
        """This server was restored, and leases are of unequal length: ask before any is lent."""
        if self.cursor is None or not self.seed_meta.get("by_speed"):
            return
        self._inquiry = Inquiry(self.live, [other for other in self.servers if other != self.comm.rank])
        self._learn()

    @property
    def _inquires(self) -> bool:
        return self._inquiry is not None

    def _ask(self, server: int) -> None:
        assert self._inquiry is not None
        self.tell(server, "which", {"question": self._inquiry.question, "lost": sorted(self._inquiry.lost)})

    def _which(self, message: Message) -> None:
        """The first server was restored and asks what is applied here."""
        if self._is_of_another_stretch(message):
            return
        self._questions.append(message)
        self._answer_questions()

    def _answer_questions(self) -> None:
        """Once this server knows of the losses that the first one knows of: then it has all that those have pushed.

        One that broke out is lost to this stretch and stays: it says so, or that it leaves, to each server itself.
        """
        waiting, self._questions = self._questions, []
        push_no_more = self.gone | self._skipped | self._broke | set(self._left) | self._through
        for message in waiting:
            if set(message.meta["lost"]).intersection(self.workers) <= push_no_more:
                edges = sorted({edge for once in self.intake.once for edge in once.edges()})
                self.tell(message.source, "applied", {"question": message.meta["question"], "edges": edges})
            else:
                self._questions.append(message)

    def _applied(self, message: Message) -> None:
        if self._inquiry is not None and not self._is_of_another_stretch(message):
            self._inquiry.answered(message.source, message.meta["question"], message.meta["edges"])
            self._learn()

    def _learn(self) -> None:
        """Ask the servers once the workers were heard of, and lend again once all is known."""
        if self._inquiry is not None and self._inquiry.is_due:
            self._inquiry.ask()
            for other in self._inquiry.servers:
                self._ask(other)
        if self._inquiry is not None and self._inquiry.over and self.cursor is not None:
            own = {edge for once in self.intake.once for edge in once.edges()}
            self.cursor.cut_at(self._inquiry.edges() | own)
            self._inquiry = None
            self.serve_parked()

    def _notice_loss(self, message: Message) -> None:
        """A restored server hears from the workers how much of its own work is gone."""
        unit = message.meta["unit"]
        ahead = message.meta["version"] - self.versions[unit]
        if self.copies.restored and ahead > self._ahead.get(unit, 0):
            self._ahead[unit] = ahead
            self.recorder.write("lost_updates", self.comm.clock.now_ns(), range=unit, updates=ahead)

    def apply(
        self,
        unit: int,
        grads: Sequence[Tensor],
        options: Sequence[Meta],
        unused: Sequence[int],
        spans: Sequence[Span],
        out: Sequence[Tensor] | None = None,
    ) -> None:
        """Move one unit by gradients over these samples; `out`: where its parameters are wanted at once, too."""
        self.versions[unit] += 1
        if self.by_lane(unit):
            shard, version = self.shard, self.versions[unit]
            self.lanes.run(unit, lambda: shard.step(unit, grads, options, unused, version, out))
        else:
            self.lanes.settle()
            self.shard.step(unit, grads, options, unused, self.versions[unit])
        touched = grads if self.shard.by_rows(unit) else self.shard.of(unit)
        self.comm.clock.touch(sum(p.nbytes for p in touched))
        self.updates += unit == 0
        self.recorded[unit] += bool(self.seed_meta["leases"])
        self.copies.moved(unit, grads, options, unused, spans)

    def by_lane(self, unit: int) -> bool:
        """Whether a lane moves this unit.

        Not where the loop itself has to see it as it is now (its rows, what mends it, its copies), nor where there is
        so little to move that handing it over would take longer.
        """
        if not self.lanes or self.shard.nbytes < _LANE_BYTES:
            return False
        seen = self.shard.by_rows(unit) or self.copies.holders or self.mitigation.compares
        return not (seen or self.wires.packs_answers)

    def give(self, message: Message, meta: Meta, landed: bool = False) -> None:
        """Answer a push with its unit's parameters; `landed`: they are where the worker wants them."""
        unit = message.meta["unit"]
        params, facts = self.shard.of(unit), {"version": self.versions[unit], **meta}
        if self.busy and message.meta["last"] and message.source == self.workers[0]:
            known = {worker: self.busy[worker] for worker in self.training if worker in self.busy}
            facts["busy"] = list(known.items()) if len(known) == len(self.training) else []
        if message.meta.get("bare"):
            return self.answer(message, facts, more=not message.meta["last"])
        if self.by_lane(unit):
            body = message.landing if landed and message.landing is not None else params
            return self.lanes.run(unit, lambda: self.answer(message, facts, body))
        if self.shard.by_rows(unit):
            params = self.shard.rows_since(unit, self._known(message))
        elif self.wires.packs_answers:
            return self._give_packed(message, facts, params)
        self.mitigation.gave(message.source, unit, params)
        self.answer(message, facts, params, more=not message.meta["last"])

    def _give_packed(self, message: Message, facts: Meta, params: Sequence[Tensor]) -> None:
        """Answer with what has changed since the last answer, packed."""
        unit = message.meta["unit"]
        ranges = self.shard.units[unit].of(self.shard.ranges)
        body, held = self.wires.pack(message.source, unit, ranges, params, self.versions[unit])
        self.mitigation.gave(message.source, unit, held)
        self.answer(message, {**facts, "packed": body is not params}, body, more=not message.meta["last"])

    def _known(self, message: Message) -> int:
        """The version of a unit's rows that a worker has; none, where it has it from the server that we replace."""
        asked = (message.source, message.meta["unit"])
        if self.copies.restored and asked not in self._acquainted:
            self._acquainted.add(asked)
            return -1
        return int(message.meta["version"])

    # Ends.

    def _leave(self, message: Message) -> None:
        if message.source not in self.workers:  # one that has come since, and has nothing here to take home
            return self.answer(message, {"empty": True})
        self._left[message.source] = message
        self._heard(message, ())
        self._answer_questions()
        self.intake.leave(message.source)
        self.serve_parked()
        self.let_go()

    def _probe(self, message: Message) -> None:
        self.answer(message, {}, message.body if message.meta.get("back") else ())

    def _skip(self, message: Message) -> None:
        """A worker takes no part: not at all, or, where it broke out of its loop, no longer."""
        broke = bool(message.meta.get("broke"))
        (self._broke if broke else self._skipped).add(message.source)
        self._heard(message, ())  # first: what this server has lost since its copy is lent again
        if broke and self.cursor is not None:
            self.cursor.applied(message.meta["done"], message.source)
        self._has_taken(message.source)
        self._answer_questions()
        self._lose(message.source, note=not broke)
        self.answer(message, {})
        self.let_go()

    def _bye(self, message: Message) -> None:
        """A worker ends. Where no stretch is under way, this worker knows better than we do who is left.

        A run may end before it has seeded its servers: a finished run that was resumed, a phase that never came.
        """
        if self._is_idle and message.meta["generation"] >= self._generation:
            self._generation, self.workers = message.meta["generation"], tuple(message.meta["workers"])

    def let_go(self) -> None:
        """Once every worker is through, let them take everything home."""
        if not self._left or not self._left.keys() | self._through >= set(self.present):
            return
        self.intake.settle()
        if not self.intake.settled:
            return
        self.lanes.settle()
        empty: Meta = {"empty": True}
        if not self.seed_meta or self._lends_only:
            facts, body = empty, []
        elif self.shard.fits(self._parcel_bytes):
            state, moments = self.shard.dump()
            facts, body = {**state, "workers": self.present}, [*self.shard.params, *moments]
        else:
            facts, body = self._parcel(START)
            facts["workers"] = self.present
            self._taking |= set(self._left) if facts["next"] is not None else set()
        for waiting in self._in_turn():
            self.answer(waiting, facts, body)
        self._through |= set(self._left)
        self._left.clear()

    @property
    def _parcel_bytes(self) -> int:
        return parcel_bytes(self.comm)

    def _parcel(self, place: Place) -> Parcel:
        return cut(self.shard.dump_unit, len(self.shard.units), place, self._parcel_bytes)

    def _take(self, message: Message) -> None:
        """A worker takes another part of the state home."""
        place = place_of(message.meta["at"])
        assert place is not None
        parcel = self._parcel(place)
        self.answer(message, parcel.meta, parcel.body)
        if parcel.next is None:
            self._has_taken(message.source)

    def _home(self, message: Message) -> None:
        """A worker has everything, perhaps from the server that this one replaces: then all have left that one."""
        if message.meta["stretch"] == self.stretch:  # otherwise the next one has begun here
            self._through.add(message.source)
        self.answer(message, {})
        self.let_go()

    def _has_taken(self, worker: int) -> None:
        """It has everything, or will never ask for it: the next stretch need not wait for it."""
        self._taking.discard(worker)
        if not self._taking:
            waiting, self._seeds = self._seeds, []
            for seed in waiting:
                self._seed(seed)

    def _in_turn(self) -> list[Message]:
        """Who wants to go home, each server beginning with another: were all to serve one first, its link would jam."""
        waiting = [self._left[worker] for worker in sorted(self._left)]
        first = (self.servers.index(self.comm.rank) if self.comm.rank in self.servers else 0) % len(waiting)
        return waiting[first:] + waiting[:first]

    def _departed(self, message: Message) -> None:
        rank = message.source
        if rank in self.servers:
            return self.copies.departed(rank)
        if rank in self.gone:
            return
        self.gone.add(rank)
        self._has_taken(rank)
        self._answer_questions()
        if rank in self.workers and rank not in self._left and rank not in self._through:
            self._lose(rank)
        self._left.pop(rank, None)
        self.let_go()

    def _lose(self, worker: int, *, note: bool = True) -> None:
        held = [] if self.cursor is None else self.cursor.held_by(worker)
        if note:
            self.recorder.write("worker_lost", self.comm.clock.now_ns(), worker=worker, leases=held)
        self._parked.pop(worker, None)
        self.mitigation.forget(worker)
        self.intake.lose(worker)
        if self._inquiry is not None:
            self._inquiry.lose(worker)
            self._learn()
        self.serve_parked()

    def _word(self, message: Message) -> None:
        if not self._is_of_another_stretch(message):
            self.intake.hear(message)

    def _hello(self, message: Message) -> None:
        """Another server was restored, and knows nothing of what it missed."""
        self.copies.renew(message.source)
        if self._is_of_another_stretch(message):
            return
        self.intake.hear(message)
        if self._inquiry is not None and self._inquiry.question:
            self._ask(message.source)

    def _retire(self, message: Message) -> None:
        self._retired = True
        self.answer(message, {})

    # Records.

    def note(self, message: Message) -> None:
        """The order of arrivals is the run's order: with it the run can be replayed.

        A push that is applied as it comes needs no record of its own: its update says as much.
        """
        meta = message.meta
        self.recorder.write(
            "arrival",
            self.comm.clock.now_ns(),
            source=message.source,
            what=message.kind,
            lease=meta.get("lease", meta.get("done")),
            range=meta.get("unit", 0),
        )

    def record_update(self, worker: int, unit: int, staleness: int, lease: int, **more: Any) -> None:
        """One record per update, worker and range."""
        self.recorder.write(
            "update",
            self.comm.clock.now_ns(),
            version=self.versions[unit],
            worker=worker,
            range=unit,
            staleness=staleness,
            lease=lease,
            first=(worker, unit) in self._fresh,
            **more,
        )
        self._fresh.discard((worker, unit))


def name_workers(ranks: Sequence[int]) -> str:
    """`worker 2`, or `workers 2, 3`."""
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
