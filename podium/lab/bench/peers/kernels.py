"""The cost of packing and unpacking a tensor on one core, without any exchange."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from podium.engine.allocator import keep_freed_memory
from podium.exchange.codecs.base import Matrix, Memory, Span, StepContext
from podium.exchange.packing import Packing, make_packing
from podium.lab.bench.peers.team import Team, answer

_EPOCHS_DONE = 100.0  # by then every codec's warm-up is over


class Cost(NamedTuple):
    """Seconds for the whole tensor, and the bytes of its wire."""

    encode: float
    decode: float
    step: float
    """Packing in a training step: with error feedback, if the codec has it."""
    wire_bytes: int


class Kernels:
    """A process with one thread and one square matrix."""

    def __init__(self, side: int) -> None:
        self._team = Team("the kernels", [partial(_alone, side)])

    def measure(self, codec: str) -> Cost:
        (cost,) = self._team.ask("cost", codec, members=[0])
        return Cost(*cost)

    def end(self) -> None:
        self._team.end()


def _alone(side: int, pipe: Connection) -> None:
    keep_freed_memory()
    tensor = torch.randn(side * side, generator=torch.Generator().manual_seed(0))
    out = torch.zeros_like(tensor)
    span = Span(0, 0, side * side, (Matrix("weight@0", 0, side, side),))

    def cost(spec: str) -> Cost:
        out.zero_()
        packing = make_packing(spec)
        codec, turn = packing.codec, StepContext(epoch=_EPOCHS_DONE)
        bare, wire = _third(Packing(codec, feedback=False), tensor, span, turn)
        whole, _ = _third(packing, tensor, span, turn)
        decode = _timed(lambda: codec.decode_add(wire, out, span, turn))
        return Cost(bare, decode, whole, wire.nbytes)

    answer(pipe, {"cost": cost})


def _third(packing: Packing, tensor: torch.Tensor, span: Span, turn: StepContext) -> tuple[float, torch.Tensor]:
    """Seconds of the third call, when the codec's memory is filled; and the wire."""
    memory = Memory([tensor])
    seconds, wires = 0.0, list[torch.Tensor]()
    for _ in range(3):
        wires.clear()
        began = time.perf_counter()
        wires.append(packing.pack(tensor, span, turn, memory))
        seconds = time.perf_counter() - began
        memory.commit()
    return seconds, wires[0]


def _timed(work: Callable[[], object]) -> float:
    """Seconds of the second call."""
    work()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
