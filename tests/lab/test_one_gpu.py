from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from podium.errors import ConfigError, UnknownName
from podium.lab.published.one_gpu import (
    Cell,
    Design,
    Key,
    curves,
    design,
    draw,
    find_bars,
    find_curves,
    from_bench,
    judgements,
    main_panels,
    missing,
    numbered,
    open_store,
    page,
    panel,
    races,
    run,
    waiting,
)
from podium.lab.published.one_gpu.design import APART, CALL_S, FUSED, LEVELS
from podium.lab.published.one_gpu.one import sweep_facts, sweep_row
from podium.lab.published.one_gpu.rows import done_keys, key_of, rounded
from podium.lab.published.one_gpu.tables import GROUPS
from podium.lab.study.store import Row

MLP = ("mnist-mlp", 64, "tf32")
DEVICE = {"type": "cuda", "name": "NVIDIA H200", "driver": "580", "power_limit_w": 700.0, "idle_w": 100.0}


def session(**more: Any) -> Row:
    versions, hardware = {"python": "3.12.3", "torch": "2.11.0"}, {"cores": 16, "cpu": "Xeon"}
    facts = {"device": DEVICE, "versions": versions, "hardware": hardware, "commit": "abc"}
    settings = design("core").settings
    return {"kind": "session", "session": 0, "at": "now", "size": "gpu", **facts, "settings": settings, **more}


def timed(
    arm: str, us: float | None, *, part: str = "times", trials: int = 64, watts: float = 200.0, **more: Any
) -> Row:
    reading = {"seconds": 3.0, "power_w": watts, "power_over_idle_w": watts - 100, "energy_is_short": part == "times"}
    reading |= {"memory_bytes": 2.0**30, "sm_util": 50.0, "dram_bw_util": 20.0, "cpu_s": 6.0}
    rounds = [] if us is None else [0.9 * us, us, 1.1 * us]
    return {
        "kind": "row", "session": 0, "part": part, "task": "mnist-mlp", "trials": trials, "precision": "tf32",
        "arm": arm, "us": us, "rounds_us": rounds, "width": 1, "start_s": 1.5, "steps_per_trial": 1000, "j": None,
        "j_over_idle": None, "reading": {} if us is None else reading, "why": "" if us else "RuntimeError: no",
        "took_s": 4.0, **more,
    }  # fmt: skip


def swept(arm: str, seconds: float | None, *, part: str = "folds", **more: Any) -> Row:
    best = {"name": "lr=0.1", "mean": 0.97, "low": 0.96, "high": 0.98, "n": 5}
    found = {"seconds": seconds, "trained": 60, "statuses": {"finished": 60}, "metric": "accuracy", "best": best}
    found |= {"chosen": [], "not_fused": [], "reading": {"seconds": seconds, "power_w": 300.0, "energy_is_short": True}}
    key = {"part": part, "task": "mnist-mlp", "trials": 60, "precision": "tf32", "arm": arm}
    why = "" if seconds else "it took longer than 60 s"
    return {"kind": "sweep", "session": 0, **key, "executor": arm, **(found if seconds else {}), "why": why,
            "took_s": 9.0, **more}  # fmt: skip


def study() -> list[Row]:
    """A small study: three levels at 64 trials, fused also at 4, a choice, two races, one arm that failed."""
    chosen = {"chosen": "fused:width=64", "chosen_arm": "fused", "said": "why", "calibration_s": 3.0}
    choice = {**timed("auto", 1.0), "kind": "auto", **chosen}
    return [
        session(),
        timed("fused", 6.0, width=64),
        timed("fused-compiled", 4.0, part="energy", width=64, j=2.0, j_over_idle=1.0, watts=400.0),
        timed("mps", 80.0, width=16),
        timed("mps-graph", 24.0, part="energy", width=16, j=5.0, j_over_idle=3.0),
        timed("ray", None),
        timed("eager", 1400.0),
        timed("streams", 20.0, width=32),
        timed("fused", 12.0, trials=4, width=4),
        choice,
        swept("fused", 2.0),
        swept("mps-graph", 6.0),
        swept("auto", 3.0, chosen=["fused:width=60"]),
        swept("ray", None),
    ]


# What is planned.


def test_all_that_is_core_fits_into_25_minutes_of_the_device_and_energy_into_one_call() -> None:
    core = design("core")
    calls = 5
    assert core.estimate_s + calls * CALL_S <= 26.5 * 60
    for part in ("times", "folds", "search"):
        assert core.only([part]).estimate_s < 600 - CALL_S or part == "times"
    pairs = [cell for cell in core.only(["energy"]).cells if cell.key.arm != "ray"]
    assert CALL_S + sum(cell.estimate_s for cell in pairs) <= 560


def test_full_has_what_core_has_and_asks_for_nothing_twice() -> None:
    core, full = (design(size) for size in ("core", "full"))
    keys = [cell.key for cell in full.cells]
    assert len(set(keys)) == len(keys)
    assert {cell.key for cell in core.cells} < set(keys)
    assert {key.arm for key in keys if key.part == "energy" and key.task == "mnist-mlp"} == set(LEVELS) - {"auto"}
    assert {key.trials for key in keys if key.part == "times" and key.arm == "fused"} == {4, 16, 64, 256}


def test_every_level_is_in_the_core_of_every_task() -> None:
    cells = design("core").cells
    for task in ("mnist-mlp", "mnist-cnn", "cifar10-resnet20"):
        arms = {cell.key.arm for cell in cells if cell.key.task == task and cell.key.part in ("times", "energy")}
        assert all(arms & set(group) for group in GROUPS.values())


def test_arms_can_be_chosen() -> None:
    chosen = design("full").only(["times"], ["mnist-cnn"], ["compiled", "graph"])
    assert {cell.key.arm for cell in chosen.cells} == {"compiled", "graph"}
    assert {(cell.key.part, cell.key.task) for cell in chosen.cells} == {("times", "mnist-cnn")}


def test_an_unknown_part_task_arm_or_size_is_refused() -> None:
    with pytest.raises(UnknownName, match="tims"):
        design("core").only(["tims"])
    with pytest.raises(UnknownName, match="mnist-mpl"):
        design("core").only([], ["mnist-mpl"])
    with pytest.raises(UnknownName, match="graff"):
        design("core").only(arms=["graff"])
    with pytest.raises(UnknownName, match="large"):
        design("large")  # type: ignore[arg-type]


# Going on.


def stand_in(measured: list[Key], why: str = "") -> Any:
    """Leaves a record as the device would, and notes for what."""

    def measure(cell: Cell, number: int) -> Row:
        measured.append(cell.key)
        row = {**timed(cell.key.arm, None if why else 5.0), **cell.key._asdict(), "session": number, "why": why}
        if cell.key.part in ("folds", "search"):
            return {**swept(cell.key.arm, 2.0), **cell.key._asdict(), "session": number}
        if cell.key.arm == "auto":
            return {**row, "kind": "auto", "chosen": "fused", "chosen_arm": "fused", "said": "", "calibration_s": 1.0}
        return row

    return measure


def test_a_study_goes_on_with_what_is_missing_and_begins_nothing_that_the_budget_does_not_hold(tmp_path: Path) -> None:
    out, asked = tmp_path / "o.jsonl", design("core").only(["times"], ["mnist-mlp"])
    first, second = list[Key](), list[Key]()
    ended = run(asked, out, budget_s=12.0, measure=stand_in(first), say=lambda text: None)
    assert first
    assert all(cell.estimate_s <= 12 for cell in asked.cells if cell.key in first)
    assert ended.left and "12 s are the budget" in ended.why
    assert {cell.key for cell in ended.left} == {cell.key for cell in asked.cells} - set(first)
    assert not run(asked, out, measure=stand_in(second), say=lambda text: None).left
    assert not set(first) & set(second)
    assert [row["session"] for row in open_store(out).rows() if row["kind"] == "session"] == [0, 1]
    assert run(asked, out, measure=stand_in(second), say=lambda text: None).measured == 0


def test_a_line_that_was_cut_short_is_measured_again_and_the_others_are_not(tmp_path: Path) -> None:
    out, asked, seen = tmp_path / "o.jsonl", design("core").only(["folds"], ["mnist-mlp"]), list[Key]()
    run(asked, out, measure=stand_in(seen), say=lambda text: None)
    whole = out.read_bytes()
    out.write_bytes(whole[:-30])
    lost, seen = seen[-1], []
    assert [cell.key for cell in waiting(asked, open_store(out).rows())] == [lost]
    assert lost.task in page(open_store(out).rows())
    run(asked, out, measure=stand_in(seen), say=lambda text: None)
    assert seen == [lost]
    rows = open_store(out).rows()
    assert done_keys(rows) == {cell.key for cell in asked.cells}


def test_what_failed_is_tried_again_only_when_asked(tmp_path: Path) -> None:
    out, asked, seen = tmp_path / "o.jsonl", design("core").only(["energy"], ["mnist-cnn"]), list[Key]()
    assert run(asked, out, measure=stand_in(seen, why="no device"), say=lambda text: None).failed == 2
    assert run(asked, out, measure=stand_in(seen), say=lambda text: None).measured == 0
    assert run(asked, out, again=True, measure=stand_in(seen), say=lambda text: None).measured == 2
    assert [line.why for line in panel(numbered(open_store(out).rows()), "mnist-cnn", 64, "tf32").lines] == ["", ""]


def test_times_leaves_out_what_was_timed_for_its_energy_but_not_what_failed_there() -> None:
    asked = design("core").only(["times"], ["mnist-mlp"])
    held = [cell for cell in asked.cells if cell.unless is not None]
    assert {cell.key.arm for cell in held} == {"fused-compiled", "mps-graph", "ray"}
    rows = [timed("mps-graph", 24.0, part="energy"), timed("ray", None, part="energy")]
    left = {cell.key.arm for cell in waiting(asked, rows) if cell.unless is not None}
    assert left == {"fused-compiled", "ray"}


def test_measurements_of_another_design_are_not_mixed_in(tmp_path: Path) -> None:
    out, asked = tmp_path / "o.jsonl", design("core").only(["energy"], ["mnist-cnn"])
    run(asked, out, measure=stand_in([]), say=lambda text: None)
    with pytest.raises(ConfigError, match=r"holds measurements with rounds 3; wanted 5"):
        run(dataclasses.replace(asked, rounds=5), out, measure=stand_in([]), say=lambda text: None)


def test_without_a_gpu_the_study_says_what_runs_here(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match="--size small"):
        run(design("core"), tmp_path / "o.jsonl", data_dir="data", say=lambda text: None)
    assert not (tmp_path / "o.jsonl").exists()


# Tables.


def test_arms_stand_in_the_order_of_their_times_with_ratios_to_the_best_fused_one() -> None:
    found = panel(numbered(study()), *MLP)
    assert [line.arm for line in found.lines] == [
        "fused-compiled", "fused", "streams", "mps-graph", "mps", "eager", "ray",
    ]  # fmt: skip
    ratios = {line.arm: line.ratio for line in found.lines}
    assert ratios["fused-compiled"] == 1.0 and ratios["mps-graph"] == pytest.approx(6.0) and ratios["ray"] is None
    assert found.lines[-1].why == "RuntimeError: no"


def test_energy_is_the_windows_own_where_it_was_long_and_a_hint_from_power_and_time_where_not() -> None:
    lines = {line.arm: line.figures for line in panel(numbered(study()), *MLP).lines}
    assert (lines["fused-compiled"].j, lines["fused-compiled"].j_is_hint) == (2.0, False)
    assert lines["mps"].j == pytest.approx(200.0 * 80e-6 * 1000)
    assert lines["mps"].j_over_idle == pytest.approx(100.0 * 80e-6 * 1000) and lines["mps"].j_is_hint
    assert lines["ray"].j is None and lines["ray"].absent["j"] == "RuntimeError: no"


def test_a_long_window_is_taken_before_a_later_short_one_and_a_time_before_a_failure() -> None:
    rows = numbered([*study(), timed("mps-graph", 30.0, width=16), timed("mps", None)])
    lines = {line.arm: line for line in panel(rows, *MLP).lines}
    assert lines["mps-graph"].us == 24.0 and lines["mps"].us == 80.0


def test_only_measurements_that_would_be_the_same_are_filled_in_at_other_numbers_of_trials() -> None:
    rows = numbered([*study(), timed("fused", 5.0, trials=256, width=256)])
    found = curves(rows, "mnist-mlp", "tf32")
    by_arm = {arm: {spot.trials: spot.measured for spot in spots} for arm, spots in found.items()}
    assert by_arm["eager"] == {4: False, 64: True, 256: False}
    assert by_arm["mps-graph"] == {64: True, 256: False}  # 16 at a time: at 4 trials it would be another measurement
    assert by_arm["streams"] == {64: True, 256: False}
    assert by_arm["fused"] == {4: True, 64: True, 256: True}
    assert by_arm["fused-compiled"] == {64: True}


def test_races_have_makespans_ratios_and_joules_per_trial() -> None:
    (race,) = races(numbered(study()))
    assert [runner.arm for runner in race.runners] == ["fused", "auto", "mps-graph", "ray"]
    third = race.runners[2]
    assert third.ratio == 3.0 and third.figures.j == pytest.approx(300.0 * 6 / 60)
    assert third.figures.j_over_idle == pytest.approx(200.0 * 6 / 60) and third.figures.j_is_hint
    assert race.runners[-1].seconds is None and race.runners[-1].why


def test_regret_is_against_the_fastest_arm_of_the_cell_and_of_the_race() -> None:
    steady, raced = judgements(numbered(study()))
    assert (steady.fastest, steady.regret) == ("fused-compiled", pytest.approx(0.5))
    assert (raced.fastest, raced.regret, raced.chosen) == ("fused", pytest.approx(0.5), "fused:width=60")


def test_missing_is_what_the_design_has_and_the_records_have_not() -> None:
    asked = design("core").only(["times", "energy"], ["mnist-mlp"])
    gone = {cell.key for cell in missing(asked, study())}
    assert Key("times", "mnist-mlp", 64, "tf32", "mps-graph") not in gone  # its energy was measured, and its time
    assert Key("times", "mnist-mlp", 64, "tf32", "graph") in gone
    assert not gone & {key_of(row) for row in study() if row["kind"] != "session"}


# A document of `podium bench sweep --json`, as an H200 left it; most arms are left out.

READING = {
    "seconds": 1.04, "energy_j": 170.4, "energy_over_idle_j": None, "power_w": 163.98893692939006,
    "power_over_idle_w": None, "energy_is_short": True, "memory_bytes": 0, "utilisation": 88.9, "sm_util": 9.156,
    "sm_occupancy": 1.1, "any_tensor_util": 0.28, "dram_bw_util": 2.12, "temperature_before_c": 37.0,
    "temperature_after_c": 37.0, "host_memory_bytes": 23094583296, "cpu_s": 16.86,
    "absent": {"energy_over_idle_j": "no idle power is known", "power_over_idle_w": "no idle power is known"},
}  # fmt: skip


def document() -> Row:
    def row(executor: str, us: float | None, width: int, trials: int = 64, **more: Any) -> Row:
        return {
            "task": "mnist-mlp", "trials": trials, "precision": "tf32", "executor": executor, "us_per_model_step": us,
            "rounds_us": [] if us is None else [0.99 * us, 1.01 * us], "width": width, "threads": None,
            "start_s": 2.32, "joules_per_trial": None, "joules_per_trial_over_idle": None,
            "reading": {} if us is None else READING, "why_absent": "", "same_as": "", **more,
        }  # fmt: skip

    cell = {
        "task": "mnist-mlp", "trials": 64, "precision": "tf32", "best": "fused-compiled",
        "best_us_per_model_step": 3.63, "auto": "fused:width=64,compiled=true", "auto_arm": "fused-compiled",
        "auto_regret": 0.0, "why": "3.64 µs per model-step", "calibration_s": 9.47,
    }  # fmt: skip
    rows = [
        row("eager", 1471.1533, 1),
        row("fused-compiled", 3.6308081366125515, 64),
        row("mps", 74.89101860627665, 16),
        row("mps", 74.89101860627665, 16, trials=256, same_as="64 trials"),
        row("ray", None, 16, why_absent="MissingExtra: ray"),
    ]
    device = {**DEVICE, "idle_w": None}
    facts = {"versions": {"python": "3.12.3", "torch": "2.11.0"}, "hardware": {"cores": 16, "cpu": "Xeon"}}
    return {"bench": "sweep", "device": device, **facts, "rows": rows, "cells": [cell], "ratios": []}


def test_a_document_of_the_bench_becomes_records_without_its_repetitions() -> None:
    rows = numbered(from_bench(document(), 3))
    assert [row["kind"] for row in rows] == ["session", "row", "row", "row", "row", "auto"]
    assert {row["session"] for row in rows} == {3}
    (found,) = main_panels(rows)
    lines = {line.arm: line for line in found.lines}
    assert lines["fused-compiled"].us == 3.6308 and lines["mps"].ratio == pytest.approx(20.6, abs=0.1)
    assert lines["mps"].figures.cores == pytest.approx(16.2, abs=0.1)
    assert lines["mps"].figures.j is None and "steps" in lines["mps"].figures.absent["j"]
    assert lines["ray"].why == "MissingExtra: ray"
    assert [one.regret for one in judgements(rows)] == [0.0]
    assert "20" in page(rows)


# The page.


def test_the_page_begins_with_the_answer_and_says_what_may_not_be_concluded() -> None:
    text = page(study())
    first = text.split("\n\n")[1]
    assert "6.0× as fast as the driver's best" in first
    assert "350× as fast as one after another" in first
    said = text.partition("What may not be concluded:")[2].partition("##")[0]
    for word in ("One machine (NVIDIA H200)", "steady state", "One profile of models", "not MLPerf"):
        assert word in said


def test_every_number_of_an_arm_links_to_the_line_it_comes_from(tmp_path: Path) -> None:
    rows = study()
    text = page(rows)
    links = re.findall(r"\[`?([^\]`]+)`?\]\(one-gpu\.jsonl#L(\d+)\)", text)
    for arm, line in links:
        row = rows[int(line) - 1]
        if arm in LEVELS:
            assert row["arm"] == arm
        elif re.fullmatch(r"[\d,.]+", arm) and arm != line:  # a number of a line is only that
            assert float(arm.replace(",", "")) == pytest.approx(row["us"], rel=0.01)
    assert {int(line) for _, line in links} == set(range(1, len(rows) + 1))


def test_absent_figures_say_why_and_what_was_left_out_is_listed() -> None:
    text = page(study())
    assert "– (a)" in text and "RuntimeError: no" in text and "it took longer than 60 s" in text
    left = text.partition("## What was left out")[2].partition("##")[0]
    (line,) = [line for line in left.splitlines() if line.startswith("- `times: mnist-mlp, 64 trials, tf32`")]
    assert "`graph`" in line and "`mps-graph`" not in line


def test_a_reading_without_energy_leaves_no_figure_and_says_why() -> None:
    rows = study()
    for row in rows:
        if "reading" in row:
            row["reading"] = {"seconds": 1.0, "absent": {"power_w": "no NVIDIA driver"}}
            row["j"] = row["j_over_idle"] = None
    assert not find_bars(numbered(rows))
    assert "No figure: no NVIDIA driver." in page(rows)


def test_figures_have_a_panel_per_task_and_are_the_same_every_time(tmp_path: Path) -> None:
    out = tmp_path / "one-gpu.jsonl"
    store = open_store(out)
    for row in study():
        store.append(row)
    assert [(one.title, len(one.arms)) for one in find_curves(numbered(study()))] == [("MNIST, MLP", 6)]
    bars = find_bars(numbered(study()))[0].bars
    assert [bar.arm for bar in bars] == ["fused", "fused-compiled", "streams", "mps-graph", "mps", "eager"]
    assert [bar.arm for bar in bars if not bar.is_hint] == ["fused-compiled", "mps-graph"]
    made = draw(out)
    names = ["one-gpu-joules.svg", "one-gpu-times.svg", "one-gpu.html", "one-gpu.md"]
    assert sorted(path.name for path in made) == names
    before = {path: path.read_bytes() for path in made}
    for path in made:
        if path.suffix == ".svg":
            ElementTree.fromstring(before[path])
    draw(out)
    assert {path: path.read_bytes() for path in made} == before


def test_a_page_without_measurements_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "one-gpu.jsonl"
    open_store(out).append(session())
    with pytest.raises(ConfigError, match="must hold a measurement, got 1 lines"):
        draw(out)


# On this machine.


@pytest.mark.slow
def test_an_arm_and_a_choice_are_measured_here_and_leave_small_records(tmp_path: Path) -> None:
    small = design("small")
    wanted = [cell for cell in small.cells if cell.key.task == "digits-mlp" and cell.key.part == "times"]
    cells = tuple(cell for cell in wanted if cell.key.arm in ("eager", "fused-compiled") and cell.key.trials == 8)
    asked = Design(**{**vars(small), "cells": cells, "rounds": 2, "seconds": 0.02})
    out = tmp_path / "o.jsonl"
    ended = run(asked, out, say=lambda text: None)
    assert (ended.measured, ended.failed, ended.left) == (2, 1, [])
    first, *rows = open_store(out).rows()
    assert first["device"]["type"] == "cpu" and first["versions"]["torch"]
    by_arm = {row["arm"]: row for row in rows}
    assert (
        by_arm["eager"]["us"] > 0 and len(by_arm["eager"]["rounds_us"]) == 2 and by_arm["eager"]["steps_per_trial"] > 9
    )
    assert "needs a GPU" in by_arm["fused-compiled"]["why"]
    assert all(len(json.dumps(row)) < 2000 for row in rows)
    assert "`eager`" in page(open_store(out).rows())


def test_a_whole_sweep_leaves_its_makespan_its_best_score_and_how_trials_ended(tmp_path: Path) -> None:
    asked = {**design("small").sweeps["folds", "digits-mlp"], "task": "digits-mlp", "device": "cpu", "epochs": 1}
    found = sweep_facts({**asked, "executor": "sequential"}, tmp_path / "s")
    assert found["statuses"] == {"finished": 12} and found["trained"] == 12 and found["best"]["n"] == 3
    assert 0 < found["best"]["mean"] <= 1 and found["seconds"] > 0 and found["why"] == ""


def test_a_sweep_that_does_not_end_in_time_is_a_row_that_says_so() -> None:
    key = Key("folds", "digits-mlp", 12, "fp32", "eager")
    row = sweep_row(0, key, {"task": "digits-mlp", "executor": "sequential"}, deadline_s=0.05)
    assert row["why"] == "it took longer than 0 s" and key_of(row) == key


def test_the_command_lists_its_plan_and_makes_a_page_from_a_document_of_the_bench(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("one_gpu", Path(__file__).parents[2] / "studies" / "one_gpu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    listed = CliRunner().invoke(module.main, ["--plan", "--part", "energy", "--only", "mnist-cnn"])
    assert listed.exit_code == 0 and "energy: mnist-cnn, 64 trials, tf32, mps-graph" in listed.output
    given, out = tmp_path / "bench.json", tmp_path / "one-gpu.jsonl"
    given.write_text(json.dumps(document()))
    made = CliRunner().invoke(module.main, ["--add-bench", str(given), "--out", str(out)])
    assert made.exit_code == 0, made.output
    assert "21× as fast as the driver's best (MNIST, MLP only)" in out.with_suffix(".md").read_text()


def test_numbers_are_kept_to_five_digits_and_words_as_they_are() -> None:
    assert rounded({"a": [1.23456789, "x", None, 7, True], "b": 123456.789}) == {
        "a": [1.2346, "x", None, 7, True], "b": 123460.0,
    }  # fmt: skip


def test_every_arm_has_a_level_and_an_executor() -> None:
    found = design("core")
    assert set(APART) | set(FUSED) < set(LEVELS)
    from podium.sweeps.plan import make_executor

    for arm in LEVELS:
        assert make_executor(found.executor(arm)).name
