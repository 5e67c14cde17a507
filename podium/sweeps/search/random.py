"""Points drawn at random, independently."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import final

from podium.errors import ConfigError
from podium.sweeps.search.base import Source
from podium.sweeps.search.space import Space
from podium.sweeps.trial import Trial


@final
@dataclass(kw_only=True, eq=False)
class RandomDraws(Source):
    """Points drawn at random from lists and ranges.

    Each value is fixed by (seed, point, name): more points or another name do not change the other values.
    """

    space: Space
    points: int
    """How many."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.points < 1:
            raise ConfigError(f"search random: points must be at least 1, got {self.points}")
        self._asked = 0

    @property
    def total(self) -> int:
        return self.points

    @property
    def exhausted(self) -> bool:
        return self._asked == self.points

    def ask(self) -> Trial | None:
        if self.exhausted:
            return None
        number, self._asked = self._asked, self._asked + 1
        # A text seeds by its hash: the same on every machine and version of Python.
        options = {name: d.draw(random.Random(f"{self.seed}/{number}/{name}")) for name, d in self.space.items()}
        return Trial(number=number, point=number, options=options)
