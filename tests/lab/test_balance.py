"""What is drawn and advised where workers differ."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from podium.lab.report.balance import advice, balanced_by_cell, division, exchange_of
from podium.lab.report.drawing import to_plotly, to_svg
from podium.lab.report.figures import MOST_LAYERS, balance_courses
from podium.lab.report.report import write_report
from podium.lab.study.store import Row
from podium.records.balance import balance
from tests.lab.synthetic import make_row, write_study
from tests.records.test_balance import change, run


def uneven(workers: int = 2) -> dict[str, Any]:
    """A balanced run: the first worker is three times faster than each of the others, and got three times as much."""
    slow = workers - 1
    before, after = [6] * workers, [9, *[3] * slow]
    first = run(10, after, [1.0, *[3.0] * slow])
    return balance([change(0, before, after), *first], 0)


def rows() -> list[Row]:
    return [make_row("all-reduce", seed, balance=uneven()) for seed in (0, 1)] + [make_row("solo", 0, balance={})]


def test_equal_parts_of_unequal_workers_are_advised_against() -> None:
    (line,) = advice(balance(run(20, [8, 8], [1.0, 4.0]), 0))
    assert line.startswith("--balance equal-finish: steps up to ") and "worker 1 takes 4.0 times as long" in line
    saves = int(line.partition("up to ")[2].partition(" %")[0])
    assert saves == round(100 * (32 - 13) / 33)  # 32 ms against 13 and 3 samples: 13 ms, of a step of 33 ms


def test_nothing_is_advised_where_it_matters_little_or_a_balancer_is_at_it() -> None:
    assert advice(balance(run(20, [8, 8], [1.0, 1.04]), 0)) == []
    assert advice({**balance(run(20, [8, 8], [1.0, 4.0]), 0), "balancer": "equal-finish"}) == []
    assert advice({}) == []


def test_fixed_shares_that_do_not_fit_the_speeds_are_advised_against() -> None:
    (line,) = advice(balance(run(20, [12, 4], [1.0, 1.0]), 0))
    assert "worker 0 has too many samples for its speed" in line


def test_a_worker_that_costs_more_than_it_brings_is_named() -> None:
    facts = {**balance(run(20, [15, 1], [1.0, 15.0], exchange_ms=40.0), 0), "balancer": "equal-finish"}
    (line,) = advice(facts)
    assert line.startswith("without worker 1 a step takes 16 ms instead of 55 ms")
    assert advice(balance(run(20, [8, 8], [1.0, 1.0], exchange_ms=40.0), 0)) == []  # two alike: neither is named


def test_an_exchange_shrinks_as_a_ring_does_and_with_servers_stays() -> None:
    ring = exchange_of(4, 3.0, servers=False)
    assert [ring(n) for n in (1, 2, 4)] == pytest.approx([0.0, 2.0, 3.0])
    assert exchange_of(4, 3.0, servers=True)(1) == 3.0


def test_a_division_among_many_is_told_by_its_ends() -> None:
    assert division([32, 16, 8, 8]) == "32/16/8/8"
    assert division(list(range(1, 20))) == "1 to 19"


def test_workers_are_told_of_by_strategy_over_all_seeds() -> None:
    (found,) = balanced_by_cell(rows()).values()
    assert [(part.rank, part.share) for part in found.parts] == [(0, 0.75), (1, 0.25)]
    assert found.parts[0].samples_per_s == pytest.approx(1000)
    assert [seed for seed, _ in found.changes] == [0, 1] and found.seed == 0


def test_a_course_has_shares_above_times_with_a_mark_where_the_division_changed() -> None:
    (found,) = balance_courses(rows()).values()
    shares, times = found.strips
    assert [trace.name for trace in shares.traces] == ["worker 0", "worker 1"]
    assert set(shares.traces[0].y) == {75.0} and shares.whole is None
    assert times.traces[1].y[2:] == (9.0,) * 8 and times.whole is not None and times.whole.y[2:] == (10.0,) * 8
    assert found.marks == (1,)  # the first step under the new division, of this run alone


def test_equal_workers_are_not_drawn() -> None:
    alike = balance(run(20, [8, 8], [1.0, 1.0]), 0)
    assert balance_courses([make_row("all-reduce", 0, balance=alike), make_row("solo", 0)]) == {}


def test_rounds_are_told_of_and_not_drawn() -> None:
    changed = change(1, [1, 1], [2, 1], unit="steps", balancer="steps=speed")
    facts = balance([*run(3, [8, 8], [1.0, 2.0]), changed], 0)
    row = make_row("local-sgd:steps=speed", 0, balance=facts)
    (found,) = balanced_by_cell([row]).values()
    assert (found.unit, found.course, found.advice) == ("steps", None, ()) and balance_courses([row]) == {}
    assert found.parts[0].share == pytest.approx(2 / 3)


def test_many_workers_are_drawn_by_lowest_median_and_highest() -> None:
    row = make_row("all-reduce", 0, balance=uneven(MOST_LAYERS + 1))
    (found,) = balance_courses([row]).values()
    assert [trace.name for trace in found.strips[0].traces] == ["highest", "median", "lowest"]
    assert found.strips[0].traces[0].y[0] == pytest.approx(100 * 9 / 33, rel=1e-4)


def test_a_course_is_drawn_on_paper_and_on_the_screen_from_the_same_numbers() -> None:
    (found,) = balance_courses(rows()).values()
    screen = json.loads(json.dumps(to_plotly(found, {})))
    assert [trace["name"] for trace in screen["data"]] == ["worker 0", "worker 1", "worker 0", "worker 1", "whole step"]
    assert screen["data"][3]["y"][:3] == [None, None, 9.0]  # a gap while it warms up
    assert [shape["x0"] for shape in screen["layout"]["shapes"]] == [1]
    paper = to_svg(found, {})
    assert paper is not None and "worker 1" in paper and "ms of computing" in paper and "whole step" in paper


def test_the_report_tells_of_uneven_workers_and_only_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # drawing on paper is most of a report's time
    store = write_study(tmp_path / "uneven", rows())
    page = write_report(store.folder).read_text(encoding="utf-8")
    assert "Uneven workers, all-reduce" in page and "Uneven workers, solo" not in page
    assert "6/6" in page and "9/3" in page and "75 %" in page and "shares and step times, all-reduce, seed 0" in page
    other = write_study(tmp_path / "alike", [make_row("all-reduce", 0, history=[])])
    assert "Uneven workers" not in write_report(other.folder, include_plotly=False).read_text(encoding="utf-8")
