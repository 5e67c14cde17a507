"""How trials share a device: the interface of executors, and what they see of the sweep.

An executor takes trials from a queue, trains them in its own way, reports each evaluation, follows the verdict, and
hands in each trial's outcome with an ordinary `state_dict`. It knows neither where trials come from (`search/`) nor by
which rule they are stopped (`stopping/`).

    Recipe     what all trials of a sweep share (`podium/sweeps/recipe.py`)
    Queue      gives out trials, takes reports and outcomes; called from one thread
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


class Queue(Protocol):
    """Gives trials to an executor and takes their outcomes. Called from one thread at a time."""

    def take(self) -> Trial | None:
        """The next trial of this executor's group; None when there is none now. Finishing one may bring more."""

    def expects_more(self) -> bool:
        """Whether `take` may ever return another trial; if not, free rows are no longer needed."""

    def report(self, trial: Trial, evaluation: Evaluation) -> Verdict:
        """Report an evaluation; returns the verdict, which executors ignore after the trial's last step."""

    def report_all(self, rows: Sequence[tuple[Trial, Evaluation]]) -> list[Verdict | ConfigError]:
        """Report trials that were evaluated together: each is judged by the reports of all of them.

        A trial without the sweep's metric gets an error instead of a verdict.
        """

    def begin_again(self, trial: Trial) -> None:
        """Forget the reports of this trial: it is trained again, in another way, from its beginning."""

    def hand_in(self, outcome: Outcome, state: State | None) -> None:
        """Hand in a trial that is over; `state` is None where there is no model to save."""

    def stop_requested(self) -> bool:
        """Whether the user wants the sweep to end now: hand in nothing more, and return."""


class Executor(ABC):
    """One way for trials to share a device."""

    name: str
    copies_rows = False
    """Whether `become` verdicts (population-based training) are possible."""

    def check(self, recipe: Recipe) -> None:
        """Refuse a recipe that this executor cannot train."""

    @abstractmethod
    def run(self, recipe: Recipe, queue: Queue, on_event: OnEvent) -> None:
        """Train until the queue has no more trials. `on_event` is called with events, as plain dicts."""

    def run_groups(self, recipe: Recipe, queues: Sequence[Queue], on_event: OnEvent) -> None:
        """Train several queues, each with trials of one structure; by default one queue after another."""
        for queue in queues:
            self.run(recipe, queue, on_event)


class QueueWrapper(ABC):
    """A queue in front of another: it overrides `take`, and forwards all other calls."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    @abstractmethod
    def take(self) -> Trial | None: ...

    def expects_more(self) -> bool:
        return self._queue.expects_more()

    def report(self, trial: Trial, evaluation: Evaluation) -> Verdict:
        return self._queue.report(trial, evaluation)

    def report_all(self, rows: Sequence[tuple[Trial, Evaluation]]) -> list[Verdict | ConfigError]:
        return self._queue.report_all(rows)

    def begin_again(self, trial: Trial) -> None:
        self._queue.begin_again(trial)

    def hand_in(self, outcome: Outcome, state: State | None) -> None:
        self._queue.hand_in(outcome, state)

    def stop_requested(self) -> bool:
        return self._queue.stop_requested()


@final
class Requeued(QueueWrapper):
    """A queue to which trials were given back: they come first."""

    def __init__(self, queue: Queue, trials: Sequence[Trial]) -> None:
        super().__init__(queue)
        self._returned = list(trials)

    def take(self) -> Trial | None:
        return self._returned.pop(0) if self._returned else self._queue.take()

    def expects_more(self) -> bool:
        return bool(self._returned) or self._queue.expects_more()
