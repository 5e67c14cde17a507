"""Faults as data: what happens to which rank, and when; and small tasks in which the faults happen.

A plan reaches the ranks as text, as an option of the task. Each rank carries out its own faults from inside the task's
code, so that a fault strikes at an exact step. Ranks load this file by its path: it imports no test.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from podium.data.base import ArrayDataset, Data
from podium.errors import MissingExtra
from podium.task import Task

TASK = f"{Path(__file__).resolve()}:small"
NOISY = f"{Path(__file__).resolve()}:noisy"
SAMPLES, BATCH, EPOCHS = 240, 24, 4
STEPS = EPOCHS * SAMPLES // BATCH


class Fault(NamedTuple):
    """`what` happens to `rank` at its `step`-th visit to `where`."""

    what: str  # kill, stop, exit, raise, refuse, hold and grip (the GIL, the latter for a while), hang, dawdle, gate
    rank: int
    where: str  # model, data, loss (of a training step), validation, checkpoint
    step: int


@dataclass(frozen=True)
class Faults:
    """A plan: `Faults().kill(2, step=7).stop(0, step=12)`."""

    plan: tuple[Fault, ...] = ()

    def kill(self, rank: int, *, step: int = 1, where: str = "loss") -> Faults:
        return self.and_then("kill", rank, step, where)

    def stop(self, rank: int, *, step: int = 1, where: str = "loss") -> Faults:
        return self.and_then("stop", rank, step, where)

    def gate(self, rank: int, *, step: int = 1, where: str = "loss") -> Faults:
        """The rank reports that it has reached the gate, and waits until a test opens it."""
        return self.and_then("gate", rank, step, where)

    def and_then(self, what: str, rank: int, step: int = 1, where: str = "loss") -> Faults:
        return Faults((*self.plan, Fault(what, rank, where, step)))

    def __str__(self) -> str:
        return "; ".join(" ".join(map(str, fault)) for fault in self.plan)

    @classmethod
    def read(cls, text: str) -> Faults:
        words = [part.split() for part in text.split(";") if part.strip()]
        return cls(tuple(Fault(what, int(rank), where, int(step)) for what, rank, where, step in words))


class Gate:
    """A point in a run where one rank waits, so that a test can act at a known point."""

    def __init__(self, folder: Path) -> None:
        self.reached, self.go = folder / "reached", folder / "go"

    def pass_through(self) -> None:
        self.reached.touch()
        while not self.go.exists():
            time.sleep(0.01)

    def wait_until_reached(self, limit_s: float = 60.0) -> None:
        until = time.monotonic() + limit_s
        while not self.reached.exists():
            assert time.monotonic() < until, "the run never came to the gate"
            time.sleep(0.01)

    def open(self) -> None:
        self.go.touch()


def own_rank() -> int | None:
    """The rank whose process this is; None in a launcher."""
    name = multiprocessing.current_process().name
    if name.startswith("podium-"):
        return int(name.removeprefix("podium-"))
    return int(os.environ["RANK"]) if "RANK" in os.environ else None


class Strike:
    """Carries out this rank's faults."""

    def __init__(self, text: str, gate: str) -> None:
        self.mine = [f for f in Faults.read(text).plan if f.rank == own_rank()]
        self.gate = Gate(Path(gate))
        self.visits: dict[str, int] = {}

    def at(self, where: str) -> None:
        self.visits[where] = self.visits.get(where, 0) + 1
        for fault in self.mine:
            if (fault.where, fault.step) == (where, self.visits[where]):
                getattr(self, f"_{fault.what}")()

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def _exit(self) -> None:
        os._exit(3)

    def _raise(self) -> None:
        raise ValueError("the user's own mistake")

    def _refuse(self) -> None:
        raise MissingExtra("nothing", "more", "this task")

    def _hold(self) -> None:
        ctypes.PyDLL(None).sleep(120)  # PyDLL keeps the GIL, so that no other thread of the rank runs

    def _grip(self) -> None:
        ctypes.PyDLL(None).sleep(3)

    def _hang(self) -> None:
        time.sleep(120)

    def _nap(self) -> None:
        time.sleep(0.5)

    def _dawdle(self) -> None:
        time.sleep(4)

    def _gate(self) -> None:
        self.gate.pass_through()


def small(faults: str = "", gate: str = "", lr: float = 0.05, hidden: int = 16) -> Task:
    """A regression on a few hundred samples; the number of workers changes its result by rounding only."""
    layers = partial(_layers, hidden)
    return _task("small", layers, Strike(faults, gate), lr)


def noisy(faults: str = "", gate: str = "", lr: float = 0.05) -> Task:
    """The same with dropout and BatchNorm: it shows whether generator and buffers were restored."""
    return _task("noisy", _noisy_layers, Strike(faults, gate), lr)


def _layers(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 2))


def _noisy_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))


def _task(name: str, layers: Callable[[], nn.Module], strike: Strike, lr: float) -> Task:
    if any(fault.where == "checkpoint" for fault in strike.mine):
        _strike_when_saving(strike)

    def model() -> nn.Module:
        strike.at("model")
        return layers()

    def data() -> Data:
        strike.at("data")
        return _data()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        strike.at("loss" if outputs.requires_grad else "validation")
        return nn.functional.mse_loss(outputs, targets)

    return Task(
        name=name,
        model=model,
        data=data,
        loss=loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9),
        metrics={"error": lambda a, b: float((a - b).abs().mean())},
        batch_size=BATCH,
        epochs=EPOCHS,
    )


def _strike_when_saving(strike: Strike) -> None:
    from podium.engine import checkpoint

    save = checkpoint.save_shared

    def save_shared(*args: Any) -> Path:
        strike.at("checkpoint")
        return save(*args)

    checkpoint.save_shared = save_shared  # type: ignore[assignment]  # the same function, after the fault


def _data() -> Data:
    draw = np.random.default_rng(5)
    inputs = draw.normal(size=(SAMPLES + 60, 6)).astype(np.float32)
    mix = draw.normal(size=(6, 2)).astype(np.float32)
    targets = np.tanh(inputs @ mix) + 0.1 * draw.normal(size=(SAMPLES + 60, 2)).astype(np.float32)
    train, test = (ArrayDataset(inputs[rows], targets[rows]) for rows in (slice(SAMPLES), slice(SAMPLES, None)))
    return Data(train, test)
