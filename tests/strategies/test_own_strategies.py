"""A strategy of the user's own that lacks something is refused with what to write."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import podium
from podium.errors import ConfigError
from podium.strategies import make_strategy
from podium.testing import toy, train

HEAD = "from dataclasses import dataclass\nfrom typing import ClassVar\nfrom podium import Strategy\n\n"
BODY = "    def init(self, worker): ...\n    def step(self, worker, state, batch): return worker.train_locally(batch)\n"
DATACLASS = "@dataclass(frozen=True, kw_only=True)\n"
NAMED = "class Mine(Strategy):\n    name: ClassVar[str] = 'mine'\n"
FAULTY = {
    "no dataclass": (NAMED + BODY, r"Mine must be a dataclass: write @dataclass\(frozen=True, kw_only=True\)"),
    "no name": (DATACLASS + "class Mine(Strategy):\n" + BODY, r"Mine must have a name for messages and checkpoints"),
    "no step": (DATACLASS + NAMED + BODY.replace("def step", "def steps"), "Mine must define step"),
    "no strategy": (DATACLASS + "class Mine:\n    pass\n", "must be a subclass of podium.Strategy, got Mine"),
}


@pytest.mark.parametrize(("text", "why"), FAULTY.values(), ids=FAULTY.keys())
def test_what_is_missing_is_named(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + text)
    with pytest.raises(ConfigError, match=why):
        make_strategy(f"{file}:Mine")


def test_state_that_is_not_laid_out_as_the_parameters_are_is_refused(tmp_path: Path) -> None:
    class Counting(type(make_strategy("solo"))):  # type: ignore[misc]
        def init(self, worker: podium.Worker) -> None:
            worker.strategy_state["count"] = torch.zeros(())  # type: ignore[assignment]

    with pytest.raises(
        ConfigError, match=r"strategy_state\['count'\] must be a list of tensors of the shapes of worker"
    ):
        train(toy(), Counting(), 1, checkpoint_every=2)
