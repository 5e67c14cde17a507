"""A model's buffers: running statistics, moving averages, masks, counters.

Buffers are looked up each time they are needed, never cached: a forward pass may assign a new tensor to a buffer's name
(`self.ema = 0.9 * self.ema + …`), add a buffer, remove one, or change its shape or dtype.

Workers exchange floating-point and complex buffers only. A mean is weighted by the samples that each worker has seen; a
worker that has seen none is left out. Values that are equal on all workers stay the same in bits, masks of -inf
included: a buffer in single precision times a whole number is exact in double precision, and buffers in double
precision travel in two parts for which this holds too.

The size of an exchange is fixed by what the workers last agreed on. A worker whose buffers have changed in name, shape
or dtype since then signals it with a NaN in a place where none can be, and all workers agree again. So the usual case
needs no additional exchange.

A frozen parameter may be used as a buffer: a codebook, a teacher, prototypes that a forward pass writes into. Workers
compare theirs whenever buffers are averaged, and average those that differ. A backbone that does not change is read,
but not sent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from podium.comm.base import Communicator
from podium.comm.broadcast_bytes import share_bytes
from podium.engine.bits import bits_added_up
from podium.errors import ConfigError, TrainingError

_CHANGED = 0x7FF8706F6469756D
"""The bits of a NaN that no computation makes. It means: the first worker's buffers are not what all agreed on."""
_LOW_BITS = (1 << 27) - 1
"""The lower half of a double's mantissa: the upper half, times up to 2**27 samples, is exact."""


class Form(NamedTuple):
    """Must be the same on all workers for a buffer to be exchanged."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """Real numbers in it: two per complex element."""
        return torch.Size(self.shape).numel() * (2 if self.dtype.startswith("complex") else 1)

    @property
    def is_double(self) -> bool:
        return self.dtype in ("float64", "complex128")


Forms = tuple[Form, ...]


class Snapshot:
    """A copy of all buffers of a model: the tensors by name, and their values."""

    def __init__(self, model: nn.Module) -> None:
        self._held = [(m, dict(m._buffers.items()), set(m._non_persistent_buffers_set)) for m in model.modules()]
        self._values = [
            (b, b.detach().clone())
            for _, held, _ in self._held
            for b in held.values()
            if b is not None and _has_bits(b)
        ]

    def restore(self) -> None:
        """Give the model the same tensors again under the same names, with the saved values."""
        for module, held, hidden in self._held:
            for name in set(module._buffers.keys()) - held.keys():
                del module._buffers[name]
            for name, tensor in held.items():
                if name not in module._buffers or module._buffers[name] is not tensor:
                    module._buffers[name] = tensor
            if module._non_persistent_buffers_set != hidden:
                module._non_persistent_buffers_set = hidden
        for tensor, value in self._values:
            if _is_writable(tensor) and not same_bits(tensor, value):
                tensor.detach().copy_(value)


class Buffers:
    """One worker's buffers, and how they are synced over the workers."""

    def __init__(self, model: nn.Module, comm: Communicator) -> None:
        self._model, self._comm = model, comm
        if comm.size > 1:
            _refuse_sparse(model)
        self._first = self._agreed = _forms(self.floating())
        self.samples_since = 0
        """Samples that went through the model in training since the last sync."""

    def floating(self) -> list[tuple[str, Tensor]]:
        """Floating-point and complex buffers as they are now, by name."""
        found = [(name, b) for name, b in self._model.named_buffers() if _is_number(b)]
        return sorted(found, key=lambda each: each[0])  # a buffer that is registered again comes last in its module

    def forget_agreement(self) -> None:
        """Members have changed: start again from the buffers of a new model, as a worker that joins has them."""
        self._agreed = self._first

    def count(self, samples: int) -> None:
        """Add samples that went through the model in training."""
        self.samples_since += samples

    def seen_since(self, samples: int) -> None:
        """Set `samples_since` back, where a step or round is undone."""
        self.samples_since = samples

    def mean(self) -> None:
        """Average floating-point buffers over the workers, weighted by samples since the last sync. Collective.

        Frozen parameters too, where a worker has written into them.
        """
        if self._comm.size > 1:
            self._mean(self.samples_since)
            self._mean_frozen(self.samples_since)
            self.samples_since = 0

    def broadcast_frozen(self) -> None:
        """Take the first worker's frozen parameters, where workers have written into theirs. Collective."""
        if self._comm.size > 1:
            self._mean_frozen(int(self._comm.index == 0))

    def broadcast(self) -> None:
        """Take the first worker's floating-point buffers. Collective."""
        if self._comm.size > 1:
            self._broadcast()

    # Inside.

    def _mean(self, samples: int) -> None:
        """Floating-point buffers become the workers' mean, weighted by samples. Collective."""
        mine, weight = self._matching(), float(samples)
        if not self._agreed:
            return
        joined = _join([] if mine is None else mine, self._agreed, weight)
        joined[-1] = torch.nan if mine is None else weight
        self._comm.wait(self._comm.all_reduce(joined))
        if joined[-1].isnan():
            self._agree_anew(has_samples=samples > 0)
            return self._mean(samples)
        if joined[-1] > 0:  # otherwise no worker has changed any
            assert mine is not None
            self._take_mean(mine, joined, weight)
        return None

    def _broadcast(self) -> None:
        """Floating-point buffers become the first worker's. Collective."""
        mine, first = self._matching(), self._comm.workers[0]
        if not self._agreed:
            return
        parts = [_reals(b) for _, b in mine or ()]
        joined = (
            torch.cat(parts) if mine is not None else torch.empty(sum(form.numel for form in self._agreed)).double()
        )
        if mine is None and joined.numel():
            joined.view(torch.int64).fill_(_CHANGED)
        self._comm.wait(self._comm.broadcast(joined, first))
        if joined.numel() and int(joined.view(torch.int64)[0]) == _CHANGED:
            told = share_bytes(self._comm, first, json.dumps(_forms(self.floating())).encode())
            self._agreed = _forms_in(told)
            self._adopt(self._agreed)
            return self._broadcast()
        if mine is None:
            self._adopt(self._agreed)
        self._scatter(self.floating(), joined)
        return None

    def _mean_frozen(self, samples: int) -> None:
        """Frozen parameters that differ between the workers become their mean, weighted by samples. Collective."""
        frozen = [p for p in self._model.parameters() if not p.requires_grad and _is_number(p) and _has_bits(p)]
        if not frozen:
            return
        rows = self._comm.gather_aside(torch.tensor([samples, *map(bits_added_up, frozen)], dtype=torch.int64))
        unequal = (rows[:, 1:] != rows[0, 1:]).any(dim=0).tolist()
        written = [p for p, differs in zip(frozen, unequal, strict=True) if differs]
        total = int(rows[:, 0].sum())
        if not written or total == 0:
            return
        joined = torch.cat([_reals(p) for p in written])
        joined = joined * samples if samples else torch.full_like(joined, -0.0)
        self._comm.wait(self._comm.all_reduce(joined))
        counts = [_form("", p).numel for p in written]
        for p, part in zip(written, (joined / total).split(counts), strict=True):
            p.data.copy_(_from_reals(part, p))

    def _matching(self) -> list[tuple[str, Tensor]] | None:
        """The floating-point buffers; None where they are not what the workers agreed on."""
        mine = self.floating()
        forms = _forms(mine)
        if forms == self._agreed:
            return mine
        if not self._agreed and self._comm.size > 1:
            raise TrainingError(
                f"rank {self._comm.rank}: buffer {forms[0].name} appeared during training, and the model had no "
                "floating-point buffer when training began; register it in the module's __init__"
            )
        return None

    def _take_mean(self, mine: Sequence[tuple[str, Tensor]], joined: Tensor, weight: float) -> None:
        numel = sum(form.numel for form in self._agreed)
        mean, low = joined[:numel] / joined[-1], joined[numel:-1] / joined[-1]
        _add_low(mean, low, self._agreed)
        if mean.isnan().any():
            self._explain_nan(mine, mean, weight)
        self._scatter(mine, mean)

    def _explain_nan(self, mine: Sequence[tuple[str, Tensor]], mean: Tensor, weight: float) -> None:
        """Raise where a mean is NaN though no worker holds NaN: +inf and -inf have no mean. Collective."""
        own = torch.cat([_reals(b) for _, b in mine])
        has = (own.isnan() & (weight > 0)).to(torch.float32)
        self._comm.wait(self._comm.all_reduce(has))
        unexplained = mean.isnan() & (has == 0)
        for form, part in zip(self._agreed, unexplained.split([form.numel for form in self._agreed]), strict=True):
            if part.any():
                raise TrainingError(
                    f"buffer {form.name}: one worker holds +inf where another holds -inf, and there is no mean of "
                    "them; use --set buffers=broadcast or buffers=local"
                )

    def _scatter(self, mine: Sequence[tuple[str, Tensor]], joined: Tensor) -> None:
        counts = [_form(name, b).numel for name, b in mine]
        for (name, buffer), part in zip(mine, joined.split(counts), strict=True):
            value = _from_reals(part, buffer)
            value = torch.where(value.isnan() & buffer.detach().isnan(), buffer.detach(), value)
            if not same_bits(buffer, value):
                write(self._model, name, buffer, value)

    def _agree_anew(self, *, has_samples: bool) -> None:
        """A worker's buffers changed in name, shape or dtype: agree on those of the workers that have seen samples.

        Collective. Workers that have seen none adopt them.
        """
        told: dict[int, tuple[bool, Forms]] = {}
        for rank in self._comm.workers:
            mine = json.dumps([has_samples, _forms(self.floating())]).encode() if rank == self._comm.rank else b""
            has, forms = json.loads(share_bytes(self._comm, rank, mine))
            told[rank] = has, tuple(Form(name, tuple(shape), dtype) for name, shape, dtype in forms)
        trained = {rank: forms for rank, (has, forms) in told.items() if has} or {r: f for r, (_, f) in told.items()}
        (first, wanted), *others = trained.items()
        for rank, forms in others:
            if forms != wanted:
                raise TrainingError(_disagreement(first, wanted, rank, forms))
        self._agreed = wanted
        self._adopt(wanted)

    def _adopt(self, wanted: Forms) -> None:
        """Make floating-point buffers of these names, shapes and dtypes; the exchange brings their values."""
        mine = dict(self.floating())
        device = next((p.device for p in self._model.parameters()), torch.device("cpu"))
        for name in mine.keys() - {form.name for form in wanted}:
            module, leaf = _place(self._model, name)
            del module._buffers[leaf]
        for form in wanted:
            if form.name not in mine or _form(form.name, mine[form.name]) != form:
                module, leaf = _place(self._model, form.name)
                module._buffers[leaf] = torch.zeros(form.shape, dtype=getattr(torch, form.dtype), device=device)


def load_buffers(model: nn.Module, by_name: Mapping[str, Tensor]) -> None:
    """Set these buffers; one that the model does not have yet, or has in another shape, is created."""
    have = dict(model.named_buffers())
    for name, kept in by_name.items():
        module, leaf = _place(model, name)
        if name not in have:
            module.register_buffer(leaf, kept.clone(), persistent=False)  # persistent ones are in `state_dict`
        elif _form(name, have[name]) == _form(name, kept):
            write(model, name, have[name], kept)
        else:
            module._buffers[leaf] = kept.to(have[name].device, copy=True)


def fit_buffers(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Make the buffers' shapes and dtypes those of a `state_dict`, which another worker's model may have changed."""
    have = dict(model.named_buffers())
    for name in have.keys() & state.keys():
        if _form(name, have[name]) != _form(name, state[name]):
            module, leaf = _place(model, name)
            module._buffers[leaf] = torch.empty_like(state[name], device=have[name].device)


def write(model: nn.Module, name: str, buffer: Tensor, value: Tensor) -> None:
    """Set a buffer: in place, or as a new tensor where it is expanded, so that elements share memory."""
    if _is_writable(buffer):
        buffer.detach().copy_(value)
    else:
        module, leaf = _place(model, name)
        module._buffers[leaf] = value.clone()


def _is_writable(tensor: Tensor) -> bool:
    expanded = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return not expanded and not tensor.is_inference()


def _place(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def _form(name: str, buffer: Tensor) -> Form:
    return Form(name, tuple(buffer.shape), str(buffer.dtype).removeprefix("torch."))


def _forms(buffers: Sequence[tuple[str, Tensor]]) -> Forms:
    return tuple(_form(name, buffer) for name, buffer in buffers)


def _forms_in(told: bytes) -> Forms:
    return tuple(Form(name, tuple(shape), dtype) for name, shape, dtype in json.loads(told))


def _disagreement(first: int, wanted: Forms, rank: int, forms: Forms) -> str:
    """The error's text: the first buffer that differs, and on which ranks."""
    mine, theirs = {form.name: form for form in wanted}, {form.name: form for form in forms}
    name = next(n for n in sorted(mine.keys() | theirs.keys()) if mine.get(n) != theirs.get(n))
    return (
        f"buffer {name} must be alike on all workers to be averaged: rank {first} has {_words(mine.get(name))}, rank "
        f"{rank} has {_words(theirs.get(name))}; keep what depends on a worker's own batch in a plain attribute, or "
        "use --set buffers=local"
    )


def _words(form: Form | None) -> str:
    return "none" if form is None else f"{form.dtype} of shape {form.shape}"


def _join(mine: Sequence[tuple[str, Tensor]], agreed: Forms, weight: float) -> Tensor:
    """Buffers times weight, the low parts of those in double precision, and a place for the weight."""
    numel, double = sum(form.numel for form in agreed), sum(form.numel for form in agreed if form.is_double)
    # Minus zero: adding it to any number, also to minus zero, changes no bit.
    joined = torch.full((numel + double + 1,), -0.0, dtype=torch.float64)
    if weight == 0:
        return joined
    at, low_at = 0, numel
    for _, buffer in mine:
        value = _reals(buffer)
        if buffer.dtype in (torch.float64, torch.complex128):
            high = (value.view(torch.int64) & ~_LOW_BITS).view(torch.float64)
            low = torch.where(value.isfinite(), value - high, torch.zeros_like(value))
            joined[low_at : low_at + value.numel()] = low * weight
            low_at += value.numel()
            value = torch.where(value.isfinite(), high, value)
        joined[at : at + value.numel()] = value * weight
        at += value.numel()
    return joined


def _add_low(mean: Tensor, low: Tensor, agreed: Forms) -> None:
    at = low_at = 0
    for form in agreed:
        if form.is_double:
            part = low[low_at : low_at + form.numel]
            mean[at : at + form.numel] += torch.where(part == 0, torch.full_like(part, -0.0), part)
            low_at += form.numel
        at += form.numel


def _refuse_sparse(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise ConfigError(
                f"buffer {name}: workers can average dense buffers only, not those of layout {buffer.layout}; keep "
                "it in a plain attribute of the module, or register its indices and values"
            )


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _reals(tensor: Tensor) -> Tensor:
    """All real numbers of a tensor, in double precision, on the CPU."""
    found = tensor.detach().resolve_conj()
    found = torch.view_as_real(found) if found.is_complex() else found
    return found.reshape(-1).to(torch.float64).cpu()


def _from_reals(part: Tensor, like: Tensor) -> Tensor:
    """These numbers with the shape, dtype and device of another tensor."""
    if like.is_complex():
        return torch.view_as_complex(part.reshape(*like.shape, 2)).to(like.dtype).to(like.device)
    return part.view(like.shape).to(like.dtype).to(like.device)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal in bits, NaN and signs of zero included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _has_bits(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not nn.parameter.is_lazy(tensor)
