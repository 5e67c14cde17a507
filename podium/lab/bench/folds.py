"""A search with cross-validation, as a user types it, beside the same search in scikit-learn.

    podium bench folds --rounds 5

The same grid, folds, model, optimizer, epochs and batch for all: Podium's `sweep` with `auto` and with one trial after
another, and scikit-learn's `GridSearchCV` around a plain PyTorch loop, with one job and with as many as there are
cores. Each operation has one thread, which is faster than several for so small a net. Time is measured from the call to
the best score, without imports. Rounds are interleaved.
"""

from __future__ import annotations

import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from torch.nn.functional import cross_entropy

from podium.lab.bench.harness import interleave, ratio
from podium.records.manifest import hardware, versions
from podium.sweeps.api import sweep
from podium.sweeps.precision import with_threads
from podium.tasks.digits import digits
from podium.tasks.recipes import mlp

GRID = {"lr": [0.03, 0.1, 0.3], "momentum": [0.0, 0.9], "weight_decay": [0.0, 1e-3]}
FOLDS = 5


def bench_folds(
    *, peers: Sequence[str] = (), rounds: int | None = None, epochs: int = 20, device: str = "cpu"
) -> dict[str, Any]:
    """12 points × 5 folds on the digits: seconds of each contender, and ratios to Podium's `auto`."""
    cores = len(os.sched_getaffinity(0))
    ways: list[_Way] = [_Podium(executor, epochs, device) for executor in ("auto", "sequential:threads=1")]
    ways += [_SklearnSearch(jobs, epochs) for jobs in sorted({1, cores})]
    times = interleave({way.name: way.run for way in ways}, rounds or 3)
    ours = times["podium auto"]
    rows = []
    for way in ways:
        row = {
            "way": way.name,
            "seconds": float(np.median(times[way.name])),
            "best_score": way.best_score,
            "note": way.note,
        }
        if way is not ways[0]:
            found = ratio(ours, times[way.name])
            row |= {"podium_over_this": found, "times_faster": 1 / found["ratio"]}
        rows.append(row)
    return {
        "bench": "folds",
        "trials": FOLDS * int(np.prod([len(values) for values in GRID.values()])),
        "epochs": epochs,
        "rows": rows,
        "versions": versions(),
        "hardware": hardware(),
    }


class _Way(ABC):
    """One contender of the search."""

    name: str
    best_score: float | None = None
    note = ""

    @abstractmethod
    def run(self) -> float:
        """Seconds of the whole search."""


class _Podium(_Way):
    def __init__(self, executor: str, epochs: int, device: str) -> None:
        self.name, self._executor, self._epochs, self._device = f"podium {executor}", executor, epochs, device

    def run(self) -> float:
        with tempfile.TemporaryDirectory() as folder:
            began = time.perf_counter()
            found = sweep(
                "digits-mlp", grid=GRID, folds=f"stratified:{FOLDS}", epochs=self._epochs, executor=self._executor,
                device=self._device, out=f"{folder}/sweep", keep="best", eval_every=0,
            )  # fmt: skip
            took = time.perf_counter() - began
        assert found.best is not None and found.best.mean is not None, "some trial of digits always finishes"
        self.best_score = found.best.mean
        self.note = "; ".join(str(choice.get("why", "")) for choice in found.choices)
        return took


class _SklearnSearch(_Way):
    def __init__(self, jobs: int, epochs: int) -> None:
        self.name, self._jobs, self._epochs = f"scikit-learn, {jobs} jobs", jobs, epochs
        data = digits(flat=True)
        inputs, targets = data.train.gather(np.arange(len(data.train)))
        self._x, self._y = inputs.numpy(), targets.numpy()

    def run(self) -> float:
        splits = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
        search = GridSearchCV(PlainTorch(epochs=self._epochs), GRID, cv=splits, n_jobs=self._jobs, refit=False)
        began = time.perf_counter()
        with with_threads(1):  # the fastest for such a small net
            search.fit(self._x, self._y)
        took = time.perf_counter() - began
        self.best_score = float(search.best_score_)
        return took


class PlainTorch(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """The digits' perceptron in a plain loop, for `GridSearchCV`."""

    def __init__(
        self, lr: float = 0.1, momentum: float = 0.0, weight_decay: float = 0.0, epochs: int = 20, seed: int = 0
    ) -> None:
        self.lr, self.momentum, self.weight_decay, self.epochs, self.seed = lr, momentum, weight_decay, epochs, seed

    def fit(self, x: np.ndarray, y: np.ndarray) -> PlainTorch:
        torch.manual_seed(self.seed)
        self.classes_ = np.unique(y)
        self.model_ = mlp((x.shape[1], 64, len(self.classes_)))
        optimizer = torch.optim.SGD(
            self.model_.parameters(), self.lr, momentum=self.momentum, weight_decay=self.weight_decay
        )
        inputs, targets, size = torch.from_numpy(x), torch.from_numpy(y), 64
        for _ in range(self.epochs):
            order = torch.randperm(len(inputs))
            for start in range(0, len(inputs) - size + 1, size):
                batch = order[start : start + size]
                optimizer.zero_grad(set_to_none=True)
                cross_entropy(self.model_(inputs[batch]), targets[batch]).backward()
                optimizer.step()
        return self

    def predict(self, x: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = self.model_(torch.from_numpy(x)).argmax(1).numpy()
        return found
