"""`podium compare`, `podium report` and `podium demo`, on real runs of a few steps."""

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

pytest.importorskip("statsmodels")

SMALL = ("--launcher", "threads", "--epochs", "1", "--set", "batch_size=256")


def compare(*words: str) -> Result:
    return CliRunner().invoke(main, ["compare", "digits-mlp", *SMALL, *words])


def test_a_comparison_ends_with_its_table_its_answer_and_its_report(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    result = compare("--strategies", "solo,all-reduce", "--seeds", "2", "--out", str(folder))
    assert result.exit_code == 0, result.output
    assert (folder / "report.html").is_file()
    assert f"report   {folder / 'report.html'}" in result.stdout
    assert "this says nothing about other" in " ".join(result.stdout.split())
    assert [line.split()[0] for line in result.stderr.splitlines()] == ["1/4", "2/4", "3/4", "4/4"]
    prose = [line for line in result.stdout.splitlines() if not line.startswith("report")]
    assert max(map(len, prose)) <= 80
    assert "\x1b" not in result.output


def test_json_holds_the_rows_of_every_run(tmp_path: Path) -> None:
    words = ("--strategy", "parameter-server:mode=async,servers=2", "--strategy", "solo", "--seeds", "1")
    result = compare(*words, "--target", "0.5", "--out", str(tmp_path / "study"), "--json")
    document = json.loads(result.stdout, parse_constant=pytest.fail)
    assert result.stderr == ""
    assert document["target"] == 0.5
    assert {row["cell"] for row in document["rows"]} == {"solo", "parameter-server:mode=async,servers=2"}
    assert all(row["status"] == "finished" for row in document["rows"])


def test_a_comparison_with_a_failed_run_fails_and_still_reports(tmp_path: Path) -> None:
    task = tmp_path / "broken.py"
    task.write_text(
        "import dataclasses, threading\n"
        "from podium.tasks.digits import digits_mlp\n\n"
        "def make_task():\n"
        "    def loss(outputs, targets):\n"
        "        raise ValueError('no loss today')\n"
        "    return dataclasses.replace(digits_mlp(), loss=loss)\n"
    )
    words = ["compare", f"{task}:make_task", *SMALL, "--strategies", "solo", "--seeds", "1"]
    result = CliRunner().invoke(main, [*words, "--out", str(tmp_path / "study")])
    assert result.exit_code == 1
    assert "1 failed" in result.stdout
    assert (tmp_path / "study" / "report.html").is_file()


def test_one_interrupt_reports_what_there_is_and_the_same_command_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    words = ["compare", *SMALL, "--strategies", "solo,all-reduce", "--seeds", "500", "--out", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "podium", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    while not process.stderr.readline().startswith("   2/1000"):
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=90)
    assert process.returncode == 130, err
    assert f"the same command with --out {folder} goes on" in out
    assert (folder / "report.html").is_file()


def test_a_report_can_be_written_anew(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    compare("--strategies", "solo", "--seeds", "1", "--out", str(folder), "--quiet")
    page = (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    result = CliRunner().invoke(main, ["report", str(folder), "--json"])
    assert json.loads(result.stdout) == {"report": str(folder / "report.html")}
    assert (folder / "report.html").read_text() == page


def test_the_demo_leads_from_nothing_to_a_report_in_eighty_columns(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["demo", "--quick", "--out", str(tmp_path / "d")])
    assert result.exit_code == 0, result.output
    for cell in ("solo", "all-reduce", "mode=async"):
        assert cell in result.stdout
    assert "podium train digits-mlp" in result.stdout
    own = [line for line in result.output.splitlines() if str(tmp_path) not in line]
    assert max(map(len, own)) <= 80
