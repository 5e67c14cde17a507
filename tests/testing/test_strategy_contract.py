"""Every built-in strategy passes the contract that users are given, and a broken one does not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import podium.testing
from podium.config import parse_spec
from podium.engine.worker import Batch, Worker
from podium.errors import MissingExtra
from podium.strategies import make_strategy
from podium.strategies.base import Strategy
from podium.testing import StrategyContract

ROOT = Path(__file__).parents[2]


class TestBuiltIn(StrategyContract):
    @pytest.fixture(
        params=[
            "all-reduce",
            "parameter-server:mode=sync,servers=2",
            "parameter-server:mode=async",
            "parameter-server:mode=ssp,staleness=2,placement=colocated",
            "local-sgd:period=4",
            "gossip",
            "ad-psgd",
            "async-local-sgd",
            "adasum",
            "all-reduce until step:at=3 | parameter-server:mode=async",
        ]
    )
    def strategy(self, request: pytest.FixtureRequest) -> Strategy[Any]:
        return make_strategy(*parse_spec(request.param, "strategy"), self.workers)


class NeverMeets(Strategy[None]):
    """Workers train alone and never sync: replicas end different."""

    name = "never-meets"

    def init(self, worker: Worker) -> None:
        return None

    def step(self, worker: Worker, state: None, batch: Batch) -> Tensor:
        return worker.train_locally(batch)


def test_a_strategy_whose_workers_never_sync_fails_the_contract() -> None:
    with pytest.raises(AssertionError):
        StrategyContract().test_replicas_are_alike_at_the_end(NeverMeets())


def test_the_example_passes_in_a_folder_of_its_own(tmp_path: Path) -> None:
    for name in ("my_strategy.py", "test_my_strategy.py"):
        shutil.copy(ROOT / "examples" / name, tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout


def test_every_exported_name_is_there() -> None:
    for name in podium.testing.__all__:
        assert getattr(podium.testing, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        podium.testing.nothing  # noqa: B018


def test_without_pytest_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("podium.testing.strategies", "podium.testing.communicators"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "pytest", None)
    with pytest.raises(MissingExtra, match=r"pip install 'podium\[testing\]'"):
        podium.testing.StrategyContract  # noqa: B018
