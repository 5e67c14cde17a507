"""The work that every contender of `podium bench codecs` does over a link: training steps of one model.

A contender is made ready (`ready`), then asked for a number of steps. A step's time is the slowest rank's. What left
the rank's interface is read from the kernel's own count, headers and acknowledgements included.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from podium.lab.bench.peers.team import Team
from podium.task import Task

LONG_S = 2.0
"""A step that takes this long needs no more than one to warm up."""


class Steps(NamedTuple):
    """The seconds of each step, and what was sent per step."""

    seconds: tuple[float, ...]
    wire_bytes: float
    """Out of the interface, by one rank; 0 where ranks share a host."""
    counted_bytes: float
    """Of tensors, by the contender's own count; 0 where it keeps none."""


class Stepping(ABC):
    """One system, which trains by whatever name it is given."""

    chosen: Mapping[str, Any] = {}
    """For `auto`: what it chose in its last round."""

    @abstractmethod
    def measure(self, how: str, seconds: float, most: int, warmup: int = 0) -> Steps:
        """As many steps as fill this time, but `most` at most and one at least, after warming up.

        That takes a step, or three where these are short, and `warmup` more.
        """

    @abstractmethod
    def end(self) -> None:
        """Leave no process behind."""


class Ranks(Stepping):
    """The processes of a system, asked for steps."""

    def __init__(self, team: Team, size: int) -> None:
        self._team, self._members = team, range(size)

    def measure(self, how: str, seconds: float, most: int, warmup: int = 0) -> Steps:
        self._team.ask("ready", how, members=self._members)
        took = self._steps(how, 1).seconds[-1]
        if took < LONG_S:
            took = self._steps(how, 2 + warmup).seconds[-1]
        return self._steps(how, max(1, min(most, int(seconds / took))))

    def ask_first(self, what: str) -> Any:
        return self._team.ask(what, members=[0])[0]

    def end(self) -> None:
        self._team.end()

    def _steps(self, how: str, count: int) -> Steps:
        ranks: list[Steps] = self._team.ask("steps", how, count, members=self._members)
        slowest = tuple(max(times) for times in zip(*(rank.seconds for rank in ranks), strict=True))
        wire, counted = np.mean([rank[1:] for rank in ranks], axis=0)
        return Steps(slowest, float(wire), float(counted))


def run_steps(
    count: int,
    step: Callable[[], object],
    barrier: Callable[[], object],
    interface: str,
    counted: Callable[[], int] = lambda: 0,
) -> Steps:
    """In a rank: `count` steps, timed one by one."""
    barrier()
    wire, own, seconds = sent_bytes(interface), counted(), []
    for _ in range(count):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return Steps(tuple(seconds), (sent_bytes(interface) - wire) / count, (counted() - own) / count)


def sent_bytes(interface: str) -> int:
    """What has left an interface of this process's namespace; 0 for none.

    Not from `/sys/class/net`, which shows the namespace that it was mounted in.
    """
    if not interface:
        return 0
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise FileNotFoundError(f"/proc/self/net/dev has no interface {interface}")


def share_of_data(task: Task, rank: int, size: int) -> tuple[Tensor, Tensor]:
    """This rank's part of the first global batch."""
    count = task.batch_size // size
    inputs, targets = task.data().train.gather(np.arange(rank * count, (rank + 1) * count))
    return inputs, targets
