"""A collective as a schedule: who sends which elements to whom, and what becomes of them there.

A schedule is a set of *chains*. The chains of one exchange run side by side and touch different elements; the moves of
one chain happen in their order. A move is `send`, `add` (receive and add to one's own) or `put` (receive in place of
one's own). All ranks work out their own part from the same few numbers, so nothing has to be agreed on beforehand.

Elements that were sent may be added to in the very next move only, and are copied for that. A `put` lands as soon as it
comes, so it must be a consequence of all earlier moves of its chain on that rank: sums are, as our own part is in them.

A message is named by (chain, round): a rank sends at most one to a given peer in a given round of a given chain, and
its receiver has a move of the same chain, round and elements.

`Running` carries out one rank's part in whatever world: it is told what has arrived, and posts what can go.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from podium.errors import CommError


class Move(NamedTuple):
    """One step of one chain on one rank."""

    kind: Literal["send", "add", "put"]
    peer: int  # its place among the members, not its rank
    round: int
    start: int  # elements
    stop: int


Chain = list[Move]
Key = tuple[int, int]
"""A chain and its round: what a message is named by, together with its sender."""


class Running:
    """One rank's part of one exchange, under way."""

    def __init__(
        self,
        chains: Sequence[Chain],
        tensor: Tensor,
        post: Callable[[int, Key, Tensor], None],
        finished: Callable[[], None],
    ) -> None:
        """`post(peer, key, part)` hands a message over and returns at once; once it has gone, `sent` must be called.

        `finished` is called when all is done, from whatever thread brought the last message.
        """
        self._chains, self._tensor, self._post, self._finished = chains, tensor, post, finished
        self._lock = threading.Lock()
        self._at = [0] * len(chains)
        self._moving = [False] * len(chains)
        self._early: dict[tuple[int, int, int], Tensor] = {}  # (peer, chain, round) -> what came before its turn
        self._unsent = 0
        self._left = sum(bool(chain) for chain in chains)
        self._awaited = {
            (move.peer, c, move.round): move for c, chain in enumerate(chains) for move in chain if move.kind != "send"
        }
        self._over = False

    def start(self) -> None:
        """Do what can be done without hearing from anyone."""
        if not self._left:
            self._settle()
        for c in range(len(self._chains)):
            self._go_on(c)

    def landing(self, peer: int, key: Key, numel: int) -> Tensor | None:
        """Where this message may be received: in its place, if it takes the place of what is there."""
        move = self._awaited.get((peer, *key))
        if move is None or numel != move.stop - move.start:
            raise CommError(f"message {key} of {numel} elements from member {peer} is not in the schedule")
        # What takes the place of our own elements is made from them too, or they were never sent: nobody needs them.
        return self._tensor[move.start : move.stop] if move.kind == "put" else None

    def arrived(self, peer: int, key: Key, part: Tensor) -> None:
        """A message is here."""
        c, round_ = key
        with self._lock:
            if self._awaited.pop((peer, c, round_), None) is None:
                raise CommError(f"message {key} from member {peer} is not in the schedule, or came before")
            self._early[peer, c, round_] = part
        self._go_on(c)

    def sent(self) -> None:
        """A message that was posted has gone; its elements are ours again."""
        with self._lock:
            self._unsent -= 1
        self._settle()

    def misses(self, peer: int) -> bool:
        """Whether something from this member has not come yet."""
        with self._lock:
            return any(source == peer for source, _, _ in self._awaited)

    @property
    def waits_for(self) -> list[int]:
        """Members from whom a message is missing."""
        with self._lock:
            heads = [chain[at] for chain, at in zip(self._chains, self._at, strict=True) if at < len(chain)]
        return sorted({move.peer for move in heads if move.kind != "send"})

    def _go_on(self, c: int) -> None:
        """Take this chain as far as it goes; one thread at a time."""
        chain = self._chains[c]
        while True:
            with self._lock:
                if self._moving[c] or self._at[c] == len(chain):
                    return
                move = chain[self._at[c]]
                part = None
                if move.kind != "send":
                    part = self._early.pop((move.peer, c, move.round), None)
                    if part is None:
                        return
                else:
                    self._unsent += 1
                self._moving[c] = True
            mine = self._tensor[move.start : move.stop]
            if part is None:
                if self._is_added_to_next(c, move):
                    mine = mine.clone()
                self._post(move.peer, (c, move.round), mine)
            elif move.kind == "add":
                mine.add_(part)
            elif part.data_ptr() != mine.data_ptr():
                mine.copy_(part)
            with self._lock:
                self._moving[c] = False
                self._at[c] += 1
                over = self._at[c] == len(chain)
                self._left -= over
            if over:
                self._settle()

    def _is_added_to_next(self, c: int, move: Move) -> bool:
        """Whether elements that are being sent would change under way."""
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
    """Bytes of tensors that it receives."""
    return sum((m.stop - m.start) * itemsize for chain in chains for m in chain if m.kind != "send")


def carry_out(schedules: Sequence[Sequence[Chain]], tensors: Sequence[Tensor]) -> None:
    """All members' parts, here and now, one message at a time: what a schedule means."""
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

    for me, (chains, tensor) in enumerate(zip(schedules, tensors, strict=True)):
        running.append(Running(chains, tensor, poster(me), finisher(me)))
    for run in running:
        run.start()
    while mail:
        source, to, key, part = mail.pop(0)
        running[to].landing(source, key, part.numel())
        running[to].arrived(source, key, part)
    if not all(done):
        stuck = {me: run.waits_for for me, run in enumerate(running) if not done[me]}
        raise CommError(f"the schedule does not end: members wait for {stuck}")


def element_cuts(numel: int, parts: int) -> list[int]:
    """Where to cut into parts that differ by one element at most: `parts + 1` places."""
    return [numel * i // parts for i in range(parts + 1)]
