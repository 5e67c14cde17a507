"""Was every sample used once? The records say, whichever worker trained on it and under whichever strategy.

A step record names where in the global order its samples begin, or the pieces in which they lie. What did not count is
taken out: rounds that were undone, and pushes that a server dropped as too stale.

Where a rank was lost, its own records do not suffice, and those of the others are asked:

    a step of all workers   Whoever survives it has the sum of all, the lost worker's part included, whose line may be
                            missing: what lies between the lost worker's last line and the end of the step that the
                            survivors put on record next was used. If the survivors did a step again that the lost
                            worker alone had on record, its line does not count.
    a lease                 It may be lent again, so several workers may have trained on it. How often it was used is
                            how often a server applied it. What a server had applied after the copy from which it was
                            restored is void. A lease that a server applied for a lost worker was used, also where its
                            line is missing.

A line that is missing from a worker that was not lost is an error, and so is a lease that a server applied twice.
"""

from __future__ import annotations

import heapq
import itertools
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from podium.records.recorder import Record, require
from podium.records.tables import Row, Table

Span = tuple[int, int]
"""From where to where."""
_UNTOLD = -1


class Audit(NamedTuple):
    """Samples of the order between where the run began and where it ended."""

    missing: int
    repeated: int


def audit(rows: Iterable[Record]) -> Audit | None:
    """How many samples no step used, and how many more than one did; None where the records do not say."""
    auditor = Auditor()
    for row in rows:
        auditor.add(row)
    return auditor.result()


class _Fall(NamedTuple):
    """Something that made void what came before: steps of an undone round, updates after a copy."""

    place: int  # how many came before
    who: int | Span  # a worker; or a server, and which of its ranges
    since: int  # the first position, or update, that is void


class _Part(NamedTuple):
    """One worker's part of a step."""

    rank: int
    samples: int
    end: int  # of the step that it is a part of; below 0 where the record does not say


class _Update(NamedTuple):
    """A server moved one range by one lease."""

    where: Span  # the server, and which of its ranges
    samples: int  # 0: as many as its step has
    worker: int


class _Place(NamedTuple):
    """All that begins at one position of the order."""

    first: int
    together: list[_Part]
    """Parts of steps that all workers make together."""
    leased: list[int]
    """Samples of leases that begin here, each once, whichever worker trained on them."""
    updates: list[_Update]


class _OfLost(NamedTuple):
    """What the survivors' records tell of lost workers."""

    windows: list[Span]
    """Steps in which a lost worker may have taken part without a line of its own."""
    last: dict[int, int]
    """Where the last step ends that each has on record, …"""
    redone: dict[int, list[Span]]
    """… and what the survivors have done of that step."""


class Auditor:
    """Takes a run's records one after another, in order of time; keeps a few numbers of each step and update."""

    def __init__(self, scratch: Path | None = None) -> None:
        """`scratch`: where a temporary file may be, should there be many steps."""
        # Where its samples begin, when it came, whose it is, how many they are, where the whole step ends.
        self._steps = Table(5, scratch=scratch)
        # Its lease, when it came, its server and range, samples, which update of that range it is, the worker.
        self._updates = Table(7, scratch=scratch)
        self._begins: dict[int, int] = {}
        self._ends: list[int] = []
        self._lost: set[int] = set()
        self._undone: list[_Fall] = []
        self._restored: list[_Fall] = []
        self._counts: dict[Span, tuple[int, int]] = {}  # by server and range: updates, and records to come of the last
        self._dropped: Counter[tuple[int, int, int]] = Counter()  # by server, worker and lease
        self._longest = 0
        self._is_told = True

    def add(self, row: Record) -> None:
        kind, rank = row["kind"], row["rank"]
        if kind == "step":
            self._add_step(row)
        elif kind == "update":
            self._add_update(row)
        elif kind == "begin" and row.get("role") == "worker":
            require(row, "position")
            self._begins.setdefault(rank, row["position"])
        elif kind == "end" and "param_hash" in row:
            require(row, "position")
            self._ends.append(row["position"])
        elif kind == "lost":
            self._lost.add(row["lost"])
        elif kind == "undone":
            require(row, "position")
            self._undone.append(_Fall(len(self._steps), rank, row["position"]))
        elif kind == "restored" and "updates" in row:
            self._add_restored(row)
        elif kind == "dropped":
            require(row, "worker", "lease")
            self._dropped[rank, row["worker"], row["lease"]] += 1

    def _add_step(self, row: Record) -> None:
        if "first" not in row:  # written before steps said so
            self._is_told = False
            return
        require(row, "samples")
        for first, count in _pieces(row):
            self._steps.append((first, len(self._steps), row["rank"], count, row.get("position", _UNTOLD)))
            self._longest = max(self._longest, count)

    def _add_update(self, row: Record) -> None:
        """Several pushes that make one update have a record each. A lease without samples has a name below 0."""
        if "lease" not in row or "range" not in row:  # written before updates said so
            return
        require(row, "worker")
        where = row["rank"], row["range"]
        number, to_come = self._counts.get(where, (0, 0))
        if to_come == 0:
            number, to_come = number + 1, row.get("pushes", 1)
        self._counts[where] = number, to_come - 1
        if row["lease"] >= 0:
            samples, place = row.get("samples", 0), len(self._updates)
            self._updates.append((row["lease"], place, *where, samples, number, row["worker"]))

    def _add_restored(self, row: Record) -> None:
        """What came after the copy is gone with the server.

        `updates` alone, as records had it before, also counts those of global steps, which have no records.
        """
        server = row["rank"]
        kept = {where: min(number, row["updates"]) for where, (number, _) in self._counts.items() if where[0] == server}
        if "recorded" in row:
            kept = {**dict.fromkeys(kept, 0), **{(server, unit): updates for unit, updates in row["recorded"]}}
        for where, updates in kept.items():
            self._restored.append(_Fall(len(self._updates), where, updates + 1))
            self._counts[where] = updates, 0

    # Adding up.

    def result(self) -> Audit | None:
        if not self._begins or not self._ends or not self._is_told:
            return None
        told = self._of_lost() if self._lost & self._begins.keys() else _OfLost([], {}, {})
        order = _Order(min(self._begins.values()), told.windows)
        applied: dict[Span, _Order] = defaultdict(lambda: _Order(0, []))
        unwritten = 0  # samples of a lease that begins where the last place does, and that no record names
        at = 0
        for first, together, leased, updates in self._places():
            if unwritten:
                order.use(at, min(unwritten, first - at))
            parts = [part for part in together if not _is_redone(first, part, told)]
            # A lost worker's lease is lent again unless it had said that it was through; servers apply it once.
            others = [part for part in parts if part.rank not in self._lost]
            used = sorted(leased + [part.samples for part in others or parts])
            for samples in used:
                order.use(first, samples)
            of_lost = [update.samples for update in updates if update.worker in self._lost]
            unwritten, at = (max(of_lost) or self._longest if of_lost and not used else 0), first
            for update in updates:
                applied[update.where].use(first, update.samples or max([*used, unwritten]))
        end = max(self._ends)
        order.use(at, min(unwritten, max(0, end - at)))
        order.use(end, 0)
        return Audit(order.missing, order.repeated + max((one.repeated for one in applied.values()), default=0))

    def _places(self) -> Iterator[_Place]:
        """What begins where, in the order of samples; what did not count is left out."""
        dropped, is_undone, is_void = self._times_dropped(), self._undoing(), _falling(self._restored)
        covered = 0  # how far leases reach that begin before
        rows = heapq.merge(self._steps.sorted(), self._updates.sorted(), key=lambda row: row[0])
        for first, here in itertools.groupby(rows, key=lambda row: row[0]):
            parts: list[_Part] = []
            updates: list[_Update] = []
            of_servers: list[Row] = []
            for row in here:
                if len(row) == self._updates.width:
                    of_servers.append(row)
                    continue
                _, place, rank, samples, end = row
                if is_undone(first, place, rank):
                    continue
                if dropped.get((rank, first), 0) > 0:
                    dropped[rank, first] -= 1
                    continue
                parts.append(_Part(rank, samples, end))
            for _, place, server, unit, samples, number, worker in of_servers:
                covered = max(covered, first + samples)
                if not is_void(number, place, (server, unit)):
                    updates.append(_Update((server, unit), samples, worker))
            is_leased = bool(of_servers) or first < covered
            leased = [p for p in parts if is_leased and p.end in (_UNTOLD, first + p.samples)]
            together = [part for part in parts if part not in leased]
            yield _Place(first, together, sorted({part.samples for part in leased}), updates)

    def _of_lost(self) -> _OfLost:
        lost = self._lost & self._begins.keys()
        last = {rank: self._begins[rank] for rank in lost}
        for place in self._places():
            for part in place.together:
                if part.rank in lost and part.end != _UNTOLD:
                    last[part.rank] = max(last[part.rank], part.end)
        following: dict[int, tuple[int, set[int]]] = {}  # by lost worker: where the next step ends, who has it
        redone: dict[int, list[Span]] = defaultdict(list)
        ends: dict[int, Span] = {}  # by survivor: of its first step, and of its last
        for place in self._places():
            for part in place.together:
                if part.end == _UNTOLD or part.rank in self._lost:
                    continue
                lowest, highest = ends.get(part.rank, (part.end, part.end))
                ends[part.rank] = min(lowest, part.end), max(highest, part.end)
                for rank in lost:
                    if part.end == last[rank]:
                        redone[rank].append((place.first, place.first + part.samples))
                    if last[rank] < part.end <= following.get(rank, (part.end, set()))[0]:
                        step, who = following.get(rank, (part.end, set()))
                        following[rank] = part.end, ({part.rank} | who if step == part.end else {part.rank})
        windows = []
        for rank, (step, who) in following.items():
            if all(other in who for other, (lowest, highest) in ends.items() if lowest < step < highest):
                windows.append((last[rank], step))  # otherwise the line is of another worker
        return _OfLost(sorted(windows), last, redone)

    def _undoing(self) -> Callable[[int, int, int], bool]:
        """Tells whether the round of a step was undone later on; a rank that is lost cannot say so itself."""
        of_all = _falling([undone._replace(who=0) for undone in self._undone])
        of_each = _falling(self._undone)
        return lambda first, place, rank: of_all(first, place, 0) if rank in self._lost else of_each(first, place, rank)

    def _times_dropped(self) -> dict[tuple[int, int], int]:
        times: dict[tuple[int, int], int] = {}
        for (_, worker, lease), count in self._dropped.items():  # each server drops it for itself
            times[worker, lease] = max(count, times.get((worker, lease), 0))
        return times


class _Order:
    """The global order, gone through from its beginning."""

    def __init__(self, begin: int, windows: Sequence[Span]) -> None:
        """`windows`: where nothing is missing, whatever the records lack."""
        self.missing = self.repeated = 0
        self._at, self._windows = begin, windows

    def use(self, first: int, samples: int) -> None:
        """These samples were used; those before them that no worker has used are missing."""
        if first > self._at:
            self.missing += first - self._at - _overlap((self._at, first), self._windows)
        self.repeated += max(0, min(self._at, first + samples) - first)
        self._at = max(self._at, first + samples)


def _falling(falls: Sequence[_Fall]) -> Callable[[int, int, int | Span], bool]:
    """Whether a worker's step is void: whether the worker later went back to it, or to before it."""

    @cache
    def of(who: int | Span) -> tuple[list[int], list[int]]:
        """When they came, and the lowest number that this or a later one made void."""
        mine = [fall for fall in falls if fall.who == who]
        lowest = list(itertools.accumulate((fall.since for fall in reversed(mine)), min))
        return [fall.place for fall in mine], lowest[::-1]

    def is_void(number: int, place: int, who: int | Span) -> bool:
        places, lowest = of(who)
        later = bisect_right(places, place)
        return later < len(places) and number >= lowest[later]

    return is_void


def _is_redone(first: int, part: _Part, told: _OfLost) -> bool:
    """Whether the survivors have divided a lost worker's last step among themselves."""
    is_last = part.end != _UNTOLD and told.last.get(part.rank) == part.end
    return is_last and _overlap((first, first + part.samples), told.redone.get(part.rank, [])) > 0


def _pieces(row: Record) -> list[tuple[int, int]]:
    """A step's samples: in one piece, or in those that its worker has drawn."""
    if "pieces" in row:
        return [(first, count) for first, count in row["pieces"]]
    return [(row["first"], row["samples"])] if row["samples"] else []


def _overlap(span: Span, others: Sequence[Span]) -> int:
    """How much of this lies in any of the others."""
    at, covered = span[0], 0
    for start, stop in sorted(others):
        low, high = max(at, start), min(span[1], stop)
        covered += max(0, high - low)
        at = max(at, stop)
    return covered
