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
    "train": "podium.launch.run",
    "compare": "podium.lab.study.run",
    "run_study": "podium.lab.study.run",
    "read_study": "podium.lab.study.file",
    "compare_results": "podium.lab.report.versus",
    "Study": "podium.lab.study.study",
    "Where": "podium.lab.study.parts",
    "Against": "podium.lab.study.parts",
    "sweep": "podium.lab.sweeps",
    "export": "podium.lab.report.export",
    "join": "podium.launch.join",
    "scale": "podium.launch.scale",
    "Task": "podium.task",
    "Data": "podium.data.base",
    "Dataset": "podium.data.base",
    "ArrayDataset": "podium.data.base",
    "MapDataset": "podium.data.base",
    "Strategy": "podium.strategies.base",
    "Cadence": "podium.strategies.traits",
    "Payload": "podium.strategies.traits",
    "ServerSpec": "podium.strategies.traits",
    "Trigger": "podium.strategies.triggers.base",
    "Seen": "podium.strategies.triggers.base",
    "Reading": "podium.strategies.triggers.base",
    "Phases": "podium.strategies.phases",
    "Worker": "podium.engine.worker",
    "Batch": "podium.engine.batch",
    "RunConfig": "podium.config",
    "RunResult": "podium.config",
    "Codec": "podium.exchange.codecs.base",
    "Collective": "podium.exchange.collectives.base",
    "Balancer": "podium.balance.base",
    "PodiumError": "podium.errors",
    "ConfigError": "podium.errors",
}

_MODULES = {"writers": "podium.records.writers"}

__all__ = ["__version__", *_HOME, *_MODULES]  # noqa: PLE0604  # the keys are names that __getattr__ serves

if TYPE_CHECKING:
    from podium.balance.base import Balancer as Balancer
    from podium.config import RunConfig as RunConfig
    from podium.config import RunResult as RunResult
    from podium.data.base import ArrayDataset as ArrayDataset
    from podium.data.base import Data as Data
    from podium.data.base import Dataset as Dataset
    from podium.data.base import MapDataset as MapDataset
    from podium.engine.batch import Batch as Batch
    from podium.engine.worker import Worker as Worker
    from podium.errors import ConfigError as ConfigError
    from podium.errors import PodiumError as PodiumError
    from podium.exchange.codecs.base import Codec as Codec
    from podium.exchange.collectives.base import Collective as Collective
    from podium.lab.report.export import export as export
    from podium.lab.report.versus import compare_results as compare_results
    from podium.lab.study.file import read_study as read_study
    from podium.lab.study.parts import Against as Against
    from podium.lab.study.parts import Where as Where
    from podium.lab.study.run import compare as compare
    from podium.lab.study.run import run_study as run_study
    from podium.lab.study.study import Study as Study
    from podium.lab.sweeps import sweep as sweep
    from podium.launch.join import join as join
    from podium.launch.run import train as train
    from podium.launch.scale import scale as scale
    from podium.records import writers as writers
    from podium.strategies.base import Strategy as Strategy
    from podium.strategies.phases import Phases as Phases
    from podium.strategies.traits import Cadence as Cadence
    from podium.strategies.traits import Payload as Payload
    from podium.strategies.traits import ServerSpec as ServerSpec
    from podium.strategies.triggers.base import Reading as Reading
    from podium.strategies.triggers.base import Seen as Seen
    from podium.strategies.triggers.base import Trigger as Trigger
    from podium.task import Task as Task


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    raise AttributeError(f"module 'podium' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
