"""`podium bench` passes on what was asked for; the measurements have tests of their own."""

from __future__ import annotations

import json
import sys
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner, Result

from podium.cli import main


@pytest.fixture(autouse=True)
def one_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement that takes no time and says what it was asked."""

    def measure(
        peers: tuple[str, ...], rounds: int | None, *, steps: int = 1, tasks: str = "", overlap: bool = True
    ) -> dict[str, Any]:
        rows = [{"task": "wide-mlp", "ratio": 0.98765, "ms": {"podium": 1.5, "ddp": 2.0}}]
        options = {"steps": steps, "tasks": tasks, "overlap": overlap}
        return {"peers": peers, "rounds": rounds, "options": options, "rows": rows, "worst": float("inf")}

    benches, steps = ModuleType("podium.lab.bench"), ModuleType("podium.lab.bench.steps")
    benches.BENCHES = {"step": "podium.lab.bench.steps:measure"}  # type: ignore[attr-defined]
    steps.measure = measure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "podium.lab.bench", benches)
    monkeypatch.setitem(sys.modules, "podium.lab.bench.steps", steps)


def bench(*words: str) -> Result:
    return CliRunner().invoke(main, ["bench", *words])


def test_peers_rounds_and_options_reach_the_measurement() -> None:
    chosen = ("--set", "steps=8", "--set", "tasks=a,b", "--set", "overlap=false")
    result = bench("step", "--peers", "ddp,plain", "--rounds", "3", *chosen, "--json")
    document = json.loads(result.stdout)
    assert document["peers"] == ["ddp", "plain"]
    assert document["rounds"] == 3
    assert document["options"] == {"steps": 8, "tasks": "a,b", "overlap": False}
    assert document["worst"] == "inf"


def test_a_person_reads_the_same_as_lines() -> None:
    result = bench("step", "--peers", "ddp")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["ratio", "0.9877"] in lines
    assert ["peers", "ddp"] in lines
    assert ["ms", "podium", "1.5,", "ddp", "2"] in lines


def test_without_a_name_it_lists_what_can_be_measured() -> None:
    assert bench().stdout.split() == ["step"]
    assert json.loads(bench("--json").stdout) == {"benches": ["step"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stepp"], "Did you mean 'step'?"),
        (["step", "--set", "rounds"], "--set takes KEY=VALUE, got 'rounds'"),
        (["step", "--set", "stepps=2"], "Did you mean 'steps'?"),
        (["step", "--set", "steps=two"], "bench step: steps must be a whole number, got 'two'"),
        (["step", "--rounds", "0"], "--rounds"),
    ],
)
def test_a_wrong_request_is_refused(words: list[str], said: str) -> None:
    result = bench(*words)
    assert result.exit_code == 2
    assert said in result.stderr.splitlines()[-1]
