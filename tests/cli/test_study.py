"""`podium compare STUDY`, as a person runs it: to the end, killed, resumed, with several runs at once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import podium
from podium.cli import main
from podium.errors import ConfigError
from podium.lab.study.run import run_study
from podium.lab.study.store import Store

STUDY = """
[study]
name = "tiny"
replications = 2
retries = 0
[settings]
task = "digits-mlp"
launcher = "virtual"
epochs = 1
eval_every = 0
[factors]
strategy = ["all-reduce", "parameter-server:mode=async", "local-sgd:period=4"]
workers = [2, 3]
"""

NO_FIGURES = Path(__file__).parent / "no_figures"
COMMAND = [sys.executable, "-m", "podium", "compare"]


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here looks at a figure, and drawing is most of a report's time."""
    for package in ("matplotlib", "plotly.offline"):
        monkeypatch.setitem(sys.modules, package, None)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(STUDY)
    return path


def environment() -> dict[str, str]:
    """One thread, and no figures: packages of these names come first, and say that they are not there."""
    path = os.pathsep.join([str(NO_FIGURES), str(Path(podium.__file__).parents[1])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def facts(folder: Path) -> dict[tuple[str, int], Any]:
    """What must not depend on how often a study was interrupted."""
    rows = Store(folder).rows()
    keys = [(row["cell"], row["seed"]) for row in rows if row["status"] == "finished"]
    assert len(keys) == len(set(keys)), "a cell was run twice"
    kept = ("levels", "param_hash", "seconds", "loss", "sent_bytes", "nodes")
    return {(row["cell"], row["seed"]): {name: row[name] for name in kept} for row in rows}


def kill_on_the_way(study: Path, out: Path, draw: random.Random, *more: str) -> int:
    """Start it, kill it at a random moment with all that it started, and say how many rows there are."""
    before = len(Store(out).rows())
    said = subprocess.DEVNULL
    process = subprocess.Popen(
        [*COMMAND, str(study), "--out", str(out), "-q", *more], env=environment(), stdout=said, stderr=said
    )
    wanted, deadline = before + draw.randrange(4), time.monotonic() + 60
    while len(Store(out).rows()) < wanted and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(draw.random() * 0.3)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=10)
    return len(Store(out).rows())


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--jobs", "2")], ids=["one by one", "two at once"])
def test_killed_at_random_moments_and_run_again_it_is_as_if_never_interrupted(
    study: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_study(study, out=whole)
    seed = time.time_ns()
    print(f"killed at moments drawn from seed {seed}")
    draw = random.Random(f"{seed}")
    counts = [kill_on_the_way(study, broken, draw, *more) for _ in range(1 if more else 2)]
    ended = subprocess.run(
        [*COMMAND, str(study), "--out", str(broken), "--json", *more],
        env=environment(),
        capture_output=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, (counts, ended.stderr.decode()[-2000:])
    assert json.loads(ended.stdout)["status"] == "finished"
    assert facts(broken) == facts(whole) and len(facts(whole)) == 12, counts
    assert (broken / "report.html").is_file()


def test_two_at_a_time_in_one_folder_are_refused(study: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with Store(out).locked(), pytest.raises(ConfigError, match="another study must not be under way"):
        run_study(study, out=out)


@pytest.mark.parametrize("request_", [{"only": {"workers": [4]}}, {"only": {"worker": [2]}}, {"budget_s": -1.0}])
def test_a_wrong_request_leaves_no_folder(study: Path, tmp_path: Path, request_: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        run_study(study, out=tmp_path / "out", **request_)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_budget_holds_for_several_runs_at_once_too(study: Path, tmp_path: Path) -> None:
    begun = run_study(study, out=tmp_path / "out", jobs=2, budget_s=0.0)
    assert begun.status == "stopped" and len(begun.rows) == 0
    some = run_study(study, out=tmp_path / "out", jobs=2, budget_s=600.0)
    assert some.status == "finished" and len(some.rows) == 12
    again = run_study(study, out=tmp_path / "out", jobs=2, budget_s=0.0)
    assert again.status == "finished" and len(again.rows) == 12


@pytest.mark.slow
def test_precision_decides_how_many_seeds_there_are(study: Path, tmp_path: Path) -> None:
    def seeds(half_width: float, response: str) -> int:
        asked = f'{{ least = 2, most = 4, half_width = {half_width}, response = "{response}" }}'
        study.write_text(STUDY.replace("replications = 2", f"replications = {asked}").replace('"all-reduce", ', ""))
        out = tmp_path / f"{response}-{half_width}"
        run_study(study, out=out)
        return len({row["seed"] for row in Store(out).rows()})

    assert seeds(0.05, "sent_bytes") == 2  # the same in every run
    assert seeds(1e-6, "loss") == 4


@pytest.mark.slow
def test_a_run_ends_at_the_first_validation_beyond_its_seconds(study: Path, tmp_path: Path) -> None:
    text = STUDY.replace("epochs = 1\neval_every = 0", "epochs = 6").replace('"parameter-server:mode=async", ', "")
    study.write_text(text)
    run_study(study, out=tmp_path / "whole")
    rows = {row["cell"]: row for row in Store(tmp_path / "whole").rows() if row["seed"] == 0}
    limit = rows["all-reduce, workers=2"]["history"][2]["seconds"] * 0.99
    study.write_text(text + f"[stop]\nseconds = {limit}\n")
    run_study(study, out=tmp_path / "cut")
    cut = {row["cell"]: row for row in Store(tmp_path / "cut").rows() if row["seed"] == 0}
    row = cut["all-reduce, workers=2"]
    assert (row["status"], row["ended_by"]) == ("finished", "seconds")
    assert [round(p["epoch"]) for p in row["history"]][:3] == [1, 2, 3] and row["epochs"] < 6
    assert row["history"][:3] == rows["all-reduce, workers=2"]["history"][:3]


@pytest.mark.slow
def test_options_set_what_the_study_sets_and_factors_cannot_be_set(study: Path, tmp_path: Path) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[bytes]:
        command = [*COMMAND, str(study), *words]
        return subprocess.run(command, env=environment(), capture_output=True, timeout=60, check=False)

    shown = run("--dry-run", "--json", "--epochs", "2", "--seeds", "1", "--set", "task.lr=0.3")
    asked = json.loads(shown.stdout)
    assert asked["settings"]["epochs"] == 2 and asked["seeds"] == [0] and asked["settings"]["task.lr"] == "0.3"
    assert asked["factors"] == {
        "strategy": ["all-reduce", "parameter-server:mode=async", "local-sgd:period=4"],
        "workers": [2, 3],
    }
    refused = run("--workers", "4")
    assert refused.returncode == 2 and b"workers is a factor" in refused.stderr


def test_a_dry_run_lists_the_runs_that_this_call_would_do(study: Path) -> None:
    def run(*words: str) -> Result:
        return CliRunner().invoke(main, ["compare", str(study), "--dry-run", *words])

    shown = json.loads(run("--json", "--only", "workers=3").stdout)
    assert {run["cell"].rpartition(", ")[2] for run in shown["order"]} == {"workers=3"}
    assert len(shown["order"]) == 3 * 2
    refused = run("--only", "workers=4")
    assert refused.exit_code == 2
    assert "unknown level of workers '4'" in refused.stderr


@pytest.mark.slow
def test_a_task_that_raises_in_one_cell_is_a_row_and_the_others_go_on(tmp_path: Path, study: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import dataclasses\n"
        "from podium.tasks.digits import digits_mlp\n"
        "def task(broken=False):\n"
        "    def model():\n"
        "        raise ValueError('no such layer')\n"
        "    made = digits_mlp()\n"
        "    return dataclasses.replace(made, model=model) if broken else made\n"
    )
    study.write_text(
        "[study]\nreplications = 1\nretries = 1\n"
        f'[settings]\ntask = "{tmp_path}/own.py:task"\nlauncher = "virtual"\nepochs = 1\n'
        '[factors]\n"task.broken" = [false, true]\nwhat = { "<2" = { workers = 1 }, ">2" = { workers = 3 } }\n'
    )
    for jobs in (1, 2):
        told: list[dict[str, Any]] = []
        found = run_study(study, out=tmp_path / f"out{jobs}", jobs=jobs, on_event=told.append)
        assert [row["status"] for row in found.rows].count("finished") == 2
        failed = [row for row in found.rows if row["status"] == "failed"]
        assert len(failed) == 4 and all("no such layer" in row["error"] for row in failed)  # two cells, two tries each
        assert found.failed == 2 and len({row["run_dir"] for row in found.rows}) == 6
        ends = [event for event in told if event.get("event") == "cell-end"]
        assert ends[-1]["number"] == ends[-1]["total"] == 4
        assert [event["status"] for event in ends].count("failed, tried again") == 2


def test_the_report_says_how_to_run_the_study_again_with_all_that_was_changed(tmp_path: Path, study: Path) -> None:
    from podium.lab.study.file import read_study
    from podium.lab.study.reproduce import command, python_call

    asked = read_study(study).changed({"task.lr": "0.3", "epochs": 2}, seeds=1, target=0.5).resolved()
    said = command(asked)
    assert said is not None and said.endswith("--seeds 1 --target 0.5 --set task.lr=0.3 --set epochs=2")
    assert "study.changed({'task.lr': '0.3', 'epochs': 2}, seeds=1, target=0.5)" in python_call(asked)
    plain = read_study(study).resolved()
    assert python_call(plain).endswith("tiny.toml')") and str(command(plain)).endswith("tiny.toml")
