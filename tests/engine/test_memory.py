"""What a run leaves behind in its process: nothing. Studies and notebooks do hundreds of runs in one."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import podium
from podium.tasks.digits import digits_mlp


@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server:mode=async", "local-sgd:period=2"])
def test_models_are_let_go_when_a_run_ends(strategy: str, tmp_path: Path) -> None:
    made: list[weakref.ref[nn.Module]] = []
    task = digits_mlp()

    def model() -> nn.Module:
        found = task.model()
        made.append(weakref.ref(found))
        return found

    changed: Any = vars(task) | {"model": model}
    own = podium.Task(**changed)
    for launcher in ("virtual", "threads"):
        podium.train(own, strategy=strategy, workers=2, launcher=launcher, steps=3, run_dir=str(tmp_path / launcher))
    gc.collect()
    assert made and [ref() for ref in made] == [None] * len(made)
