"""Consistency modes of a parameter server: what makes an update, and how far workers may drift apart.

One class per mode and one line in `MODES`. `podium/servers/gate.py` has the table of modes with their papers. A mode is
used by workers: how a global step is cut into slices, what fraction of an update each push is, how large the update
is. Servers know no modes: they get `Rules`, which a mode makes.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, final

from podium.errors import ConfigError
from podium.servers.gate import Rules

ModeName = Literal["sync", "async", "ssp", "dssp", "softsync", "backup", "gba"]

_TOGETHER = Rules(bound=0, all_workers=True, wait=True)


class Sizes(NamedTuple):
    """How a global step is divided."""

    workers: int  # that train
    batch_size: int
    slices: int  # a worker leases one at a time


@dataclass(frozen=True, kw_only=True)
class Mode(ABC):
    """The fields of a mode are the options of the strategy that it uses."""

    by_leases: ClassVar[bool] = True
    """Whether workers lease samples, each at its own speed, rather than share every global step."""
    can_drop: ClassVar[bool] = False
    """Whether pushes that are too stale may be dropped (`drop_beyond`)."""
    can_mitigate: ClassVar[bool] = True
    """Whether gradients may be stale, so that `mitigation` has an effect."""
    not_replayed: ClassVar[str] = ""
    """Why a recorded run cannot be replayed."""

    @property
    def streams(self) -> bool:
        """Whether every push is an update by itself, applied chunk by chunk."""
        return False

    def check(self, who: str, workers: int) -> None:
        """Raise ConfigError where this many training workers are too few."""

    @abstractmethod
    def rules(self, sizes: Sizes) -> Rules:
        """The rules for servers."""

    def slices(self, workers: int) -> int:
        """Slices per global step, unless the strategy sets a lease's size."""
        return workers

    def pushes(self, workers: int) -> int:
        """Pushes per update."""
        return 1

    def updates(self, workers: int) -> int:
        """Updates in the time in which every worker pushes once."""
        return workers if self.streams else 1

    def share(self, sizes: Sizes) -> float:
        """An update's samples divided by those of a global step."""
        return min(1.0, self.pushes(sizes.workers) / sizes.slices)

    def weight(self, part: float, sizes: Sizes) -> float:
        """The weight in an update of a push that has this part of a global step's samples."""
        return 1.0


@final
@dataclass(frozen=True, kw_only=True)
class Sync(Mode):
    """Every global step is one update, made by all workers together."""

    by_leases: ClassVar[bool] = False
    can_mitigate: ClassVar[bool] = False

    def rules(self, sizes: Sizes) -> Rules:
        return _TOGETHER

    def share(self, sizes: Sizes) -> float:
        return 1.0

    def weight(self, part: float, sizes: Sizes) -> float:
        return part


@final
@dataclass(frozen=True, kw_only=True)
class Async(Mode):
    """Every push is an update; no worker waits."""

    can_drop: ClassVar[bool] = True

    drop_beyond: int | None

    @property
    def streams(self) -> bool:
        return self.drop_beyond is None

    def rules(self, sizes: Sizes) -> Rules:
        return Rules(freshest=self.drop_beyond, wait=self.drop_beyond is not None)


@dataclass(frozen=True, kw_only=True)
class SSP(Mode):
    """Every push is an update; a worker that is too far ahead waits. With bound 0, all workers make every update."""

    staleness: int

    @property
    def bound_high(self) -> int | None:
        return None

    @property
    def streams(self) -> bool:
        return self.staleness > 0 or bool(self.bound_high)

    def rules(self, sizes: Sizes) -> Rules:
        return Rules(bound=self.staleness, bound_high=self.bound_high) if self.streams else _TOGETHER

    def pushes(self, workers: int) -> int:
        return 1 if self.streams else workers

    def weight(self, part: float, sizes: Sizes) -> float:
        return 1.0 if self.streams else part


@final
@dataclass(frozen=True, kw_only=True)
class DSSP(SSP):
    """SSP whose bound is raised where that shortens the wait."""

    not_replayed: ClassVar[str] = "mode=dssp (its gate looks at the clock)"

    staleness_high: int

    @property
    def bound_high(self) -> int | None:
        return self.staleness_high

    def __post_init__(self) -> None:
        if self.staleness_high < self.staleness:
            raise ConfigError(
                f"parameter-server: staleness_high must be at least staleness ({self.staleness}), "
                f"got {self.staleness_high}"
            )


@final
@dataclass(frozen=True, kw_only=True)
class Softsync(Mode):
    """The pushes of a group of workers make an update."""

    can_drop: ClassVar[bool] = True

    groups: int
    drop_beyond: int | None

    def pushes(self, workers: int) -> int:
        return max(1, workers // self.groups)

    def updates(self, workers: int) -> int:
        return workers // self.pushes(workers)

    def rules(self, sizes: Sizes) -> Rules:
        return Rules(pushes=self.pushes(sizes.workers), freshest=self.drop_beyond)

    def weight(self, part: float, sizes: Sizes) -> float:
        return part * sizes.slices / self.pushes(sizes.workers)


@final
@dataclass(frozen=True, kw_only=True)
class Backup(Mode):
    """The first pushes make an update; those of the slowest `backups` workers come too late and are dropped."""

    can_mitigate: ClassVar[bool] = False

    backups: int

    def check(self, who: str, workers: int) -> None:
        if self.backups >= workers:
            raise ConfigError(f"{who}: backups must be below the number of workers, {workers}")

    def slices(self, workers: int) -> int:
        return self.pushes(workers)

    def pushes(self, workers: int) -> int:
        return workers - min(self.backups, workers - 1)  # at least one, also after losses

    def rules(self, sizes: Sizes) -> Rules:
        return Rules(pushes=self.pushes(sizes.workers), wait=True, freshest=0)

    def weight(self, part: float, sizes: Sizes) -> float:
        return part


@final
@dataclass(frozen=True, kw_only=True)
class GBA(Mode):
    """Pushes make an update once they hold a global batch of samples."""

    can_drop: ClassVar[bool] = True

    drop_beyond: int | None

    def rules(self, sizes: Sizes) -> Rules:
        return Rules(samples=sizes.batch_size, freshest=self.drop_beyond)

    def share(self, sizes: Sizes) -> float:
        return 1.0

    def weight(self, part: float, sizes: Sizes) -> float:
        return part


MODES: dict[ModeName, type[Mode]] = {
    "sync": Sync,
    "async": Async,
    "ssp": SSP,
    "dssp": DSSP,
    "softsync": Softsync,
    "backup": Backup,
    "gba": GBA,
}


def make_mode(name: ModeName, options: Any) -> Mode:
    """The mode of that name, with this strategy's options."""
    cls = MODES[name]
    return cls(**{field.name: getattr(options, field.name) for field in dataclasses.fields(cls)})
