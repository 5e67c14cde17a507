"""`podium.sweep`: train all trials of a sweep on one device, and leave a folder from which the result is read.

A sweep's folder, besides the queue's files (`queue.py`):

    manifest.json    the request, the machine, the commit
    events.jsonl     events of executors: whether trials could be fused, what `auto` chose and why, processes lost
    slots.jsonl      which trial was trained when, and in which row of which group
    sessions.jsonl   one line each time the sweep ended or was asked to stop: trials, samples, measurements
    .lock            locked while a sweep runs in the folder, so that only one does; removed at its end

If the executor trains groups, trials are sorted into groups of one structure. The executor is called until no group has
trials left: a search may bring new structures at any time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from podium.errors import as_request
from podium.records.folder_lock import folder_lock
from podium.records.folder_name import new_folder
from podium.sweeps.executors.base import Executor
from podium.sweeps.fingerprint import TaskLike
from podium.sweeps.plan import plan
from podium.sweeps.recipe import Precision
from podium.sweeps.request import Keep, SpaceLike
from podium.sweeps.result import Sweep, read_sweep
from podium.sweeps.search.base import Source
from podium.sweeps.search.sweep_folds import FoldsLike
from podium.sweeps.session import OnEvent, Session
from podium.sweeps.stopping.base import Stopping
from podium.sweeps.sweep_folder import open_folder


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
    or a file of them; `search` names a source of your own. `folds` is a number (5), a kind and a number
    (`stratified:5`), any scikit-learn splitter, or pairs of index arrays; without folds, trials are validated on the
    task's test data. `seed` fixes folds and draws; `seeds` is the number of trainings per point (seeds 0, 1, 2 …), or a
    list of seeds.

    `options`, `epochs` and `batch_size` hold for all trials. `metric` is the task's first when not given; losses and
    errors are minimised, all else maximised, unless `maximize` is given. `keep` is which models are saved: that of the
    best point's best trial, all, or none. The same call with the same `out` resumes an earlier one. `on_event`
    is called with `{"event": "sweep"}` (with `total`), `{"event": "outcome"}` for each trial, and by the executor.
    Setting `stop` ends the sweep soon; finished trials stay in the folder.
    """
    began_in = Path.cwd()  # the task's own code may change the working directory
    with as_request():
        found = plan(
            task, grid=grid, space=space, random=random, optuna=optuna, trials=trials, search=search, seeds=seeds,
            folds=folds, seed=seed, executor=executor, stopping=stopping, metric=metric, maximize=maximize,
            epochs=epochs, batch_size=batch_size, options=options, data_dir=data_dir, device=device,
            precision=precision, eval_every=eval_every, steps=steps, keep=keep,
        )  # fmt: skip
    chosen_device = found.recipe.torch_device  # refused before a folder is made
    folder = began_in / out if out is not None else new_folder(began_in / "runs", f"sweep-{found.config['task']}")
    with folder_lock(folder, "sweep"):
        open_folder(folder, found.config, chosen_device)
        Session(found, folder, on_event or _ignore, stop or Event()).run(_shown(folder, began_in))
    return read_sweep(_shown(folder, began_in))


def _shown(folder: Path, began_in: Path) -> Path:
    """The folder's path relative to the working directory, if that is still where the sweep began."""
    return folder.relative_to(began_in) if folder.is_relative_to(began_in) and Path.cwd() == began_in else folder


def _ignore(event: dict[str, Any]) -> None:
    """The default `on_event`."""
