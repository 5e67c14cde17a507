"""The small verbs: run, list, doctor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import podium.cli.checkup
from podium.cli import main
from podium.cli.checkup import Check
from podium.config import RunConfig


def invoke(*words: str) -> Result:
    return CliRunner().invoke(main, list(words))


def test_the_list_names_what_the_other_verbs_take() -> None:
    document = json.loads(invoke("list", "--json").stdout)
    assert document["tasks"]["digits-mlp"]
    assert document["strategies"]["all-reduce"]
    assert "virtual" in document["launchers"]
    shown = invoke("list").stdout
    assert all(name in shown for name in (*document["tasks"], *document["strategies"]))


def test_the_list_names_triggers_with_their_options() -> None:
    document = json.loads(invoke("list", "--json").stdout)
    assert document["triggers"]["plateau"].startswith("Fires when")
    assert document["trigger_options"]["plateau"]["window"] == 6 and "of" in document["trigger_options"]["function"]
    assert "options: factor=1.5, patience=3, gone=false, latest=1.0" in invoke("list").stdout


FINE = Check(name="torch", status="ok", detail="2.13.0, one gradient computed")
SKIPPED = Check(name="nccl", status="skipped", detail="no CUDA GPU here")
BROKEN = Check(name="loopback TCP", status="failed", detail="refused", fix="ip link set lo up")


@pytest.mark.parametrize(("found", "code"), [([FINE, SKIPPED], 0), ([FINE, BROKEN, SKIPPED], 1)])
def test_doctor_fails_when_one_check_did(found: list[Check], code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(podium.cli.checkup, "checks", lambda: found)
    assert invoke("doctor").exit_code == code
    result = invoke("doctor", "--json")
    assert result.exit_code == code
    assert json.loads(result.stdout)["ok"] is (code == 0)


def test_doctor_puts_the_fix_beside_the_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(podium.cli.checkup, "checks", lambda: [FINE, BROKEN, SKIPPED])
    lines = invoke("doctor").stdout.splitlines()
    assert [line[0] for line in lines[:2]] == ["✓", "✗"]
    assert lines[2].strip() == "fix: ip link set lo up"
    assert lines[3].startswith("– nccl")
    assert lines[-1] == "1 failed: loopback TCP"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RunConfig, str, tuple[str, ...]]]:
    """What `podium run` asks the launcher for; the launcher has tests of its own."""
    import podium.launch.run

    asked = []

    def run_script(config: RunConfig, script: str, args: tuple[str, ...], **_: Any) -> int:
        asked.append((config, script, tuple(args)))
        return 3

    monkeypatch.setattr(podium.launch.run, "run_script", run_script, raising=False)
    return asked


@pytest.mark.parametrize(
    ("words", "workers", "args"),
    [
        (["SCRIPT", "--workers", "4", "--lr", "0.1", "x"], 4, ("--lr", "0.1", "x")),
        (["--workers", "4", "SCRIPT", "--", "--workers", "8", "--json"], 4, ("--workers", "8", "--json")),
        (["SCRIPT"], 1, ()),
    ],
)
def test_run_keeps_its_own_options_and_passes_on_the_rest(
    words: list[str], workers: int, args: tuple[str, ...], started: list[Any], tmp_path: Path
) -> None:
    script = tmp_path / "loop.py"
    script.write_text("")
    result = invoke("run", *(str(script) if word == "SCRIPT" else word for word in words))
    ((config, path, passed),) = started
    assert (config.workers, path, passed) == (workers, str(script), args)
    assert result.exit_code == 3


def test_run_reports_the_scripts_exit_code_as_json(started: list[Any], tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text("")
    document = json.loads(invoke("run", str(script), "a", "-n", "2", "--strategy", "solo", "--json").stdout)
    assert document == {"script": str(script), "args": ["a"], "workers": 2, "strategy": "solo", "exit_code": 3}


@pytest.mark.slow
def test_what_a_script_prints_is_shown_but_does_not_spoil_the_document(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(
        "import sys\n"
        "import torch\n"
        "import podium\n"
        "model = torch.nn.Linear(2, 1)\n"
        "run = podium.join(model, torch.optim.SGD(model.parameters(), lr=0.1))\n"
        "print('worker', run.size, sys.argv[1:], flush=True)\n"
    )
    words = ["run", str(script), "--workers", "2", "--lr", "0.1", "--out", str(tmp_path / "runs"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "podium", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["exit_code"] == 0
    assert "worker 2 ['--lr', '0.1']" in done.stderr
