"""The task digits-mlp, whose steps take long for as long as a file exists: until a test is through with its faults.

Ranks load this file by its path: it imports no test.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np

from podium.data.base import Data, Dataset
from podium.task import Task
from podium.tasks.digits import digits_mlp

TASK = f"{Path(__file__).resolve()}:task"
STEP_S = 0.1


class Slow(Dataset):
    """Takes its time with samples that are trained on: those that are asked for with their keys."""

    def __init__(self, held: Dataset, mark: Path) -> None:
        self.held, self.mark = held, mark

    def __len__(self) -> int:
        return len(self.held)

    def gather(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Any, Any]:
        if keys is not None and self.mark.exists():
            time.sleep(STEP_S)
        return self.held.gather(indices, keys)


def task(mark: str) -> Task:
    """`mark`: the file that slows it down."""
    made = digits_mlp()
    data = made.data()
    return dataclasses.replace(made, data=lambda: Data(Slow(data.train, Path(mark)), data.test))
