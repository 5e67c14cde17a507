"""Solo: plain training, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from podium.errors import ConfigError
from podium.strategies import make_strategy
from podium.strategies.base import Strategy
from podium.strategies.solo import Solo
from tests.strategies.contract import OneWorkerContract


class TestSolo(OneWorkerContract):
    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return Solo()

    def test_a_parameter_that_nobody_uses_does_not_move(self, strategy: Strategy[Any]) -> None:
        pytest.skip("solo has one worker; the comparison with plain PyTorch covers this")

    def test_more_than_one_worker_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="workers=2"):
            make_strategy("solo", workers=2)
