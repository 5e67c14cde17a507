"""PowerSGD: each matrix becomes a product of two thin ones, found by one step of power iteration.

    P = sum M Q;  orthogonalise P;  Q = sum M' P;  the sum of all M is nearly P Q'

Both sums are all-reduces, and the next step starts from this step's Q. A worker contributes P (M' P)' of its own M,
and the sum over the workers is P Q'; the rest of M is its residual, so nothing is lost. Elements outside matrices, and
matrices too small to gain, are sent as they are.

All workers must compute the same P from the same sum, bit for bit: it is orthogonalised in float64, on its own memory,
one column after the other. That holds among machines of one kind; others may round differently.

Vogels et al., 2019, arXiv:1905.13727.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from podium.errors import ConfigError
from podium.exchange.codecs.base import Matrix, Memory, Rounds, RoundsCodec, Span, StepContext
from podium.exchange.codecs.blocks import BLOCK, add_into, scratch, words

_DEPENDENT = 1e-6
"""A column counts as linearly dependent if less than this share of its norm is left after orthogonalisation."""
_NATIVE = (torch.float32, torch.float64)
"""Dtypes that are computed in directly; others are computed in float32."""


@final
@dataclass(frozen=True, kw_only=True)
class PowerSGD(RoundsCodec):
    """Two thin matrices in place of each large one."""

    name: ClassVar[str] = "power-sgd"

    rank: int = 1
    """Columns of the thin matrices."""
    min_rate: float = 2.0
    """A matrix is compressed only if that makes it smaller by more than this factor."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"power-sgd: rank must be at least 1, got {self.rank}")
        if self.min_rate < 1:
            raise ConfigError(f"power-sgd: min_rate must be at least 1, got {self.min_rate}")

    def plan(self, span: Span) -> Plan:
        """Which parts of a span are compressed."""
        return _plan(span.matrices, span.numel, self.rank, self.min_rate)

    def rounds(self, tensor: Tensor, span: Span, context: StepContext, memory: Memory) -> PowerRounds:
        return PowerRounds(self.plan(span), tensor, context, memory)

    def encode(self, tensor: Tensor, span: Span, context: StepContext, memory: Memory) -> Tensor:
        """For one worker alone: P, the uncompressed elements and Q, concatenated."""
        rounds = self.rounds(tensor, span, context, memory)
        left = rounds.first()
        right = rounds.next(left)
        if right is None:
            return left
        left[: rounds.plan.left].copy_(rounds.flat_left())
        rounds.next(right)
        rounds.remember()
        return torch.cat([left, right])

    def decode_add(self, wire: Tensor, out: Tensor, span: Span, context: StepContext, alpha: float = 1.0) -> None:
        plan = self.plan(span)
        left, rest, right = wire.split([plan.left, plan.rest, plan.right])
        for start, stop, place in plan.runs:
            out[start:stop].add_(rest[place : place + stop - start], alpha=alpha)
        for one in plan.thin:
            _add_product(one.of(out), one.left_of(left), one.right_of(right), alpha)


class Thin(NamedTuple):
    """A compressed matrix, and the offsets of its P and Q, which are stored transposed."""

    matrix: Matrix
    rank: int
    left: int
    right: int

    def of(self, tensor: Tensor) -> Tensor:
        m = self.matrix
        return tensor[m.offset : m.offset + m.rows * m.cols].view(m.rows, m.cols)

    def left_of(self, flat: Tensor) -> Tensor:
        return flat[self.left : self.left + self.rank * self.matrix.rows].view(self.rank, -1)

    def right_of(self, flat: Tensor) -> Tensor:
        return flat[self.right : self.right + self.rank * self.matrix.cols].view(self.rank, -1)


class Plan(NamedTuple):
    """How a span is divided into compressed matrices and the rest."""

    thin: tuple[Thin, ...]
    runs: tuple[tuple[int, int, int], ...]
    """Uncompressed elements: start, stop, and their offset among all such elements."""
    left: int
    """Elements of all P."""
    right: int
    """Elements of all Q."""
    rest: int
    """Elements of all runs."""


@lru_cache(maxsize=1024)
def _plan(matrices: tuple[Matrix, ...], numel: int, rank: int, min_rate: float) -> Plan:
    thin: list[Thin] = []
    runs: list[tuple[int, int, int]] = []
    left = right = rest = done = 0
    for matrix in (*matrices, Matrix("", numel, 0, 0)):
        _, offset, rows, cols = matrix
        if offset < numel and (rows + cols) * rank * min_rate >= rows * cols:
            continue
        if done < offset:
            runs.append((done, offset, rest))
            rest += offset - done
        if offset < numel:
            thin.append(Thin(matrix, rank, left, right))
            left, right, done = left + rank * rows, right + rank * cols, offset + rows * cols
    return Plan(tuple(thin), tuple(runs), left, right, rest)


@final
class PowerRounds(Rounds):
    """Two sums: of all P and the uncompressed elements, then of all Q."""

    def __init__(self, plan: Plan, tensor: Tensor, context: StepContext, memory: Memory) -> None:
        self.plan = plan
        self._tensor, self._context, self._memory = tensor, context, memory
        self._dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        self._left: list[Tensor] = []
        self._rest: Tensor | None = None
        self._own: Tensor | None = None
        self._right: Tensor | None = None

    def first(self) -> Tensor:
        plan = self.plan
        wire = torch.empty(plan.left + plan.rest, dtype=self._tensor.dtype, device=self._tensor.device)
        for one in plan.thin:
            _times(one.of(self._tensor), self._start(one), one.left_of(wire))
        for start, stop, place in plan.runs:
            wire[plan.left + place : plan.left + place + stop - start].copy_(self._tensor[start:stop])
        return wire

    def next(self, summed: Tensor) -> Tensor | None:
        plan = self.plan
        if self._rest is not None:
            self._right = summed
            return None
        self._rest = summed[plan.left :]
        if not plan.thin:
            return None
        wire = torch.empty(plan.right, dtype=self._tensor.dtype, device=self._tensor.device)
        for one in plan.thin:
            left = _orthogonal(one.left_of(summed)).to(self._dtype)
            self._left.append(left)
            _times_transposed(one.of(self._tensor), left, one.right_of(wire))
        self._own = wire.clone()
        return wire

    def finish(self, out: Tensor) -> None:
        assert self._rest is not None, "finish comes after the last sum"
        for start, stop, place in self.plan.runs:
            out[start:stop].copy_(self._rest[place : place + stop - start])
        if self.plan.thin:
            assert self._right is not None, "finish comes after the last sum"
            for one, left in zip(self.plan.thin, self._left, strict=True):
                _put_product(one.of(out), left, one.right_of(self._right))
            self.remember()

    def subtract_own(self, residual: Tensor) -> None:
        for start, stop, _ in self.plan.runs:
            residual[start:stop].zero_()
        if self._own is not None:
            for one, left in zip(self.plan.thin, self._left, strict=True):
                _add_product(one.of(residual), left, one.right_of(self._own), -1.0)

    def flat_left(self) -> Tensor:
        """All P, orthogonalised."""
        return torch.cat([left.view(-1) for left in self._left])

    def remember(self) -> None:
        """Store this Q as the next step's start; a column that is zero is drawn again."""
        assert self._right is not None
        some_are_zero = bool((self._right == 0).any())
        for one in self.plan.thin:
            right = one.right_of(self._right).to(self._dtype, copy=True)
            if some_are_zero:
                dead = (right == 0).all(1)
                right[dead] = self._fresh(one)[dead]
            self._memory.put_named(_name(one), right)

    def _start(self, one: Thin) -> Tensor:
        kept = self._memory.get_named(_name(one))
        return kept if kept is not None and kept.shape == (one.rank, one.matrix.cols) else self._fresh(one)

    def _fresh(self, one: Thin) -> Tensor:
        """A random Q that all workers agree on."""
        digest = hashlib.blake2b(one.matrix.name.encode(), digest_size=8).digest()
        drawn = words(one.rank * one.matrix.cols, self._context.seed, int.from_bytes(digest, "little"))
        uniform = (drawn >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
        return torch.from_numpy(uniform).view(one.rank, -1).to(self._tensor.device, self._dtype)


def _name(one: Thin) -> str:
    return f"q:{one.matrix.name}"


def _orthogonal(columns: Tensor) -> Tensor:
    """Orthonormalise the rows; a row that depends on the rows before it becomes zero."""
    basis = columns.to(torch.float64, copy=True)
    for i, row in enumerate(basis):
        size = rest = torch.linalg.vector_norm(row)
        if i:
            before = basis[:i]
            for _ in range(2):  # one pass leaves rounding errors as large as the part it subtracts
                row.sub_(before.t().mv(before.mv(row)))
            rest = torch.linalg.vector_norm(row)
        # Not `rest > …`: NaN must stay NaN.
        row.mul_(torch.where(rest <= _DEPENDENT * size, 0.0, rest.reciprocal()))
    return basis


def _at_once(matrix: Tensor, rank: int) -> bool:
    """Whether a thin product needs no blocks: it reads the matrix once, or the matrix fits the cache."""
    return matrix.dtype in _NATIVE and (rank == 1 or matrix.device.type != "cpu" or matrix.numel() <= 2 * BLOCK)


def _row_blocks(matrix: Tensor) -> Iterator[slice]:
    """Blocks of rows that fit the cache: thin products are then up to twice as fast on a CPU."""
    rows, cols = matrix.shape
    step = max(1, 2 * BLOCK // cols) if matrix.device.type == "cpu" else rows
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _wide(block: Tensor, dtype: torch.dtype) -> Tensor:
    """A block of rows, converted to `dtype`."""
    if block.dtype == dtype:
        return block
    return scratch(block.numel(), dtype, block.device).view_as(block).copy_(block)


def _times(matrix: Tensor, right: Tensor, out: Tensor) -> None:
    """`out = (M Q)'`, with Q and the result one column per row."""
    if _at_once(matrix, len(right)):
        torch.mm(right, matrix.t(), out=out)
        return
    for rows in _row_blocks(matrix):
        out[:, rows] = right @ _wide(matrix[rows], right.dtype).t()


def _times_transposed(matrix: Tensor, left: Tensor, out: Tensor) -> None:
    """`out = (M' P)'`, with P and the result one column per row."""
    if _at_once(matrix, len(left)):
        torch.mm(left, matrix, out=out)
        return
    result = torch.zeros_like(out, dtype=left.dtype)
    for rows in _row_blocks(matrix):
        result.addmm_(left[:, rows], _wide(matrix[rows], left.dtype))
    out.copy_(result)


def _put_product(matrix: Tensor, left: Tensor, right: Tensor) -> None:
    """`M = P Q'`."""
    if not (matrix.dtype == left.dtype == right.dtype):
        matrix.zero_()
        _add_product(matrix, left, right, 1.0)
    elif len(left) == 1:
        torch.mul(left[0][:, None], right[0], out=matrix)
    else:
        for rows in _row_blocks(matrix):
            torch.mm(left[:, rows].t(), right, out=matrix[rows])


def _add_product(matrix: Tensor, left: Tensor, right: Tensor, alpha: float) -> None:
    """`M += alpha P Q'`."""
    native = matrix.dtype in _NATIVE and matrix.dtype == left.dtype == right.dtype
    if native and len(left) == 1:
        matrix.addcmul_(left[0][:, None], right[0], value=alpha)
        return
    left, right = (left, right) if native else (left.float(), right.float())
    for rows in _row_blocks(matrix):
        block = matrix[rows]
        if native:
            block.addmm_(left[:, rows].t(), right, alpha=alpha)
        else:
            add_into(block.view(-1), (left[:, rows].t() @ right).view(-1), alpha, block.view(-1))
