"""Where the trials of a sweep come from: an interface that gives trials (`ask`) and receives outcomes (`tell`).

A source gives one trial per point of the search; `crossed.py` makes the folds and seeds of each point from it. A source
knows neither how trials are trained nor by which rule they are stopped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from podium.sweeps.trial import Outcome, Trial


class Source(ABC):
    """Gives out trials, numbered from 0 in the order in which `ask` returns them."""

    @property
    @abstractmethod
    def total(self) -> int | None:
        """How many trials there will be; None when that is unknown."""

    @property
    @abstractmethod
    def exhausted(self) -> bool:
        """Whether `ask` will never return another trial."""

    @abstractmethod
    def ask(self) -> Trial | None:
        """The next trial; None when there is none now. Telling an outcome may bring more, unless `exhausted`."""

    def tell(self, outcome: Outcome, score: float | None) -> None:
        """A trial of this source is over. `score` is the metric as it was measured, None where there is none."""

    def recall(self, points: Sequence[Mapping[str, Any]]) -> None:
        """Options of the points of an interrupted sweep: `ask` must return these first. Called before `ask`.

        A source whose trials do not depend on outcomes need not override this.
        """
