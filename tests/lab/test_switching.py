from __future__ import annotations

import dataclasses
import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.config import parse_strategy
from podium.errors import ConfigError, UnknownName
from podium.lab.published.switching import (
    QUICK,
    Cell,
    Machines,
    Part,
    Setting,
    Study,
    ablations,
    chances,
    draw,
    failure,
    figure,
    is_final,
    open_store,
    page,
    panels,
    run,
    setback,
    time_to,
    timings,
    train_one,
)
from podium.lab.published.switching.design import (
    ALL_REDUCE,
    ALL_REDUCE_FP16,
    ASYNC_FP16,
    CIFAR,
    CIFAR_EQUAL,
    DIGITS,
    DIVIDED,
    DROPPED_FP16,
    OUTER,
    SWITCH,
    SWITCH_FP16,
    TIMED,
    TIMED_CIFAR,
    diloco,
)
from podium.lab.published.switching.rows import identity
from podium.lab.study.store import Row
from podium.launch.clusters.description import read_cluster
from podium.strategies import make_strategy

COMMITTED = Path(__file__).parents[2] / "docs" / "studies"
STUDY = Study()


def make_row(setting: Setting, arm: Any, seed: int, accuracy: float, seconds: float, **more: Any) -> Row:
    cell = Cell(setting, arm, seed)
    return {
        **identity(cell, STUDY.options(cell)),
        "status": "finished",
        "accuracy": accuracy,
        "loss": 0.5,
        "seconds": seconds,
        "steps": 100,
        "samples": 1000,
        "sent_bytes": 1000,
        "exchanges": 100,
        "staleness": {},
        "audit": {"missing": 0, "repeated": 0},
        "history": {
            "epoch": [1.0, 2.0],
            "seconds": [seconds / 2, seconds],
            "loss": [1.0, 0.5],
            "accuracy": [accuracy - 0.1, accuracy],
        },
        "train_loss": [2.0, 1.0],
        "switches": [],
        "rules": [],
        "train": 500,
        "test": 2000,
        "wall_s": 10.0,
        "versions": {"python": "3.12.0", "torch": "2.11.0"},
        **more,
    }


def switched(epoch: float = 0.5, loss_after: float = 1.0) -> dict[str, Any]:
    parts = {"drain": 0.0, "home": 0.0, "hand_over": 0.0, "begin": 1.5, "total": 1.5}
    switch = {"rule": "plateau", "why": "training loss settled: 1.2", "value": 0.04, "epoch": epoch, "seconds": 5.0}
    rule = {"rule": "plateau", "epoch": epoch, "seconds": 5.0, "value": 0.04, "threshold": 0.05, "after_switch": False}
    return {
        "switches": [{**switch, "position": round(500 * epoch), "cost_ms": parts, "loss_after": loss_after}],
        "rules": [{**rule, "in_force": True, "readings": []}, {**rule, "rule": "share:at=0.125", "in_force": False}],
        "staleness": {"mean": 7.0},
    }


def example() -> list[Row]:
    """Three seeds of everything that a page shows."""
    rows = []
    for seed in range(3):
        up = 0.002 * seed
        rows += [
            make_row(CIFAR, ALL_REDUCE, seed, 0.75 + up, 100.0),
            make_row(CIFAR, ALL_REDUCE_FP16, seed, 0.75 + up, 80.0),
            make_row(CIFAR, SWITCH, seed, 0.75, 58.0 + seed, **switched()),
            make_row(CIFAR, SWITCH_FP16, seed, 0.751 + up, 50.0, **switched(loss_after=1.0 + up)),
            make_row(CIFAR, DROPPED_FP16, seed, 0.74, 50.0, **switched(loss_after=1.3)),
            make_row(CIFAR, ASYNC_FP16, seed, 0.69 + up, 33.0, staleness={"mean": 7.0}),
            make_row(CIFAR_EQUAL, ALL_REDUCE, seed, 0.76, 90.0),
            make_row(CIFAR_EQUAL, diloco(1.0, 0.5), seed, 0.72 + up, 60.0, exchanges=2, sent_bytes=20),
        ]
    times = (660.0, 530.0, 590.0, 520.0, 300.0, 220.0)
    rows += [make_row(TIMED_CIFAR, arm, 0, 0.2, ms / 10) for arm, ms in zip(TIMED, times, strict=True)]
    return rows


def divided(rows: list[Row]) -> list[Row]:
    """The same with all-reduce timed with steps divided by speed: 400 ms a step at first, then less."""
    later = (310.0, 230.0)
    return [
        *rows,
        *(make_row(TIMED_CIFAR, arm, 0, 0.2, 40.0, later_ms=ms) for arm, ms in zip(DIVIDED, later, strict=True)),
    ]


class TestDesign:
    def test_every_run_is_named_once(self) -> None:
        keys = [cell.key for cell in STUDY.cells({})]
        assert len(keys) == len(set(keys))

    def test_every_arm_is_a_strategy_that_exists(self) -> None:
        for cell in STUDY.cells({}):
            name, options = parse_strategy(cell.arm.strategy)
            assert make_strategy(name, options, cell.setting.machines.workers).name == name

    @given(st.lists(st.integers(0, 2000), min_size=len(OUTER), max_size=len(OUTER)))
    def test_the_best_outer_step_goes_on_once_all_were_tried(self, right: list[int]) -> None:
        arms = [diloco(*outer).name for outer in OUTER]
        known = {(CIFAR_EQUAL.name, arm, 0): n / 2000 for arm, n in zip(arms, right, strict=True)}
        later = [c.arm.name for c in STUDY.cells(known) if c.setting is CIFAR_EQUAL and c.seed and c.arm.name in arms]
        assert len(later) == 2
        assert {known[CIFAR_EQUAL.name, arm, 0] for arm in later} == {max(known.values())}
        del known[CIFAR_EQUAL.name, arms[0], 0]
        assert not [c for c in STUDY.cells(known) if c.seed and c.arm.name in arms]

    @given(
        st.integers(2, 20),
        st.floats(0.1, 1.0),
        st.floats(1.0, 1000.0),
        st.none() | st.floats(1e-6, 1.0),
    )
    def test_the_cluster_file_says_what_the_machines_are(
        self, workers: int, slow: float, mbit: float, per_sample: float | None
    ) -> None:
        machines = Machines(workers=workers, slow=slow, mbit=mbit, seconds_per_sample=per_sample)
        path = Path(self.folder) / "cluster.toml"
        path.write_text(machines.as_toml())
        cluster = read_cluster(path)
        assert [node.speed for node in cluster.nodes] == [1.0] * (workers - 1) + [slow]
        assert {node.up_mbit for node in cluster.nodes} == {mbit}
        assert cluster.seconds_per_sample == per_sample

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def test_unknown_settings_are_refused(self) -> None:
        with pytest.raises(UnknownName, match="imagenet"):
            STUDY.only(["imagenet"])
        assert {part.setting.name for part in STUDY.only(["mnist"]).parts} == {"mnist"}

    def test_a_part_without_seeds_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="seed"):
            Study(parts=(Part(setting=CIFAR, arms=(SWITCH,), seeds=()),))


class TestTables:
    def test_arms_are_paired_with_all_reduce_by_seed(self) -> None:
        (panel, _) = panels(example())
        line = panel.line(SWITCH.name)
        assert line is not None
        assert line.gaps == pytest.approx((0.0, -0.2, -0.4))
        assert line.time is not None
        assert line.time.mean == pytest.approx(0.59)

    def test_fp16_is_also_held_against_fp16(self) -> None:
        (panel, _) = panels(example())
        line = panel.line(SWITCH_FP16.name)
        assert line is not None
        assert line.time is not None
        assert line.time_equal is not None
        assert (line.time.mean, line.time_equal.mean) == pytest.approx((0.5, 50 / 80))

    def test_a_failed_run_counts_as_tried(self) -> None:
        rows = [row for row in example() if (row["cell"], row["seed"]) != (SWITCH.name, 1)]
        cell = Cell(CIFAR, SWITCH, 1)
        rows.append(failure(identity(cell, STUDY.options(cell)), "TrainingError: the loss became nan"))
        line = panels(rows)[0].line(SWITCH.name)
        assert line is not None
        assert (line.tried, len(line.accuracies)) == (3, 2)
        assert "the loss became nan" in page(rows)

    @given(st.lists(st.tuples(st.floats(0.0, 1.0), st.floats(0.0, 1e4)), min_size=1, max_size=20), st.floats(0, 100))
    def test_time_to_is_the_first_validation_that_is_good_enough(
        self, points: list[tuple[float, float]], wanted: float
    ) -> None:
        history = {"accuracy": [a for a, _ in points], "seconds": [s for _, s in points]}
        found = time_to({"history": history}, wanted)
        good = [s for a, s in points if 100 * a >= wanted - 1e-9]
        assert found == (good[0] if good else None)

    def test_a_setback_is_a_loss_that_was_low_and_is_high_again(self) -> None:
        assert setback([2.0, 1.9, 0.5, 0.1, 0.3, 1.2, 0.1]) == 6
        assert setback([2.0, 1.9, 0.5, 0.1, 0.9]) is None
        assert setback([2.0, 0.5, 1.9]) is None

    @given(st.lists(st.floats(0.01, 3.0), min_size=1, max_size=30))
    def test_a_loss_that_only_falls_has_no_setback(self, losses: list[float]) -> None:
        assert setback(sorted(losses, reverse=True)) is None

    def test_moments_are_compared_where_both_switched_at_the_same_place(self) -> None:
        rows = example()
        (one,) = ablations(rows)
        assert one.accuracy.mean == pytest.approx(1.3)
        assert one.loss is not None
        assert one.loss.mean == pytest.approx(-0.298)
        next(row for row in rows if row["cell"] == DROPPED_FP16.name)["switches"][0]["position"] += 1
        (one,) = ablations(rows)
        assert (len(one.losses), one.apart, one.accuracy.n) == (2, (0,), 3)

    @given(st.lists(st.lists(st.floats(-1.0, 1.0), min_size=3, max_size=6), min_size=1, max_size=6))
    def test_the_correction_only_raises_p_and_keeps_the_order(self, tests: list[list[float]]) -> None:
        found = chances([[(i, d, 0.0) for i, d in enumerate(some)] for some in tests])
        known = [one for one in found if one is not None]
        assert len(known) == len(tests)
        assert all(0 <= one.p <= one.p_holm <= 1 for one in known)
        holm = [one.p_holm for one in sorted(known)]
        assert holm == sorted(holm)

    def test_the_correction_agrees_with_statsmodels(self) -> None:
        multitest = pytest.importorskip("statsmodels.stats.multitest")
        tests = [[(0, 1.0, 0.2), (1, 1.2, 0.1), (2, 0.9, 0.3)], [(0, 1.0, 0.9), (1, 1.0, 1.3), (2, 1.2, 1.0)]]
        found = [one for one in chances([*tests, []]) if one is not None]
        assert len(found) == 2
        assert [one.p_holm for one in found] == pytest.approx(
            multitest.multipletests([one.p for one in found], method="holm")[1]
        )

    def test_a_switched_run_is_put_together_from_its_phases(self) -> None:
        rows = example()
        (timing,) = timings(rows, panels(rows))
        assert timing.share == pytest.approx(0.25)
        assert timing.ratio("all-reduce", "async", "all-reduce") == pytest.approx(0.25 + 0.75 * 300 / 660)
        assert timing.ratio("all-reduce", "nobody", "all-reduce") is None


class TestPage:
    def test_what_the_baseline_lacks_is_said_beside_the_ratio_that_it_gives(self) -> None:
        text = page(divided(example()))
        answer = next(line for line in text.splitlines() if line.startswith("- **CIFAR-10, ResNet-20.**"))
        assert "its gradients leave in one bucket" in answer and "equal parts although one is slower" in answer
        share = 0.25  # of the budget, where the example switches
        overlap = (share * 530 + (1 - share) * 300) / 530
        assert f"a switch takes {overlap:.3f} of all-reduce's time with small buckets on both sides" in answer
        assert f"(`equal-finish`) {310 / 660:.3f} of it without a switch (660 to 310 ms a step, 230 with" in answer

    def test_without_such_timings_it_says_nothing_of_them(self) -> None:
        assert "lacks two things" not in page(example())

    def test_versions_of_all_runs_are_told(self) -> None:
        rows = divided(example())
        rows[-1]["versions"] = {"python": "3.11.0", "torch": "2.13.0"}
        assert "python 3.11.0, torch 2.13.0: 1" in page(rows)

    def test_targets_are_judged_by_the_mean_and_by_the_interval(self) -> None:
        text = page(example())
        assert "time 0.590 ± 0.025 (met, not settled by these seeds)" in text
        assert "time 0.500 (met), accuracy +0.10" in text

    def test_a_missed_target_is_said_to_be_missed(self) -> None:
        rows = [{**row, "seconds": 95.0} if row["cell"] == SWITCH.name else row for row in example()]
        assert "time 0.950 (missed)" in page(rows)
        assert "−3.80 ± 0.50 points (missed)" in page(rows)  # DiLoCo

    def test_a_sample_that_was_not_used_once_is_told(self) -> None:
        rows = example()
        assert "every sample was used once" in page(rows)
        rows[0]["audit"] = {"missing": 3, "repeated": 0}
        assert "'missing': 3" in page(rows)

    def test_the_figure_is_svg_with_a_panel_per_setting(self) -> None:
        rows = example()
        text = figure(panels(rows), rows)
        ElementTree.fromstring(text)
        assert text.count("in parts of all-reduce's") == 2

    def test_nothing_to_draw_is_an_error(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="all-reduce"):
            draw(tmp_path)

    def test_the_committed_page_is_made_from_the_committed_rows(self) -> None:
        rows = open_store(COMMITTED).rows()
        assert page(rows) == (COMMITTED / "switching.md").read_text(encoding="utf-8")
        assert figure(panels(rows), rows).startswith("<?xml")

    def test_the_committed_rows_are_those_of_the_design(self) -> None:
        rows = open_store(COMMITTED).rows()
        known = {(r["setting"], r["cell"], int(r["seed"])): r["accuracy"] for r in rows if is_final(r)}
        wanted = {cell.key: identity(cell, STUDY.options(cell))["config"] for cell in STUDY.cells(known)}
        assert wanted.keys() == known.keys()
        for row in rows:
            ours = wanted[row["setting"], row["cell"], int(row["seed"])]
            assert {**row["config"], "device": "cpu"} == json.loads(json.dumps(ours))


class TestRunning:
    SMALL = dataclasses.replace(DIGITS, epochs=3, machines=Machines(workers=2))

    def test_a_run_leaves_what_the_page_needs(self, tmp_path: Path) -> None:
        cell = Cell(self.SMALL, SWITCH_FP16, 0)
        options = STUDY.options(cell)
        row = train_one(identity(cell, options), options, tmp_path)
        assert row["status"] == "finished", row
        (switch,) = row["switches"]
        assert switch["epoch"] == pytest.approx(0.35 * 3, abs=0.1)
        assert math.isfinite(switch["loss_after"])
        assert row["audit"] == {"missing": 0, "repeated": 0}
        assert len(row["train_loss"]) == 3
        base = {**row, "cell": ALL_REDUCE.name, "switches": [], "rules": []}
        store = open_store(tmp_path)
        for one in (base, row):
            store.append(one)
        draw(tmp_path)
        assert "## When and why it switched" in (tmp_path / "switching.md").read_text(encoding="utf-8")

    @pytest.mark.slow
    def test_a_study_runs_and_resumes(self, tmp_path: Path) -> None:
        study = Study(parts=(Part(setting=self.SMALL, arms=(ALL_REDUCE,), seeds=(0,)),), deadline_s=50.0)
        said: list[str] = []
        assert run(study, tmp_path, jobs=2, say=said.append) == 0
        (row,) = open_store(tmp_path).rows()
        assert row["status"] == "finished", row
        assert row["exchanges"] == row["steps"]
        said.clear()
        assert run(study, tmp_path, jobs=1, say=said.append) == 0
        assert not said
        other = dataclasses.replace(self.SMALL, epochs=4)
        with pytest.raises(ConfigError, match="epochs"):
            run(Study(parts=(Part(setting=other, arms=(ALL_REDUCE,), seeds=(0,)),)), tmp_path, jobs=1)

    def test_a_run_that_takes_too_long_has_failed(self, tmp_path: Path) -> None:
        study = Study(parts=(Part(setting=self.SMALL, arms=(ALL_REDUCE,), seeds=(0,)),), deadline_s=0.01)
        assert run(study, tmp_path, jobs=1, say=lambda text: None) == 1
        (row,) = open_store(tmp_path).rows()
        assert "took longer than" in row["error"]

    def test_jobs_must_be_positive(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="jobs"):
            run(QUICK, tmp_path, jobs=0)
