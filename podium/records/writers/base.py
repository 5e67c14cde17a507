"""What a writer is: it puts the numbers of runs where another program looks for them.

A writer is fed in two ways. Called with the events of a launcher or a study, it follows runs as they go; what events do
not tell (bytes, waiting, staleness) comes from the run's records at its end. `podium export` opens a page for each
finished run and writes all of it at once. Both give the same names:

    train/…        at each global step: loss, samples_per_s, sent_bytes, wait_share, staleness
    validation/…   at each validation: loss and the task's metrics
    final/…        once, when the run is over

Training continues whatever happens to a writer: a writer that fails warns once and gets no more events.
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
    """What a writer knows of a run before its first number."""

    label: str
    """The strategy, the cell of a study, or the trial of a sweep."""
    seed: int
    task: str
    key: str
    """No other run has it: the absolute path of its folder, and what tells it from others there."""
    params: Mapping[str, Scalar] = field(default_factory=dict)
    """The resolved configuration, flat (`task_options.lr`), and in a study `level.<factor>`. Nothing that is unset."""
    tags: Mapping[str, str] = field(default_factory=dict)
    started_s: float = 0.0
    """Seconds since 1970; 0 where it is not recorded."""

    @property
    def about(self) -> dict[str, Scalar]:
        """All that sets it apart, its label first."""
        return {"label": self.label, "seed": self.seed, "task": self.task, **self.params}

    @property
    def place(self) -> str:
        """A folder's name for it, of two parts: `all-reduce/seed0`."""
        stem = "".join(c if c.isalnum() or c in "._=" else "-" for c in self.label).strip("-.") or "run"
        return f"{stem}/seed{self.seed}"


class Page(ABC):
    """One run's place in a writer."""

    @abstractmethod
    def write(self, points: Sequence[Point]) -> None:
        """Add these points."""

    @abstractmethod
    def end(self, status: str, seconds: float | None = None) -> None:
        """The run is over: `finished`, `stopped`, `failed` or whatever its row says.

        `seconds` is how long it took; None means that it is over now.
        """


class Writer(ABC):
    """Takes events by being called with them, from any thread. A context: leaving it closes what is open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._page: Page | None = None
        self._run_dir = Path()
        self._config: Mapping[str, Any] = {}
        self._failed = False

    @abstractmethod
    def open(self, run: Run) -> Page | None:
        """A page for this run; None where the run is in there already, whole."""

    def flush(self) -> None:
        """Bring all that was written to where others can read it."""

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
        """Whatever a foreign package raises must not end a training that may have taken days."""
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
        self._end("failed")  # a run that fails says nothing more
        self._run_dir = Path(event["run_dir"])
        manifest = read_manifest(self._run_dir)
        self._config = manifest["config"]
        self._page = self.open(describe(self._run_dir, manifest, cell=event.get("cell")))

    def _progress(self, event: Event) -> list[Point]:
        step = event["step"]
        if event["epoch"] > 0 and self._config.get("batch_size"):
            # One worker's count says little where workers do not go in step.
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
    """What only the run's folder can tell: costs at each step, and what the run came to where it came to anything."""
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
    """Several listeners as one, told of every event in this order. A context: leaving it closes the writers in it."""

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
    """A run as its manifest has it; in a study, with its cell and the cell's levels."""
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
    """A configuration with dots for its tables; what is unset is left out, and lists are JSON."""
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
    """A manifest's `started` in seconds since 1970; 0 where it says nothing that can be read."""
    try:
        return datetime.strptime(text or "", "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return 0.0
