"""Every combination of the choices."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass
from typing import final

from podium.errors import ConfigError
from podium.sweeps.search.base import Source
from podium.sweeps.search.space import Choices, Space
from podium.sweeps.trial import Trial


@final
@dataclass(kw_only=True, eq=False)
class Grid(Source):
    """Every combination of the choices, the last name changing fastest, or shuffled.

    Where trials do not all run at once, a rule that compares a trial with earlier ones stops none while each is better
    than the one before, as in a grid ordered from bad to good: then shuffle.
    """

    space: Space
    shuffle: bool = False
    seed: int = 0
    """Of the shuffling."""

    def __post_init__(self) -> None:
        if ranges := self.space.ranges():
            raise ConfigError(
                f"search grid: every name must have a list of values, got a range for {', '.join(ranges)}; say how "
                f"many values to take from it (`{ranges[0]}={self.space[ranges[0]]}:5`), or search at random"
            )
        axes = [d.values for d in self.space.values() if isinstance(d, Choices)]
        self._total = math.prod(map(len, axes))
        points = itertools.product(*axes)
        self._points = iter(random.Random(self.seed).sample(list(points), self._total)) if self.shuffle else points
        self._asked = 0

    @property
    def total(self) -> int:
        return self._total

    @property
    def exhausted(self) -> bool:
        return self._asked == self._total

    def ask(self) -> Trial | None:
        if self.exhausted:
            return None
        number, self._asked = self._asked, self._asked + 1
        return Trial(number=number, point=number, options=dict(zip(self.space, next(self._points), strict=True)))
