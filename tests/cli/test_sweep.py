"""`podium sweep`, on real models of one epoch."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from podium.cli import main
from podium.cli.sweep_progress import line_of, sweep_progress
from podium.lab.sweeps.reproduce import command
from podium.records.recorder import read_records

FUSED = ("--executor", "fused", "--device", "cpu", "--epochs", "1")


def sweep(*words: str) -> Result:
    return CliRunner().invoke(main, ["sweep", *words])


def numbers(folder: Path) -> list[int]:
    """The trials that are over."""
    path = folder / "results.jsonl"
    return [row["trial"]["number"] for row in read_records(path)] if path.is_file() else []


@pytest.mark.slow
def test_one_command_ends_with_the_best_trial_its_state_a_table_and_a_plot(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    grid = ("--grid", "lr=0.3,0.1,0.03", "--grid", "hidden=16|32", "--grid", "momentum=0,0.9")
    result = sweep("digits-mlp", *grid, "--folds", "5", "--epochs", "1", "--executor", "auto:seconds=0.02",
                   "--out", str(folder))  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "12 points, mean ± half of the 95 % interval" in result.stdout
    assert "Best of 12 points" in result.stdout and "60 trials" in result.stdout
    (model,) = (folder / "models").iterdir()
    assert f"model    {model}" in result.stdout and f"report   {folder / 'report.html'}" in result.stdout
    assert (folder / "figures" / "scores.svg").is_file() and (folder / "points.csv").is_file()
    assert "60/60 trials over, 60 evaluations" in result.stderr
    prose = [line for line in result.stdout.splitlines() if str(tmp_path) not in line]
    assert max(map(len, prose)) <= 80 and "\x1b" not in result.output


def test_json_is_one_document_of_all_trials(tmp_path: Path) -> None:
    file = tmp_path / "points.csv"
    file.write_text("lr,hidden\n0.3,16\n0.1,\n")
    result = sweep("--trials", str(file), *FUSED, "--seeds", "2", "--out", str(tmp_path / "a"), "--json")
    assert result.exit_code == 0 and result.stderr == ""
    document = json.loads(result.stdout, parse_constant=pytest.fail)
    assert Counter(o["status"] for o in document["outcomes"]) == {"finished": 4}
    assert document["best"]["n"] == 2 and document["metric"] == "accuracy" and document["maximize"]
    assert [point["options"] for point in sorted(document["points"], key=lambda p: p["number"])] == [
        {"lr": 0.3, "hidden": [16]},
        {"lr": 0.1},
    ]
    assert document["reading"]["absent"]["energy_j"] and document["best_trial"]["model"]


def test_a_failed_trial_is_told_and_exits_with_one(tmp_path: Path) -> None:
    result = sweep("digits-mlp", "--grid", "hidden=16|-1", *FUSED, "--out", str(tmp_path / "a"))
    assert result.exit_code == 1
    assert "trial 1 failed: " in result.stderr and "Of 2 trials 1 failed" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["digit-mlp"], "Did you mean 'digits-mlp'"),
        (["--grid", "lrr=0.1"], "Did you mean 'lr'"),
        (["--executor", "fuse"], "Did you mean 'fused'"),
        (["--stop", "asha:grase=1"], "Did you mean 'grace'"),
        (["--keep", "bst"], "Did you mean 'best'"),
        (["--grid", "lr"], "takes NAME=VALUES, got 'lr'"),
        (["--set", "lr=1"], "--set takes task.NAME=VALUE, got 'lr=1'"),
        (["--precision", "fp8"], "precision must be fp32, tf32 or bf16, got 'fp8'"),
        (["--trials", "none.csv"], "none.csv: cannot be read"),
        (["--grid", "lr=0.1,0.2", "--stop", "pbt", "--executor", "processes"], "executor must be auto or fused"),
    ],
)
def test_refusals_have_exit_code_two_and_the_nearest_match(words: list[str], message: str, tmp_path: Path) -> None:
    result = sweep(*words, "--device", "cpu", "--out", str(tmp_path / "a"))
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert not (tmp_path / "a").exists()


def test_when_no_trial_has_a_score_the_exit_code_says_so(tmp_path: Path) -> None:
    result = sweep("digits-mlp", "--grid", "lr=1e30,1e31", *FUSED, "--out", str(tmp_path / "a"))
    assert result.exit_code == 1 and "Nothing can be concluded" in result.stdout


def test_a_dry_run_says_what_would_be_trained_and_the_report_how_to_ask_for_it_again(tmp_path: Path) -> None:
    words = ("--grid", "lr=0.1,0.2", "--folds", "3", "--set", "task.hidden=8", "--device", "cpu", "--dry-run",
             "--stop", "asha:grace=2", "--metric", "loss", "--set", "task.clip_norm=None")  # fmt: skip
    document = json.loads(sweep(*words, "--out", str(tmp_path / "a"), "--json").stdout)
    assert document["total"] == 6 and document["options"] == {"hidden": [8], "clip_norm": None}
    assert document["folds"]["kind"] == "stratified" and not (tmp_path / "a").exists()
    again = command(document)
    assert again is not None
    assert json.loads(sweep(*shlex.split(again)[2:], "--dry-run", "--json").stdout) == document


@pytest.mark.slow
def test_a_killed_sweep_is_taken_up_again_and_trains_each_trial_once(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    words = ["sweep", "--space", "lr=1e-3..1:log", "--random", "60", "--executor", "sequential:threads=1", "--device",
             "cpu", "--epochs", "2", "--out", str(folder), "-q"]  # fmt: skip
    process = subprocess.Popen([sys.executable, "-m", "podium", *words], env={**os.environ, "OMP_NUM_THREADS": "1"})
    until = time.monotonic() + 60
    while len(numbers(folder)) < 3:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    done = numbers(folder)
    assert 3 <= len(done) < 60
    words[words.index("sequential:threads=1")] = "fused"  # how it is trained may change, what is trained may not
    result = CliRunner().invoke(main, [*words, "--json"])
    assert result.exit_code == 0, result.stderr
    assert numbers(folder)[: len(done)] == done
    assert sorted(numbers(folder)) == list(range(60))
    document = json.loads(result.stdout)
    assert [session["trained"] for session in document["sessions"]] == [60 - len(done)]
    assert f"{len(done)} more were trained in a session that was killed" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_finished_and_the_same_command_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    words = ("--random", "200", "--space", "lr=1e-3..1:log", *FUSED, "--executor", "sequential", "--out", str(folder))

    def press() -> None:
        until = time.monotonic() + 30
        while len(numbers(folder)) < 2 and time.monotonic() < until:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    result = sweep(*words)
    thread.join()
    assert result.exit_code == 130, result.output
    assert f"the same command with --out {folder} resumes" in result.stdout
    assert 2 <= len(numbers(folder)) < 200 and (folder / "report.html").is_file()


def test_a_lost_process_is_a_line_and_a_failed_trial_and_the_sweep_continues(tmp_path: Path) -> None:
    task = tmp_path / "lethal.py"
    task.write_text(
        "import dataclasses, os, signal\n"
        "from podium.tasks.digits import digits_mlp\n\n"
        "def make_task(lr=0.1):\n"
        "    def loss(outputs, targets):\n"
        "        if lr == 0.3:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "        return (outputs.logsumexp(1) - outputs.gather(1, targets[:, None])[:, 0]).mean()\n"
        "    return dataclasses.replace(digits_mlp(lr=lr), loss=loss)\n"
    )
    words = ("--grid", "lr=0.1,0.3", "--epochs", "1", "--executor", "processes:count=1", "--out", str(tmp_path / "out"))
    result = CliRunner().invoke(main, ["sweep", f"{task}:make_task", *words])
    assert result.exit_code == 1, result.output
    assert "process 0 lost" in result.stderr
    assert len(numbers(tmp_path / "out")) == 2


def test_a_study_s_folder_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text("{}")
    result = sweep("digits-mlp", "--grid", "lr=0.1", *FUSED, "--out", str(tmp_path))
    assert result.exit_code == 2
    assert "holds a study" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["study.json"]


@pytest.mark.parametrize("executor", ["fused", "sequential"])
def test_a_module_that_is_returned_twice_is_refused_and_left_as_it_is(tmp_path: Path, executor: str) -> None:
    task = tmp_path / "same.py"
    task.write_text(
        "import dataclasses\nfrom podium.tasks.digits import digits_mlp\n\n"
        "SHARED = digits_mlp().model()\n\n"
        "def make_task(lr=0.1):\n"
        "    assert next(SHARED.parameters()).dtype.itemsize == 4, 'changed in place'\n"
        "    return dataclasses.replace(digits_mlp(lr=lr), model=lambda: SHARED)\n"
    )
    words = ("--grid", "lr=0.1,0.2", "--epochs", "1", "--executor", executor, "--device", "cpu")
    result = sweep(f"{task}:make_task", *words, "--seeds", "2", "--out", str(tmp_path / "out"))
    assert result.exit_code == 2, result.output
    assert "must make a new module at each call" in result.stderr
    assert not (tmp_path / "out").exists()
    assert "changed in place" not in result.output


def test_the_list_names_executors_rules_and_searches() -> None:
    document = json.loads(CliRunner().invoke(main, ["list", "--json"]).stdout)
    assert {"auto", "fused", "sequential"} <= set(document["executors"])
    assert {"asha", "pbt"} <= set(document["stopping_rules"]) and {"grid", "optuna"} <= set(document["searches"])
    assert all(document["executors"].values())


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"event": "sweep", "folder": "f", "total": 6, "done": 2}, "sweep f: 6 trials, 2 of them done before"),
        ({"event": "chose", "executor": "fused", "why": "fused: 3×"}, "chose fused: 3×"),
        ({"event": "probe", "fuses": False, "why": "a branch"}, "cannot be fused: a branch"),
        ({"event": "probe", "fuses": True, "why": ""}, None),
        (
            {"event": "fell back", "why": "no room"},
            "trials begin again, one by one: no room",
        ),
        ({"event": "process lost", "process": 1, "why": "killed"}, "process 1 lost: killed"),
        ({"event": "narrowed", "before": 8, "rows": 3}, None),
        ({"event": "report"}, None),
    ],
)
def test_what_is_worth_a_line(event: dict[str, Any], line: str | None) -> None:
    assert line_of(event) == line


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("podium.cli.display.is_live", lambda stream: True)
    with sweep_progress(quiet=False) as hear:
        hear({"event": "sweep", "folder": "f", "total": 2, "done": 0})
        hear({"event": "report"})
        hear({"event": "outcome", "done": 2, "total": 2, "status": "finished"})
    assert "trials" in capsys.readouterr().err
