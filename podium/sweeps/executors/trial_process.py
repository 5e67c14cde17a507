"""The process that trains trials for a pool, one message at a time.

It makes the recipe again from plain values, opens the data once, and then answers one message at a time, so that it
does not matter how messages travel (a pipe in `processes.py`, a call in `ray.py`):

    {"trial": …}    →  {"evaluation": …}  or  {"over": …}
    {"verdict": …}  →  {"evaluation": …}  or  {"over": …}

Messages are JSON; nothing is unpickled. A model does not travel: its file is left in the spool, a folder that both
sides see. A trial that raises is answered as failed, and the process takes the next.
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
    """A message. What JSON does not know is refused, but for mappings and numbers of other kinds."""
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
    """All that a process needs to know to begin. Plain values, since they travel as JSON."""

    number: int
    recipe: Mapping[str, Any]
    """As `Recipe.to_dict` gives it."""
    spool: str
    """The folder that both sides see."""
    mode: Mode = "eager"
    threads: int = 1
    deadline_s: float = 300.0
    """How long it waits for a verdict."""
    cwd: str = "."
    """Where names of files are looked up from."""
    path: tuple[str, ...] = ()
    """Where Python looks for modules."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that it gets."""
    clears_env: bool = False
    """Whether it has no others."""
    grace_s: float = 5.0
    """How long it may take to finish a step once the pool is gone."""

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


# What lies in the spool.


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
    """A few bytes of memory that a process and its pool both see: how far it is, and whether it is to stop.

    Reading and writing them costs less than a microsecond, so it is done at every step; and a process that hangs does
    not move, which a heartbeat from a thread of its own would hide.
    """

    _FORM = struct.Struct("<QQQ")
    _STOP = _FORM.size
    _BYTES = _FORM.size + 1

    def __init__(self, path: Path) -> None:
        """Open the page; it is made where it does not exist."""
        with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b") as file:
            if os.fstat(file.fileno()).st_size < self._BYTES:
                file.truncate(self._BYTES)
            self._memory = mmap.mmap(file.fileno(), self._BYTES)
        self._pid = os.getpid()

    def tick(self, steps: int = 0) -> None:
        """Say that something was done, and how many steps of the trial that makes."""
        self._FORM.pack_into(self._memory, 0, self.ticks + 1, steps, self._pid)

    @property
    def ticks(self) -> int:
        return int(self._FORM.unpack_from(self._memory)[0])

    @property
    def steps(self) -> int:
        return int(self._FORM.unpack_from(self._memory)[1])

    @property
    def pid(self) -> int:
        """The process's process; 0 until it has begun."""
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
    """`cut`: it was asked to stop, and the trial is neither finished nor handed in."""
    why: str = ""
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0
    evaluation: dict[str, Any] | None = None
    """The last one, where it was not sent before."""
    state: str = ""
    """The name of its file in the spool."""
    traceback: str = ""
    is_fit: bool = True
    """Whether the process can train another one: after some faults its GPU context cannot."""


class TrialProcess:
    """Trains one trial after the other, as messages say."""

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
        """Do what a message says until the next evaluation or the trial's end, which is the answer."""
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
        """Let the device end what it was given: a process that goes with work under way may harm others under MPS."""
        if self.recipe.torch_device.type == "cuda":
            torch.cuda.synchronize()

    def _recover(self) -> bool:
        """Give back what a failed trial held; whether the device still works."""
        self._graphs.clear()  # one that failed in mid-step may have left its array half changed
        gc.collect()
        if self.recipe.torch_device.type != "cuda":
            return True
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:  # an illegal access or a failed assertion stays with the context for good
            return False
        return True


def train(runner: ReferenceTrainer, page: ProgressPage) -> Generator[Evaluation, Verdict, TrialEnd]:
    """Train to the end: yields each evaluation and takes the verdict on it."""
    torch.manual_seed(seed_of_training(runner.trial))  # what the model draws itself comes from the trial's seed
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
    """Be a process at the other end of this connection, until it is closed."""
    leave_to_launcher()  # signals reach all processes of a job; the pool's is the one to answer
    let_go_of_fork_server()
    setup = ProcessSetup.from_json(text)
    if _MPS not in setup.env:  # a client of MPS that is killed may take the others with it: it ends by itself
        die_with_parent()
    settle_in(setup)
    watch = partial(_end_when_closed, connection.fileno(), ProgressPage(setup.page), setup.grace_s)
    threading.Thread(target=watch, name="watch", daemon=True).start()
    trial_process = TrialProcess(setup)
    with contextlib.suppress(EOFError, ConnectionError):  # the pool is gone, or wants nothing more
        while trial_process.is_fit:
            if not connection.poll(setup.deadline_s if trial_process.awaits_verdict else None):
                raise DeadlineExceeded(f"process {setup.number}: no verdict came within {setup.deadline_s:g} s")
            told = trial_process.answer(connection.recv_bytes(LONGEST_MESSAGE).decode())
            connection.send_bytes(told.encode())


def _end_when_closed(file: int, page: ProgressPage, grace_s: float) -> None:
    """Wait for the other end to be closed, which its death does too; then stop, at the latest after this time."""
    watched = select.poll()
    watched.register(file, 0)  # for no event but the one that cannot be left out: that it is closed
    watched.poll()
    page.ask_to_stop()
    time.sleep(grace_s)
    os._exit(1)


def settle_in(setup: ProcessSetup) -> None:
    """Make this process a process's own: its environment, where it is, where its output goes, its threads."""
    # Before anything starts CUDA, which looks at its environment once.
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
