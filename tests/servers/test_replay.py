"""A recorded asynchronous run, however it raced, happens again in virtual time, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.config import RunResult
from podium.errors import ConfigError, RecordError
from podium.launch.replay import as_recorded
from podium.strategies import make_strategy

TASK = "podium.testing.toys:toy"


def run(where: Path, launcher: str, servers: int = 1, **options: Any) -> RunResult:
    return podium.train(
        TASK,
        strategy=f"parameter-server:mode=async,servers={servers},lease=3",
        workers=3,
        launcher=launcher,
        run_dir=str(where),
        **{"epochs": 3, **options},
    )


@pytest.mark.slow
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("launcher", ["threads", "local"])
def test_a_run_that_raced_replays_to_the_same_bits(launcher: str, servers: int, tmp_path: Path) -> None:
    raced = run(tmp_path / "raced", launcher, servers)
    again = run(tmp_path / "again", "virtual", servers, replay=raced.run_dir)
    assert again.param_hash == raced.param_hash
    assert again.staleness == raced.staleness
    assert again.loss == raced.loss


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", ["mode=ssp,staleness=1", "mode=softsync", "mode=backup", "mode=async,drop_beyond=1"]
)
def test_so_does_one_with_another_gate(options: str, tmp_path: Path) -> None:
    strategy = f"parameter-server:{options},servers=2"
    fields: dict[str, Any] = {"strategy": strategy, "workers": 3, "epochs": 3}
    raced = podium.train(TASK, launcher="local", run_dir=str(tmp_path / "raced"), **fields)
    again = podium.train(TASK, launcher="virtual", run_dir=str(tmp_path / "again"), replay=raced.run_dir, **fields)
    assert again.param_hash == raced.param_hash


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "top-k:ratio=0.2", "power-sgd"])
def test_so_does_one_that_packs_both_ways(codec: str, tmp_path: Path) -> None:
    strategy = "parameter-server:mode=async,servers=2,pull=int8"
    fields: dict[str, Any] = {"strategy": strategy, "codec": codec, "workers": 3, "epochs": 3}
    raced = podium.train(TASK, launcher="local", run_dir=str(tmp_path / "raced"), **fields)
    again = podium.train(TASK, launcher="virtual", run_dir=str(tmp_path / "again"), replay=raced.run_dir, **fields)
    assert again.param_hash == raced.param_hash
    with pytest.raises(ConfigError, match="name the codec that it chose"):
        podium.train(TASK, launcher="virtual", replay=raced.run_dir, **{**fields, "codec": "auto"})


@pytest.mark.parametrize("options", ["mode=dssp", "mode=async,servers=2,replicas=2"])
def test_what_cannot_be_replayed_is_refused(options: str, tmp_path: Path) -> None:
    fields: dict[str, Any] = {"strategy": f"parameter-server:{options}", "workers": 2, "epochs": 1}
    raced = podium.train(TASK, launcher="threads", run_dir=str(tmp_path / "raced"), **fields)
    with pytest.raises(ConfigError, match="cannot be replayed"):
        podium.train(TASK, launcher="virtual", run_dir=str(tmp_path / "again"), replay=raced.run_dir, **fields)


def test_a_run_with_phases_is_refused_in_words(tmp_path: Path) -> None:
    phases = make_strategy("phases", {"run": "all-reduce until step:at=2 | parameter-server:mode=async"}, 2)
    with pytest.raises(ConfigError, match="a run with phases cannot be replayed"):
        as_recorded(phases, tmp_path)


def test_the_order_of_arrivals_is_what_decides(tmp_path: Path) -> None:
    """Otherwise replays would show nothing: uneven workers come to another result, and a replay of them to theirs."""
    cluster = tmp_path / "uneven.toml"
    cluster.write_text('[cluster]\njitter = 0.5\nseconds_per_sample = 1e-3\n[[node]]\nname = "n"\ncount = 4\n')
    even = run(tmp_path / "even", "virtual")
    uneven = run(tmp_path / "uneven", "virtual", cluster=str(cluster))
    again = run(tmp_path / "again", "virtual", replay=uneven.run_dir)
    assert uneven.param_hash != even.param_hash
    assert again.param_hash == uneven.param_hash


def test_a_replay_replays_too(tmp_path: Path) -> None:
    raced = run(tmp_path / "raced", "threads")
    once = run(tmp_path / "once", "virtual", replay=raced.run_dir)
    twice = run(tmp_path / "twice", "virtual", replay=once.run_dir)
    assert twice.param_hash == raced.param_hash


def test_a_record_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    raced = Path(run(tmp_path / "raced", "threads").run_dir)
    lines = (raced / "records.jsonl").read_text().splitlines()
    arrivals = [n for n, line in enumerate(lines) if json.loads(line)["kind"] in ("arrival", "update")]
    (raced / "records.jsonl").write_text("\n".join(lines[: arrivals[10]]) + "\n")
    with pytest.raises(RecordError, match="the record ends before"):
        run(tmp_path / "again", "virtual", replay=str(raced))


@pytest.mark.parametrize(
    ("other", "field"), [({"epochs": 2}, "epochs"), ({"strategy_options": {"lease": 4}}, "strategy")]
)
def test_a_record_of_another_run_is_refused(other: dict[str, Any], field: str, tmp_path: Path) -> None:
    raced = run(tmp_path / "raced", "threads")
    with pytest.raises(ConfigError, match=f"{field} must be as recorded"):
        run(tmp_path / "again", "virtual", replay=raced.run_dir, **other)


def test_only_virtual_time_replays(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="launcher must be 'virtual'"):
        run(tmp_path, "threads", replay=str(tmp_path))
