"""Solo: plain training, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from podium.errors import ConfigError
from podium.strategies import make_strategy
from podium.strategies.base import Strategy
from podium.strategies.solo import Solo
from tests.strategies.contract import ClippingContract, OneWorkerContract


class TestSolo(OneWorkerContract, ClippingContract):
    most_workers = 1

    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return Solo()

    def test_more_than_one_worker_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="workers=2"):
            make_strategy("solo", workers=2)
