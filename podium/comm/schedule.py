"""A collective as a schedule: which rank sends which elements to which rank, and what the receiver does with them.

A schedule is a set of *chains*. The chains of one exchange run side by side and touch different elements; the moves of
one chain happen in their order. A move is `send`, `add` (receive and add to this rank's elements) or `put` (receive and
overwrite them). Each rank computes its own part from the same few numbers, so nothing has to be agreed on beforehand.

A chain may also have a *total* beside this rank's elements, for sums whose order matters, and for ranks of one host
that read and write each other's tensors. `hold` receives into the total, or adds to it; `fold` adds the elements of
some members of this host to it, in order; `send` sends the total, where there is one, and forgets it; `share` writes it
(or where there is none, this rank's elements) into the tensors of some members of this host, and forgets it.

Elements that were sent may be added to in the very next move only, and are copied for that. A `put` lands as soon as it
arrives, so it must depend on all earlier moves of its chain on that rank: a sum does, as it contains that rank's part.

A message is identified by (chain, round): a rank sends at most one to a given peer in a given round of a given chain,
and its receiver has a move of the same chain, round and elements.

`Running` runs one rank's part in any world: callers pass it what arrives, and it posts what can be sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from podium.errors import CommError

RECEIVING = ("add", "put", "hold")
"""Moves that wait for a message."""
AT_HOST = ("fold", "share")
"""Moves that need the tensors of other members of this host, where they name any."""


class Move(NamedTuple):
    """One step of one chain on one rank."""

    kind: Literal["send", "add", "put", "hold", "fold", "share"]
    peer: int  # index among the members, not a rank; this member's own where nothing is sent or received
    round: int
    start: int  # elements
    stop: int
    members: tuple[int, ...] = ()  # of `fold` and `share`


Chain = list[Move]
Key = tuple[int, int]
"""A chain and its round: identifies a message, together with its sender."""


class Running:
    """One rank's part of one exchange, under way."""

    def __init__(
        self,
        chains: Sequence[Chain],
        tensor: Tensor,
        post: Callable[[int, Key, Tensor], None],
        finished: Callable[[], None],
        near: Collection[int] = (),
    ) -> None:
        """`post(peer, key, part)` sends a message without waiting; once it is sent, `sent` must be called.

        `finished` is called when all is done, on the thread that brought the last message. `near`: the other members of
        this host whose tensors the chains name; `meet` must be called for each of them.
        """
        self._chains, self._tensor, self._post, self._finished = chains, tensor, post, finished
        self._near: dict[int, Tensor] = {}
        self._strange = set(near)
        self._totals: list[Tensor | None] = [None] * len(chains)
        self._lock = threading.Lock()
        self._at = [0] * len(chains)
        self._moving = [False] * len(chains)
        self._early: dict[tuple[int, int, int], Tensor] = {}  # (peer, chain, round) -> elements that came early
        self._unsent = 0
        self._left = sum(bool(chain) for chain in chains)
        self._awaited = {
            (move.peer, c, move.round): move
            for c, chain in enumerate(chains)
            for move in chain
            if move.kind in RECEIVING
        }
        self._over = self._halted = False

    def start(self) -> None:
        """Make all moves that need no message."""
        if not self._left:
            self._settle()
        for c in range(len(self._chains)):
            self._go_on(c)

    def meet(self, member: int, tensor: Tensor) -> None:
        """The tensor of another member of this host: it may be read and written from now on."""
        if tensor.numel() != self._tensor.numel() or tensor.dtype != self._tensor.dtype:
            raise CommError(
                f"member {member} exchanges {tensor.numel()} elements of {tensor.dtype} where we exchange "
                f"{self._tensor.numel()} of {self._tensor.dtype}"
            )
        with self._lock:
            self._near[member] = tensor
            self._strange.discard(member)
            ready = not self._strange
        for c in range(len(self._chains) if ready else 0):
            self._go_on(c)

    def halt(self) -> None:
        """Begin no move any more; one that is under way ends."""
        with self._lock:
            self._halted = True

    def landing(self, peer: int, key: Key, numel: int) -> Tensor | None:
        """Where this message may be received: for a `put` the elements that it overwrites, otherwise None."""
        move = self._awaited.get((peer, *key))
        if move is None or numel != move.stop - move.start:
            raise CommError(f"message {key} of {numel} elements from member {peer} is not in the schedule")
        # The new elements were computed from ours, or ours were never sent: the old values are not needed any more.
        return self._tensor[move.start : move.stop] if move.kind == "put" else None

    def arrived(self, peer: int, key: Key, part: Tensor) -> None:
        """A message has arrived."""
        c, round_ = key
        with self._lock:
            if self._awaited.pop((peer, c, round_), None) is None:
                raise CommError(f"message {key} from member {peer} is not in the schedule, or came before")
            self._early[peer, c, round_] = part
        self._go_on(c)

    def sent(self) -> None:
        """A posted message is sent; its elements may change again."""
        with self._lock:
            self._unsent -= 1
        self._settle()

    def misses(self, peer: int) -> bool:
        """Whether a message or the tensor of this member is still missing."""
        with self._lock:
            return peer in self._strange or any(source == peer for source, _, _ in self._awaited)

    @property
    def waits_for(self) -> list[int]:
        """Members whose message is needed next."""
        with self._lock:
            heads = [chain[at] for chain, at in zip(self._chains, self._at, strict=True) if at < len(chain)]
            return sorted({move.peer for move in heads if move.kind in RECEIVING} | self._strange)

    def _go_on(self, c: int) -> None:
        """Make all moves of this chain that are possible now; one thread at a time."""
        chain = self._chains[c]
        while True:
            with self._lock:
                if self._moving[c] or self._at[c] == len(chain) or self._halted:
                    return
                move = chain[self._at[c]]
                part = None
                if move.kind in RECEIVING:
                    part = self._early.pop((move.peer, c, move.round), None)
                    if part is None:
                        return
                elif move.kind == "send":
                    self._unsent += 1
                elif self._strange:
                    return
                self._moving[c] = True
            self._make(c, move, part)
            with self._lock:
                self._moving[c] = False
                self._at[c] += 1
                over = self._at[c] == len(chain)
                self._left -= over
            if over:
                self._settle()

    def _make(self, c: int, move: Move, part: Tensor | None) -> None:
        mine, total = self._tensor[move.start : move.stop], self._totals[c]
        if move.kind == "send":
            self._send(c, move, mine, total)
        elif move.kind == "fold":
            theirs = [self._elements(member, move) for member in move.members]
            self._totals[c] = added_up(theirs if total is None else [total, *theirs], private=total is not None)
        elif move.kind == "share":
            for member in move.members:
                place = self._elements(member, move)
                if total is not None or place.data_ptr() != mine.data_ptr():
                    place.copy_(mine if total is None else total)
            self._totals[c] = None
        else:
            assert part is not None
            self._receive(c, move, mine, part)

    def _send(self, c: int, move: Move, mine: Tensor, total: Tensor | None) -> None:
        if total is not None:
            self._totals[c] = None
            self._post(move.peer, (c, move.round), total)
            return
        self._post(move.peer, (c, move.round), mine.clone() if self._is_added_to_next(c, move) else mine)

    def _receive(self, c: int, move: Move, mine: Tensor, part: Tensor) -> None:
        total = self._totals[c]
        if move.kind == "hold":
            self._totals[c] = part if total is None else total.add_(part)
        elif move.kind == "add":
            mine.add_(part)
        elif part.data_ptr() != mine.data_ptr():
            mine.copy_(part)

    def _elements(self, member: int, move: Move) -> Tensor:
        """These elements of a member of this host; such a move names this member as its peer."""
        tensor = self._tensor if member == move.peer else self._near[member]
        return tensor[move.start : move.stop]

    def _is_added_to_next(self, c: int, move: Move) -> bool:
        """Whether the next move adds to elements that are still being sent."""
        chain, after = self._chains[c], self._at[c] + 1
        if after == len(chain) or chain[after].kind != "add":
            return False
        return chain[after].start < move.stop and move.start < chain[after].stop

    def _settle(self) -> None:
        with self._lock:
            over = self._left == 0 and self._unsent == 0 and not self._over
            self._over = self._over or over
        if over:
            self._finished()


def nbytes_sent(chains: Sequence[Chain], itemsize: int) -> int:
    """Bytes of tensors that one rank sends."""
    return sum((m.stop - m.start) * itemsize for chain in chains for m in chain if m.kind == "send")


def nbytes_received(chains: Sequence[Chain], itemsize: int) -> int:
    """Bytes of tensors that one rank receives."""
    return sum((m.stop - m.start) * itemsize for chain in chains for m in chain if m.kind in RECEIVING)


def added_up(tensors: Sequence[Tensor], *, private: bool) -> Tensor:
    """The sum from left to right, in a new tensor; `private`: in the first one, which nobody else uses."""
    total = tensors[0] if private else tensors[0].clone() if len(tensors) == 1 else tensors[0] + tensors[1]
    for tensor in tensors[1 if private else 2 :]:
        total.add_(tensor)
    return total


def carry_out(
    schedules: Sequence[Sequence[Chain]], tensors: Sequence[Tensor], hosts: Sequence[Sequence[int]] = ()
) -> None:
    """Run all members' parts in this thread, one message at a time: the reference meaning of a schedule.

    `hosts`: members that read and write each other's tensors.
    """
    mail: list[tuple[int, int, Key, Tensor]] = []
    done = [False] * len(tensors)
    running: list[Running] = []

    def poster(me: int) -> Callable[[int, Key, Tensor], None]:
        def post(peer: int, key: Key, part: Tensor) -> None:
            mail.append((me, peer, key, part.clone()))
            running[me].sent()

        return post

    def finisher(me: int) -> Callable[[], None]:
        def finish() -> None:
            done[me] = True

        return finish

    beside = {me: [other for other in host if other != me] for host in hosts for me in host}
    for me, (chains, tensor) in enumerate(zip(schedules, tensors, strict=True)):
        running.append(Running(chains, tensor, poster(me), finisher(me), near=beside.get(me, ())))
    for run in running:
        run.start()
    for me, others in beside.items():
        for other in others:
            running[me].meet(other, tensors[other])
    while mail:
        source, to, key, part = mail.pop(0)
        running[to].landing(source, key, part.numel())
        running[to].arrived(source, key, part)
    if not all(done):
        stuck = {me: run.waits_for for me, run in enumerate(running) if not done[me]}
        raise CommError(f"the schedule does not end: members wait for {stuck}")


def element_cuts(numel: int, parts: int) -> list[int]:
    """Offsets that cut `numel` elements into parts that differ by one element at most: `parts + 1` of them."""
    return [numel * i // parts for i in range(parts + 1)]
