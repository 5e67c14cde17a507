"""Tables from records: staleness of updates by worker and by range, dropped pushes, restored servers.

A worker's first push of a segment is left out everywhere: all workers begin a segment with fresh parameters. Each range
counts its own versions, so one push has a staleness in every range it reaches; an update that several pushes made has a
record for each of them. Older records without a range are all of range 0.

Percentiles are by nearest rank, so each is a value that occurred, unless it lies in a bin of several values.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from podium.records.recorder import Record, require

SINGLE = 64
"""Up to here every value has its own bin; beyond, bins end at powers of two: 65 to 128, 129 to 256 …"""


class Bin(NamedTuple):
    """How many updates had a staleness from `low` to `high`, both included."""

    low: int
    high: int
    updates: int


@dataclass(frozen=True)
class Spread:
    """The distribution of staleness over at least one update."""

    count: int
    mean: float
    p50: int
    p90: int
    max: int
    histogram: tuple[Bin, ...]
    """Non-empty bins, in order."""

    def to_dict(self) -> dict[str, Any]:
        facts = {"count": self.count, "mean": self.mean, "p50": self.p50, "p90": self.p90, "max": self.max}
        return {**facts, "histogram": [list(bin) for bin in self.histogram]}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Spread:
        """From the result of `to_dict`; other fields are ignored."""
        facts = {name: fields[name] for name in ("count", "mean", "p50", "p90", "max")}
        return cls(**facts, histogram=tuple(Bin(*bin) for bin in fields["histogram"]))


@dataclass(frozen=True)
class Staleness:
    """The tables of one run; all empty where workers do not train on leases."""

    overall: Spread | None = None
    workers: Mapping[int, Spread] = field(default_factory=dict)
    ranges: Mapping[tuple[int, int], Spread] = field(default_factory=dict)
    """By server and range."""
    dropped: Mapping[int, int] = field(default_factory=dict)
    """Pushes that were too stale, by worker."""
    lead: int | None = None
    """The most steps that a worker was ahead of the slowest; None where that is not bounded."""
    bound: int | None = None
    """The largest lead allowed. Records do not have it, so the caller must give it."""

    def to_dict(self) -> dict[str, Any]:
        """For JSON: tables are lists of lines."""
        return {
            "overall": None if self.overall is None else self.overall.to_dict(),
            "workers": [{"worker": worker, **spread.to_dict()} for worker, spread in self.workers.items()],
            "ranges": [{"server": s, "range": r, **spread.to_dict()} for (s, r), spread in self.ranges.items()],
            "dropped": [{"worker": worker, "count": count} for worker, count in self.dropped.items()],
            "lead": self.lead,
            "bound": self.bound,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Staleness:
        return cls(
            overall=None if fields["overall"] is None else Spread.from_dict(fields["overall"]),
            workers={line["worker"]: Spread.from_dict(line) for line in fields["workers"]},
            ranges={(line["server"], line["range"]): Spread.from_dict(line) for line in fields["ranges"]},
            dropped={line["worker"]: line["count"] for line in fields["dropped"]},
            lead=fields["lead"],
            bound=fields["bound"],
        )


def tables(records: Iterable[Record], bound: int | None = None) -> Staleness:
    """All tables of a run; `bound` is the lead that its strategy allowed."""
    workers: defaultdict[int, Counter[int]] = defaultdict(Counter)
    ranges: defaultdict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    too_stale = Dropped()
    lead: int | None = None
    for row in records:
        if row["kind"] == "dropped":
            too_stale.add(row)
        elif row["kind"] == "update":
            if "lead" in row:
                lead = row["lead"] if lead is None else max(lead, row["lead"])
            if not row["first"]:
                workers[row["worker"]][row["staleness"]] += 1
                ranges[row["rank"], row.get("range", 0)][row["staleness"]] += 1
    return Staleness(
        overall=_counted(sum(workers.values(), Counter())) if workers else None,
        workers={worker: _counted(values) for worker, values in sorted(workers.items())},
        ranges={place: _counted(values) for place, values in sorted(ranges.items())},
        dropped=too_stale.by_worker(),
        lead=lead,
        bound=bound,
    )


def later(updates: Iterable[Record]) -> list[Record]:
    """All updates but each worker's first push of a segment."""
    return [row for row in updates if not row["first"]]


def spread(values: Sequence[int]) -> Spread | None:
    """The distribution of some values; None if there are none."""
    return _spread(values) if values else None


def pooled(spreads: Iterable[Spread]) -> Spread | None:
    """Several distributions as one; a percentile that falls into a bin of several values is the bin's upper end."""
    some = list(spreads)
    if len(some) < 2:  # a single one keeps its exact percentiles
        return some[0] if some else None
    counts: Counter[tuple[int, int]] = Counter()
    for one in some:
        for low, high, updates in one.histogram:
            counts[low, high] += updates
    bins = tuple(Bin(*ends, updates) for ends, updates in sorted(counts.items()))
    total, top = sum(one.count for one in some), max(one.max for one in some)
    mean = sum(one.mean * one.count for one in some) / total
    return Spread(total, mean, min(top, _percentile(bins, 50)), min(top, _percentile(bins, 90)), top, bins)


def histogram(values: Iterable[int]) -> tuple[Bin, ...]:
    """Values counted in bins, without empty bins."""
    return binned(Counter(values))


def binned(counts: Mapping[int, int]) -> tuple[Bin, ...]:
    """`histogram` of values that are already counted."""
    bins: Counter[tuple[int, int]] = Counter()
    for value, updates in counts.items():
        bins[bin_of(value)] += updates
    return tuple(Bin(*ends, updates) for ends, updates in sorted(bins.items()))


def bin_of(value: int) -> tuple[int, int]:
    """The ends of a value's bin, both included."""
    if value <= SINGLE:
        return value, value
    high = 1 << (value - 1).bit_length()
    return high // 2 + 1, high


def dropped(records: Iterable[Record]) -> dict[int, int]:
    """Pushes that were too stale, by worker."""
    found = Dropped()
    for row in records:
        found.add(row)
    return found.by_worker()


class Dropped:
    """Counts pushes that were too stale.

    Every server records each dropped push, and a replaced server may have missed some; a slice that is lent again may
    be dropped again.
    """

    def __init__(self) -> None:
        self._seen: Counter[tuple[int, int, int]] = Counter()

    def add(self, row: Record) -> None:
        if row["kind"] == "dropped":
            require(row, "worker", "lease")
            self._seen[row["worker"], row["lease"], row["rank"]] += 1

    def by_worker(self) -> dict[int, int]:
        pushes: dict[tuple[int, int], int] = {}
        for (worker, lease, _), count in self._seen.items():
            pushes[worker, lease] = max(count, pushes.get((worker, lease), 0))
        found: Counter[int] = Counter()
        for (worker, _), count in pushes.items():
            found[worker] += count
        return dict(sorted(found.items()))


def restored(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Servers that replaced lost ones, in order of time.

    Each has `server`, `source` (of its state), `took_s` (since the loss; None where no launcher recorded it) and
    `lost_updates`: how many updates the lost server was ahead of its copy, as the maximum over its ranges.
    """
    found: list[dict[str, Any]] = []
    last: dict[int, dict[str, Any]] = {}
    for row in records:
        if row["kind"] == "restored":
            last[row["rank"]] = {"server": row["rank"], "source": row["source"], "took_s": None, "lost_updates": 0}
            found.append(last[row["rank"]])
        elif row["kind"] == "lost_updates" and row["rank"] in last:
            # Workers report one after another, each with the version it knows: the largest is what was lost.
            mine = last[row["rank"]]
            mine["lost_updates"] = max(mine["lost_updates"], row["updates"])
        elif row["kind"] == "replaced" and row["server"] in last:
            last[row["server"]]["took_s"] = row["took_ns"] / 1e9
    return found


def lost_updates(records: Iterable[Record]) -> dict[int, int]:
    """Updates lost with each server, summed over its losses."""
    found: Counter[int] = Counter()
    for one in restored(records):
        found[one["server"]] += one["lost_updates"]
    return dict(sorted(found.items()))


def _spread(values: Sequence[int]) -> Spread:
    return _counted(Counter(values))


def _counted(counts: Mapping[int, int]) -> Spread:
    """The distribution of counted values."""
    single = [Bin(value, value, updates) for value, updates in sorted(counts.items())]
    total = sum(counts.values())
    mean = sum(value * updates for value, updates in counts.items()) / total
    p50, p90 = _percentile(single, 50), _percentile(single, 90)
    return Spread(total, mean, p50, p90, single[-1].high, binned(counts))


def _percentile(bins: Sequence[Bin], percent: int) -> int:
    """The upper end of the bin with the value of this rank."""
    wanted = -(-sum(bin.updates for bin in bins) * percent // 100)
    for bin in bins:
        wanted -= bin.updates
        if wanted <= 0:
            return bin.high
    raise AssertionError("a spread has at least one value")
