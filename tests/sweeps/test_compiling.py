"""Compiled methods of many objects in one process: as many kinds as come, shared within one, given back after."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from podium.sweeps.fused import array as array_module
from podium.sweeps.fused import compiling
from podium.sweeps.fused.compiling import compile_method
from podium.sweeps.trial import Trial
from tests.sweeps import nets
from tests.sweeps.nets import apart, array_of, recipe_of

LIMIT = torch._dynamo.config.recompile_limit
"""How many kinds torch compiles one code for."""


class Scale:
    """Something with a method to compile, which torch compiles anew for each width."""

    def __init__(self, width: int, kind: int) -> None:
        self.factors = torch.arange(float(width))
        self.scaled = compile_method(self._scaled, ("scale", kind), backend="eager")

    def _scaled(self, x: Tensor, *, twice: bool = False) -> Tensor:
        return self.factors * x * (2 if twice else 1)

    def is_right(self) -> bool:
        return torch.equal(self.scaled(torch.tensor(3.0)), 3 * self.factors)


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def compiled_here() -> int:
    """torch leaves what it compiles among the names of the module that the function is from."""
    return sum(name.startswith("__compiled_fn") for name in globals())


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    compiling._kept.clear()


def test_there_may_be_more_kinds_than_torch_compiles_one_code_for() -> None:
    alive = [Scale(width, kind=width) for width in range(2, 3 + LIMIT)]
    assert all(one.is_right() for one in alive)
    before = graphs()
    assert all(one.is_right() for one in alive)
    assert graphs() == before, "those of before were compiled again"


def test_only_the_first_of_a_kind_waits_for_the_compiler() -> None:
    before = graphs()
    for _ in range(compiling._SHARED):
        assert Scale(5, kind=5).is_right()
    assert graphs() == before + 1


def test_what_torch_tells_apart_may_be_called_one_kind() -> None:
    alive = [Scale(width, kind=0) for width in range(2, 3 + LIMIT)]
    assert all(one.is_right() for one in alive)


def test_a_copy_takes_the_arguments_that_the_method_takes() -> None:
    one = Scale(4, kind=4)
    assert torch.equal(one.scaled(torch.tensor(1.0), twice=True), 2 * one.factors)


@pytest.mark.slow
def test_compiled_code_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_KEPT", 3)
    gc.collect()
    assert compiled_here() == 0
    for width in range(2, 8):
        assert Scale(width, kind=width).is_right()
    gc.collect()
    assert compiled_here() == 3
    compiling._kept.clear()
    gc.collect()
    assert compiled_here() == 0


def test_what_is_in_use_is_not_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "_KEPT", 2)
    first = Scale(2, kind=2)
    assert first.is_right()
    for width in range(3, 7):
        assert Scale(width, kind=width).is_right()
    gc.collect()
    before = graphs()
    assert first.is_right() and graphs() == before


@pytest.mark.slow
def test_more_arrays_may_be_compiled_than_torch_compiles_one_code_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # What torch's tracing gives is run as it is: the limit is on tracing, and needs no C++ compiler to be met.
    monkeypatch.setattr(array_module, "compile_method", partial(compile_method, backend="eager"))
    recipe = recipe_of(nets.toy)
    with torch._dynamo.config.patch(recompile_limit=1):
        for width in (4, 5):
            trials = [Trial(number=i, options={"width": width, "lr": 0.1 * (1 + i)}, seed=i) for i in range(2)]
            plain, compiled = array_of(recipe, trials), array_of(recipe, trials, compiled=True)
            for _ in range(3):
                plain.step()
                compiled.step()
            assert all(apart(plain.save(row), compiled.save(row)) < 1e-9 for row in range(2))
