"""Podium trains a PyTorch model under any distribution strategy and measures strategies on equal terms.

import podium
result = podium.train("digits-mlp", strategy="all-reduce", workers=4)
print(result.metrics["accuracy"])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Names are looked up when first used, so that `podium --help` does not import torch.
_HOME = {
    "train": "podium.cluster.launch",
    "compare": "podium.study.run",
    "run_study": "podium.study.run",
    "read_study": "podium.study.file",
    "compare_results": "podium.study.versus",
    "Study": "podium.study.study",
    "sweep": "podium.study.sweeps",
    "export": "podium.study.export",
    "join": "podium.loop",
    "scale": "podium.cluster.scale",
    "Task": "podium.task",
    "Data": "podium.data.base",
    "Dataset": "podium.data.base",
    "ArrayDataset": "podium.data.base",
    "MapDataset": "podium.data.base",
    "Strategy": "podium.strategies.base",
    "Trigger": "podium.triggers.base",
    "Reading": "podium.triggers.base",
    "Phases": "podium.strategies.phases",
    "Worker": "podium.worker",
    "Batch": "podium.worker",
    "RunConfig": "podium.config",
    "RunResult": "podium.config",
    "PodiumError": "podium.errors",
}

_MODULES = {"writers": "podium.measure.writers"}

__all__ = ["__version__", *_HOME, *_MODULES]  # noqa: PLE0604  # the keys are names that __getattr__ serves

if TYPE_CHECKING:
    from podium.cluster.launch import train as train
    from podium.cluster.scale import scale as scale
    from podium.config import RunConfig as RunConfig
    from podium.config import RunResult as RunResult
    from podium.data.base import ArrayDataset as ArrayDataset
    from podium.data.base import Data as Data
    from podium.data.base import Dataset as Dataset
    from podium.data.base import MapDataset as MapDataset
    from podium.errors import PodiumError as PodiumError
    from podium.loop import join as join
    from podium.measure import writers as writers
    from podium.strategies.base import Strategy as Strategy
    from podium.strategies.phases import Phases as Phases
    from podium.study.export import export as export
    from podium.study.file import read_study as read_study
    from podium.study.run import compare as compare
    from podium.study.run import run_study as run_study
    from podium.study.study import Study as Study
    from podium.study.sweeps import sweep as sweep
    from podium.study.versus import compare_results as compare_results
    from podium.task import Task as Task
    from podium.triggers.base import Reading as Reading
    from podium.triggers.base import Trigger as Trigger
    from podium.worker import Batch as Batch
    from podium.worker import Worker as Worker


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'podium' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
