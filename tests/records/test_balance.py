"""Who did how much of shared steps, from hand-written records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from podium.records.balance import MOST_POINTS, balance, whole_steps
from podium.records.summary import summarise

MS = 1_000_000


def step(rank: int, number: int, first: int, end: int, samples: int, pass_ms: float, step_ms: float) -> dict[str, Any]:
    """A worker's part of a global step; what it does not compute it waits."""
    times = {"pass_ns": int(pass_ms * MS), "step_ns": int(step_ms * MS), "wait_ns": int((step_ms - pass_ms) * MS)}
    place = {"step": number, "first": first, "position": end, "samples": samples, "sent": 0}
    return {"kind": "step", "rank": rank, "t_ns": int(number * step_ms * MS), **place, **times}


def run(steps: int, parts: Sequence[int], per_sample_ms: Sequence[float], exchange_ms: float = 1.0) -> list[Any]:
    """Steps of workers that take so many milliseconds for a sample and then exchange."""
    size = sum(parts)
    lasts = max(part * ms for part, ms in zip(parts, per_sample_ms, strict=True)) + exchange_ms
    rows = []
    for k in range(steps):
        first = k * size
        for rank, (part, ms) in enumerate(zip(parts, per_sample_ms, strict=True)):
            rows.append(step(rank, k + 1, first, (k + 1) * size, part, part * ms, lasts))
            first += part
    return rows


def change(after_step: int, before: Sequence[int], after: Sequence[int], **fields: Any) -> dict[str, Any]:
    facts = {"kind": "balance", "rank": 0, "t_ns": 50 * MS, "step": after_step, "balancer": "equal-finish"}
    facts |= {"ranks": list(range(len(before))), "before": list(before), "after": list(after)}
    return {**facts, "predicted_s": {"before": 0.04, "after": 0.03}, **fields}


def test_each_worker_is_told_of_with_its_speed_and_its_waiting() -> None:
    found = balance(run(20, [8, 8], [1.0, 4.0]), 0)
    fast, slow = found["workers"]
    assert (fast["samples_per_s"], slow["samples_per_s"]) == (pytest.approx(1000), pytest.approx(250))
    assert (fast["wait_share"], slow["wait_share"]) == (pytest.approx(25 / 33), pytest.approx(1 / 33))
    assert fast["samples"] == slow["samples"] == 160
    assert found["division"] == {"0": 8, "1": 8} and found["uneven"] and found["changes"] == []


def test_what_the_last_to_come_waits_is_the_exchange() -> None:
    assert balance(run(20, [8, 8], [1.0, 4.0], exchange_ms=3.0), 0)["exchange_s"] == pytest.approx(0.003)


def test_a_warm_up_is_left_out_of_times_but_not_of_samples() -> None:
    rows = run(20, [8, 8], [1.0, 1.0])
    for row in rows[:4]:
        row["pass_ns"], row["step_ns"] = 900 * MS, 1000 * MS
    found = balance(rows, 0)
    assert found["workers"][0]["samples_per_s"] == pytest.approx(1000) and found["workers"][0]["samples"] == 160


def test_workers_that_are_alike_are_not_called_uneven_and_leave_no_course() -> None:
    found = balance(run(20, [8, 8], [1.0, 1.05]), 0)
    assert not found["uneven"] and "course" not in found


def test_a_difference_that_may_be_chance_is_none() -> None:
    rows = run(6, [8, 8], [1.0, 1.2])
    for row in rows:  # one worker's passes are all over the place
        if row["rank"] == 1:
            row["pass_ns"] = (2 if row["step"] % 2 else 17) * MS
    assert not balance(rows, 0)["uneven"]


def test_unequal_parts_and_changes_leave_a_course_of_shares_and_times() -> None:
    rows = [*run(10, [8, 8], [1.0, 3.0]), change(10, [8, 8], [12, 4])]
    later = [{**row, "step": row["step"] + 10, "first": row["first"] + 160, "position": row["position"] + 160}
             for row in run(10, [12, 4], [1.0, 3.0])]  # fmt: skip
    found = balance([*rows, *later], 0)
    assert found["division"] == {"0": 12, "1": 4}
    (told,) = found["changes"]
    assert (told["step"], told["before"], told["after"], told["why"]) == (10, [8, 8], [12, 4], "gain")
    assert told["saves"] == pytest.approx(0.25) and told["seconds"] == pytest.approx(0.05)
    course = found["course"]
    assert course["step"] == list(range(1, 21))
    assert course["workers"]["0"]["share"] == [0.5] * 10 + [0.75] * 10
    assert course["workers"]["1"]["pass_ms"] == [None, None, *[24.0] * 8, *[12.0] * 10]  # warming up at first
    assert course["step_ms"][2:] == [25.0] * 8 + [13.0] * 10


def test_a_change_without_a_prediction_is_told_of_all_the_same() -> None:
    (told,) = balance([*run(6, [8, 8], [1.0, 2.0]), change(3, [8, 8], [9, 7], predicted_s=None)], 0)["changes"]
    assert told["saves"] is None


def test_a_long_run_has_a_course_of_means() -> None:
    course = balance(run(1001, [12, 4], [1.0, 3.0]), 0)["course"]
    assert len(course["step"]) <= MOST_POINTS and course["step"][:3] == [1, 7, 13]
    assert set(course["workers"]["0"]["share"]) == {0.75}


def test_a_short_last_step_is_neither_the_division_nor_a_dent_in_the_course() -> None:
    rows = run(10, [12, 4], [1.0, 3.0])
    short = [step(0, 11, 160, 164, 3, 3.0, 4.0), step(1, 11, 163, 164, 1, 3.0, 4.0)]
    found = balance([*rows, *short], 0)
    assert found["division"] == {"0": 12, "1": 4} and len(found["course"]["step"]) == 10


def test_a_worker_that_is_lost_has_a_gap_and_no_part_of_the_last_division() -> None:
    rows = run(10, [8, 8], [1.0, 4.0])
    alone = [step(0, k, 160 + 16 * (k - 11), 160 + 16 * (k - 10), 16, 16.0, 17.0) for k in range(11, 14)]
    found = balance([*rows, *alone], 0)  # steps of one worker alone were not shared
    assert found["division"] == {"0": 8, "1": 8} and len(whole_steps([*rows, *alone])) == 10


def test_leases_and_rounds_of_unequal_numbers_of_steps_are_no_shared_steps() -> None:
    leases = [step(k % 2, k // 2 + 1, 8 * k, 8 * (k + 1), 8, 8.0, 9.0) for k in range(20)]
    round_ = [step(0, 1, 0, 0, 8, 8.0, 9.0), step(0, 2, 8, 24, 8, 8.0, 9.0), step(1, 1, 16, 24, 8, 8.0, 9.0)]
    assert balance(leases, 0) == {} and balance(round_, 0) == {}


def test_rounds_are_told_of_by_the_steps_of_each_worker() -> None:
    first, rest = run(1, [8, 8], [1.0, 2.0]), [step(rank, 2, 16, 16, 8, 8.0 + 8 * rank, 17.0) for rank in (0, 1)]
    paced = change(1, [1, 1], [2, 1], unit="steps", balancer="steps=speed")
    found = balance([*first, paced, *rest], 0)
    assert (found["unit"], found["division"], found["balancer"]) == ("steps", {"0": 2, "1": 1}, "steps=speed")
    assert found["workers"][1]["samples"] == 16 and "course" not in found


def test_records_of_older_runs_say_nothing_and_a_summary_has_its_place_for_it() -> None:
    rows = run(6, [8, 8], [1.0, 4.0])
    older = [{k: v for k, v in row.items() if k != "pass_ns"} for row in rows]
    assert summarise(older)["balance"] == {} and summarise(rows)["balance"]["uneven"]
