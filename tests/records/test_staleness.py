"""Tables of staleness, from hand-written records and from a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.records.recorder import read_records, to_json
from podium.records.staleness import Bin, Staleness, bin_of, dropped, histogram, lost_updates, pooled, restored, spread
from podium.records.staleness import tables as tables_of


def row(kind: str, rank: int, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "t_ns": 0, **fields}


def update(server: int, worker: int, staleness: int, *, first: bool = False, **fields: Any) -> dict[str, Any]:
    return row("update", server, worker=worker, staleness=staleness, first=first, **fields)


def drop(server: int, worker: int, lease: int) -> dict[str, Any]:
    return row("dropped", server, worker=worker, lease=lease, staleness=9)


def test_values_beyond_64_share_bins_that_end_at_powers_of_two() -> None:
    assert [bin_of(v) for v in (0, 64, 65, 128, 129, 1000)] == [
        (0, 0),
        (64, 64),
        (65, 128),
        (65, 128),
        (129, 256),
        (513, 1024),
    ]
    assert histogram([3, 70, 3, 128, 0]) == (Bin(0, 0, 1), Bin(3, 3, 2), Bin(65, 128, 2))


def test_bins_follow_on_one_another_without_gap_or_overlap() -> None:
    low, high = bin_of(0)
    for value in range(2000):
        if value > high:
            assert bin_of(value)[0] == high + 1
            low, high = bin_of(value)
        assert low <= value <= high and bin_of(value) == (low, high)


def test_a_spread_is_that_of_its_values() -> None:
    found = spread([5, 1, 2, 4, 3, 10, 9, 8, 7, 100])
    assert found is not None
    assert (found.count, found.mean, found.p50, found.p90, found.max) == (10, 14.9, 5, 10, 100)
    assert spread([]) is None


def test_spreads_together_are_the_spread_of_all_values() -> None:
    first, second = [0, 1, 1, 2], [3, 3, 5, 64, 7]
    parts = [one for one in (spread(first), spread(second)) if one is not None]
    whole, together = spread(first + second), pooled(parts)
    assert whole is not None and together is not None
    assert together.mean == pytest.approx(whole.mean)
    assert (together.count, together.p50, together.p90) == (whole.count, whole.p50, whole.p90)
    assert (together.max, together.histogram) == (whole.max, whole.histogram)
    assert pooled([]) is None


def test_a_percentile_of_several_runs_never_lies_beyond_their_largest_value() -> None:
    parts = [one for one in (spread([70]), spread([80])) if one is not None]
    together = pooled(parts)
    assert together is not None and (together.p50, together.p90, together.max) == (80, 80, 80)


def test_updates_are_told_apart_by_worker_and_by_server_and_range() -> None:
    found = tables_of(
        [
            update(4, 0, 9, first=True, range=0),
            update(4, 0, 1, range=0),
            update(4, 1, 3, range=0),
            update(4, 0, 5, range=1),
            update(5, 1, 7, range=0),
            row("step", 0, step=1),
        ]
    )
    assert found.overall is not None and (found.overall.count, found.overall.mean, found.overall.max) == (4, 4.0, 7)
    assert {worker: one.mean for worker, one in found.workers.items()} == {0: 3.0, 1: 5.0}
    assert {place: one.mean for place, one in found.ranges.items()} == {(4, 0): 2.0, (4, 1): 5.0, (5, 0): 7.0}


def test_records_without_a_range_are_of_range_0() -> None:
    assert list(tables_of([update(2, 0, 1), update(2, 1, 2)]).ranges) == [(2, 0)]


def test_a_run_without_updates_has_empty_tables() -> None:
    assert tables_of([row("step", 0, step=1)]) == Staleness()


def test_the_largest_lead_is_of_all_updates_and_absent_where_nothing_is_bounded() -> None:
    bounded = [update(2, 0, 0, first=True, lead=2), update(2, 0, 0, lead=1)]
    assert (tables_of(bounded, bound=3).lead, tables_of(bounded, bound=3).bound) == (2, 3)
    assert tables_of([update(2, 0, 0)]).lead is None


def test_a_dropped_push_counts_once_however_many_servers_wrote_it_down() -> None:
    both = [drop(server, 1, 64) for server in (4, 5)]
    again = [drop(server, 1, 64) for server in (4, 5)]
    missed_by_a_replaced_server = [drop(5, 0, 128)]
    assert dropped([*both, *again, *missed_by_a_replaced_server, update(4, 0, 1)]) == {0: 1, 1: 2}


def test_a_restored_server_lost_as_much_as_its_furthest_worker_knew() -> None:
    records = [
        row("restored", 4, source="snapshot", updates=10),
        row("lost_updates", 4, range=0, updates=3),
        row("lost_updates", 4, range=0, updates=5),
        row("lost_updates", 4, range=1, updates=4),
        row("replaced", -1, server=4, took_ns=500_000_000),
        row("restored", 5, source="replica at 4", updates=12),
        row("restored", 4, source="snapshot", updates=20),
        row("lost_updates", 4, range=1, updates=2),
    ]
    assert restored(records) == [
        {"server": 4, "source": "snapshot", "took_s": 0.5, "lost_updates": 5},
        {"server": 5, "source": "replica at 4", "took_s": None, "lost_updates": 0},
        {"server": 4, "source": "snapshot", "took_s": None, "lost_updates": 2},
    ]
    assert lost_updates(records) == {4: 7, 5: 0}


def test_tables_come_back_from_json_as_they_were() -> None:
    records = [update(4, 0, 1, range=0, lead=1), update(5, 1, 90, range=2), drop(4, 1, 0)]
    found = tables_of(records, bound=3)
    assert Staleness.from_dict(json.loads(to_json(found.to_dict()))) == found


def test_the_tables_of_a_run_agree_with_its_result_and_the_bound_is_kept(tmp_path: Path) -> None:
    strategy = {"mode": "ssp", "staleness": 2, "servers": 2, "unit_bytes": 8000}
    fields: dict[str, Any] = {"workers": 3, "launcher": "virtual", "steps": 12, "run_dir": str(tmp_path / "run")}
    result = podium.train("digits-mlp", strategy="parameter-server", strategy_options=strategy, **fields)
    found = tables_of(read_records(tmp_path / "run"), bound=2)
    assert found.overall is not None and found.lead is not None
    assert found.overall.count == result.staleness["count"] and found.overall.max == result.staleness["max"]
    assert [list(bin) for bin in found.overall.histogram] == result.histogram
    assert set(found.workers) == {0, 1, 2} and {server for server, _ in found.ranges} == {3, 4}
    assert len(found.ranges) > 2, "each server holds several ranges"
    for table in (found.workers, found.ranges):
        assert sum(one.count for one in table.values()) == found.overall.count
    assert found.lead <= 2


def test_backups_drop_pushes_and_the_result_says_how_many(tmp_path: Path) -> None:
    strategy = {"mode": "backup", "servers": 2}
    fields: dict[str, Any] = {"workers": 3, "launcher": "virtual", "steps": 12, "run_dir": str(tmp_path / "run")}
    result = podium.train("digits-mlp", strategy="parameter-server", strategy_options=strategy, **fields)
    records = list(read_records(tmp_path / "run"))
    of_first_server = [r for r in records if r["kind"] == "dropped" and r["rank"] == 3]
    assert result.dropped == len(of_first_server) > 0
    assert result.restored == []
