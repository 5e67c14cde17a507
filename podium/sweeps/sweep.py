"""Train all trials of a sweep on one device, and leave a folder from which everything else is worked out.

A sweep's folder, besides what the queue writes (`queue.py`):

    manifest.json    what was asked for, on what, from which commit
    events.jsonl     what executors said: whether trials could be fused, what `auto` chose and why, processes lost
    slots.jsonl      which trial was trained when, and in which row of which group
    sessions.jsonl   one line each time the sweep ended or was asked to stop: trials, samples, what was measured
    lock             locked while a sweep is at work here, so that there is one only

Trials are sorted into groups of one structure, as far as the executor makes anything of that, and the executor is
called until no group has trials left: a search may bring new structures as it goes on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any, Literal

import torch

from podium.errors import ConfigError, PodiumError, RecordError, TrainingError, as_request
from podium.records.manifest import read_manifest, write_manifest
from podium.records.nvml import Gpu, open_board
from podium.records.recorder import read_records, to_json
from podium.records.window import Reading, Window
from podium.sweeps.best_models import BestModel
from podium.sweeps.executors.base import Executor
from podium.sweeps.fingerprint import TaskLike
from podium.sweeps.folder_lock import held
from podium.sweeps.fused.array import structure_of
from podium.sweeps.plan import FoldsLike, Plan, SpaceLike, plan
from podium.sweeps.queue import Keep, TrialQueue, read_outcomes
from podium.sweeps.recipe import Precision
from podium.sweeps.result import Sweep, read_sweep
from podium.sweeps.search.base import Source
from podium.sweeps.stopping.base import Stopping
from podium.sweeps.trial import Outcome, Trial

OnEvent = Callable[[dict[str, Any]], None]

MAY_DIFFER = ("executor", "device")
"""What may be another when a sweep is gone on with: how trials are trained, not what they are."""
MADE_FROM = {"source": "source file of the task", "data": "data set"}
"""What trials are made from (`fingerprint.py`), in words."""


def sweep(
    task: TaskLike = "digits-mlp",
    *,
    grid: SpaceLike = None,
    space: SpaceLike = None,
    random: int | None = None,
    optuna: int | None = None,
    trials: str | Path | Sequence[Mapping[str, Any]] | None = None,
    search: str | Source | None = None,
    seeds: int | Sequence[int] = 1,
    folds: FoldsLike = None,
    seed: int = 0,
    executor: str | Executor = "auto",
    stopping: str | Stopping | None = None,
    metric: str | None = None,
    maximize: bool | None = None,
    epochs: int | None = None,
    batch_size: int | None = None,
    options: Mapping[str, Any] | None = None,
    data_dir: str | None = None,
    device: str = "auto",
    precision: Precision = "fp32",
    eval_every: int = 1,
    steps: int | None = None,
    keep: Keep = "best",
    out: str | Path | None = None,
    on_event: OnEvent | None = None,
    stop: Event | None = None,
) -> Sweep:
    """Train `task` once for each point of a search, fold and seed, all on one device.

    Points: every combination of `grid` (a name's values, `{"lr": [0.1, 0.03]}`), or `random=N` draws, or `optuna=N`
    suggestions from it and `space` (which may have ranges, `{"lr": "1e-4..1e-1:log"}`), or `trials`, a list of options
    or a file of them; `search` names a source of your own. `folds` is how many (5), of which kind (`stratified:5`), any
    scikit-learn splitter, or pairs of index arrays; without them trials are validated on the task's test data. `seed`
    fixes folds and draws; `seeds` is how many trainings each point gets (0, 1, 2 …), or with which seeds.

    `options`, `epochs` and `batch_size` hold for all trials. `metric` is the task's first when not given; losses and
    errors are minimised, all else maximised, unless `maximize` says. `keep` is which models are left: that of the best
    point's best trial, all, or none. The same call with the same `out` goes on where an earlier one ended. `on_event`
    hears `{"event": "sweep"}` (with `total`), `{"event": "outcome"}` for each trial, and whatever the executor says.
    Setting `stop` ends the sweep soon; what is finished is kept.
    """
    began_in = Path.cwd()  # the task's own code may go elsewhere
    with as_request():
        found = plan(
            task, grid=grid, space=space, random=random, optuna=optuna, trials=trials, search=search, seeds=seeds,
            folds=folds, seed=seed, executor=executor, stopping=stopping, metric=metric, maximize=maximize,
            epochs=epochs, batch_size=batch_size, options=options, data_dir=data_dir, device=device,
            precision=precision, eval_every=eval_every, steps=steps, keep=keep,
        )  # fmt: skip
    chosen_device = found.recipe.torch_device  # refused before a folder is made
    folder = began_in / out if out is not None else _new_folder(found.config["task"], began_in)
    with held(folder):
        _open_folder(folder, found.config, chosen_device)
        _Work(found, folder, began_in, on_event or _ignore, stop or Event()).run()
    return read_sweep(_told(folder, began_in))


# The folder.


def _told(folder: Path, began_in: Path) -> Path:
    """As short as can be: from where the sweep began, if that is where we still are."""
    return folder.relative_to(began_in) if folder.is_relative_to(began_in) and Path.cwd() == began_in else folder


def _new_folder(task: str, within: Path) -> Path:
    stem = "".join(c if c.isalnum() else "-" for c in task).strip("-")
    base = within / "runs" / f"sweep-{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    for tries in itertools.count(1):
        path = base if tries == 1 else base.with_name(f"{base.name}-{tries}")
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:  # another sweep began in the same second
            continue
        except OSError as error:
            raise RecordError(f"{path} cannot be made: {error.strerror or error}") from error
    raise AssertionError("numbers do not end")


def _open_folder(folder: Path, config: Mapping[str, Any], device: torch.device) -> None:
    """Write the manifest, or see that it is of the same sweep."""
    found = _manifest_of(folder)
    if found is None:
        if (folder / "trials.jsonl").is_file():
            raise ConfigError(f"sweep: {folder} holds trials without a whole manifest.json; take another folder")
        write_manifest(folder, dict(config), board=_board_facts(device))
        return
    wanted = json.loads(to_json(dict(config)))  # compared as JSON has them: a tuple written is a list read
    for name, value in wanted.items():
        if name not in MAY_DIFFER and found.get(name) != value:
            before, now = _apart(found.get(name), value)
            if name in MADE_FROM:
                raise ConfigError(
                    f"sweep: {folder} was begun with another {MADE_FROM[name]}, {before}; now it is {now}. Trials of "
                    "both cannot be ranked together: put it back as it was, or give another folder"
                )
            raise ConfigError(
                f"sweep: {folder} holds another one, with {name} {before}; wanted {now}. Give another folder, or ask "
                "for the same sweep to go on with it"
            )


def _manifest_of(folder: Path) -> Mapping[str, Any] | None:
    """What a sweep in this folder was asked for; None where nobody has come so far as to write that down."""
    if not (folder / "manifest.json").is_file():
        return None
    try:
        found: Mapping[str, Any] = read_manifest(folder)["config"]
    except RecordError:  # killed in the middle of writing it
        return None
    return found


def _apart(before: Any, now: Any) -> tuple[Any, Any]:
    """Two values, of two tables only what differs."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return repr(before), repr(now)
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    first, second = ({name: table[name] for name in names if name in table} for table in (before, now))
    return repr(first), repr(second)


def _board_facts(device: torch.device) -> dict[str, Any] | None:
    """What the device is and may draw, as results are to be read beside it."""
    with _board(device) as board:
        if board is None:
            return None
        return {"name": board.name, "driver": board.driver, "power_limit_w": board.power_limit_w}


@contextlib.contextmanager
def _board(device: torch.device) -> Iterator[Gpu | None]:
    board = open_board(device.index or 0) if device.type == "cuda" else None
    if board is None:
        yield None
        return
    with board:
        yield board


# The work.


class _Work:
    """One session of a sweep: from the first trial that is left to the last."""

    def __init__(self, found: Plan, folder: Path, began_in: Path, on_event: OnEvent, stop: Event) -> None:
        self.recipe, self.rule, self.executor, self.config = found.recipe, found.stopping, found.executor, found.config
        self.folder, self.on_event, self.stop, self.source, self.why = folder, on_event, stop, found.source, found.why
        self.began, self.told = time.perf_counter(), str(_told(folder, began_in))
        for name in ("events.jsonl", "slots.jsonl", "sessions.jsonl"):
            _cut_torn_line(folder / name)
        slots, events = _read(folder / "slots.jsonl"), _read(folder / "events.jsonl")
        # One that was killed left no line of its own, but perhaps some of these.
        self.number = 1 + max(
            (row["session"] for row in [*slots, *events, *_read(folder / "sessions.jsonl")]), default=-1
        )
        self.offset_s = max((row["ended_s"] for row in slots), default=0.0)
        self.groups: dict[Hashable, int] = {}
        self.group_of: dict[int, int] = {}
        self.running: dict[int, dict[str, Any]] = {}
        self.said: list[dict[str, Any]] = []
        self.trained, self.samples = 0, 0

    def run(self) -> None:
        with TrialQueue(
            self.source,
            stopping=self.rule,
            metric=self.config["metric"],
            maximize=self.config["maximize"],
            folder=self.folder,
            keep_models="none" if self.config["keep"] == "none" else "all",
            done=_done_before(self.folder),
            on_event=self._hear_queue,
            should_stop=self.stop.is_set,
        ) as queue:
            self.queue = queue
            self.kept = BestModel(self.folder, self.config, queue.outcomes) if self.config["keep"] == "best" else None
            total, done = self.source.total, len(queue.outcomes)
            self.on_event({"event": "sweep", "folder": self.told, "total": total, "done": done})
            if self.why:
                self.say({"event": "chose", "group": None, "executor": "fused", "why": self.why, "table": []})
            window, through = None, False
            try:
                with _board(self.recipe.torch_device) as board, Window(board) as window:
                    self.began = time.perf_counter()
                    self._train(queue)
                through = not self.stop.is_set() or (total is not None and len(queue.outcomes) >= total)
            except BaseException:
                with contextlib.suppress(RecordError):  # a full disk: what was first in the way is what is told
                    self._end_session("stopped", window)
                raise
            self._end_session("finished" if through else "stopped", window)

    def _train(self, queue: TrialQueue) -> None:
        # An executor that trains each trial by itself makes nothing of groups, and would only wait between them.
        sorts = type(self.executor).run_groups is not Executor.run_groups
        queue.sort_into(self._group_key if sorts else self._no_key)
        while (keys := queue.groups()) and not self.stop.is_set():
            self._check_copies(keys)
            before = len(queue.outcomes)
            self.round = [self.groups.setdefault(key, len(self.groups)) for key in keys]
            self.executor.run_groups(self.recipe, [queue.group_queue(key) for key in keys], self._hear_executor)
            if len(queue.outcomes) == before and not self.stop.is_set():
                raise TrainingError(f"executor {self.executor.name}: came back without having trained a trial")

    def _group_key(self, trial: Trial) -> Hashable:
        try:
            key = structure_of(self.recipe.make(trial))
        except PodiumError:
            raise
        except Exception as error:  # the user's own code may raise anything, and it is this trial's own trouble
            raise TrainingError(f"{type(error).__name__}: {error}") from error
        self.group_of[trial.number] = self.groups.setdefault(key, len(self.groups))
        return key

    def _no_key(self, trial: Trial) -> Hashable:
        self._group_key(trial)
        self.group_of[trial.number] = 0
        return None

    def _check_copies(self, keys: Sequence[Hashable]) -> None:
        if self.rule.copies and len(keys) > 1:
            raise ConfigError(
                f"stopping {self.rule.name}: copies trials onto each other, so all must have one structure, got "
                f"{len(keys)}: leave options that change the model's shapes or the batch size out of the search"
            )

    def _check_population(self) -> None:
        """Whoever waits for a place can neither be copied nor copied from."""
        if self.rule.copies and (waiting := self.queue.count_waiting()):
            raise ConfigError(
                f"stopping {self.rule.name}: all trials must train side by side, got {waiting} that wait for a row: "
                "ask for fewer trials, or for more rows (`fused:width=N`)"
            )

    # What is heard, and written down.

    def say(self, event: dict[str, Any]) -> None:
        """Write down what an executor said, and pass it on."""
        self._append("events.jsonl", {"session": self.number, "t_s": round(self._now(), 6), **event})
        self.on_event(event)

    def _now(self) -> float:
        return self.offset_s + time.perf_counter() - self.began

    def _hear_executor(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "trial":
            slot = self.running.setdefault(event["trial"], {})
            slot.update(began_s=self._now(), row=event.get("row"))
        if kind in ("trial", "progress"):
            self.on_event(event)
            return
        if kind == "chose" and event.get("group") is not None:
            event = {**event, "group": self.round[event["group"]]}
        if kind == "probe":
            if not event["fuses"] and self.rule.copies:
                raise ConfigError(
                    f"stopping {self.rule.name}: copies rows of a fused array, but these trials cannot be fused: "
                    f"{event['why']}"
                )
            facts = {name: event.get(name) for name in ("fuses", "mode", "why", "looped")}
            if facts in self.said:
                return
            self.said.append(facts)
        self.say(event)

    def _hear_queue(self, event: dict[str, Any]) -> None:
        if event["kind"] == "begin":
            self.running[event["number"]] = {"began_s": self._now(), "row": None}
        elif event["kind"] == "outcome":
            self._over(event)
        else:
            self._check_population()
            self.on_event({"event": "report", **{k: v for k, v in event.items() if k != "kind"}})

    def _over(self, event: dict[str, Any]) -> None:
        trial = event["trial"]
        slot = self.running.pop(trial["number"], None)
        if slot is not None:
            place = {"trial": trial["number"], "session": self.number, "group": self.group_of.get(trial["number"], 0)}
            times = {"began_s": round(slot["began_s"], 6), "ended_s": round(self._now(), 6)}
            self._append("slots.jsonl", {**place, "row": slot["row"], **times, "status": event["status"]})
        self.trained += event["steps"] > 0  # not one that could not be made, nor one that a rule skipped
        self.samples += event["samples"]
        if self.kept is not None:
            self.kept.add(self.queue.outcomes[-1])
        facts = {name: event[name] for name in ("status", "why", "seconds", "samples")}
        evaluation = event["evaluation"] or {"loss": None, "metrics": {}}
        value = evaluation["metrics"].get(self.config["metric"], evaluation["loss"])
        counts = {"done": len(self.queue.outcomes), "total": self.source.total}
        self.on_event({"event": "outcome", "trial": trial, "value": value, **facts, **counts})

    def _end_session(self, status: Literal["finished", "stopped"], window: Window | None) -> None:
        reading: Reading | None = None
        if window is not None:
            with contextlib.suppress(ConfigError):  # it never ended: a device that failed cannot be waited for
                reading = window.reading
        if self.kept is not None and status == "finished":
            self.kept.end()
        self._append("sessions.jsonl", {
            "session": self.number, "status": status, "executor": self.config["executor"],
            "device": str(self.recipe.torch_device), "trained": self.trained, "samples": self.samples,
            "seconds": reading.seconds if reading is not None else time.perf_counter() - self.began,
            "reading": None if reading is None else dataclasses.asdict(reading),
        })  # fmt: skip

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        try:
            with (self.folder / name).open("a", encoding="utf-8") as file:
                file.write(to_json(dict(row)) + "\n")
        except OSError as error:
            raise RecordError(f"{self.folder / name} cannot be written: {error}") from error


def _read(path: Path) -> list[dict[str, Any]]:
    return list(read_records(path)) if path.is_file() else []


def _done_before(folder: Path) -> list[Outcome]:
    """Outcomes of earlier sessions, with options as they were asked for: a rule may have changed them on the way."""
    asked = {row["number"]: row["options"] for row in _read(folder / "trials.jsonl")}
    found = read_outcomes(folder)
    return [
        dataclasses.replace(o, trial=dataclasses.replace(o.trial, options=asked.get(o.trial.number, o.trial.options)))
        for o in found
    ]


def _cut_torn_line(path: Path) -> None:
    """Bring a file back to whole lines after a writer was killed in the middle of one."""
    if path.is_file() and not (data := path.read_bytes()).endswith(b"\n"):
        with path.open("rb+") as file:
            file.truncate(data.rfind(b"\n") + 1)


def _ignore(event: dict[str, Any]) -> None:
    """Nobody listens."""
