"""Was every sample used once? Computed from the records, for any number of workers and any strategy.

A step record has the position in the global order at which its samples begin, or the pieces that they are in. Steps
that did not count are left out: rounds that were undone, and pushes that a server dropped as too stale.

Where a rank was lost, its own records are not enough, and those of the other ranks are used:

    a step of all workers   The survivors have the sum of all gradients, including the lost worker's part, whose record
                            may be missing. So its part of the next step that all survivors recorded counts as used.
                            A host that vanished takes with it what its ranks had not sent yet: then its part of every
                            such step counts, up to the position at which the survivors regrouped without it. If the
                            survivors repeated a step that only the lost worker had recorded, its record does not count.
    a lease                 It may be lent again, so several workers may have trained on it. It was used as often as a
                            server applied it. What a server had applied after the copy from which it was restored is
                            void. A lease that a server applied for a lost worker was used, even if the worker's record
                            is missing.

A missing record of a worker that was not lost is an error, and so is a lease that a server applied twice.
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
"""Begin and end."""
_UNTOLD = -1


class Audit(NamedTuple):
    """Counts of samples, over the part of the global order that the run trained on."""

    missing: int
    repeated: int


def audit(rows: Iterable[Record]) -> Audit | None:
    """How many samples no step used, and how many several steps used; None where the records are too old to tell."""
    auditor = Auditor()
    for row in rows:
        auditor.add(row)
    return auditor.result()


class _Fall(NamedTuple):
    """An event that made earlier records void: an undone round, or a server restored from a copy."""

    place: int  # how many records came before
    who: int | Span  # a worker; or a server and one of its ranges
    since: int  # the first position, or update, that is void


class _Part(NamedTuple):
    """One worker's part of a step."""

    rank: int
    samples: int
    end: int  # of the whole step; below 0 where the record does not have it


class _Update(NamedTuple):
    """A server applied one lease to one range."""

    where: Span  # the server and one of its ranges
    samples: int  # 0: as many as the step has
    worker: int


class _Place(NamedTuple):
    """All records that begin at one position of the order."""

    first: int
    together: list[_Part]
    """Parts of steps that all workers make together."""
    leased: list[int]
    """Samples of leases that begin here, each once, even if several workers trained on it."""
    updates: list[_Update]


class _OfLost(NamedTuple):
    """What the survivors' records show about lost workers."""

    windows: list[Span]
    """Steps in which a lost worker may have taken part without a record."""
    last: dict[int, int]
    """The end of the last step that each lost worker recorded, …"""
    redone: dict[int, list[Span]]
    """… and the parts of that step that the survivors recorded."""


class Auditor:
    """Takes a run's records one after another, in order of time; stores a few numbers of each step and update."""

    def __init__(self, scratch: Path | None = None) -> None:
        """`scratch`: a folder for a temporary file, for runs with many steps."""
        # First position, arrival number, rank, samples, end of the whole step.
        self._steps = Table(5, scratch=scratch)
        # Lease, arrival number, server, range, samples, number of the update of that range, worker.
        self._updates = Table(7, scratch=scratch)
        self._begins: dict[int, int] = {}
        self._ends: list[int] = []
        self._lost: dict[int, int] = {}  # rank to the generation in which it was lost
        self._lost_workers: set[int] = set()
        self._regroups: list[tuple[int, int, frozenset[int]]] = []  # generation, position, members
        self._undone: list[_Fall] = []
        self._restored: list[_Fall] = []
        self._counts: dict[Span, tuple[int, int]] = {}  # by server and range: updates, records missing of the last one
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
            self._lost[row["lost"]] = row.get("generation", 0)
            if row.get("role") == "worker":
                self._lost_workers.add(row["lost"])
        elif kind == "regroup" and "position" in row:
            self._regroups.append((row["generation"], row["position"], frozenset(row["members"])))
        elif kind == "undone":
            require(row, "position")
            self._undone.append(_Fall(len(self._steps), rank, row["position"]))
        elif kind == "restored" and "updates" in row:
            self._add_restored(row)
        elif kind == "dropped":
            require(row, "worker", "lease")
            self._dropped[rank, row["worker"], row["lease"]] += 1

    def _add_step(self, row: Record) -> None:
        if "first" not in row:  # an older record
            self._is_told = False
            return
        require(row, "samples")
        for first, count in _pieces(row):
            self._steps.append((first, len(self._steps), row["rank"], count, row.get("position", _UNTOLD)))
            self._longest = max(self._longest, count)

    def _add_update(self, row: Record) -> None:
        """Several pushes that make one update have a record each. A lease without samples has a negative number."""
        if "lease" not in row or "range" not in row:  # an older record
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
        """Updates after the copy are lost with the server.

        `updates` alone, as in older records, also counts updates of global steps, which have no records.
        """
        server = row["rank"]
        kept = {where: min(number, row["updates"]) for where, (number, _) in self._counts.items() if where[0] == server}
        if "recorded" in row:
            kept = {**dict.fromkeys(kept, 0), **{(server, unit): updates for unit, updates in row["recorded"]}}
        for where, updates in kept.items():
            self._restored.append(_Fall(len(self._updates), where, updates + 1))
            self._counts[where] = updates, 0

    # The result.

    def result(self) -> Audit | None:
        if not self._begins or not self._ends or not self._is_told:
            return None
        told = (
            self._of_lost() if self._lost.keys() & (self._begins.keys() | self._lost_workers) else _OfLost([], {}, {})
        )
        order = _Order(min(self._begins.values()), told.windows)
        applied: dict[Span, _Order] = defaultdict(lambda: _Order(0, []))
        unwritten = 0  # the most samples of a lease at the last place that no worker's record has
        at, waiting = 0, list[Span]()  # that place, and the ranges to which servers applied the lease

        def use_unwritten(until: int) -> None:
            samples = min(unwritten, until - at)  # the last lease of an epoch is shorter
            for where in waiting:
                applied[where].use(at, samples)
            order.use(at, samples)

        for first, together, leased, updates in self._places():
            if unwritten:
                use_unwritten(first)
            parts = [part for part in together if not _is_redone(first, part, told)]
            # A lost worker's lease is lent again unless the worker had reported its end; servers apply it once.
            others = [part for part in parts if part.rank not in self._lost]
            used = sorted(leased + [part.samples for part in others or parts])
            for samples in used:
                order.use(first, samples)
            of_lost = [update.samples for update in updates if update.worker in self._lost]
            unwritten, at = (max(of_lost) or self._longest if of_lost and not used else 0), first
            waiting = [update.where for update in updates] if unwritten else []
            for update in updates if not unwritten else ():
                applied[update.where].use(first, update.samples or max(used, default=0))
        end = max(self._ends)
        use_unwritten(max(at, end))
        order.use(end, 0)
        return Audit(order.missing, order.repeated + max((one.repeated for one in applied.values()), default=0))

    def _places(self) -> Iterator[_Place]:
        """Records by position, in the order of samples, without those that did not count."""
        dropped, is_undone, is_void = self._times_dropped(), self._undoing(), _falling(self._restored)
        covered = 0  # the end of the leases that begin before
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
        lost = self._lost.keys() & (self._begins.keys() | self._lost_workers)
        last = {rank: self._begins.get(rank, self._joined_at(rank)) for rank in lost}
        for place in self._places():
            for part in place.together:
                if part.rank in lost and part.end != _UNTOLD:
                    last[part.rank] = max(last[part.rank], part.end)
        limits = {rank: self._regrouped_without(rank) for rank in lost}
        following: dict[int, dict[int, set[int]]] = {rank: {} for rank in lost}  # ends of next steps, who recorded each
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
                    steps = following[rank]
                    if last[rank] < part.end <= max(limits[rank], min(steps, default=part.end)):
                        steps.setdefault(part.end, set()).add(part.rank)
        windows = []
        for rank, steps in following.items():
            nearest = min(steps, default=0)
            kept = sorted(end for end in steps if end <= max(limits[rank], nearest))
            for begin, end in zip([last[rank], *kept], kept, strict=False):
                # A survivor that was a step behind copied the last step before the regroup: it has no record of it.
                copied = end == limits[rank]
                if copied or all(who in steps[end] for who, (low, high) in ends.items() if low < end < high):
                    windows.append((begin, end))  # otherwise the missing record is another worker's
        return _OfLost(sorted(windows), last, redone)

    def _joined_at(self, rank: int) -> int:
        """Where a worker began of which no record has come."""
        joined = [position for _, position, members in self._regroups if rank in members]
        return min(joined, default=min(self._begins.values()))

    def _regrouped_without(self, rank: int) -> int:
        """The position up to which a lost worker was a member; 0 where no record says so."""
        later = [r for r in self._regroups if r[0] > self._lost[rank] and rank not in r[2]]
        return max((position for generation, position, _ in later if generation == min(later)[0]), default=0)

    def _undoing(self) -> Callable[[int, int, int], bool]:
        """A function: whether a step's round was undone later; for a lost rank, which cannot record it, by any rank."""
        of_all = _falling([undone._replace(who=0) for undone in self._undone])
        of_each = _falling(self._undone)
        return lambda first, place, rank: of_all(first, place, 0) if rank in self._lost else of_each(first, place, rank)

    def _times_dropped(self) -> dict[tuple[int, int], int]:
        times: dict[tuple[int, int], int] = {}
        for (_, worker, lease), count in self._dropped.items():  # each server records the drop
            times[worker, lease] = max(count, times.get((worker, lease), 0))
        return times


class _Order:
    """Goes through the global order from its beginning, and counts."""

    def __init__(self, begin: int, windows: Sequence[Span]) -> None:
        """`windows`: where nothing counts as missing."""
        self.missing = self.repeated = 0
        self._at, self._windows = begin, windows

    def use(self, first: int, samples: int) -> None:
        """Count these samples as used, and unused samples before them as missing."""
        if first > self._at:
            self.missing += first - self._at - _overlap((self._at, first), self._windows)
        self.repeated += max(0, min(self._at, first + samples) - first)
        self._at = max(self._at, first + samples)


def _falling(falls: Sequence[_Fall]) -> Callable[[int, int, int | Span], bool]:
    """A function: whether a record is void, because a later fall went back to it or to before it."""

    @cache
    def of(who: int | Span) -> tuple[list[int], list[int]]:
        """The places of the falls, and for each the lowest number that it or a later one made void."""
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
    """A step's samples: one piece, or the pieces that its worker drew."""
    if "pieces" in row:
        return [(first, count) for first, count in row["pieces"]]
    return [(row["first"], row["samples"])] if row["samples"] else []


def _overlap(span: Span, others: Sequence[Span]) -> int:
    """The length of the part of `span` that the others cover."""
    at, covered = span[0], 0
    for start, stop in sorted(others):
        low, high = max(at, start), min(span[1], stop)
        covered += max(0, high - low)
        at = max(at, stop)
    return covered
