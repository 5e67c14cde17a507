"""How trials share a device: the interface of executors, and what they see of the sweep.

An executor takes trials from a desk, trains them in its own way, reports each evaluation and does as the desk says, and
hands in each trial's outcome with an ordinary `state_dict`. It knows neither where trials come from (`search/`) nor by
which rule they are stopped (`stopping/`).

    Recipe     what all trials of a sweep share (`recipe.py`)
    Desk       gives out trials, hears reports, takes outcomes; called from one thread
    Executor   trains
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

from torch import Tensor

from podium.errors import ConfigError
from podium.sweeps.recipe import Recipe
from podium.sweeps.trial import Evaluation, Outcome, Trial, Verdict

State = Mapping[str, Tensor]
"""A trial's `state_dict`, on the CPU."""

OnEvent = Callable[[dict[str, Any]], None]


class Desk(Protocol):
    """Where an executor gets its trials, and hands them in. Called from one thread at a time."""

    def take(self) -> Trial | None:
        """The next trial of this executor's group; None when there is none now. Finishing one may bring more."""

    def expects_more(self) -> bool:
        """Whether `take` may ever give another trial: where not, nobody needs a free place any more."""

    def report(self, trial: Trial, evaluation: Evaluation) -> Verdict:
        """Tell how a trial does; at its last step the verdict means nothing."""

    def report_all(self, rows: Sequence[tuple[Trial, Evaluation]]) -> list[Verdict | ConfigError]:
        """Tell how several trials do that came to this point together: each is judged by what all of them reported.

        One that lacks what the sweep looks at gets the error instead of a verdict.
        """

    def begin_again(self, trial: Trial) -> None:
        """What was reported of this trial does not count: it is trained again, in another way, from its beginning."""

    def hand_in(self, outcome: Outcome, state: State | None) -> None:
        """A trial is over; `state` is None where it has none to keep."""

    def stop_requested(self) -> bool:
        """Whether the user wants the sweep to end now: hand in nothing more, and return."""


class Executor(ABC):
    """One way for trials to share a device."""

    name: str
    copies_rows = False
    """Whether `become` verdicts (population-based training) are possible."""

    @abstractmethod
    def run(self, recipe: Recipe, desk: Desk, on_event: OnEvent) -> None:
        """Train until the desk has no more trials. `on_event` hears what may be of interest, as plain dicts."""

    def run_groups(self, recipe: Recipe, desks: Sequence[Desk], on_event: OnEvent) -> None:
        """The same for several desks, each with trials of one structure; one after another unless it knows better."""
        for desk in desks:
            self.run(recipe, desk, on_event)


class InFront(ABC):
    """A desk in front of another: it has its own way to give out trials, and passes on all else."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    @abstractmethod
    def take(self) -> Trial | None: ...

    def expects_more(self) -> bool:
        return self._desk.expects_more()

    def report(self, trial: Trial, evaluation: Evaluation) -> Verdict:
        return self._desk.report(trial, evaluation)

    def report_all(self, rows: Sequence[tuple[Trial, Evaluation]]) -> list[Verdict | ConfigError]:
        return self._desk.report_all(rows)

    def begin_again(self, trial: Trial) -> None:
        self._desk.begin_again(trial)

    def hand_in(self, outcome: Outcome, state: State | None) -> None:
        self._desk.hand_in(outcome, state)

    def stop_requested(self) -> bool:
        return self._desk.stop_requested()


@final
class WithReturned(InFront):
    """A desk that some trials were taken from and given back to: they come first."""

    def __init__(self, desk: Desk, trials: Sequence[Trial]) -> None:
        super().__init__(desk)
        self._returned = list(trials)

    def take(self) -> Trial | None:
        return self._returned.pop(0) if self._returned else self._desk.take()

    def expects_more(self) -> bool:
        return bool(self._returned) or self._desk.expects_more()
