"""The interface of writers, which write the numbers of runs for another program.

A writer gets numbers in two ways. Called with the events of a launcher or a study, it follows runs as they train;
numbers that events do not have (bytes, waiting, staleness) come from the run's records at its end. `podium export`
opens a page for each finished run and writes all of it at once. Both give the same names:

    train/…        at each global step: loss, samples_per_s, sent_bytes, wait_share, staleness
    validation/…   at each validation: loss and the task's metrics
    final/…        once, when the run is over

A failing writer does not stop training: it warns once and gets no more events.
"""

from __future__ import annotations

import json
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from podium.errors import Interrupted, PodiumError
from podium.records.manifest import read_manifest
from podium.records.recorder import read_records
from podium.records.writers.series import Point, costs, finals, global_step

Event = Mapping[str, Any]
Listener = Callable[[dict[str, Any]], None]
"""What `podium.train(on_event=…)` and `podium.compare(on_event=…)` take."""

Scalar = bool | int | float | str


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's description, given to a writer before the first number."""

    label: str
    """The strategy, the cell of a study, or the trial of a sweep."""
    seed: int
    task: str
    key: str
    """Unique: the absolute path of the run's folder, and its name among other runs in that folder."""
    params: Mapping[str, Scalar] = field(default_factory=dict)
    """The resolved configuration, flat (`task_options.lr`), and in a study `level.<factor>`. Without unset values."""
    tags: Mapping[str, str] = field(default_factory=dict)
    started_s: float = 0.0
    """Seconds since 1970; 0 where it is not recorded."""

    @property
    def about(self) -> dict[str, Scalar]:
        """Label, seed, task and params."""
        return {"label": self.label, "seed": self.seed, "task": self.task, **self.params}

    @property
    def place(self) -> str:
        """The run's folder name, of two parts: `all-reduce/seed0`."""
        stem = "".join(c if c.isalnum() or c in "._=" else "-" for c in self.label).strip("-.") or "run"
        return f"{stem}/seed{self.seed}"


class Page(ABC):
    """Writes the numbers of one run."""

    @abstractmethod
    def write(self, points: Sequence[Point]) -> None:
        """Add these points."""

    @abstractmethod
    def end(self, status: str, seconds: float | None = None) -> None:
        """The run is over: `finished`, `stopped`, `failed` or another status of its row.

        `seconds` is how long the run took; None means that it has just ended.
        """


class Writer(ABC):
    """Called with events, from any thread. A context manager: leaving it ends the open run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._page: Page | None = None
        self._run_dir = Path()
        self._config: Mapping[str, Any] = {}
        self._failed = False

    @abstractmethod
    def open(self, run: Run) -> Page | None:
        """A page for this run; None where the run was already written completely."""

    def flush(self) -> None:
        """Make all written numbers visible to readers."""

    @final
    def __call__(self, event: Event) -> None:
        with self._lock:
            if not self._failed:
                self._guarded(lambda: self._hear(event))

    @final
    def __enter__(self) -> Self:
        return self

    @final
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        stopped = isinstance(error, Interrupted | KeyboardInterrupt)
        self.close("stopped" if stopped else "failed")

    @final
    def close(self, status: str = "failed") -> None:
        """End the run that is still open, with this status."""
        with self._lock:
            if not self._failed:
                self._guarded(lambda: self._end(status))

    def _guarded(self, action: Callable[[], None]) -> None:
        """An error in another package must not end a training that may have taken days."""
        try:
            action()
        except Exception as error:
            self._failed = True
            where = f"{type(self).__name__} of {self._run_dir}"
            warnings.warn(f"{where} stops writing: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=4)

    def _hear(self, event: Event) -> None:
        kind = event.get("event")
        if kind == "start":
            self._begin(event)
        elif self._page is None:
            return
        elif kind == "progress":
            self._page.write(self._progress(event))
        elif kind == "eval":
            values = {"loss": event["loss"], **event["metrics"]}
            self._page.write([Point(f"validation/{name}", x, event["step"]) for name, x in values.items()])
        elif kind in ("end", "cell-end"):
            self._end(event["status"])

    def _begin(self, event: Event) -> None:
        self._end("failed")  # a failed run sends no `end` event
        self._run_dir = Path(event["run_dir"])
        manifest = read_manifest(self._run_dir)
        self._config = manifest["config"]
        self._page = self.open(describe(self._run_dir, manifest, cell=event.get("cell")))

    def _progress(self, event: Event) -> list[Point]:
        step = event["step"]
        if event["epoch"] > 0 and self._config.get("batch_size"):
            # One worker's count of steps says little in asynchronous training.
            samples = round(event["position"] / event["epoch"])
            step = global_step(event["position"], samples, self._config["batch_size"])
        told = {"loss": event["loss"], "samples_per_s": event.get("samples_per_s")}
        return [Point(f"train/{name}", x, step) for name, x in told.items() if x is not None]

    def _end(self, status: str) -> None:
        page, self._page = self._page, None
        if page is None:
            return
        try:
            page.write(_afterwards(self._run_dir, self._config))
        except PodiumError as error:
            warnings.warn(f"{self._run_dir}: not all could be written: {error}", RuntimeWarning, stacklevel=2)
        page.end(status)
        self.flush()


def _afterwards(run_dir: Path, config: Mapping[str, Any]) -> list[Point]:
    """Numbers that only the run's folder has: costs at each step, and the result if there is one."""
    points = [point for point in costs(read_records(run_dir), config) if point.tag not in _HEARD]
    try:
        result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return points
    return [*points, *finals(result)]


_HEARD = ("train/loss", "train/samples_per_s")
"""Sent as events during the run."""


@final
class Together:
    """Several listeners as one, called in this order. A context manager: leaving it closes its writers."""

    def __init__(self, *listeners: Listener | None) -> None:
        self._listeners = [listener for listener in listeners if listener is not None]

    def __call__(self, event: dict[str, Any]) -> None:
        for listener in self._listeners:
            listener(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for listener in self._listeners:
            if isinstance(listener, Writer):
                listener.__exit__(kind, error, trace)


def describe(
    run_dir: Path, manifest: Mapping[str, Any], *, cell: str | None = None, levels: Mapping[str, Any] | None = None
) -> Run:
    """A run from its manifest; in a study, with its cell and the cell's levels."""
    config = manifest["config"]
    seed, task = int(config.get("seed") or 0), Path(str(config["task"])).name
    label = cell or _strategy(config)
    params = {**flat(config), **{f"level.{name}": level for name, level in (levels or {}).items()}}
    return Run(
        label=label,
        seed=seed,
        task=task,
        key=str(run_dir.absolute()),
        params=params,
        tags={"strategy": label, "seed": str(seed), "task": task, "launcher": str(config.get("launcher", ""))},
        started_s=when(manifest.get("started")),
    )


def _strategy(config: Mapping[str, Any]) -> str:
    name, options = str(config.get("strategy", "")), config.get("strategy_options") or {}
    return name + (":" + ",".join(f"{key}={value}" for key, value in options.items()) if options else "")


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Scalar]:
    """A configuration with dotted names for nested tables; unset values are left out, and lists are JSON."""
    found: dict[str, Scalar] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found.update(flat(value, f"{prefix}{name}."))
        elif isinstance(value, Scalar):
            found[prefix + name] = value
        elif value is not None:
            found[prefix + name] = json.dumps(value)
    return found


def when(text: str | None) -> float:
    """A manifest's `started` in seconds since 1970; 0 where it cannot be parsed."""
    try:
        return datetime.strptime(text or "", "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return 0.0
