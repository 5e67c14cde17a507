"""How trials share a device: the interface of executors, and what they see of the sweep.

An executor takes trials from a queue, trains them in its own way, reports each evaluation, does as the queue says, and
hands in each trial's outcome with an ordinary `state_dict`. It knows neither where trials come from (`search/`) nor by
which rule they are stopped (`stopping/`).

    Recipe     what all trials of a sweep share (`podium/sweeps/recipe.py`)
    Queue       gives out trials, hears reports, takes outcomes; called from one thread
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
    def run(self, recipe: Recipe, queue: Queue, on_event: OnEvent) -> None:
        """Train until the queue has no more trials. `on_event` hears what may be of interest, as plain dicts."""

    def run_groups(self, recipe: Recipe, queues: Sequence[Queue], on_event: OnEvent) -> None:
        """The same for several queues, each with trials of one structure; one after another unless it knows better."""
        for queue in queues:
            self.run(recipe, queue, on_event)


class QueueWrapper(ABC):
    """A queue in front of another: it has its own way to give out trials, and passes on all else."""

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
    """A queue that some trials were taken from and given back to: they come first."""

    def __init__(self, queue: Queue, trials: Sequence[Trial]) -> None:
        super().__init__(queue)
        self._returned = list(trials)

    def take(self) -> Trial | None:
        return self._returned.pop(0) if self._returned else self._queue.take()

    def expects_more(self) -> bool:
        return bool(self._returned) or self._queue.expects_more()
