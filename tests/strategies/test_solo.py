"""Solo: plain training, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from podium.errors import ConfigError
from podium.strategies import make_strategy
from podium.strategies.base import Strategy
from podium.strategies.solo import Solo
from podium.testing.strategies import ClippingContract, OneWorkerContract
from podium.testing.toys import Half, assert_same_bits, toy, train, train_plainly


class TestSolo(OneWorkerContract, ClippingContract):
    most_workers = 1

    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return Solo()

    def test_more_than_one_worker_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="workers=2"):
            make_strategy("solo", workers=2)


@pytest.mark.parametrize("name", ["solo", "all-reduce", "parameter-server"])
def test_half_precision_is_plain_pytorch_where_no_parameter_is_cut(name: str) -> None:
    """Kernels for half precision round differently with the cut, so several servers could not promise this."""
    task = toy(model=Half)
    assert_same_bits(train(task, make_strategy(name))[0].state, train_plainly(task).state)
