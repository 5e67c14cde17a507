"""`podium train`, on real runs of a few steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from podium.cli import main
from podium.cli.summary import agreement

THREADS = ("--launcher", "threads", "--workers", "2")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def train(*words: str) -> Result:
    return CliRunner().invoke(main, ["train", "digits-mlp", *words])


def start(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "podium", *words]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, encoding="utf-8"
    )


def test_the_summary_says_what_came_of_the_run_and_what_to_do_next(tmp_path: Path) -> None:
    result = train(*THREADS, "--epochs", "1", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    (folder,) = tmp_path.iterdir()
    for part in ("accuracy", "samples/s", "all 2 equal", str(folder), "podium compare digits-mlp"):
        assert part in result.stdout
    assert "epoch 1" in result.stderr
    assert "\x1b" not in result.output


def test_quiet_shows_the_summary_alone(tmp_path: Path) -> None:
    result = train(*THREADS, "--steps", "2", "--out", str(tmp_path), "--quiet")
    assert result.stderr == ""
    assert "accuracy" in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "threads", "virtual"])
def test_json_is_the_result_and_nothing_else(launcher: str, tmp_path: Path) -> None:
    words = ("--launcher", launcher, "-n", "2", "--steps", "3", "--out", str(tmp_path), "--json")
    process = start("train", "digits-mlp", *words)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    document = json.loads(out, parse_constant=pytest.fail)
    assert out.count("\n") == 1
    assert document["status"] == "finished"
    assert document["steps"] == 3
    assert len(set(document["param_hash"].values())) == 1


@pytest.mark.slow
def test_what_processes_print_does_not_spoil_the_document(tmp_path: Path) -> None:
    task = tmp_path / "loud.py"
    task.write_text(
        "import subprocess\n"
        "from podium.tasks.digits import digits_mlp\n\n"
        "def make_task():\n"
        "    print('from Python')\n"
        "    subprocess.run(['echo', 'from a child'], check=True)\n"
        "    return digits_mlp()\n"
    )
    process = start("train", f"{task}:make_task", *THREADS, "--steps", "1", "--out", str(tmp_path / "runs"), "--json")
    out, err = process.communicate(timeout=60)
    assert json.loads(out)["steps"] == 1
    assert "from Python" in err
    assert "from a child" in err


def test_a_run_that_fails_is_a_document_with_its_error(tmp_path: Path) -> None:
    task = tmp_path / "broken.py"
    task.write_text(
        "import dataclasses\n"
        "from podium.tasks.digits import digits_mlp\n\n"
        "def make_task():\n"
        "    def loss(outputs, targets):\n"
        "        raise ValueError('no loss today')\n"
        "    return dataclasses.replace(digits_mlp(), loss=loss)\n"
    )
    words = ["train", f"{task}:make_task", *THREADS, "--out", str(tmp_path / "runs"), "--json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "no loss today" in json.loads(result.stdout)["error"]["message"]
    assert "no loss today" in result.stderr


@pytest.mark.slow
def test_one_interrupt_finishes_the_step_saves_and_reports(tmp_path: Path) -> None:
    process = start("train", "digits-mlp", *THREADS, "--epochs", "100000", "--out", str(tmp_path))
    assert process.stderr is not None
    while not process.stderr.readline().startswith("epoch"):
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "finishing the step, saving…" in err
    assert "stopped" in out.splitlines()[0]
    (folder,) = tmp_path.iterdir()
    assert list((folder / "checkpoints").iterdir())
    assert f"podium train --resume {folder}" in out


def test_a_resumed_run_is_asked_for_as_before_unless_told(tmp_path: Path) -> None:
    first = train(*THREADS, "--strategy", "all-reduce:bucket_bytes=4096", "--steps", "2", "--out", str(tmp_path), "-q")
    assert first.exit_code == 0, first.output
    (folder,) = tmp_path.iterdir()
    (checkpoint,) = (folder / "checkpoints").iterdir()
    for place in (folder, checkpoint):
        words = ["train", "--resume", str(place), "--steps", "5", "--dry-run", "--json"]
        config = json.loads(CliRunner().invoke(main, words).stdout)
        assert (config["workers"], config["launcher"], config["steps"]) == (2, "threads", 5)
        assert config["strategy_options"] == {"bucket_bytes": "4096"}
        assert config["run_dir"] is None


def test_the_summary_of_a_resumed_run_says_what_is_of_this_run(tmp_path: Path) -> None:
    first = train(*THREADS, "--steps", "2", "--set", f"run_dir={tmp_path / 'first'}", "-q")
    assert "(this run)" not in first.stdout
    words = ["train", "--resume", str(tmp_path / "first"), "--steps", "5", "--out", str(tmp_path / "rest"), "-q"]
    lines = CliRunner().invoke(main, words).stdout.splitlines()
    (work,) = [line for line in lines if line.startswith("  work")]
    assert work.split(None, 1)[1].startswith("5 steps, ")
    assert work.endswith(" 192 samples (this run)")
    assert [line.split()[0] for line in lines if line.endswith("(this run)")] == ["time", "work", "sent"]


def test_a_replay_is_of_the_same_run_in_virtual_time(tmp_path: Path) -> None:
    train(*THREADS, "--strategy", "parameter-server:mode=async", "--steps", "2", "--out", str(tmp_path), "-q")
    (folder,) = tmp_path.iterdir()
    result = CliRunner().invoke(main, ["train", "--replay", str(folder), "--dry-run", "--json"])
    config = json.loads(result.stdout)
    assert (config["strategy"], config["workers"], config["launcher"]) == ("parameter-server", 2, "virtual")


def test_replicas_that_differ_are_said_to() -> None:
    assert agreement({"0": "a1", "1": "a1"}) == "all 2 equal (a1)"
    assert agreement({"0": "a1", "1": "b2", "2": "a1"}) == "2 different among 3 workers"
