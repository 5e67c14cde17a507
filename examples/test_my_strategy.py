"""The strategy of `my_strategy.py` passes Podium's own contracts: `pytest examples/test_my_strategy.py`."""

import pytest
from my_strategy import LocalSteps

from podium.testing import StrategyContract


class TestLocalSteps(StrategyContract):
    @pytest.fixture
    def strategy(self) -> LocalSteps:
        return LocalSteps(every=4)
