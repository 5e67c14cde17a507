"""Flat buffers: a model's trainable parameters as views into one contiguous buffer per dtype, cut into buckets.

Parameters lie in reverse order of registration, roughly the order in which backward finishes their gradients, so that
the first bucket is ready first. Buckets begin at cache lines, so there may be a little padding between two, which
always holds zeros. Gradients lie in a second buffer of the same layout. The last bucket carries a short tail behind
its gradients, which costs no exchange of its own: see `TAIL`.

Build this last: a parameter that gets another storage afterwards (`p.data = …`) is brought back by `follow`; one that
gets another dtype, device, shape or layout is refused, and so is another object in its place
(`load_state_dict(assign=True)`). Empty parameters are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Optimizer

from podium.errors import ConfigError, TrainingError

TAIL = 5
"""Extra numbers behind the last bucket: how many workers vote to stop, the sum of their weighted losses, how many used
other parameters in this step than when they last agreed on the used ones, how many vote to pause, and how many vote to
switch to the next phase."""

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is smaller, so that the first exchange starts early."""
ALIGNMENT = 16
"""A bucket starts at a multiple of this many elements (a cache line of floats): gloo's all-reduce of 26 MB took 16 ms
aligned and 19 ms at an odd place."""


Allocate = Callable[[int, torch.dtype, torch.device], Tensor]
"""Makes a buffer of zeros."""


class Piece(NamedTuple):
    """One parameter's place: elements `start` to `stop` of a flat buffer."""

    name: str
    buffer: int
    start: int
    stop: int
    group: int  # the optimizer's parameter group
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    row: int = 0  # elements per row, where only touched rows travel; 0: all of it does

    def view(self, flat: Tensor) -> Tensor:
        """This piece of a buffer, in the parameter's own shape and layout."""
        return flat[self.start : self.stop].as_strided(self.shape, self.stride)


class Bucket(NamedTuple):
    """Gradients that travel together: elements `start` to `stop` of a flat buffer, and the `pieces` in them."""

    buffer: int
    start: int
    stop: int
    pieces: tuple[int, ...]
    nbytes: int


class Flat:
    """Parameters and gradients of one replica, flat."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        bucket_bytes: int,
        first_bucket_bytes: int = FIRST_BUCKET_BYTES,
        allocate: Allocate | None = None,
        rows: bool = False,
    ) -> None:
        """`allocate` gives the buffers their memory; `Communicator.allocate` is one such.

        `rows`: embeddings whose optimizer leaves rows without a gradient alone are marked to travel by rows.
        """
        self._model, self._allocate = model, allocate or _zeros
        self._by_rows = rows_of(model, optimizer) if rows else set()
        named = {id(p): name for name, p in model.named_parameters()}
        groups = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
        wanted = [p for p in model.parameters() if p.requires_grad]
        for p in wanted:
            _require_flattenable(p, named[id(p)], groups)
        trainable = [p for p in wanted if p.numel()]
        if not trainable:
            raise ConfigError("the model has no parameter to train (all are frozen or empty, or there are none)")
        _require_known(optimizer, named)
        _require_apart(model, {id(p) for p in trainable})
        self.parameters: list[nn.Parameter] = trainable[::-1]
        """Trainable parameters in piece order; a tied one is listed once."""
        self.pieces: list[Piece] = []
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self.buckets: list[Bucket] = []
        self._lay_out(self._cut(bucket_bytes, min(first_bucket_bytes, bucket_bytes)), named, groups)
        self.bucket_of = [0] * len(self.pieces)
        """The bucket of each piece."""
        for b, bucket in enumerate(self.buckets):
            for i in bucket.pieces:
                self.bucket_of[i] = b
        last = self.buckets[-1]
        self.tail = self.grads[last.buffer][last.stop : last.stop + TAIL]
        self.views = [piece.view(self.grads[piece.buffer]) for piece in self.pieces]
        self._places = [p.data_ptr() for p in self.parameters]

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, without padding."""
        return sum(bucket.nbytes for bucket in self.buckets)

    def bucket(self, index: int) -> Tensor:
        """A bucket's gradients; the last one with the tail behind them."""
        b = self.buckets[index]
        extra = TAIL if index == len(self.buckets) - 1 else 0
        return self.grads[b.buffer][b.start : b.stop + extra]

    def touched_rows(self, piece: int) -> tuple[Tensor, Tensor]:
        """Of a parameter that travels by rows: sorted indices of the rows that have a gradient, and their gradients."""
        p, row = self.parameters[piece], self.pieces[piece].row
        if p.grad is None:
            return torch.empty(0, dtype=torch.int64), torch.empty((0, row), dtype=p.dtype)
        if p.grad.is_sparse:
            grad = p.grad.coalesce()
            return grad.indices()[0].cpu(), grad.values().cpu()
        rows = p.grad.abs().amax(dim=1).nonzero()[:, 0]  # tied to something dense
        return rows.cpu(), p.grad[rows].cpu()

    def by_name(self, flats: Sequence[Tensor]) -> dict[str, Tensor]:
        """Copies of each parameter's part of these flat tensors, by name; without parameters that travel by rows."""
        return {p.name: flats[p.buffer][p.start : p.stop].clone() for p in self.pieces if not p.row}

    def add_by_name(self, flats: Sequence[Tensor], parts: Mapping[str, Tensor]) -> None:
        """Add what `by_name` returned to flat tensors."""
        for piece in self.pieces:
            if piece.name in parts:
                mine = flats[piece.buffer][piece.start : piece.stop]
                mine += parts[piece.name].to(mine.device)

    def holds_all(self) -> bool:
        """Whether all parameters are still views of the flat buffers."""
        return list(map(Tensor.data_ptr, self.parameters)) == self._places

    def left(self) -> str:
        """The name of a parameter that is no longer a view of its flat buffer."""
        both = zip(self.pieces, self.parameters, self._places, strict=True)
        return next(piece.name for piece, p, place in both if p.data_ptr() != place)

    def check(self) -> None:
        """Call `follow`, and raise where another object has replaced a parameter in the model."""
        present = dict(self._model.named_parameters())
        for p, piece in zip(self.parameters, self.pieces, strict=True):
            if present.get(piece.name) is not p:
                raise TrainingError(
                    f"parameter {piece.name} left its flat buffer: another object took its place in the model "
                    "(load_state_dict(assign=True)?); change its values in place"
                )
        self.follow()

    def follow(self, *, may_change: bool = True) -> None:
        """Bring parameters that got another storage back into their buffer, with their present values.

        `may_change`: whether these values may differ from those in the buffer.
        """
        for p, piece, place in zip(self.parameters, self.pieces, self._places, strict=True):
            if p.data_ptr() == place and p.shape == piece.shape and p.stride() == piece.stride:
                continue
            home = piece.view(self.params[piece.buffer])
            if p.dtype != home.dtype or p.device != home.device or p.shape != home.shape:
                raise TrainingError(
                    f"parameter {piece.name} left its flat buffer: it was {home.dtype} of shape {piece.shape} on "
                    f"{home.device} and is {p.dtype} of shape {tuple(p.shape)} on {p.device}; move, cast or reshape "
                    "the model before training begins"
                )
            shared = self._shares_place(p)
            if shared is not None:
                raise TrainingError(_TIED.format(one=f"parameter {piece.name}", other=f"parameter {shared}"))
            if not may_change and not torch.equal(p.data, home):
                raise TrainingError(
                    f"parameter {piece.name} was changed by the model or the training loop (p.data = …), and servers "
                    "hold the parameters: their next answer would undo it; use a strategy without servers, such as "
                    "all-reduce"
                )
            if p.data_ptr() == place:  # the same memory in another order
                p.data = p.data.clone()
            home.copy_(p.data)
            p.data = home

    def _shares_place(self, p: Tensor) -> str | None:
        """The other parameter whose place in a buffer this storage overlaps, if any."""
        for other, piece in zip(self.parameters, self.pieces, strict=True):
            if other is not p and _overlap(p, piece.view(self.params[piece.buffer])):
                return piece.name
        return None

    def _cut(self, bucket_bytes: int, first_bucket_bytes: int) -> list[list[int]]:
        """Which parameters share a bucket: it is closed once it holds enough; each dtype fills its own."""
        closed: list[list[int]] = []
        filling: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        sizes: dict[tuple[torch.dtype, torch.device], int] = {}
        for i, p in enumerate(self.parameters):
            kind = p.dtype, p.device
            filling.setdefault(kind, []).append(i)
            sizes[kind] = sizes.get(kind, 0) + p.nbytes
            if sizes[kind] >= (bucket_bytes if closed else first_bucket_bytes):
                closed.append(filling.pop(kind))
                del sizes[kind]
        return closed + list(filling.values())

    def _lay_out(self, buckets: list[list[int]], named: dict[int, str], groups: dict[int, int]) -> None:
        """Assign every parameter its place, copy it there, and make it a view of that place."""
        buffers: dict[tuple[torch.dtype, torch.device], int] = {}
        ends: list[int] = []
        pieces: dict[int, Piece] = {}
        for members in buckets:
            first = self.parameters[members[0]]
            buffer = buffers.setdefault((first.dtype, first.device), len(buffers))
            ends += [0] * (len(buffers) - len(ends))
            start = end = -(-ends[buffer] // ALIGNMENT) * ALIGNMENT
            for i in members:
                pieces[i] = _piece(self.parameters[i], named, groups, buffer, end)
                if id(self.parameters[i]) in self._by_rows:
                    pieces[i] = pieces[i]._replace(row=self.parameters[i].shape[1])
                end = pieces[i].stop
            ends[buffer] = end
            self.buckets.append(Bucket(buffer, start, end, tuple(members), (end - start) * first.element_size()))
        self.pieces = [pieces[i] for i in range(len(self.parameters))]
        for (dtype, device), buffer in buffers.items():
            self.params.append(self._allocate(ends[buffer], dtype, device))
            self.grads.append(self._allocate(ends[buffer] + TAIL, dtype, device))
        for p, piece in zip(self.parameters, self.pieces, strict=True):
            home = piece.view(self.params[piece.buffer])
            home.copy_(p.data)
            p.data = home


def rows_of(model: nn.Module, optimizer: Optimizer) -> set[int]:
    """Ids of embeddings with `sparse=True` whose optimizer does nothing to rows without a gradient."""
    local: set[int] = set()
    for group in optimizer.param_groups:
        plain = not group.get("momentum") and not group.get("weight_decay") and not group.get("maximize")
        if plain and type(optimizer) in (SGD, Adagrad):
            local |= {id(p) for p in group["params"]}
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    return {id(w) for w in tables if id(w) in local and w.is_contiguous() and w.dim() == 2 and w.requires_grad}


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=device)


def _piece(p: nn.Parameter, named: dict[int, str], groups: dict[int, int], buffer: int, start: int) -> Piece:
    dense = p.data if _is_dense(p) else p.data.contiguous()
    return Piece(named[id(p)], buffer, start, start + p.numel(), groups[id(p)], tuple(p.shape), dense.stride())


def _is_dense(p: Tensor) -> bool:
    """Whether the elements fill one run of memory, in whatever order of dimensions."""
    formats = [torch.contiguous_format]
    if p.dim() == 4:
        formats.append(torch.channels_last)
    if p.dim() == 5:
        formats.append(torch.channels_last_3d)
    return any(p.is_contiguous(memory_format=f) for f in formats)


_TIED = (
    "{one} and {other} share memory (tied through .data?), and would be separated; tie parameters by assigning the "
    "parameter itself: b.weight = a.weight"
)


def _require_apart(model: nn.Module, trainable: set[int]) -> None:
    """Refuse a trainable parameter that shares memory with another parameter or with a buffer."""
    held: list[tuple[str, Tensor]] = [(f"parameter {name}", p) for name, p in model.named_parameters()]
    held += [(f"buffer {name}", b) for name, b in model.named_buffers()]
    held = [(name, t) for name, t in held if t.layout is torch.strided and _is_there(t)]
    held.sort(key=lambda each: (str(each[1].device), each[1].data_ptr()))
    for i, (one, tensor) in enumerate(held):
        for other, neighbour in held[i + 1 :]:
            if not _begins_in(neighbour, tensor):
                break
            if (id(tensor) in trainable or id(neighbour) in trainable) and _overlap(tensor, neighbour):
                raise ConfigError(_TIED.format(one=one, other=other))


def _is_there(tensor: Tensor) -> bool:
    return not nn.parameter.is_lazy(tensor) and not tensor.is_meta and tensor.numel() > 0


def _begins_in(later: Tensor, tensor: Tensor) -> bool:
    """Whether one tensor's memory begins before the other's ends."""
    return later.device == tensor.device and later.data_ptr() < tensor.data_ptr() + _extent(tensor)


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have an element in common in memory."""
    if a.device != b.device or a.data_ptr() >= b.data_ptr() + _extent(b) or b.data_ptr() >= a.data_ptr() + _extent(a):
        return False
    return bool(torch.isin(_addresses(a), _addresses(b)).any())


def _addresses(tensor: Tensor) -> Tensor:
    found = torch.tensor(tensor.data_ptr())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = found[..., None] + torch.arange(size) * stride * tensor.element_size()
    return found.reshape(-1)


def _require_known(optimizer: Optimizer, named: dict[int, str]) -> None:
    for g, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in named:
                raise ConfigError(
                    f"the optimizer's group {g} holds a parameter of shape {tuple(p.shape)} that is not in the model; "
                    "register it as a parameter of the model"
                )


def _require_flattenable(p: nn.Parameter, name: str, groups: dict[int, int]) -> None:
    if isinstance(p, nn.UninitializedParameter):
        raise ConfigError(f"parameter {name} has no shape yet: run a lazy module once before it is trained")
    if not p.is_floating_point():
        raise ConfigError(f"parameter {name}: trainable parameters must be real floating-point numbers, got {p.dtype}")
    if id(p) not in groups:
        raise ConfigError(f"parameter {name} is trainable but the optimizer does not hold it; freeze it or add it")
