"""Writers: a run's numbers for TensorBoard and MLflow, during the run or afterwards.

    podium.train("digits-mlp", on_event=podium.writers.TensorBoard("tb"))

Each is a listener for `on_event`; `Together` combines several. A package is imported when its writer is made.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from podium.errors import UnknownName
from podium.records.writers.base import Listener, Page, Run, Together, Writer
from podium.records.writers.mlflow import MLflow
from podium.records.writers.series import Point
from podium.records.writers.tensorboard import TensorBoard

__all__ = ["Listener", "MLflow", "Page", "Point", "Run", "TensorBoard", "Together", "Writer", "open_log"]

WRITERS: dict[str, Callable[[str], Writer]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def open_log(text: str, out: str | Path = "runs") -> Writer:
    """The writer of `--log NAME[:WHERE]`; WHERE is by default the folder `NAME` below `out`.

    Raises on an unknown name, a missing package and a place that cannot be written, so it is called before the run.
    """
    name, _, where = text.partition(":")
    if name not in WRITERS:
        raise UnknownName("log", name, WRITERS)
    return WRITERS[name](where or str(Path(out) / name))
