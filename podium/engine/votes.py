"""Votes: what each worker requests of all workers, and what all have agreed on.

    stop     end the run after this step
    pause    end the segment here and regroup: a worker joins or leaves
    switch   end the segment here and begin the next phase

A worker's votes travel with its next exchange. One worker's vote is enough, so all workers agree in the same step. What
they agreed on holds until it is carried out. The loss travels the same way, and its mean over the workers is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from podium.engine.progress import Round


class Vote(NamedTuple):
    stop: bool = False
    pause: bool = False
    switch: bool = False


class Votes:
    """One worker's votes, and the outcome."""

    def __init__(self) -> None:
        self.requested = Vote()
        """What this worker votes for with its next exchange."""
        self.agreed = Vote()
        """What all workers agreed on and have not carried out yet."""
        self.mean_loss: float | None = None
        """Mean loss of all workers over the last step or round that they ended together; None where it is unknown."""

    @property
    def ends_segment(self) -> bool:
        """Whether the workers agreed to end the segment before its horizon."""
        return any(self.agreed)

    def request(self, *, stop: bool | None = None, pause: bool | None = None, switch: bool | None = None) -> None:
        """Vote for these with the next exchange; None leaves a vote as it is."""
        asked = {"stop": stop, "pause": pause, "switch": switch}
        self.requested = self.requested._replace(**{name: vote for name, vote in asked.items() if vote is not None})

    def agree(self, outcome: Sequence[bool]) -> None:
        """Store what the workers agreed on, in the order of `Vote`; what was agreed before stays."""
        self.agreed = Vote(*(old or bool(new) for old, new in zip(self.agreed, outcome, strict=True)))

    def ballot(self, done: Round) -> Tensor:
        """This worker's votes and its loss over a round: to be summed over all workers, then given to `count`."""
        return torch.tensor([*self.requested, done.loss, done.samples], dtype=torch.float64)

    def count(self, ballots: Tensor) -> None:
        """Read the sum of all workers' ballots."""
        *votes, loss, samples = ballots.tolist()
        self.agree([vote > 0 for vote in votes])
        self.mean_loss = loss / samples if samples else None

    def set_mean_loss(self, loss: float | None) -> None:
        """For a mean loss that does not come through `count`: with the gradients, or from a server."""
        self.mean_loss = loss

    def regrouped(self) -> None:
        """The pause is carried out."""
        self.agreed = self.agreed._replace(pause=False)

    def switched(self) -> None:
        """The next phase begins: drop this worker's vote for it."""
        self.requested, self.agreed = self.requested._replace(switch=False), self.agreed._replace(switch=False)

    def restore(self, agreed: Sequence[bool]) -> None:
        """Take over another worker's outcome, except the pause, which this worker carries out itself."""
        stop, _, switch = agreed
        self.agreed = self.agreed._replace(stop=stop, switch=switch)
