from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.config import RunConfig, RunResult
from podium.errors import ConfigError, Interrupted, RankFailed, UnknownName
from podium.lab.study.parts import Stop, label
from podium.lab.study.run import compare, run_study
from podium.lab.study.run_parallel import least_used
from podium.lab.study.store import Store
from podium.lab.study.study import Study, strategies_study
from podium.lab.study.terminal import format_plain, format_table
from tests.lab.synthetic import STRATEGIES, make_row

Act = Callable[[RunConfig], None]


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests look at no figure, and drawing is most of a report's time."""
    for package in ("matplotlib", "plotly.offline"):
        monkeypatch.setitem(sys.modules, package, None)


class Runs:
    """Stands where the launcher does: notes each run, and returns a plausible result or does what it is told."""

    def __init__(self, act: Act | None = None, status: str = "finished") -> None:
        self.seen: list[RunConfig] = []
        self.act, self.status = act, status

    def __call__(self, config: RunConfig, *, task: Any, on_event: Any, stop: threading.Event) -> RunResult:
        self.seen.append(config)
        on_event({"event": "end", "status": self.status})
        if self.act is not None:
            self.act(config)
        row = make_row(config.strategy, config.seed, seconds=1 + 0.1 * config.seed + len(config.strategy) / 10)
        fields = {k: v for k, v in row.items() if k not in ("cell", "parameters")}
        run_dir = str(config.run_dir)
        assert Path(run_dir).is_dir() and not any(Path(run_dir).iterdir())
        fields |= {"status": self.status, "run_dir": run_dir, "workers": config.workers}
        return RunResult(**fields)

    @property
    def keys(self) -> list[tuple[str, int]]:
        return [(config.strategy, config.seed) for config in self.seen]


def small_compare(out: Path, launch: Runs, **options: Any) -> Any:
    return compare("digits-mlp", **{"strategies": STRATEGIES, "seeds": 2, "out": out, "launch": launch, **options})


def test_every_strategy_runs_once_with_every_seed(tmp_path: Path) -> None:
    runs = Runs()
    comparison = small_compare(tmp_path, runs, epochs=3)
    assert sorted(runs.keys) == sorted((s.partition(":")[0], seed) for s in STRATEGIES for seed in range(2))
    assert all(config.epochs == 3 for config in runs.seen)
    assert {config.strategy: config.workers for config in runs.seen}["solo"] == 1
    assert {config.strategy: config.workers for config in runs.seen}["all-reduce"] == 2
    assert comparison.status == "finished" and comparison.failed == 0
    assert [line.cell for line in comparison.table] == STRATEGIES


def test_it_leaves_design_results_and_report(tmp_path: Path) -> None:
    comparison = small_compare(tmp_path, Runs())
    study = json.loads((tmp_path / "study.json").read_text())
    assert list(study["factors"]["strategy"]) == STRATEGIES and study["seeds"] == [0, 1] and len(study["order"]) == 6
    assert study["versions"]["podium"] and study["hardware"]["cores"] >= 1
    assert len(Store(tmp_path).rows()) == 6
    assert Path(comparison.report).read_text().count("<h2") == 9


def test_a_comparison_is_json_all_through(tmp_path: Path) -> None:
    comparison = small_compare(tmp_path, Runs())
    document = json.loads(json.dumps(comparison.to_dict()))
    assert document["answer"] == comparison.answer and len(document["rows"]) == 6
    assert document["table"][0]["metric"]["mean"] == pytest.approx(0.97)


def test_the_order_is_shuffled_in_blocks_of_one_seed_and_always_the_same() -> None:
    design = strategies_study("t", STRATEGIES, 6, {"workers": 2})
    order = design.order()
    blocks = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert [{seed for _, seed in block} for block in blocks] == [{seed} for seed in range(6)]
    assert all({cell for cell, _ in block} == set(STRATEGIES) for block in blocks)
    assert len({tuple(cell for cell, _ in block) for block in blocks}) > 1
    assert order == design.order()


def test_every_worker_has_as_many_threads_as_any_other_unless_told(tmp_path: Path) -> None:
    runs, told = Runs(), Runs()
    small_compare(tmp_path / "a", runs, strategies=["solo", "all-reduce"], workers=2)
    assert len({config.threads for config in runs.seen}) == 1 and runs.seen[0].threads is not None
    small_compare(tmp_path / "b", told, strategies=["solo"], threads=7)
    assert {config.threads for config in told.seen} == {7}


def test_a_failing_cell_is_recorded_and_the_others_go_on(tmp_path: Path) -> None:
    def fail(config: RunConfig) -> None:
        if (config.strategy, config.seed) == ("all-reduce", 0):
            raise RankFailed("rank 1: ValueError: no such digit")

    comparison = small_compare(tmp_path, Runs(fail))
    (failed,) = [row for row in comparison.rows if row["status"] == "failed"]
    assert (failed["cell"], failed["seed"]) == ("all-reduce", 0)
    assert failed["error"] == "RankFailed: rank 1: ValueError: no such digit"
    assert len(comparison.rows) == 6 and comparison.failed == 1
    assert "1 of 6 runs failed" in comparison.answer
    assert "no such digit" in Path(comparison.report).read_text()


def test_a_killed_comparison_goes_on_without_repeating_finished_cells(tmp_path: Path) -> None:
    killed = Runs()

    def kill(config: RunConfig) -> None:
        if len(killed.seen) == 4:
            raise KeyboardInterrupt

    killed.act = kill
    with pytest.raises(KeyboardInterrupt):
        small_compare(tmp_path, killed)
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"cell": "solo", "se')  # what a kill in the middle of a line leaves
    resumed = Runs()
    comparison = small_compare(tmp_path, resumed)
    assert len(resumed.seen) == 3 and resumed.keys[0] == killed.keys[3]
    assert not set(resumed.keys) & set(killed.keys[:3])
    assert len(comparison.rows) == 6 and comparison.status == "finished"


def test_a_failed_cell_is_tried_again_and_its_failure_stays_visible(tmp_path: Path) -> None:
    def fail(config: RunConfig) -> None:
        if config.strategy == "solo":
            raise RankFailed("rank 0: out of luck")

    small_compare(tmp_path, Runs(fail))
    again = Runs()
    comparison = small_compare(tmp_path, again)
    assert again.keys == [("solo", 0), ("solo", 1)]
    assert comparison.failed == 0 and len(comparison.rows) == 8
    assert "out of luck" in Path(comparison.report).read_text()


def test_a_finished_comparison_is_not_run_again(tmp_path: Path) -> None:
    first = small_compare(tmp_path, Runs())
    again = Runs()
    assert small_compare(tmp_path, again) == first and again.seen == []


def test_a_stopped_run_ends_the_comparison_and_is_run_again_later(tmp_path: Path) -> None:
    stopped = small_compare(tmp_path, Runs(status="stopped"))
    assert stopped.status == "stopped" and len(stopped.rows) == 1
    assert Path(stopped.report).is_file()
    later = Runs()
    assert small_compare(tmp_path, later).status == "finished" and len(later.seen) == 6


def test_stop_between_runs_starts_no_other(tmp_path: Path) -> None:
    stop = threading.Event()
    runs = Runs(lambda config: stop.set())
    assert small_compare(tmp_path, runs, stop=stop).status == "stopped" and len(runs.seen) == 1


def test_an_interruption_is_not_a_failed_cell(tmp_path: Path) -> None:
    def interrupt(config: RunConfig) -> None:
        raise Interrupted("stopped at once")

    with pytest.raises(Interrupted):
        small_compare(tmp_path, Runs(interrupt))
    assert Store(tmp_path).rows() == []


def test_a_folder_with_another_study_is_refused_untouched(tmp_path: Path) -> None:
    small_compare(tmp_path, Runs())
    before = (tmp_path / "results.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"holds another study, with settings: epochs None; wanted 5"):
        small_compare(tmp_path, Runs(), epochs=5)
    assert (tmp_path / "results.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"strategies": ["solo", "all-reduced"]}, UnknownName, "all-reduce"),
        ({"strategies": ["parameter-server:mod=async"]}, UnknownName, "mode"),
        ({"strategies": []}, ConfigError, "at least one"),
        ({"strategies": "solo"}, ConfigError, "list of texts"),
        ({"strategies": ["solo", "solo"]}, ConfigError, "differ"),
        ({"seeds": 0}, ConfigError, "at least one"),
        ({"seeds": [1, 1]}, ConfigError, "differ"),
        ({"epoch": 3}, UnknownName, "epochs"),
        ({"run_dir": "x"}, ConfigError, "differs from run to run"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_run(
    tmp_path: Path, options: dict[str, Any], error: type[ConfigError], message: str
) -> None:
    runs = Runs()
    with pytest.raises(error, match=message):
        small_compare(tmp_path / "new", runs, **options)
    assert runs.seen == [] and not (tmp_path / "new").exists()


def test_events_say_which_run_they_belong_to(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    small_compare(tmp_path, Runs(), strategies=["solo"], on_event=events.append)
    assert [event["event"] for event in events] == ["cell", "end", "cell-end"] * 2
    assert {(event["cell"], event["seed"]) for event in events} == {("solo", 0), ("solo", 1)}
    assert [event["number"] for event in events if event["event"] == "cell"] == [1, 2]


def test_one_strategy_has_one_spelling() -> None:
    assert label(" parameter-server: mode = async ") == "parameter-server:mode=async"


def test_the_plain_table_fits_80_columns_and_shows_every_strategy(tmp_path: Path) -> None:
    comparison = small_compare(tmp_path, Runs())
    text = format_plain(comparison)
    assert max(map(len, text.splitlines())) <= 80
    assert "all-reduce" in text and "mode=async" in text.replace("\n", "")


def test_the_table_of_a_terminal_has_a_line_per_strategy(tmp_path: Path) -> None:
    comparison = small_compare(tmp_path, Runs())
    assert format_table(comparison).row_count == len(STRATEGIES)


def test_an_asynchronous_run_leaves_its_staleness_by_worker_and_range_in_its_row(tmp_path: Path) -> None:
    cell = "parameter-server:mode=dssp,staleness=1,staleness_high=2"
    strategies = ["all-reduce", cell]
    compare("digits-mlp", strategies=strategies, seeds=1, workers=2, launcher="virtual", out=tmp_path, steps=6)
    by_cell = {row["cell"]: row for row in Store(tmp_path).rows()}
    assert "staleness_by" not in by_cell["all-reduce"]
    found = by_cell[cell]["staleness_by"]
    assert [line["worker"] for line in found["workers"]] == [0, 1]
    assert found["lead"] <= found["bound"] == 2
    assert f"Staleness, {cell}" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_run_ends_at_the_target_by_the_studys_own_direction(tmp_path: Path) -> None:
    """No accuracy is as low as 0.01 after an epoch, and every one is as high."""
    ended = {}
    for way in (None, False):
        study = Study(
            name="ends",
            settings={"task": "digits-mlp", "launcher": "virtual", "epochs": 2},
            factors={"strategy": ["solo"]},
            replications=1,
            target=0.01,
            stop=Stop(target=True),
            maximize=way,
        )
        (row,) = run_study(study, out=tmp_path / str(way)).rows
        ended[way] = row.get("ended_by")
        assert json.loads((tmp_path / str(way) / "study.json").read_text())["maximize"] is way
    assert ended == {None: "target", False: None}


def test_a_comparison_may_be_told_which_way_is_better(tmp_path: Path) -> None:
    comparison = small_compare(tmp_path, Runs(), maximize=False)
    assert json.loads((tmp_path / "study.json").read_text())["maximize"] is False
    assert comparison.target == pytest.approx(1.02, abs=0.01)  # short of the best from above


@given(st.sets(st.integers(0, 63), min_size=1), st.integers(0, 200))
def test_runs_are_spread_evenly_over_cores(cores: set[int], count: int) -> None:
    taken: list[int] = []
    for _ in range(count):
        taken.append(least_used(cores, taken))
    runs = [taken.count(core) for core in cores]
    assert sum(runs) == count and max(runs) - min(runs) <= 1
