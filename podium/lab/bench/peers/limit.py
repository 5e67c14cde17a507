"""The limit of the machine: a round trip's arithmetic and one copy, in one process, without any exchange."""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection
from typing import final

import torch

from podium.lab.bench.peers.team import TeamContender, answer
from podium.lab.bench.peers.work import LR, Pulled, Tally, pattern, run_for, units

CUT_ELEMENTS = 1 << 19
"""The update processes the parameters in chunks of this size, which stay in the cache."""


@final
class Limit(TeamContender):
    """Per round trip: the SGD update of all parameters in place, and one copy of them, all in warm buffers."""

    variants = ("limit",)

    def __init__(self, size: int) -> None:
        super().__init__("the limit", [partial(_alone, size)], 1)

    def tally(self, variant: str) -> Tally:
        ((pushed, server, copied),) = self.team.ask("tally", members=[0])
        return Tally(pushed, server, (Pulled(pushed, *copied),))


def _alone(size: int, pipe: Connection) -> None:
    params, grad, copy = pattern(size), torch.ones(size), torch.zeros(size)
    pairs = list(zip(params.split(CUT_ELEMENTS), grad.split(CUT_ELEMENTS), strict=True))
    pushed = 0

    def round_trip() -> None:
        nonlocal pushed
        for part, of_grad in pairs:
            part.add_(of_grad, alpha=-LR)
        copy.copy_(params)
        pushed += 1

    answer(
        pipe,
        {
            "round": lambda variant, seconds: run_for(seconds, round_trip),
            "tally": lambda: (float(pushed), units(params), units(copy)),
        },
    )
