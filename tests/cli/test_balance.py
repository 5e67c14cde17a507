"""What the summary says of uneven workers, and that the guide's examples run."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.cli.summary import summary
from podium.config import RunConfig, RunResult
from podium.records.balance import balance
from podium.records.recorder import read_records
from tests.records.test_balance import change, run

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "balance.md"
UNEVEN = str(ROOT / "examples" / "clusters" / "one-slow-of-four.toml")


def told(facts: dict[str, Any]) -> str:
    measured = {"metrics": {}, "loss": 0.3, "param_hash": {"0": "00"}, "steps": 10, "samples": 640, "epochs": 1.0}
    fields = {"run_dir": "runs/one", "status": "finished", "task": "digits-mlp", "strategy": "all-reduce", "workers": 2}
    cost = {"seconds": 1.0, "samples_per_s": 640.0, "sent_bytes": 0, "seed": 0, "launcher": "local"}
    return summary(RunResult(**measured, **fields, **cost, balance=facts), RunConfig(workers=2))


def code(containing: str) -> str:
    """The guide's block of Python with these words in it."""
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [block for block in blocks if containing in block]
    return str(found)


def test_uneven_workers_are_told_of_in_three_lines() -> None:
    text = told(balance(run(20, [8, 8], [1.0, 4.0]), 0))
    assert "1,000/250 samples/s by worker while computing, 76/3 % of step time spent waiting" in text
    assert "8/8 samples of a step, no change" in text
    assert "--balance equal-finish: steps up to" in text


def test_changes_are_counted_and_the_last_division_is_told() -> None:
    once = balance([*run(20, [12, 4], [1.0, 3.0]), change(0, [8, 8], [12, 4])], 0)
    assert "12/4 samples of a step, 1 change" in told(once)
    twice = {**once, "changes": once["changes"] * 2}
    assert "2 changes" in told(twice) and "advice" not in told(twice)
    assert "12/4 samples of a step, as they drew them" in told({**once, "balancer": "steal", "changes": []})


def test_steps_of_a_round_are_called_so() -> None:
    paced = change(1, [1, 1], [2, 1], unit="steps", balancer="steps=speed")
    assert "2/1 steps of a round, 1 change" in told(balance([*run(3, [8, 8], [1.0, 2.0]), paced], 0))


def test_of_many_workers_the_slowest_and_the_fastest_are_told() -> None:
    text = told(balance(run(20, [4] * 10, [1.0] * 9 + [2.0]), 0))
    assert "500 to 1,000 samples/s (workers 9 and 8) while computing" in text


def test_nothing_is_said_of_workers_that_are_alike() -> None:
    assert not {"speed", "division", "advice"} & {line.split()[0] for line in told({}).splitlines()[1:]}
    alike = told(balance(run(20, [8, 8], [1.0, 1.0], exchange_ms=0.1), 0))
    assert not {"speed", "division", "advice"} & {line.split()[0] for line in alike.splitlines()[1:]}


def test_the_guides_own_balancer_divides_by_speed_and_the_same_model_comes_from_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "careful.py").write_text(code("# careful.py"), encoding="utf-8")
    options = {"launcher": "virtual", "cluster": UNEVEN, "epochs": 2, "run_dir": str(tmp_path / "run")}
    result = podium.train("digits-mlp", workers=4, balance=f"{tmp_path}/careful.py:Careful:trust=0.8", **options)
    assert result.balance["changes"], "the slow worker must have been relieved"
    parts = result.balance["division"]
    assert 0 < parts["3"] < 16 < parts["0"] and sum(parts.values()) == 64
    assert json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))["balance"]["division"] == parts

    found: dict[str, Any] = {}
    exec(code("SpeedModel()").replace("runs/…", str(tmp_path / "run")), found)  # the guide's own text
    speeds = found["speeds"]
    assert sorted(speeds) == [0, 1, 2, 3]
    assert speeds[3].seconds(8) / speeds[0].seconds(8) == pytest.approx(4, rel=0.4)

    last = [r for r in read_records(tmp_path / "run") if r["kind"] == "balance"][-1]
    documented = re.findall(
        r"`(\w+)`", next(line for line in _records_page() if line.startswith("| `balance` | first"))
    )
    assert {*last, *last["members"][0]} - {"kind", "rank", "t_ns"} <= set(documented)


def _records_page() -> list[str]:
    return (ROOT / "docs" / "records.md").read_text(encoding="utf-8").splitlines()
