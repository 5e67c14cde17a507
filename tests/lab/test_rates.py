from __future__ import annotations

import dataclasses
import json
import math
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import ConfigError, DataError, UnknownName
from podium.exchange.reducing import make_packing
from podium.lab.published.rates import (
    CODECS,
    PAIRS,
    QUICK,
    Panel,
    Rates,
    Workload,
    answer,
    draw,
    failure,
    figure,
    is_final,
    open_store,
    page,
    place_names,
    run,
    tabulate,
    train_one,
)
from podium.lab.published.rates.running import start
from podium.lab.study.processes import least_used
from podium.lab.study.store import Row

RIGHT = st.integers(0, 2_000).map(lambda count: count / 2_000)
"""Accuracies as a test set of 2,000 can have them."""
DIGITS = Workload(task="digits-mlp", epochs=1)


def make_row(codec: str, seed: int, accuracy: float, sent: int = 1000, task: str = "mnist-lenet5", **more: Any) -> Row:
    return {
        "cell": codec,
        "task": task,
        "seed": seed,
        "epochs": 10,
        "workers": 4,
        "device": "cpu",
        "task_options": {},
        "status": "finished",
        "accuracy": accuracy,
        "loss": 0.1,
        "sent_bytes": sent,
        "feedback": "off",
        "reduction": "sum",
        "replicas_equal": True,
        "parameters": 61_706,
        "train": 8_000,
        "test": 2_000,
        "batch_size": 64,
        "steps": 1_250,
        "wall_s": 60.0,
        "versions": {"python": "3.12.0", "torch": "2.11.0"},
        **more,
    }


def failed_row(
    codec: str, seed: int, error: str = "TrainingError: the loss became nan", task: str = "mnist-lenet5"
) -> Row:
    options = {"task": task, "seed": seed, "epochs": 10, "workers": 4, "device": "cpu", "task_options": {}}
    return failure({**options, "codec": codec}, error)


def three(codec: str, accuracy: float, sent: int, task: str = "mnist-lenet5", **more: Any) -> list[Row]:
    return [make_row(codec, seed, accuracy + 0.001 * seed, sent, task, **more) for seed in range(3)]


def only(rows: list[Row]) -> Panel:
    (panel,) = tabulate(rows)
    return panel


class TestTables:
    def test_a_gap_is_paired_by_seed(self) -> None:
        seeds = {0: 0.90, 1: 0.95, 2: 0.85}
        rows = [make_row("dense", seed, value) for seed, value in seeds.items()]
        rows += [make_row("fp16", seed, value - 0.01, 500) for seed, value in seeds.items()]
        fp16 = only(rows).lines[1]
        assert fp16.ratio == 0.5
        assert fp16.gap is not None and fp16.accuracy is not None
        assert fp16.gap.mean == pytest.approx(-1.0)
        # The same gap in all seeds: no spread, although accuracies differ widely.
        assert fp16.gap.low == pytest.approx(-1.0) and fp16.gap.high == pytest.approx(-1.0)
        assert fp16.accuracy.low is not None and fp16.accuracy.low < 80

    @pytest.mark.slow
    @given(st.lists(st.tuples(RIGHT, RIGHT), min_size=2, max_size=6))
    def test_gaps_are_the_mean_of_differences_and_lie_in_their_interval(self, pairs: list[tuple[float, float]]) -> None:
        rows = [make_row("dense", seed, first) for seed, (first, _) in enumerate(pairs)]
        rows += [make_row("int8", seed, second) for seed, (_, second) in enumerate(pairs)]
        gap = only(rows).lines[1].gap
        assert gap is not None and gap.low is not None and gap.high is not None
        assert gap.n == len(pairs)
        assert gap.mean == pytest.approx(100 * math.fsum(b - a for a, b in pairs) / len(pairs), abs=1e-9)
        assert gap.low <= gap.mean <= gap.high

    @pytest.mark.slow
    @given(st.permutations([*three("dense", 0.97, 1000), *three("fp16", 0.96, 500), failed_row("int8", 0)]))
    def test_the_order_of_the_rows_does_not_matter(self, rows: list[Row]) -> None:
        panel = only(rows)
        assert [line.codec for line in panel.lines] == ["dense", "fp16", "int8"]
        assert panel.lines[1].gap == only(sorted(rows, key=lambda r: (r["cell"], r["seed"]))).lines[1].gap

    def test_a_seed_without_dense_has_no_gap_but_an_accuracy(self) -> None:
        rows = [make_row("dense", 0, 0.9), make_row("fp16", 0, 0.8, 500), make_row("fp16", 1, 0.7, 500)]
        line = only(rows).lines[1]
        assert line.finished == 2 and line.gap is not None and line.gap.n == 1
        assert line.gap.low is None

    def test_a_codec_that_failed_with_one_seed_is_not_called_close(self) -> None:
        rows = [*three("dense", 0.97, 1000), *three("int8", 0.97, 500)[:2], failed_row("int8", 2)]
        line = only(rows).lines[1]
        assert (line.finished, line.tried, line.close) == (2, 3, False)

    def test_a_later_try_takes_the_place_of_a_failed_one(self) -> None:
        rows = [make_row("dense", 0, 0.9), failed_row("fp16", 0, "its process ended with -9"), make_row("fp16", 0, 0.9)]
        line = only(rows).lines[1]
        assert (line.finished, line.tried, line.failed) == (1, 1, 0)

    def test_without_dense_there_is_nothing_to_compare_with(self) -> None:
        assert tabulate(three("fp16", 0.9, 500)) == []

    def test_close_by_the_mean_is_not_yet_close_for_sure(self) -> None:
        rows = three("dense", 0.97, 1000)
        rows += [make_row("int8", seed, 0.97 + 0.001 * seed + d, 500) for seed, d in enumerate((-0.02, 0.0, 0.02))]
        line = only(rows).lines[1]
        assert line.close and not line.settled
        assert "[`int8`](#mnist-lenet5-int8) (0.50, +0.0?)" in answer(tabulate(rows))


class TestPage:
    @pytest.fixture
    def rows(self) -> list[Row]:
        rows = []
        for task in ("cifar10-resnet20", "mnist-lenet5"):
            rows += three("dense", 0.90, 1000, task)
            rows += three("fp16", 0.90, 500, task)
            rows += three("top-k:ratio=0.01", 0.895, 20, task, feedback="on", reduction="gather")
            rows += three("top-k:ratio=0.01;feedback=false", 0.60, 20, task, reduction="gather")
            rows += [failed_row("int8", seed, task=task) for seed in range(3)]
        return rows

    def test_the_answer_names_what_is_close_what_is_not_and_what_failed(self, rows: list[Row]) -> None:
        lead, mnist, cifar = answer(tabulate(rows)).split("\n\n")
        assert "`top-k:ratio=0.01` sends least: 0.0200 (MNIST, LeNet-5" in lead
        assert mnist.startswith("*MNIST, LeNet-5*") and cifar.startswith("*CIFAR-10, ResNet-20*")
        close, rest = mnist.split(" Further below: ")
        below, failed = rest.split(" Failed to train: ")
        assert "[`fp16`](#mnist-lenet5-fp16) (0.50, +0.0)" in close
        assert "[`top-k:ratio=0.01`](#mnist-lenet5-top-k-ratio-0-01) (0.020, −0.5)" in close
        assert below.startswith(
            "[`top-k:ratio=0.01;feedback=false`](#mnist-lenet5-top-k-ratio-0-01-feedback-false) (0.020, −30.0)"
        )
        assert failed == "[`int8`](#mnist-lenet5-int8) (3 of 3 seeds)."

    def test_a_codec_that_is_close_on_one_task_only_does_not_lead(self, rows: list[Row]) -> None:
        worse = [
            {**row, "accuracy": 0.5} if (row["task"], row["cell"]) == ("mnist-lenet5", "top-k:ratio=0.01") else row
            for row in rows
        ]
        assert "`fp16` sends least" in answer(tabulate(worse))

    def test_a_lead_that_the_seeds_do_not_settle_is_said_to_be_open(self, rows: list[Row]) -> None:
        assert "do not settle" not in answer(tabulate(rows))
        swings = {0: 0.91, 1: 0.90, 2: 0.88}
        shaky = [{**row, "accuracy": swings[row["seed"]]} if row["cell"] == "top-k:ratio=0.01" else row for row in rows]
        lead = answer(tabulate(shaky)).split("\n\n")[0]
        assert "`top-k:ratio=0.01` sends least" in lead
        assert "do not settle that: on MNIST, LeNet-5 and CIFAR-10, ResNet-20 its interval" in lead
        assert lead.endswith("Intervals that stay above that line everywhere: `fp16`.")
        alone = [row for row in shaky if row["cell"] != "fp16"]
        assert "No codec's interval stays above that line everywhere." in answer(tabulate(alone))

    def test_none_close_is_said(self) -> None:
        rows = [*three("dense", 0.97, 1000), *three("fp16", 0.5, 500)]
        assert answer(tabulate(rows)).startswith("**No codec stays within one point of dense on MNIST")

    def test_failures_are_shown_in_table_and_list(self, rows: list[Row]) -> None:
        text = page(tabulate(rows), rows)
        assert "| `int8` | – | – | – | failed | – | 0 of 3 |" in text
        assert "- MNIST, LeNet-5, `int8`, seed 1: TrainingError: the loss became nan" in text

    def test_a_task_whose_dense_failed_is_not_dropped_without_a_word(self, rows: list[Row]) -> None:
        failing = [
            failed_row("dense", row["seed"]) if row["cell"] == "dense" and "mnist" in row["task"] else row
            for row in rows
        ]
        panels = tabulate(failing)
        assert [panel.task for panel in panels] == ["cifar10-resnet20"]
        assert "- MNIST, LeNet-5, `dense`, seed 0: TrainingError" in page(panels, failing)

    def test_tasks_on_two_devices_are_made_again_by_two_commands(self, rows: list[Row]) -> None:
        mixed = [{**row, "device": "cuda"} if "cifar" in row["task"] else row for row in rows]
        text = page(tabulate(mixed), mixed)
        assert "--device cpu --task mnist-lenet5\n" in text and "--device cuda --task cifar10-resnet20\n" in text
        assert "CIFAR-10, ResNet-20 on one GPU" in text
        assert "--task" not in page(tabulate(rows), rows)

    def test_feedback_is_told_by_its_difference(self, rows: list[Row]) -> None:
        text = page(tabulate(rows), rows)
        assert "| MNIST, LeNet-5 | `top-k:ratio=0.01` | `top-k:ratio=0.01;feedback=false` | +29.5" in text

    def test_small_data_are_said_to_be_small(self, rows: list[Row]) -> None:
        text = page(tabulate(rows), rows)
        assert "trained on [8,000 images for 10 epochs](#sizes-mnist-lenet5); the whole set has 60,000" in text
        assert "[2,000 test images](#sizes-mnist-lenet5)" in text

    def test_unequal_replicas_are_not_hidden(self, rows: list[Row]) -> None:
        assert "did not end equal" not in page(tabulate(rows), rows)
        odd = [*rows, make_row("bf16", 0, 0.9, replicas_equal=False)]
        assert "did not end equal\n\n- MNIST, LeNet-5, `bf16`, seed 0" in page(tabulate(odd), odd)

    @pytest.mark.slow
    def test_the_figure_is_svg_names_all_that_trained_and_repeats_itself(self, rows: list[Row]) -> None:
        svg = figure(tabulate(rows))
        texts = [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]
        assert "fp16" in texts and "top-k 0.01" in texts
        assert any("failed with some seeds: int8" in text for text in texts)
        assert "int8" not in texts
        assert figure(tabulate(rows)) == svg

    def test_perfect_and_useless_accuracies_can_be_drawn(self) -> None:
        rows = [*three("dense", 0.998, 1000), *three("fp16", 0.0, 500)]
        assert "<svg" in figure(tabulate(rows))

    @given(st.lists(st.tuples(st.floats(0, 300), st.floats(0, 250)), min_size=1, max_size=19))
    def test_names_never_lie_on_points_nor_on_each_other(self, spots: list[tuple[float, float]]) -> None:
        names = ["power-sgd 2"] * len(spots)
        boxes = []
        for (x, y), (dx, dy) in zip(spots, place_names(spots, names), strict=True):
            boxes.append((x + dx, y + dy))
            assert not any(
                boxes[-1][0] < a + 3 and a - 3 < boxes[-1][0] + 38.5 and y + dy < b + 3 and b - 3 < y + dy + 7
                for a, b in spots
            )
        for i, (a, b) in enumerate(boxes):
            assert not any(abs(a - c) < 38.5 and abs(b - d) < 7 for c, d in boxes[:i])

    @pytest.mark.slow
    def test_drawing_needs_rates_jsonl_only(self, rows: list[Row], tmp_path: Path) -> None:
        for row in rows:
            open_store(tmp_path).append(row)
        draw(tmp_path)
        assert (tmp_path / "rates.md").read_text() == page(tabulate(rows), rows)
        assert (tmp_path / "rates.svg").read_text() == figure(tabulate(rows))

    def test_nothing_to_draw_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="must hold a finished run with dense, got 0 rows"):
            draw(tmp_path)


class TestDesign:
    def test_every_codec_can_be_made_and_pairs_differ_in_feedback_alone(self) -> None:
        packings = {codec: make_packing(codec) for codec in CODECS}
        for on, off in PAIRS:
            assert packings[on].keeps_residual and not packings[off].keeps_residual
        assert not packings["vote"].keeps_residual

    def test_each_run_is_asked_for_once(self) -> None:
        cells = Rates().cells()
        assert len(cells) == len({cell.key for cell in cells}) == 2 * 19 * 3
        assert set(QUICK.codecs) <= set(CODECS)

    def test_tasks_can_be_chosen_and_unknown_ones_are_refused(self) -> None:
        assert Rates().only([]) == Rates()
        assert {cell.load.task for cell in Rates().only(["cifar10-resnet20"]).cells()} == {"cifar10-resnet20"}
        with pytest.raises(UnknownName, match="Did you mean 'mnist-lenet5'"):
            Rates().only(["mnist-lenet"])

    def test_dense_must_be_there(self) -> None:
        with pytest.raises(ConfigError, match="codecs must hold dense"):
            Rates(codecs=("fp16",))

    def test_what_diverged_is_a_result_and_what_was_killed_is_not(self) -> None:
        assert is_final(make_row("dense", 0, 0.9))
        assert is_final(failed_row("dense", 0, "TrainingError: rank 0: the loss became nan"))
        assert not is_final(failed_row("dense", 0, "its process ended with -9: it said nothing"))
        assert not is_final(failed_row("dense", 0, "DataError: no such file"))

    @given(st.sets(st.integers(0, 63), min_size=1), st.integers(0, 200))
    def test_runs_are_spread_evenly_over_cores(self, cores: set[int], count: int) -> None:
        taken: list[int] = []
        for _ in range(count):
            taken.append(least_used(cores, taken))
        runs = [taken.count(core) for core in cores]
        assert sum(runs) == count and max(runs) - min(runs) <= 1


class TestRunning:
    """Real processes, on scikit-learn's digits."""

    def test_a_run_keeps_to_the_core_that_it_was_given(self, tmp_path: Path) -> None:
        study = Rates(workloads=(DIGITS,), codecs=("dense",), seeds=(0,))
        cell, core = study.cells()[0], max(os.sched_getaffinity(0))
        one = start(study.options(cell), tmp_path / "run", 60.0, core)
        try:
            assert os.sched_getaffinity(one.process.pid) == {core}
        finally:
            one.kill()

    @pytest.mark.slow
    def test_runs_leave_rows_page_and_figure_and_are_not_repeated(self, tmp_path: Path) -> None:
        study = Rates(workloads=(DIGITS,), codecs=("dense", "top-k:ratio=0.01"), seeds=(0,))
        said: list[str] = []
        assert run(study, tmp_path, jobs=2, say=said.append) == 0
        rows = {row["cell"]: row for row in open_store(tmp_path).rows()}
        assert set(rows) == {"dense", "top-k:ratio=0.01"} and len(said) == 2
        assert all(row["status"] == "finished" and row["replicas_equal"] for row in rows.values())
        assert (rows["dense"]["train"], rows["dense"]["test"], rows["dense"]["parameters"]) == (1438, 359, 4810)
        # One element in a hundred, gathered by 4 workers: twice the ratio of one wire, and the first parameters.
        assert 0.02 < rows["top-k:ratio=0.01"]["sent_bytes"] / rows["dense"]["sent_bytes"] < 0.05
        assert (tmp_path / "rates.md").is_file() and (tmp_path / "rates.svg").is_file()
        before = (tmp_path / "rates.jsonl").read_bytes()
        run(study, tmp_path, jobs=2, say=said.append)
        assert (tmp_path / "rates.jsonl").read_bytes() == before
        assert said[-1].startswith("2 of 2 runs are in")

    def test_divergence_is_a_row_without_accuracy_and_is_not_tried_again(self, tmp_path: Path) -> None:
        wild = Workload(task="digits-mlp", epochs=1, options={"lr": 1e30})
        study = Rates(workloads=(wild,), codecs=("dense",), seeds=(0,))
        row = train_one(study.options(study.cells()[0]), tmp_path)
        assert row["status"] == "failed" and row["accuracy"] is None
        assert row["error"].startswith("TrainingError: ") and "the loss became" in row["error"]
        open_store(tmp_path).append(row)
        with pytest.raises(ConfigError, match="must hold a finished run with dense, got 1 rows"):
            run(study, tmp_path, jobs=1, say=lambda _: None)
        assert open_store(tmp_path).rows() == [row]

    def test_a_run_beyond_its_deadline_is_ended_and_tried_again_later(self, tmp_path: Path) -> None:
        store = open_store(tmp_path)
        done = {**make_row("dense", 0, 0.9, task="digits-mlp"), "epochs": 1}
        store.append(done)
        study = Rates(workloads=(DIGITS,), codecs=("dense", "fp16"), seeds=(0,), deadline_s=0.01)
        assert run(study, tmp_path, jobs=1, say=lambda _: None) == 1
        kept, late = store.rows()
        assert kept == json.loads(json.dumps(done))
        assert late["cell"] == "fp16" and late["error"] == "took longer than 0.0100 s" and not is_final(late)

    def test_another_design_in_the_same_file_is_refused(self, tmp_path: Path) -> None:
        open_store(tmp_path).append(make_row("dense", 0, 0.9, task="digits-mlp"))
        study = Rates(workloads=(DIGITS,), codecs=("dense",), seeds=(0,))
        with pytest.raises(ConfigError, match="holds other runs of digits-mlp"):
            run(study, tmp_path, jobs=1)

    def test_missing_data_are_found_before_the_first_run(self, tmp_path: Path) -> None:
        study = dataclasses.replace(Rates(), data_dir=str(tmp_path / "nowhere"))
        with pytest.raises(DataError):
            run(study, tmp_path, jobs=1)
        assert not (tmp_path / "rates.jsonl").exists()

    def test_jobs_must_be_at_least_one(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="jobs must be at least 1, got 0"):
            run(QUICK, tmp_path, jobs=0)
