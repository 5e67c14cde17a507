"""Two sets of results side by side: what changed, what did not, and what nobody can tell."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from podium.errors import RecordError
from podium.lab.report.versus import Set, Versus, compare_results, compare_sets, lines, welch, write_versus
from podium.lab.study.store import Row, Store
from podium.lab.study.study import Study
from tests.lab.synthetic import STRATEGIES, failed_row, make_row, write_study

stats = pytest.importorskip("scipy.stats")
pytest.importorskip("statsmodels")
pytest.importorskip("matplotlib")

SEEDS = 5


def some_rows(slower: float = 1.0, noise: float = 0.02, start: int = 0, draw: int = 0, **fields: Any) -> list[Row]:
    """Five seeds of three cells; all-reduce takes `slower` times as long as it should."""
    rng = random.Random(draw)
    return [
        make_row(
            cell,
            seed,
            seconds=(1 + rng.gauss(0, noise)) * (slower if cell == "all-reduce" else 1),
            final=0.9 + 0.01 * seed + rng.gauss(0, 0.001),
            **fields,
        )
        for cell in STRATEGIES
        for seed in range(start, start + SEEDS)
    ]


def save(folder: Path, rows: list[Row]) -> Store:
    """A study's folder with these rows, written in one go."""
    store = write_study(folder, [], SEEDS)
    store.results.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return store


@pytest.fixture
def versus(tmp_path: Path) -> Callable[..., Versus]:
    """Compare two lists of rows, with changes to the second one's study."""

    def run(a: list[Row], b: list[Row], **changed: Any) -> Versus:
        for name, rows in (("a", a), ("b", b)):
            store = save(tmp_path / name, rows)
            if name == "b":
                store.write_study({**store.read_study(), **changed})
        return compare_results(tmp_path / "a", tmp_path / "b")

    return run


def test_a_planted_slow_down_is_found_in_its_cell_and_nowhere_else(versus: Callable[..., Versus]) -> None:
    found = versus(some_rows(), some_rows(1.3, draw=1))
    verdicts = {change.cell: change.verdict for change in found.of("seconds")}
    assert verdicts.pop("all-reduce") == "larger"
    assert set(verdicts.values()) == {"no difference detected"}
    change = found.of("seconds")[1]
    assert change.low is not None and change.high is not None
    assert change.low < 1.3 < change.high
    begin, end = "Seconds: 1 of 3 cells became slower (all-reduce), by 1.", "×; in 2 no difference that we can detect."
    assert found.answer.startswith(begin) and end in found.answer
    assert "Final accuracy: no difference that we can detect in 3 cells." in found.answer


def test_tests_are_paired_by_seed_and_corrected_over_cells(versus: Callable[..., Versus]) -> None:
    a, b = some_rows(), list(reversed(some_rows(draw=1)))  # the order in which runs ended means nothing
    found = versus(a, b).of("final accuracy")
    raw = []
    for change in found:
        values = [
            [row["metrics"]["accuracy"] for row in sorted(rows, key=lambda row: int(row["seed"])) if row["cell"] == c]
            for rows, c in ((b, change.cell), (a, change.cell))
        ]
        raw.append(stats.ttest_rel(*values).pvalue)
        assert change.p == pytest.approx(raw[-1])
        assert change.test == "paired"
    assert min(change.p_holm or 0 for change in found) == pytest.approx(min(1, 3 * min(raw)))


def test_half_as_many_bytes_and_a_better_metric_are_told_in_their_own_words(versus: Callable[..., Versus]) -> None:
    b = [
        {
            **row,
            "sent_bytes": row["sent_bytes"] // 2,
            "metrics": {"accuracy": row["metrics"]["accuracy"] + 0.05 + 1e-5 * row["seed"]},
        }
        for row in some_rows()
    ]
    answer = versus(some_rows(), b).answer
    assert "Final accuracy: 3 of 3 cells became better, by 0.05" in answer
    assert "Bytes sent: 2 of 2 cells became smaller, by 2.00×." in answer
    assert "Seconds: the same in every pair of 3 cells." in answer


def test_a_difference_in_the_last_digit_is_none(versus: Callable[..., Versus]) -> None:
    a = [make_row("solo", seed, final=0.9, seconds=1.0) for seed in range(3)]
    b = [make_row("solo", seed, final=0.9 * (1 + 4e-16), seconds=1 + 4e-16) for seed in range(3)]
    found = versus(a, b)
    assert found.of("final accuracy")[0].p == 1.0
    assert {change.verdict for change in found.changes} == {"the same in every pair"}


def test_a_metric_that_is_better_when_lower_became_worse_when_higher(versus: Callable[..., Versus]) -> None:
    a = [make_row("solo", seed, metric="mae", final=0.5 + 0.01 * seed) for seed in range(3)]
    b = [make_row("solo", seed, metric="mae", final=0.7 + 0.011 * seed) for seed in range(3)]
    assert "Final mae: solo became worse, by 0.20" in versus(a, b).answer


def test_one_run_is_no_test(versus: Callable[..., Versus]) -> None:
    found = versus([make_row("solo", 0, seconds=1.0)], [make_row("solo", 0, seconds=1.5)])
    change = found.of("seconds")[0]
    assert (change.p, change.low, change.verdict) == (None, None, "not tested")
    assert "Seconds: 1.50× in 1 cell; too few runs to test anything." in found.answer


def test_sets_without_seeds_in_common_are_compared_without_pairs(versus: Callable[..., Versus]) -> None:
    found = versus(some_rows(), some_rows(1.3, start=SEEDS, draw=1))
    change = found.of("seconds")[1]
    assert (change.test, change.n, change.verdict) == ("Welch", 0, "larger")
    assert "compared without pairs" in found.limits
    assert [one.what for one in found.differences] == ["seeds"]


def test_computed_times_of_other_seeds_have_a_ratio_and_no_test(versus: Callable[..., Versus]) -> None:
    a = [make_row("solo", seed, launcher="virtual") for seed in (0, 1)]
    b = [make_row("solo", seed, seconds=2.0, launcher="virtual") for seed in (2, 3)]
    found = versus(a, b)
    change = found.of("seconds")[0]
    assert change.value == pytest.approx(2.0)
    assert change.verdict == "not tested"
    assert "simulated" in found.limits and "heat" not in found.limits


def test_welch_is_scipys() -> None:
    rng = random.Random(3)
    a, b = [rng.gauss(0, 1) for _ in range(4)], [rng.gauss(1, 3) for _ in range(7)]
    theirs = stats.ttest_ind(b, a, equal_var=False)
    interval = theirs.confidence_interval()
    assert welch(a, b) == pytest.approx((sum(b) / 7 - sum(a) / 4, interval.low, interval.high, theirs.pvalue))
    assert welch(a, b[:1]) is None
    assert welch([1.0, 1.0], [2.0, 2.0]) is None


def test_a_cell_that_missed_the_target_once_has_no_time_to_it(versus: Callable[..., Versus]) -> None:
    a = some_rows()
    b = [{**row, "history": row["history"][:1]} if (row["cell"], row["seed"]) == ("solo", 0) else row for row in a]
    assert [change.cell for change in versus(a, b).of("seconds to target")] == STRATEGIES[1:]


def test_what_differs_is_listed_and_forbids_to_name_a_cause(versus: Callable[..., Versus]) -> None:
    changed = {
        "settings": {
            "task": "digits-mlp",
            "epochs": 8,
            "workers": 2,
            "launcher": "local",
            "task_options": {"lr": 0.05},
        },
        "versions": {"torch": "9.9"},
        "hardware": {"cores": 96},
        "commit": "abc+",
    }
    found = versus(some_rows(), some_rows(draw=1), **changed)
    told = {(one.kind, one.what): (one.first, one.second) for one in found.differences}
    assert told["settings", "task.lr"] == ("–", "0.05")
    assert told["versions", "torch"][1] == "9.9"
    assert told["hardware", "cores"][1] == "96"
    assert told["commit", "commit"][1] == "abc+"
    assert ("settings", "epochs") not in told
    assert "no difference in results can be attributed to one alone" in found.limits
    assert "machines differ" in found.limits and "not committed" in found.limits


def test_cells_and_failures_of_one_set_alone_are_named(versus: Callable[..., Versus]) -> None:
    a = [row for row in some_rows() if row["cell"] != "solo"]
    b = [row for row in some_rows(draw=1) if row["cell"] != "all-reduce"] + [failed_row("all-reduce", 0)]
    found = versus(a, b)
    assert (found.a.only, found.b.only, found.b.failed) == (("all-reduce",), ("solo",), 1)
    assert "2 cells with finished runs in one set only are left out." in found.answer
    assert "  only in B: solo" in lines(found)


def test_sets_with_no_cell_in_common_say_so(versus: Callable[..., Versus], tmp_path: Path) -> None:
    found = versus([make_row("solo", 0)], [make_row("all-reduce", 0)])
    assert found.answer.startswith("Nothing to compare: a and b have no cell in common.")
    assert "no cell in common" in write_versus(tmp_path / "a", tmp_path / "b")[1].read_text()


def test_equal_parameters_are_counted(versus: Callable[..., Versus]) -> None:
    b = some_rows(draw=1)
    b[0] = {**b[0], "param_hash": {"0": "ff"}}
    b[1] = {**b[1], "param_hash": {}}
    found = versus(some_rows(), b)
    assert found.same_parameters == (13, 14)
    assert "the same bit by bit in 13 of 14 pairs" in found.answer


def test_a_folder_without_finished_runs_is_refused(tmp_path: Path) -> None:
    write_study(tmp_path / "a", [failed_row("solo", 0)])
    with pytest.raises(RecordError, match="at least one finished run"):
        compare_results(tmp_path / "a", tmp_path / "a")
    with pytest.raises(RecordError, match="holds no study"):
        compare_results(tmp_path, tmp_path / "a")


def test_the_page_links_to_records_stands_alone_and_is_the_same_each_time(tmp_path: Path) -> None:
    save(tmp_path / "one" / "run", list(reversed(some_rows())))
    save(tmp_path / "two" / "run", [*some_rows(1.3, draw=1), failed_row("<b>", 0)])
    found, path = write_versus(tmp_path / "one" / "run", tmp_path / "two" / "run", tmp_path / "out")
    text = path.read_text()
    assert path == tmp_path / "out" / "versus.html"
    assert "one/run and two/run" in text and found.answer.replace("'", "&#39;") in text
    line = re.search(r'<th scope="row">solo</th>.*?</tr>', text, re.S)
    assert line is not None
    linked = [re.findall(rf'href="../{name}/run/results.jsonl#L(\d+)"', line[0]) for name in ("one", "two")]
    assert linked == [["11", "12", "13", "14", "15"], ["1", "2", "3", "4", "5"]]
    assert text.count("<svg") == 2  # of seconds and seconds to target: bytes did not change
    assert not re.search(r'(src|href)="(https?:|//)|<script', text)
    assert write_versus(tmp_path / "one" / "run", tmp_path / "two" / "run", tmp_path / "out")[1].read_text() == text


def test_it_can_be_written_as_json(versus: Callable[..., Versus]) -> None:
    document = json.loads(json.dumps(versus(some_rows(), some_rows(1.3, draw=1)).to_dict(), allow_nan=False))
    assert [change["verdict"] for change in document["changes"] if change["measure"] == "seconds"][1] == "larger"


@pytest.mark.slow
def test_where_nothing_changed_few_cells_are_said_to(tmp_path: Path) -> None:
    """At a level of 5 % for all cells of a measure, 2 or 3 of 50 may err; 10 would come 2 times in 10,000."""
    study = Study.from_dict(write_study(tmp_path, []).read_study())
    wrong = 0
    for draw in range(50):
        sets = [Set("x", tmp_path, study, rows, rows) for rows in (some_rows(draw=draw), some_rows(draw=1000 + draw))]
        wrong += any(change.verdict in ("larger", "smaller") for change in compare_sets(*sets).of("seconds"))
    assert wrong < 10


def test_bytes_that_come_from_nothing_or_go_to_nothing_are_told_without_a_ratio(
    versus: Callable[..., Versus], tmp_path: Path
) -> None:
    a, b = some_rows(), some_rows()  # solo sends nothing in either
    for row in b:
        row["sent_bytes"] = {"solo": 2_000_000, "all-reduce": 0}.get(row["cell"], row["sent_bytes"])
    found = versus(a, b)
    told = {one.cell: (one.measure, one.first.mean, one.second.mean) for one in found.zeros}
    assert told == {"solo": ("bytes sent", 0, 2e6), "all-reduce": ("bytes sent", 4e6, 0)}
    assert [change.cell for change in found.of("bytes sent")] == [STRATEGIES[2]]
    said = "MB sent by all ranks: solo from 0 ± 0 to 2.00 ± 0, all-reduce from 4.00 ± 0 to 0 ± 0; 0 has no ratio."
    assert said in found.answer
    assert "  solo, MB sent by all ranks  0 ± 0 → 2.00 ± 0" in lines(found)
    page = write_versus(tmp_path / "a", tmp_path / "b")[1].read_text()
    assert "From 0 or to 0" in page and '<tr><th scope="row">solo</th><td>MB sent by all ranks</td>' in page
    assert json.loads(json.dumps(found.to_dict()))["zeros"][0]["second"]["mean"] == 2e6


def test_what_is_nothing_in_both_sets_is_no_change(versus: Callable[..., Versus], tmp_path: Path) -> None:
    assert versus(some_rows(), some_rows(start=SEEDS, draw=1)).zeros == ()
    assert "From 0 or to 0" not in write_versus(tmp_path / "a", tmp_path / "b")[1].read_text()


def test_a_study_s_own_word_on_which_way_is_better_holds_and_is_listed(versus: Callable[..., Versus]) -> None:
    a = [make_row("solo", seed, final=0.5 + 0.01 * seed) for seed in range(3)]
    b = [make_row("solo", seed, final=0.7 + 0.011 * seed) for seed in range(3)]
    assert "Final accuracy: solo became better, by 0.20" in versus(a, b).answer
    found = versus(a, b, maximize=False)
    assert "Final accuracy: solo became worse, by 0.20" in found.answer
    assert [(one.what, one.first, one.second) for one in found.differences] == [("maximize", "–", "False")]
