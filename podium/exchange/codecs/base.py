"""A codec: how a flat tensor is packed for the wire.

A codec is a frozen dataclass of hyper-parameters. What it must remember from one exchange to the next (the residual of
error feedback, a factor to start from) is the worker's, and reaches it as a `Memory`: it reads what was true before
this step and writes what will be true after it, so a step that did not happen leaves no trace.

    sum      wires of all workers have the same layout and may be added up element by element: they ride a collective
    gather   every worker needs every wire, and adds up what they say

*Ratio* means one thing everywhere: what is kept over what there was. In reports it is bytes on the wire over bytes of
the tensor; where it is an option (top-k, random-k) it is elements, and their wires are made so that both agree.

Encoders and decoders are torch operations on flat tensors, on whatever device these lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor


class Matrix(NamedTuple):
    """A run of elements that is a matrix, rows one after the other: a weight, or whole rows of one."""

    name: str
    """Of the parameter, and where in it this part begins."""
    offset: int
    """Of its first element inside the span."""
    rows: int
    cols: int


class Span(NamedTuple):
    """What is packed together: elements `start` to `stop` of one flat buffer of gradients."""

    buffer: int
    start: int
    stop: int
    matrices: tuple[Matrix, ...] = ()
    """Disjoint, in order; what lies between them has no shape (biases, padding)."""

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, flats: list[Tensor]) -> Tensor:
        """This span of flat buffers."""
        return flats[self.buffer][self.start : self.stop]


class StepContext(NamedTuple):
    """When, and by whom. All but `rank` is the same on all workers in one exchange of a synchronous strategy."""

    step: int = 0
    epoch: float = 0.0
    """How often the data have been gone through."""
    seed: int = 0
    rank: int = 0
    workers: int = 1


class Memory:
    """What a worker's codec remembers: before this step (`get`) and after it (`put`).

    `of_span` are flat tensors as long as the buffers they belong to, of which a codec sees its span; `named` are
    tensors of any shape. Nothing that was put is seen by `get` before `commit`.
    """

    def __init__(self, flats: list[Tensor], elements: int | None = None) -> None:
        """`flats`: the buffers of gradients, for their sizes, dtypes and devices.

        `elements`: how many of theirs lie in spans; the rest is padding.
        """
        self._like = flats
        self._elements = sum(flat.numel() for flat in flats) if elements is None else elements
        self.of_span: dict[str, list[Tensor]] = {}
        self.named: dict[str, Tensor] = {}
        self._next_span: dict[str, list[Tensor]] = {}
        self._next_named: dict[str, Tensor] = {}
        self._written: dict[str, dict[tuple[int, int, int], Span]] = {}

    def get(self, name: str, span: Span) -> Tensor | None:
        """What `name` was for this span before this step; None at first. Not to be changed."""
        flats = self.of_span.get(name)
        return None if flats is None else span.of(flats)

    def put(self, name: str, span: Span) -> Tensor:
        """Where to write what it will be after this step; must be written in full. The same place when asked again."""
        if name not in self._next_span:
            self._next_span[name] = [torch.zeros_like(flat) for flat in self._like]
        self._written.setdefault(name, {})[span.buffer, span.start, span.stop] = span
        return span.of(self._next_span[name])

    def get_named(self, name: str) -> Tensor | None:
        return self.named.get(name)

    def put_named(self, name: str, tensor: Tensor) -> None:
        """Keeps the tensor itself."""
        self._next_named[name] = tensor

    def commit(self) -> None:
        """The step has happened."""
        for name, written in self._written.items():
            old, new = self.of_span.get(name), self._next_span[name]
            if old is not None and sum(span.numel for span in written.values()) < self._elements:
                # Where not all of it was written, the rest stays as it was.
                for span in written.values():
                    span.of(old).copy_(span.of(new))
                continue
            self.of_span[name] = new
            if old is None:
                self._next_span.pop(name)
            else:
                self._next_span[name] = old
        self.named.update(self._next_named)
        self.forget()

    def forget(self) -> None:
        """The step has not happened."""
        for name in self._written.keys() - self.of_span.keys():
            self._next_span.pop(name, None)  # the first step to happen may write less of it, and the rest must be zero
        self._written.clear()
        self._next_named.clear()

    def clear(self) -> None:
        """Begin anew, with nothing remembered."""
        self.of_span.clear()
        self.named.clear()
        self._next_span.clear()
        self.forget()


class Codec(ABC):
    """How a flat tensor is packed for the wire. Subclasses are frozen, keyword-only dataclasses."""

    name: ClassVar[str]
    reduction: ClassVar[Literal["sum", "gather"]]
    exact: ClassVar[bool] = False
    """Whether nothing is lost."""
    biased: ClassVar[bool] = True
    """Whether what is lost is not made up for on average: error feedback is then on unless told otherwise."""
    takes_momentum: ClassVar[bool] = False
    """Whether it does the optimizer's momentum itself, before packing."""
    keeps_residual: ClassVar[bool] = False
    """Whether what was not sent stays in its own memory, so that nobody else has to keep it."""
    feeds_back: ClassVar[bool] = True
    """Whether error feedback has a meaning with it."""
    remembers: ClassVar[tuple[str, ...]] = ("residual",)
    """What it or its error feedback keeps for whole spans, by name; all of it is shared out when workers leave."""
    passes: ClassVar[float] = 6.0
    """How often packing and unpacking go through the tensor in memory, roughly: what virtual time charges for it."""

    @property
    def wants_feedback(self) -> bool:
        """Whether error feedback is on unless told otherwise."""
        return self.biased and not self.keeps_residual

    def check(self, optimizer: Mapping[str, object]) -> None:
        """Raise ConfigError when this codec cannot work beside an optimizer with these settings (a param group)."""

    @abstractmethod
    def encode(self, tensor: Tensor, span: Span, context: StepContext, memory: Memory) -> Tensor:
        """The wire: one contiguous 1-D tensor on the tensor's device, not sharing its memory.

        Its length and dtype depend on the span and on the context only, not on the values. Leaves `tensor` as it is.
        """

    @abstractmethod
    def decode_add(self, wire: Tensor, out: Tensor, span: Span, context: StepContext, alpha: float = 1.0) -> None:
        """`out += alpha *` what this wire says; `wire` may be a sum of wires where `reduction` is `sum`."""

    def wire_like(self, span: Span, context: StepContext, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Length and dtype of the wire, for a span of this dtype: to know one that cannot be right."""
        return _wire_like(self, span, dtype)

    def remainder(self, wire: Tensor, tensor: Tensor, out: Tensor, span: Span, context: StepContext) -> None:
        """`out` becomes `tensor` minus what this wire says; they may be one and the same."""
        if out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        self.decode_add(wire, out, span, context, -1.0)

    def combine(self, wires: Tensor, out: Tensor, span: Span, context: StepContext) -> None:
        """`out` becomes the sum of what these wires say, one per row: what `gather` ends with."""
        out.zero_()
        for wire in wires:
            self.decode_add(wire, out, span, context)


@lru_cache(maxsize=4096)
def _wire_like(codec: Codec, span: Span, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Found by packing nothing; the context does not matter to most."""
    alone = span._replace(buffer=0, start=0, stop=span.numel)
    zeros = torch.zeros(span.numel, dtype=dtype)
    wire = codec.encode(zeros, alone, StepContext(), Memory([zeros]))
    return wire.numel(), wire.dtype


class Rounds(ABC):
    """One span on its way through a codec that needs more than one sum."""

    @abstractmethod
    def first(self) -> Tensor:
        """What all workers add up first."""

    @abstractmethod
    def next(self, summed: Tensor) -> Tensor | None:
        """What they add up next, given the last sum; None when there is nothing more to be sent."""

    @abstractmethod
    def finish(self, out: Tensor) -> None:
        """`out` becomes the sum as the workers agree on it. Puts what it remembers into the memory."""

    @abstractmethod
    def subtract_own(self, residual: Tensor) -> None:
        """`residual`, a copy of the tensor or the tensor itself, loses what this worker put into the sum.

        Only once nothing more is to be sent.
        """


class RoundsCodec(Codec):
    """A codec with more than one sum per exchange; alone (to a server) it is encoded in one go like any other."""

    reduction: ClassVar[Literal["sum", "gather"]] = "sum"

    @abstractmethod
    def rounds(self, tensor: Tensor, span: Span, context: StepContext, memory: Memory) -> Rounds:
        """Begin an exchange. `tensor` stays unchanged until `finish`."""
