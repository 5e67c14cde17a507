"""A codec: how a flat tensor is packed for the wire.

A codec is a frozen dataclass of hyper-parameters. Its state between exchanges (the residual of error feedback, a factor
to start from) belongs to the worker and is passed in as a `Memory`: the codec reads the state before this step and
writes the state after it, so a step that did not happen leaves no trace.

    sum      wires of all workers have the same layout and can be summed element by element, by an all-reduce
    gather   every worker needs every wire, decodes all of them and sums the results

*Ratio* means one thing everywhere: kept over original. In reports it is bytes on the wire over bytes of the tensor;
where it is an option (top-k, random-k) it counts elements, and the wires are laid out so that both agree.

Encoders and decoders are torch operations on flat tensors of any device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor


class Matrix(NamedTuple):
    """A contiguous row-major matrix inside a span: a weight, or whole rows of one."""

    name: str
    """Name of the parameter, and its row where this part begins."""
    offset: int
    """Index of its first element inside the span."""
    rows: int
    cols: int


class Span(NamedTuple):
    """Elements that are packed together: `start` to `stop` of one flat buffer of gradients."""

    buffer: int
    start: int
    stop: int
    matrices: tuple[Matrix, ...] = ()
    """Disjoint, in order; the elements between them have no shape (biases, padding)."""

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def of(self, flats: list[Tensor]) -> Tensor:
        """This span's view of the flat buffers."""
        return flats[self.buffer][self.start : self.stop]


class StepContext(NamedTuple):
    """Step and rank of an exchange. In a synchronous strategy all but `rank` is the same on all workers."""

    step: int = 0
    epoch: float = 0.0
    """Passes over the data so far."""
    seed: int = 0
    rank: int = 0
    workers: int = 1


class Memory:
    """A worker's codec state: before this step (`get`) and after it (`put`).

    `of_span` holds flat tensors as long as the gradient buffers, of which a codec sees its span; `named` holds tensors
    of any shape. `get` returns what was put only after `commit`.
    """

    def __init__(self, flats: list[Tensor], elements: int | None = None) -> None:
        """`flats`: the gradient buffers, for their sizes, dtypes and devices.

        `elements`: how many of their elements lie in spans; the rest is padding.
        """
        self._like = flats
        self._elements = sum(flat.numel() for flat in flats) if elements is None else elements
        self.of_span: dict[str, list[Tensor]] = {}
        self.named: dict[str, Tensor] = {}
        self._next_span: dict[str, list[Tensor]] = {}
        self._next_named: dict[str, Tensor] = {}
        self._written: dict[str, dict[tuple[int, int, int], Span]] = {}

    def get(self, name: str, span: Span) -> Tensor | None:
        """The state `name` of this span before this step; None at first. Must not be changed."""
        flats = self.of_span.get(name)
        return None if flats is None else span.of(flats)

    def put(self, name: str, span: Span) -> Tensor:
        """A view for the state after this step; the caller must write all of it. A second call returns the same."""
        if name not in self._next_span:
            self._next_span[name] = [torch.zeros_like(flat) for flat in self._like]
        self._written.setdefault(name, {})[span.buffer, span.start, span.stop] = span
        return span.of(self._next_span[name])

    def get_named(self, name: str) -> Tensor | None:
        return self.named.get(name)

    def put_named(self, name: str, tensor: Tensor) -> None:
        """Stores the tensor itself, not a copy."""
        self._next_named[name] = tensor

    def commit(self) -> None:
        """The step has happened."""
        for name, written in self._written.items():
            old, new = self.of_span.get(name), self._next_span[name]
            if old is not None and sum(span.numel for span in written.values()) < self._elements:
                # Only some spans were written; the others stay as they were.
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
            self._next_span.pop(name, None)  # the next step may write fewer spans, and the rest must be zero
        self._written.clear()
        self._next_named.clear()

    def clear(self) -> None:
        """Delete all state."""
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
    """Whether the loss is not zero on average: error feedback is then on by default."""
    takes_momentum: ClassVar[bool] = False
    """Whether the codec applies the optimizer's momentum itself, before packing."""
    keeps_residual: ClassVar[bool] = False
    """Whether the codec stores its residual itself, so that the caller does not have to."""
    feeds_back: ClassVar[bool] = True
    """Whether error feedback makes sense with this codec."""
    remembers: ClassVar[tuple[str, ...]] = ("residual",)
    """Names of the per-span state of the codec and its error feedback; shared out before a worker joins or leaves."""
    passes: ClassVar[float] = 6.0
    """Passes over the tensor in memory to pack and unpack, roughly; virtual time charges for them."""

    @property
    def wants_feedback(self) -> bool:
        """Whether error feedback is on by default."""
        return self.biased and not self.keeps_residual

    def check(self, optimizer: Mapping[str, object]) -> None:
        """Raise ConfigError when this codec cannot work beside an optimizer with these settings (a param group)."""

    @abstractmethod
    def encode(self, tensor: Tensor, span: Span, context: StepContext, memory: Memory) -> Tensor:
        """The wire: one contiguous 1-D tensor on the tensor's device, not sharing its memory.

        Its length and dtype depend on the span and on the context only, not on the values. `tensor` is not changed.
        """

    @abstractmethod
    def decode_add(self, wire: Tensor, out: Tensor, span: Span, context: StepContext, alpha: float = 1.0) -> None:
        """`out += alpha * decode(wire)`; `wire` may be a sum of wires where `reduction` is `sum`."""

    def wire_like(self, span: Span, context: StepContext, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        """Length and dtype of the wire for a span of this dtype, to reject a wrong one."""
        return _wire_like(self, span, dtype)

    def remainder(self, wire: Tensor, tensor: Tensor, out: Tensor, span: Span, context: StepContext) -> None:
        """`out = tensor - decode(wire)`; `out` may be `tensor`."""
        if out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        self.decode_add(wire, out, span, context, -1.0)

    def combine(self, wires: Tensor, out: Tensor, span: Span, context: StepContext) -> None:
        """`out` becomes the sum of these decoded wires, one per row: the last step of `gather`."""
        out.zero_()
        for wire in wires:
            self.decode_add(wire, out, span, context)


@lru_cache(maxsize=4096)
def _wire_like(codec: Codec, span: Span, dtype: torch.dtype) -> tuple[int, torch.dtype]:
    """Found by packing zeros, with a default context: most codecs ignore it."""
    alone = span._replace(buffer=0, start=0, stop=span.numel)
    zeros = torch.zeros(span.numel, dtype=dtype)
    wire = codec.encode(zeros, alone, StepContext(), Memory([zeros]))
    return wire.numel(), wire.dtype


class Rounds(ABC):
    """One exchange of a span by a codec that needs more than one sum."""

    @abstractmethod
    def first(self) -> Tensor:
        """The first tensor that all workers sum."""

    @abstractmethod
    def next(self, summed: Tensor) -> Tensor | None:
        """The next tensor to sum, given the last sum; None after the last one."""

    @abstractmethod
    def finish(self, out: Tensor) -> None:
        """Write the sum over the workers to `out`, and the codec's state into the memory."""

    @abstractmethod
    def subtract_own(self, residual: Tensor) -> None:
        """Subtract this worker's contribution to the sum from `residual`, a copy of the tensor or the tensor itself.

        Called after the last sum.
        """


class RoundsCodec(Codec):
    """A codec with more than one sum per exchange. A push to a server is encoded in one go, as by any codec."""

    reduction: ClassVar[Literal["sum", "gather"]] = "sum"

    @abstractmethod
    def rounds(self, tensor: Tensor, span: Span, context: StepContext, memory: Memory) -> Rounds:
        """Begin an exchange. The caller leaves `tensor` unchanged until `finish`."""
