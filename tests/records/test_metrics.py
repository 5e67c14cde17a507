"""Which way a metric is better is decided in one place."""

from __future__ import annotations

import pytest

from podium.records.metrics import lower_is_better

LOWER = (
    "loss",
    "val_loss",
    "logloss",
    "MSE",
    "val-mae",
    "mae_of_test",
    "val_error",
    "wer",
    "fid",
    "ppl",
    "cost",
    "err",
)
HIGHER = ("accuracy", "r2", "f1", "top5", "bleu", "merit", "coverage")


@pytest.mark.parametrize("name", LOWER)
def test_losses_and_errors_are_better_when_lower(name: str) -> None:
    assert lower_is_better(name)
    assert not lower_is_better(name, maximize=True), "the user knows better"


@pytest.mark.parametrize("name", HIGHER)
def test_all_else_is_better_when_higher(name: str) -> None:
    assert not lower_is_better(name)
    assert lower_is_better(name, maximize=False)
