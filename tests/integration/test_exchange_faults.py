"""Ranks are lost, join and leave in the middle of packed exchanges and under every collective: the others go on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import podium
from podium.config import RunResult
from podium.errors import RankFailed
from podium.testing.faults import STEPS, Faults, Gate
from tests.integration.runs import at_gate, audit_steps, distance, pid_of, records_of, train

COLLECTIVES = ["shared", "ring", "halving-doubling", "tree"]
Calm = Callable[..., float]
CODECS = {"top-k": "top-k:ratio=0.1", "dgc": "dgc:ratio=0.2,warmup_epochs=1", "power-sgd": "power-sgd:min_rate=1"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """What one process makes of the same task and seed."""
    return train(tmp_path_factory.mktemp("alone"), strategy="solo", launcher="threads")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Calm:
    """The loss of undisturbed runs, by codec and strategy."""

    @cache
    def loss(spec: str, strategy: str = "all-reduce") -> float:
        folder = tmp_path_factory.mktemp("calm")
        return train(folder, workers=4, codec=spec, strategy=strategy, launcher="virtual").loss

    return loss


@pytest.mark.parametrize(
    ("collective", "blow"), [*((name, "kill") for name in COLLECTIVES), ("shared", "stop"), ("tree", "stop")]
)
def test_training_goes_on_under_every_collective(tmp_path: Path, alone: RunResult, collective: str, blow: str) -> None:
    faults = Faults().and_then(blow, 1, step=12)
    result = train(tmp_path, faults, workers=4, collective=collective, heartbeat_s=1.0 if blow == "stop" else 5.0)
    assert result.status == "finished" and result.lost == [1]
    assert sorted(map(int, result.param_hash)) == [0, 2, 3]
    assert len(set(result.param_hash.values())) == 1
    assert distance(result, alone) < 1e-5
    audit_steps(result.run_dir)


@pytest.mark.parametrize("collective", ["shared", "ring"])
def test_one_after_the_other_may_go_until_one_is_left(tmp_path: Path, alone: RunResult, collective: str) -> None:
    faults = Faults().kill(0, step=6).kill(2, step=12)
    result = train(tmp_path, faults, workers=3, collective=collective)
    assert list(result.param_hash) == ["1"]
    assert distance(result, alone) < 1e-5
    audit_steps(result.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "strategy"),
    [
        *((spec, "all-reduce") for spec in CODECS.values()),
        (CODECS["top-k"], "parameter-server:servers=2"),
        (CODECS["power-sgd"], "parameter-server:pull=int8"),
    ],
)
def test_training_goes_on_with_every_codec_that_remembers(tmp_path: Path, calm: Calm, spec: str, strategy: str) -> None:
    faults = Faults().kill(1, step=9).kill(3, step=20)
    result = train(tmp_path, faults, workers=4, strategy=strategy, codec=spec, checkpoint_every=10)
    assert result.status == "finished" and sorted(result.lost) == [1, 3]
    assert len(result.param_hash) == 2 and len(set(result.param_hash.values())) == 1
    assert result.steps == STEPS
    assert result.loss < 1.5 * calm(spec, strategy)
    audit_steps(result.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["shared", "halving-doubling"])
def test_codecs_and_collectives_are_lost_together(tmp_path: Path, calm: Calm, collective: str) -> None:
    """Wires are gathered, thin matrices summed twice: a rank may go between any two of these."""
    for spec in (CODECS["top-k"], CODECS["power-sgd"]):
        faults = Faults().kill(0, step=7).kill(2, step=19)
        result = train(tmp_path / spec[:5], faults, workers=4, collective=collective, codec=spec)
        assert sorted(result.lost) == [0, 2] and len(set(result.param_hash.values())) == 1
        assert result.loss < 1.5 * calm(spec)
        audit_steps(result.run_dir)


@pytest.mark.slow
def test_asynchronous_workers_keep_what_they_have_not_sent_when_one_is_killed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"strategy": "parameter-server:mode=async", "codec": CODECS["top-k"], "workers": 3}
    calm = train(tmp_path / "calm", checkpoint_every=10, **options)
    struck = train(tmp_path / "struck", Faults().kill(1, step=6), checkpoint_every=10, **options)
    assert struck.lost == [1] and len(set(struck.param_hash.values())) == 1
    assert struck.loss < 2 * calm.loss
    assert not [row for row in records_of(struck.run_dir, "regroup") if len(row["members"]) != 2]


def test_a_server_that_packs_its_answers_is_replaced(tmp_path: Path) -> None:
    """Its successor does not know what workers hold: it begins with whole answers."""

    def act() -> None:
        os.kill(pid_of(3), signal.SIGKILL)
        Gate(tmp_path).open()

    acting = at_gate(tmp_path, act)
    strategy = "parameter-server:servers=2,replicas=2,snapshot_every=0,pull=top-k:ratio=0.3"
    result = train(tmp_path, Faults().gate(0, step=9), strategy=strategy, workers=3, codec=CODECS["top-k"])
    acting.join()
    assert result.status == "finished" and result.lost == [3]
    assert len(set(result.param_hash.values())) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server:mode=ssp"])
def test_workers_join_and_leave_a_run_with_a_codec(
    tmp_path: Path, calm: Calm, strategy: str, before: int, after: int
) -> None:
    acting = scale_at_gate(tmp_path, after)
    spec = CODECS["top-k"]
    result = train(tmp_path, Faults().gate(0, step=9), workers=before, strategy=strategy, codec=spec)
    acting.join()
    assert result.status == "finished" and result.lost == []
    assert len(records_of(result.run_dir, "regroup")[-1]["members"]) == after
    assert len(result.param_hash) == after and len(set(result.param_hash.values())) == 1
    assert result.loss < 1.5 * calm(spec, strategy)


def scale_at_gate(folder: Path, workers: int) -> threading.Thread:
    """Ask for so many workers while the run is at its gate, and let it go on once newcomers are there."""

    def act() -> None:
        (run_dir,) = [path for path in folder.iterdir() if path.is_dir()]
        before = {path.name for path in (run_dir / "records").iterdir()}
        told = podium.scale(run_dir, workers=workers)
        until = time.monotonic() + 30.0
        while time.monotonic() < until:
            if len({path.name for path in (run_dir / "records").iterdir()} - before) >= len(told.starting):
                break
            time.sleep(0.05)
        time.sleep(1.0)
        Gate(folder).open()

    return at_gate(folder, act)


@pytest.mark.parametrize("spec", [CODECS["top-k"], CODECS["power-sgd"]])
def test_a_cut_run_resumes_to_the_bits_of_the_unbroken_one(tmp_path: Path, spec: str) -> None:
    options: dict[str, Any] = {"workers": 2, "codec": spec, "checkpoint_every": 10}
    whole = train(tmp_path / "whole", **options)
    with pytest.raises(RankFailed):
        train(tmp_path / "cut", Faults().and_then("raise", 0, 26), **options)
    (run_dir,) = [path for path in (tmp_path / "cut").iterdir() if path.is_dir()]
    rest = train(tmp_path / "rest", resume=str(run_dir), **options)
    assert rest.param_hash == whole.param_hash


def test_auto_chooses_anew_among_those_who_are_left(tmp_path: Path, alone: RunResult) -> None:
    spec = "auto:candidates=fp16+power-sgd:rank=4"  # summed as gradients are, so that loopback never pays
    result = train(tmp_path, Faults().kill(2, step=9), workers=3, codec=spec)
    chosen = records_of(result.run_dir, "codec")
    assert [row["chosen"] for row in chosen if row["rank"] == 0] == [["dense"]] * 2
    assert distance(result, alone) < 1e-5
