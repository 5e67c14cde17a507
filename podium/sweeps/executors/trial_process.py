"""The process that trains trials for a pool, one message at a time.

It rebuilds the recipe from plain values, opens the data once, and then answers one message at a time, over any
transport (a pipe in `processes.py`, a call in `ray.py`):

    {"trial": …}    →  {"evaluation": …}  or  {"over": …}
    {"verdict": …}  →  {"evaluation": …}  or  {"over": …}

Messages are JSON; nothing is unpickled. Models are not in messages: the process writes a file into the spool, a folder
that it shares with the pool. A trial that raises is answered as failed, and the process takes the next.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import select
import struct
import sys
import threading
import time
import traceback
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from podium.engine.allocator import keep_freed_memory
from podium.engine.files import save_tree
from podium.errors import ConfigError, DeadlineExceeded
from podium.launch.forking import let_go_of_fork_server
from podium.launch.signals import die_with_parent, leave_to_launcher
from podium.sweeps.executors.sequential import make_trainer
from podium.sweeps.precision import precision_of
from podium.sweeps.recipe import Recipe
from podium.sweeps.reference import ReferenceTrainer, seed_of_training, training
from podium.sweeps.search.sweep_folds import Folds
from podium.sweeps.seeds import seed_others
from podium.sweeps.trial import Evaluation, Status, Trial, Verdict

Mode = Literal["eager", "graph", "compiled"]
"""How a process trains its trials: as `sequential` does with this mode."""

LONGEST_MESSAGE = 1 << 20
_MPS = "CUDA_MPS_PIPE_DIRECTORY"
_LONGEST_WHY = 2000
_LONGEST_TRACEBACK = 16000


def to_json(value: Any) -> str:
    """A message. Mappings and numpy numbers are converted; any other type that JSON does not know raises."""
    try:
        return json.dumps(value, default=_plain)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sweep: options must be plain values for trials in other processes: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"got a {type(value).__name__}")


@dataclass(frozen=True, kw_only=True)
class ProcessSetup:
    """All that a process needs to start. Plain values, since they are sent as JSON."""

    number: int
    recipe: Mapping[str, Any]
    """As `Recipe.to_dict` gives it."""
    spool: str
    """The folder that pool and process share."""
    mode: Mode = "eager"
    threads: int = 1
    deadline_s: float = 300.0
    """How long the process waits for a verdict."""
    cwd: str = "."
    """The working directory."""
    path: tuple[str, ...] = ()
    """Where Python looks for modules."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables to set."""
    clears_env: bool = False
    """Whether all other environment variables are removed."""
    grace_s: float = 5.0
    """How long the process may take to finish a step once the pool is gone."""

    def to_json(self) -> str:
        return to_json(vars(self))

    @classmethod
    def from_json(cls, text: str) -> ProcessSetup:
        return cls(**json.loads(text))

    @property
    def page(self) -> Path:
        return page_path(Path(self.spool), self.number)

    @property
    def log(self) -> Path:
        return log_path(Path(self.spool), self.number)

    def make_recipe(self) -> Recipe:
        return Recipe(**self.recipe, folds=load_folds(Path(self.spool)))


# Files in the spool.


def page_path(spool: Path, number: int) -> Path:
    return spool / f"process-{number}.page"


def log_path(spool: Path, number: int) -> Path:
    return spool / f"process-{number}.log"


def state_path(spool: Path, trial: int) -> Path:
    return spool / f"trial-{trial}.safetensors"


def save_folds(spool: Path, folds: Folds | None) -> None:
    if folds is not None:
        named = {f"{part}{i}": pair[j] for i, pair in enumerate(folds) for j, part in enumerate(("train", "valid"))}
        np.savez(spool / "folds.npz", **named)  # type: ignore[arg-type]  # its own option allow_pickle is not among them


def load_folds(spool: Path) -> Folds | None:
    path = spool / "folds.npz"
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as file:
        return [(file[f"train{i}"], file[f"valid{i}"]) for i in range(len(file.files) // 2)]


class ProgressPage:
    """A few bytes of memory shared by a process and its pool: the process's progress, and the pool's request to stop.

    Reading and writing them costs less than a microsecond, so it is done at every step. A process that hangs stops
    ticking, which a heartbeat from a separate thread would hide.
    """

    _FORM = struct.Struct("<QQQ")
    _STOP = _FORM.size
    _BYTES = _FORM.size + 1

    def __init__(self, path: Path) -> None:
        """Open the page; creates it if it does not exist."""
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
            if os.fstat(file.fileno()).st_size < self._BYTES:
                file.truncate(self._BYTES)
            self._memory = mmap.mmap(file.fileno(), self._BYTES)
        self._pid = os.getpid()

    def tick(self, steps: int = 0) -> None:
        """Report progress: one tick, and the steps done of the trial."""
        self._FORM.pack_into(self._memory, 0, self.ticks + 1, steps, self._pid)

    @property
    def ticks(self) -> int:
        return int(self._FORM.unpack_from(self._memory)[0])

    @property
    def steps(self) -> int:
        return int(self._FORM.unpack_from(self._memory)[1])

    @property
    def pid(self) -> int:
        """The process id; 0 until the process has started."""
        return int(self._FORM.unpack_from(self._memory)[2])

    def ask_to_stop(self) -> None:
        self._memory[self._STOP] = 1

    @property
    def stop_asked(self) -> bool:
        return self._memory[self._STOP] != 0


@dataclass
class TrialEnd:
    """How a trial ended in a process; the pool makes an outcome of it."""

    status: Status | Literal["cut"]
    """`cut`: the process was asked to stop; the trial is neither finished nor handed in."""
    why: str = ""
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    evaluation: dict[str, Any] | None = None
    """The last one, if it was not sent before."""
    state: str = ""
    """The name of its file in the spool."""
    traceback: str = ""
    is_fit: bool = True
    """Whether the process can train another trial: some faults leave its GPU context unusable."""


class TrialProcess:
    """Trains one trial after another, driven by messages."""

    def __init__(self, setup: ProcessSetup) -> None:
        self.recipe = setup.make_recipe()
        self.is_fit = True
        self._spool, self._mode, self._page = Path(setup.spool), setup.mode, ProgressPage(setup.page)
        self._training: Generator[Evaluation, Verdict, TrialEnd] | None = None
        self._graphs: dict[Any, Any] = {}
        self._page.tick()

    @property
    def awaits_verdict(self) -> bool:
        return self._training is not None

    def answer(self, text: str) -> str:
        """Train until the next evaluation or the trial's end, and return that as a message."""
        message = json.loads(text)
        with precision_of(self.recipe):
            if "trial" in message:
                assert self._training is None, "a trial is given out before the last one is over"
                self._training = self._train(Trial(**message["trial"]))
                told = self._go_on(None)
            else:
                told = self._go_on(Verdict(**message["verdict"]))
        return to_json(told)

    def _go_on(self, verdict: Verdict | None) -> dict[str, Any]:
        assert self._training is not None, "a verdict is given on nothing"
        try:
            evaluation = next(self._training) if verdict is None else self._training.send(verdict)
            return {"evaluation": evaluation._asdict()}
        except StopIteration as end:
            over: TrialEnd = end.value
        except Exception as error:
            over = _failed(error)
            over.steps = self._page.steps
        self._training = None
        if over.status == "failed":
            self.is_fit = over.is_fit = self._recover()
        return {"over": vars(over)}

    def _train(self, trial: Trial) -> Generator[Evaluation, Verdict, TrialEnd]:
        self._page.tick()
        runner = self._make_runner(trial)
        self._page.tick()
        over = yield from train(runner, self._page)
        if over.status == "cut":
            self._come_to_rest()
        else:
            path = state_path(self._spool, trial.number)
            save_tree(path, runner.state(), durable=False)
            over.state = path.name
        return over

    def _make_runner(self, trial: Trial) -> ReferenceTrainer:
        parts = self.recipe.make(trial)
        data = self.recipe.device_data_of(parts.task)
        runner: ReferenceTrainer = make_trainer(self._mode, self.recipe, parts, data, self._graphs)
        return runner

    def _come_to_rest(self) -> None:
        """Wait for the GPU: under MPS, a process that exits with work under way may harm other clients."""
        if self.recipe.torch_device.type == "cuda":
            torch.cuda.synchronize()

    def _recover(self) -> bool:
        """Free the memory of a failed trial; whether the device still works."""
        self._graphs.clear()  # a trial that failed in mid-step may have left its array half changed
        gc.collect()
        if self.recipe.torch_device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:  # after an illegal access or a failed assertion the context is unusable
            return False
        return True


def train(runner: ReferenceTrainer, page: ProgressPage) -> Generator[Evaluation, Verdict, TrialEnd]:
    """Train to the end: yields each evaluation and takes the verdict on it."""
    torch.manual_seed(seed_of_training(runner.trial))  # for models that draw random numbers themselves
    seed_others(seed_of_training(runner.trial))
    began = time.perf_counter()
    ending = yield from training(runner, lambda: page.stop_asked, page.tick)
    return TrialEnd(
        ending.status,
        ending.why,
        steps=runner.steps_done,
        samples=runner.steps_done * runner.parts.batch_size,
        seconds=time.perf_counter() - began,
        evaluation=None if ending.evaluation is None else ending.evaluation._asdict(),
    )


def work(connection: Connection, text: str) -> None:
    """The main function of a process: answers messages until the connection is closed."""
    leave_to_launcher()  # signals reach all processes of a job; the pool's process handles them
    let_go_of_fork_server()
    setup = ProcessSetup.from_json(text)
    if _MPS not in setup.env:  # killing a client of MPS may harm the other clients: it ends by itself
        die_with_parent()
    settle_in(setup)
    watch = partial(_end_when_closed, connection.fileno(), ProgressPage(setup.page), setup.grace_s)
    threading.Thread(target=watch, name="watch", daemon=True).start()
    trial_process = TrialProcess(setup)
    with contextlib.suppress(EOFError, ConnectionError):  # the pool is gone, or has no more trials
        while trial_process.is_fit:
            if not connection.poll(setup.deadline_s if trial_process.awaits_verdict else None):
                raise DeadlineExceeded(f"process {setup.number}: no verdict came within {setup.deadline_s:g} s")
            told = trial_process.answer(connection.recv_bytes(LONGEST_MESSAGE).decode())
            connection.send_bytes(told.encode())


def _end_when_closed(file: int, page: ProgressPage, grace_s: float) -> None:
    """Wait until the pool closes its end or dies; then stop after the step, or exit after `grace_s`."""
    watched = select.poll()
    watched.register(file, 0)  # no events: `poll` still reports a hang-up
    watched.poll()
    page.ask_to_stop()
    time.sleep(grace_s)
    os._exit(1)


def settle_in(setup: ProcessSetup) -> None:
    """Set this process's environment, working directory, output, import path and threads."""
    # Before anything starts CUDA, which reads its environment once.
    for name in set(os.environ) - set(setup.env) if setup.clears_env else ():
        del os.environ[name]
    os.environ.update(setup.env)
    file = os.open(setup.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    os.chdir(setup.cwd)
    sys.path += [place for place in setup.path if place not in sys.path]
    torch.set_num_threads(setup.threads)
    keep_freed_memory()


def _failed(error: Exception) -> TrialEnd:
    why = f"{type(error).__name__}: {error}"[:_LONGEST_WHY]
    return TrialEnd("failed", why, traceback="".join(traceback.format_exception(error))[-_LONGEST_TRACEBACK:])
