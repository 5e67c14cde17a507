"""The audit: was every sample used once, by the records alone."""

from __future__ import annotations

from typing import Any

from podium.records.audit import audit
from podium.strategies import make_strategy
from podium.testing.toys import SAMPLES, toy, train

BEGIN = [{"kind": "begin", "rank": rank, "role": "worker", "position": 0} for rank in (0, 1)]
END = [{"kind": "end", "rank": rank, "position": 20, "param_hash": "x"} for rank in (0, 1)]


LOST = {"kind": "lost", "rank": -1, "lost": 1}


def step(rank: int, first: int, samples: int = 5, **more: int) -> dict[str, Any]:
    return {"kind": "step", "rank": rank, "first": first, "samples": samples, **more}


def update(worker: int, lease: int, server: int = 2, unit: int = 0, **more: int) -> dict[str, Any]:
    return {"kind": "update", "rank": server, "worker": worker, "lease": lease, "range": unit, **more}


def restored(updates: int, server: int = 2, **more: Any) -> dict[str, Any]:
    return {"kind": "restored", "rank": server, "updates": updates, "source": "snapshot", **more}


def test_all_is_well_where_steps_tile_the_order() -> None:
    steps = [step(0, 0), step(1, 5), step(1, 10), step(0, 15)]
    assert audit([*BEGIN, *steps, *END]) == (0, 0)


def test_what_is_missing_or_done_twice_is_counted() -> None:
    assert audit([*BEGIN, step(0, 0), step(1, 10), step(0, 15), *END]) == (5, 0)
    assert audit([*BEGIN, step(0, 0, 10), step(1, 5), step(1, 10), step(0, 15), *END]) == (0, 5)
    assert audit([*BEGIN, step(0, 0), *END]) == (15, 0)


def test_a_round_that_was_undone_did_not_count() -> None:
    undone = {"kind": "undone", "rank": 0, "steps": 1, "step": 1, "position": 5}
    steps = [step(0, 0), step(0, 5), undone, step(0, 5, 15)]
    assert audit([*BEGIN, *steps, *END]) == (0, 0)


def test_a_killed_worker_cannot_say_that_its_part_was_undone() -> None:
    undone = {"kind": "undone", "rank": 0, "steps": 1, "step": 1, "position": 10}
    lost = LOST
    steps = [step(0, 0), step(1, 5), step(1, 15), step(0, 10), lost, undone, step(0, 10, 10)]
    assert audit([*BEGIN, *steps, END[0]]) == (0, 0)


def test_a_lease_that_was_lent_again_counts_once() -> None:
    lost = {"kind": "lost", "rank": -1, "lost": 1}
    assert audit([*BEGIN, step(0, 0), step(1, 5), lost, step(0, 5), step(0, 10, 10), END[0]]) == (0, 0)


def test_a_push_that_was_dropped_many_times_is_taken_out_as_often() -> None:
    dropped = [{"kind": "dropped", "rank": server, "worker": 1, "lease": 5, "staleness": 9} for server in (2, 3, 2, 3)]
    steps = [step(0, 0), step(1, 5), step(1, 5), step(1, 5), step(1, 10, 10)]
    assert audit([*BEGIN, *steps, *dropped, *END]) == (0, 0)


def test_records_that_do_not_say_cannot_be_audited() -> None:
    assert audit([*BEGIN, {"kind": "step", "rank": 0, "samples": 5}, *END]) is None


def test_a_real_run_that_loses_a_step_would_be_found_out() -> None:
    run = "all-reduce until step:at=3 | parameter-server:mode=async"
    trained = train(toy(), make_strategy("phases", {"run": run}, 3), 3)
    rows = [row for one in trained for row in one.records]
    assert audit(rows) == (0, 0)
    without = [row for row in rows if not (row["kind"] == "step" and row["rank"] == 1 and row["step"] == 2)]
    missing, repeated = audit(without) or (0, 0)
    assert 0 < missing < SAMPLES
    assert repeated == 0


class TestLostRanks:
    """The survivors' records tell what a lost rank could not put on record."""

    def test_the_last_line_of_a_lost_worker_is_not_missed_where_the_others_have_made_the_step(self) -> None:
        steps = [step(0, 0, position=10), step(1, 5, position=10), step(0, 10, position=20), LOST]
        assert audit([*BEGIN, *steps, END[0]]) == (0, 0)
        assert audit([*BEGIN, step(0, 0, position=10), LOST, step(0, 10, 10, position=20), END[0]]) == (0, 0)

    def test_no_other_line_of_it_may_be_missing(self) -> None:
        steps = [step(0, 0, position=10), step(0, 10, position=20), step(1, 15, position=20), LOST]
        assert audit([*BEGIN, *steps, END[0]]) == (5, 0)

    def test_a_host_takes_with_it_what_its_ranks_had_not_sent(self) -> None:
        """Several steps before the survivors regrouped without it, as their record says; none after."""
        lost = {**LOST, "generation": 0}
        regroup = {"kind": "regroup", "rank": 0, "generation": 1, "position": 30, "members": [0]}
        steps = [step(0, 0, position=10), step(1, 5, position=10), step(0, 10, position=20), step(0, 20, position=30)]
        end = {"kind": "end", "rank": 0, "position": 40, "param_hash": "x"}
        assert audit([*BEGIN, *steps, lost, regroup, step(0, 30, 10, position=40), end]) == (0, 0)
        assert audit([*BEGIN, *steps, lost, regroup, step(0, 30, 5, position=40), end]) == (5, 0)
        assert audit([*BEGIN, *steps, lost, step(0, 30, 10, position=40), end]) == (5, 0)
        none_came = [row for row in [*BEGIN, *steps] if row["rank"] != 1]
        rest = [regroup, step(0, 30, 10, position=40), end]
        assert audit([*none_came, {**lost, "role": "worker"}, *rest]) == (0, 0)
        assert audit([*none_came, {**lost, "role": "server"}, *rest]) == (15, 0)

    def test_a_survivor_that_copied_the_last_step_has_no_line_of_it(self) -> None:
        begin = [*BEGIN, {"kind": "begin", "rank": 2, "role": "worker", "position": 0}]
        rows = [step(rank, rank * 2, 2, position=6) for rank in range(3)]
        rows += [step(0, 6, 2, position=12)]  # worker 1 was lost in this step, and worker 2 had not applied it
        rows += [step(0, 12, 3, position=18), step(2, 15, 3, position=18)]
        regroup = {"kind": "regroup", "rank": 0, "generation": 1, "position": 12, "members": [0, 2]}
        end = {"kind": "end", "rank": 0, "position": 18, "param_hash": "x"}
        assert audit([*begin, *rows, {**LOST, "generation": 0}, regroup, end]) == (0, 0)
        assert audit([*begin, *rows, {**LOST, "generation": 0}, end]) == (4, 0)

    def test_a_line_that_another_worker_lacks_is_missing(self) -> None:
        begin = [*BEGIN, {"kind": "begin", "rank": 2, "role": "worker", "position": 0}]
        end = {"kind": "end", "rank": 0, "position": 18, "param_hash": "x"}
        rows = [step(rank, rank * 2, 2, position=6) for rank in range(3)]
        rows += [step(0, 6, 2, position=12), step(2, 10, 2, position=12)]  # worker 1 was lost before it wrote its line
        rows += [step(0, 12, 3, position=18), step(2, 15, 3, position=18)]
        assert audit([*begin, *rows, LOST, end]) == (0, 0)
        without = [row for row in rows if (row["rank"], row["position"]) != (2, 12)]
        assert audit([*begin, *without, LOST, end]) == (4, 0)

    def test_a_step_that_the_others_made_again_counts_once(self) -> None:
        steps = [step(0, 0, position=10), step(1, 5, position=10), step(1, 15, position=20), LOST]
        assert audit([*BEGIN, *steps, step(0, 10, 10, position=20), END[0]]) == (0, 0)

    def test_a_lease_that_servers_applied_for_it_was_used(self) -> None:
        updates = [update(0, 0), update(1, 5), update(0, 10), update(0, 15)]
        steps = [step(0, 0), step(0, 10), step(0, 15), LOST]
        assert audit([*BEGIN, *steps, *updates, END[0]]) == (0, 0)
        assert audit([*BEGIN, *steps, *[u for u in updates if u["lease"] != 5], END[0]]) == (5, 0)
        mine = [update(0, row["lease"]) for row in updates]
        assert audit([*BEGIN, *steps, *mine, END[0]]) == (5, 0)  # it was not the lost worker's

    def test_a_short_lease_of_a_lost_worker_is_not_taken_for_a_long_one(self) -> None:
        steps = [step(0, 0), step(0, 7, 13), LOST]  # the worker that had 5 to 7 was lost before its record came
        updates = [update(0, 0), update(1, 5), update(0, 7)]
        assert audit([*BEGIN, *steps, *updates, END[0]]) == (0, 0)

    def test_leases_that_were_trained_on_twice_and_applied_once_count_once(self) -> None:
        steps = [step(0, 0), step(1, 5), step(0, 5), step(0, 10, 10)]
        updates = [update(0, 0), update(1, 5), update(0, 10)]
        skipped = {"kind": "arrival", "rank": 2, "source": 0, "what": "push", "lease": 5, "range": 0}
        assert audit([*BEGIN, *steps, *updates, skipped, *END]) == (0, 0)
        assert audit([*BEGIN, *steps, *updates, update(0, 5), *END]) == (0, 5)

    def test_what_a_server_applied_after_its_copy_is_void(self) -> None:
        first, again = [update(0, 0), update(1, 5), update(0, 10)], [update(0, 5), update(1, 10), update(0, 15)]
        steps = [step(0, 0), step(1, 5), step(0, 10), step(0, 5), step(1, 10), step(0, 15)]
        other = [update(w, n, server=3) for w, n in ((0, 0), (1, 5), (0, 10), (0, 15))]
        assert audit([*BEGIN, *steps, *first, restored(1), *again, *other, *END]) == (0, 0)
        assert audit([*BEGIN, *steps, *first, restored(3), *again, *other, *END]) == (0, 10)
        assert audit([*BEGIN, *steps, *first, *again, restored(1, server=3), *END]) == (0, 10)

    def test_updates_of_several_pushes_are_told_apart(self) -> None:
        rows = [update(0, 0, pushes=2), update(1, 5, pushes=2), update(0, 10, pushes=2), update(1, 15, pushes=2)]
        steps = [step(0, 0), step(1, 5), step(0, 10), step(1, 15)]
        assert audit([*BEGIN, *steps, *rows, restored(1), *rows[2:], *END]) == (0, 0)
        assert audit([*BEGIN, *steps, *rows, restored(2), *rows[2:], *END]) == (0, 10)

    def test_updates_without_a_record_do_not_count_among_those_that_a_copy_has(self) -> None:
        """Those of a phase of global steps, before: the server has made 100 of them."""
        steps = [step(0, first) for first in (0, 5, 10, 15)]
        first, again = [update(0, lease) for lease in (0, 5, 10)], [update(0, lease) for lease in (5, 10, 15)]
        rows = [*BEGIN, *steps, *first]
        assert audit([*rows, restored(101, recorded=[[0, 1]]), *again, *END]) == (0, 0)
        assert audit([*rows, restored(102, recorded=[[0, 2]]), *again, *END]) == (0, 5)

    def test_ranges_may_be_at_different_updates_in_one_copy(self) -> None:
        """One worker's push was applied to the first range only when the snapshot was taken."""
        steps = [step(0, first) for first in (0, 5, 10, 15)]
        both = [update(0, lease, unit=unit) for lease in (0, 5, 10, 15) for unit in (0, 1)]
        again = [update(0, 5, unit=1), *both[4:]]
        assert audit([*BEGIN, *steps, *both[:6], restored(2, recorded=[[0, 2], [1, 1]]), *again, *END]) == (0, 0)

    def test_leases_of_several_steps_that_overlap_on_a_server_are_found(self) -> None:
        steps = [step(0, 0), step(0, 5), step(1, 5), step(1, 10), step(0, 15)]
        good = [update(0, 0, samples=10), update(1, 10, samples=5), update(0, 15, samples=5)]
        bad = [update(0, 0, samples=10), update(1, 5, samples=10), update(0, 15, samples=5)]
        pushed = {"kind": "arrival", "rank": 2, "source": 1, "what": "push", "lease": 5, "range": 0}
        assert audit([*BEGIN, *steps, *good, pushed, *END]) == (0, 0)
        assert audit([*BEGIN, *steps, *bad, *END]) == (0, 5)
