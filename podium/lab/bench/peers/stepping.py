"""The work of every contender of `podium bench codecs` over a link: training steps of one model.

A contender is prepared (`ready`), then makes a number of steps. A step's time is the slowest rank's. The bytes sent by
the rank's interface are the kernel's count, including headers and acknowledgements.
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
"""If a step takes this long, one step of warm-up is enough."""


class Steps(NamedTuple):
    """The seconds of each step, and the bytes sent per step."""

    seconds: tuple[float, ...]
    wire_bytes: float
    """Sent by one rank's interface; 0 if ranks share a host."""
    counted_bytes: float
    """Of tensors, by the contender's own count; 0 if it has none."""


class Stepping(ABC):
    """One system, which trains with a codec or hook given by name."""

    chosen: Mapping[str, Any] = {}
    """For `auto`: its choice in its last round."""

    @abstractmethod
    def measure(self, how: str, seconds: float, most: int, warmup: int = 0) -> Steps:
        """As many steps as fit into `seconds`, at least one and at most `most`, after a warm-up.

        The warm-up takes one step, or if steps are short, three and `warmup` more.
        """

    @abstractmethod
    def end(self) -> None:
        """Leave no process behind."""


class Ranks(Stepping):
    """The processes of a system."""

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
    """Make and time `count` steps; called in a rank."""
    barrier()
    wire, own, seconds = sent_bytes(interface), counted(), []
    for _ in range(count):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return Steps(tuple(seconds), (sent_bytes(interface) - wire) / count, (counted() - own) / count)


def sent_bytes(interface: str) -> int:
    """Bytes that an interface of this process's namespace has sent; 0 if `interface` is empty.

    Not from `/sys/class/net`, which shows the namespace in which it was mounted.
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
