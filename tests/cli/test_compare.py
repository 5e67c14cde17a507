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
from markupsafe import Markup

from podium.cli import main
from podium.lab.report.browser import find_browser
from tests.lab.synthetic import make_row, write_study

pytest.importorskip("statsmodels")

SMALL = ("--launcher", "threads", "--epochs", "1", "--set", "batch_size=256")


def compare(*words: str) -> Result:
    return CliRunner().invoke(main, ["compare", "digits-mlp", *SMALL, *words])


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
    assert f"the same command with --out {folder} resumes" in out
    assert (folder / "report.html").is_file()


@pytest.mark.slow
def test_a_report_can_be_written_anew(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    compare("--strategies", "solo", "--seeds", "1", "--out", str(folder), "--quiet")
    page = (folder / "report.html").read_text()
    (folder / "report.html").unlink()
    result = CliRunner().invoke(main, ["report", str(folder), "--json"])
    assert json.loads(result.stdout) == {"report": str(folder / "report.html")}
    assert (folder / "report.html").read_text() == page


def report(*words: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, words)])


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two comparisons, `a` and `b`, that differ in their learning rates."""
    folder = tmp_path_factory.mktemp("studies")
    for name, options in (("a", {}), ("b", {"task_options": {"lr": 0.05}})):
        store = write_study(folder / name, [make_row("solo", seed, history=[]) for seed in (0, 1)], seeds=2)
        study = store.read_study()
        store.write_study({**study, "settings": {**study["settings"], **options}})
    return folder


def test_two_results_are_told_apart_in_words_and_on_a_page(studies: Path) -> None:
    result = report(studies / "a", studies / "b")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Seconds: the same in every pair of 1 cell.")
    assert "  task.lr  – → 0.05" in result.stdout.splitlines()
    assert result.stdout.splitlines()[-1] == f"report: {studies / 'b' / 'versus.html'}"
    assert "what changed" in (studies / "b" / "versus.html").read_text()


def test_two_results_as_json_and_a_page_elsewhere(studies: Path, tmp_path: Path) -> None:
    result = report(studies / "a", studies / "b", "--out", tmp_path, "--json")
    document = json.loads(result.stdout, parse_constant=pytest.fail)
    assert document["report"] == str(tmp_path / "versus.html")
    assert document["differences"] == [{"kind": "settings", "what": "task.lr", "first": "–", "second": "0.05"}]
    assert {change["test"] for change in document["changes"]} == {"paired"}


def test_figures_and_a_page_in_markdown_come_when_asked_for(studies: Path) -> None:
    pytest.importorskip("matplotlib")
    document = json.loads(report(studies / "a", "--figures", "--markdown", "--json").stdout)
    assert {Path(path).suffix for path in document["figures"]} == {".svg", ".pdf"}
    assert all(Path(path).stat().st_size > 0 for path in document["figures"])
    assert "](figures/seconds-of-training.svg)" in Path(document["page"]).read_text()


def test_which_way_the_metric_is_better_can_be_said_to_a_report(studies: Path, tmp_path: Path) -> None:
    """Of studies that were run with the direction of the metric's name."""
    texts = {}
    for way in ("--maximize", "--minimize"):
        assert report(studies / "a", way, "--markdown").exit_code == 0
        texts[way] = (studies / "a" / "README.md").read_text()
        found = json.loads(report(studies / "a", studies / "b", "--out", tmp_path, way, "--json").stdout)
        assert found["maximize"] is (way == "--maximize")
    assert texts["--maximize"] != texts["--minimize"]
    refused = report(tmp_path / "page.md", "--minimize")
    assert refused.exit_code == 2 and "for comparisons and studies, got a page" in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("a", "b", "c"), "takes one folder or two, got 3"),
        (("a", "b", "--figures"), "are for one folder, got two"),
        (("a", "--out", "x"), "--out is for two folders"),
    ],
)
def test_a_report_that_cannot_be_is_refused(words: tuple[str, ...], said: str) -> None:
    result = report(*words)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_page_that_is_wrong_in_a_browser_fails_the_check(
    studies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("playwright")
    if find_browser() is None:
        pytest.skip("no browser is installed")
    good = report(studies / "a", studies / "b", "--out", tmp_path, "--check")
    assert (good.exit_code, good.stdout.splitlines()[-1]) == (0, "check: nothing wrong in a browser")
    picture = Markup('<img src="http://127.0.0.1/x.png">')
    monkeypatch.setattr("podium.lab.report.versus.page.amount", lambda change: picture)
    bad = report(studies / "a", studies / "b", "--out", tmp_path, "--check", "--json")
    assert bad.exit_code == 1
    assert any("127.0.0.1" in problem for problem in json.loads(bad.stdout)["problems"])


def test_a_check_without_a_browser_says_so(studies: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = report(studies / "a", studies / "b", "--out", tmp_path, "--check")
    assert result.exit_code == 2
    assert "must be installed to look at a page" in result.stderr


@pytest.mark.slow
def test_the_demo_leads_from_nothing_to_a_report_in_eighty_columns(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["demo", "--quick", "--out", str(tmp_path / "d")])
    assert result.exit_code == 0, result.output
    for cell in ("solo", "all-reduce", "mode=async"):
        assert cell in result.stdout
    assert "podium train digits-mlp" in result.stdout
    own = [line for line in result.output.splitlines() if str(tmp_path) not in line]
    assert max(map(len, own)) <= 80
