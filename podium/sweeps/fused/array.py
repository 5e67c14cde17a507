"""An array: trials of one structure, one per row, that take their steps together.

    flat        [rows, parameters]   trainable parameters, each row one trial's, side by side
    buffers     [rows, …] each       the model's buffers (running statistics, dropout's counters)
    numbers     [rows, window, columns]  the optimizer's numbers (lr, betas …); `window` is 1 without a schedule
    order       [rows, window × batch]   indices of the next samples; `keys` seed their augmentation
    tick        [rows]               the step inside the window

A step gathers every row's own batch from the one copy of the data, runs the model once under `torch.vmap`, takes the
gradient of the sum of the losses (rows are independent, so each row's gradient is its own, and backward runs on
ordinary kernels), and updates all rows. A step does not depend on the host, so it can be captured in a CUDA graph and
replayed; between replays trials are copied into and out of rows.

A row without a trial keeps computing, with the values of its last trial; its results are ignored. A row may also become
NaN without harm: no operation here mixes rows.

With one row there is no `vmap`: the module is called as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.optim import SGD, Adagrad

from podium.errors import ConfigError, TrainingError
from podium.sweeps.fused.compiling import compile_method, seconds_to_compile
from podium.sweeps.fused.device_data import DeviceData
from podium.sweeps.fused.dropout import CountedDropout
from podium.sweeps.fused.evaluation import evaluate_rows
from podium.sweeps.fused.losses import lifted
from podium.sweeps.fused.modules import prepared
from podium.sweeps.fused.stacked_optim import (
    ALIGN,
    OwnOptimizers,
    Place,
    Span,
    Timetable,
    columns_of,
    spans_of,
    stack_optimizer,
    values_of,
)
from podium.sweeps.fused.structure import callable_key
from podium.sweeps.parts import Parts, Structure
from podium.sweeps.precision import computing
from podium.sweeps.recipe import Recipe
from podium.sweeps.reference import on_device, plain_state
from podium.sweeps.trial import Evaluation

Mode = Literal["forward", "gradient"]
"""What `vmap` maps: the forward pass, with an ordinary backward; or the gradient too (recurrent nets need it)."""

_WINDOW_BYTES = 32 << 20
_LONGEST_WINDOW = 512
_SHORTEST_WINDOW = 4


class Array:
    """`rows` trials of one structure on one device. Rows are loaded, stepped together, saved and copied."""

    def __init__(
        self,
        recipe: Recipe,
        first: Parts,
        device_data: DeviceData,
        rows: int,
        *,
        mode: Mode = "forward",
        fast: bool | None = None,
        compiled: bool = False,
        tells: bool = False,
    ) -> None:
        """`first` is any trial of the structure.

        `fast` replaces layers by ones written for many models at once; None does so on a GPU, where they are faster.
        They have no gradient under `vmap`, so the mode `gradient` does not use them. With `tells` torch warns of
        operations that it computes row by row.
        """
        self.recipe, self.device_data, self.rows, self.mode = recipe, device_data, rows, mode
        self.device, self.task, self.batch_size = recipe.torch_device, first.task, first.batch_size
        self._check_data(first)
        self._options: dict[str, Any] = {"mode": mode, "fast": fast, "compiled": compiled}
        switch: Any = torch._C._functorch  # there is no public switch
        switch._set_vmap_fallback_warning_enabled(tells)
        self.structure = first.structure
        self.parts: list[Parts | None] = [None] * rows
        """The trial in each row."""
        if rows > 1:
            fast = (self.device.type == "cuda" if fast is None else fast) and mode == "forward"
        self._make_models(first, fast=bool(fast))
        self._lay_out(first, compiled=compiled)
        self._make_tables(first)
        loss = on_device(first.task.loss, self.device)
        self._call = lifted(loss, varies="label_smoothing" in first.varies).call
        self._losses: Callable[..., Tensor] = self._stacked_losses
        self._apply: Callable[..., None] = self._update
        if compiled:
            kind = (self.structure, rows, mode, fast, self.device, recipe.precision, recipe.dtype)
            self._losses = compile_method(self._stacked_losses, kind)
            if self.optimizer.capturable:
                self._apply = compile_method(self._update, kind)

    # The step.

    def step(self) -> None:
        """One step of every row, on its own next batch."""
        tick = self.tick % self.window  # the tick of a row without a trial keeps growing
        place = tick[:, None] * self.batch_size + self._places_in_batch
        index = self.order.gather(1, place)
        keys = None if self.keys is None else self.keys.gather(1, place)
        inputs, targets = self.device_data.train.batch(index, keys)
        if self.mode == "gradient":
            grads, losses = self._gradients(inputs, targets)
        else:
            # New leaves: a leaf remembers the stream it was first used on, which would break a capture on another.
            leaves = [leaf.detach().requires_grad_() for leaf in self.leaves]
            losses = self._losses(leaves, inputs, targets)
            grads = torch.autograd.grad(losses.sum(), leaves)
        with torch.no_grad():
            self._apply(grads, losses.detach())  # torch warns when it compiles for a tensor with an autograd graph

    def _stacked_losses(self, leaves: list[Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        with computing(self.recipe, self.task):
            if self.rows == 1:
                whole = (self.frozen, self.buffers)
                frozen, buffers = ({name: t[0] for name, t in held.items()} for held in whole)
                return self._one(
                    [leaf[0] for leaf in leaves], frozen, buffers, inputs[0], targets[0], self.smoothing[0]
                )[None]
            # Random numbers that do not come from the trial's seed would differ from a trial alone: raise.
            losses: Tensor = vmap(self._one, randomness="error")(
                leaves, self.frozen, self.buffers, inputs, targets, self.smoothing
            )
            return losses

    def _one(
        self,
        leaves: Sequence[Tensor],
        frozen: dict[str, Tensor],
        buffers: dict[str, Tensor],
        inputs: Tensor,
        targets: Tensor,
        smoothing: Tensor,
    ) -> Tensor:
        """One row's loss."""
        given = {place.name: leaf for place, leaf in zip(self.places, leaves, strict=True)}
        outputs = functional_call(self.base, {**given, **frozen, **buffers}, (inputs,), strict=True)
        loss = self._call(outputs, targets, smoothing)
        if loss.dim():
            raise ConfigError(f"{self.task.name}: the loss must be one number, got the shape {tuple(loss.shape)}")
        return loss

    def _gradients(self, inputs: Tensor, targets: Tensor) -> tuple[Sequence[Tensor], Tensor]:
        with computing(self.recipe, self.task):
            found, losses = vmap(grad_and_value(self._one), randomness="error")(
                self.leaves, self.frozen, self.buffers, inputs, targets, self.smoothing
            )
        return found, losses

    def _update(self, grads: Sequence[Tensor], losses: Tensor) -> None:
        cut = [g.reshape(self.rows, -1) for g in grads]
        pieces = [self._joined(cut[span.first : span.last], span) for span in self.spans]
        if self.structure.clipped:
            norms = [torch.linalg.vector_norm(piece, dim=1, keepdim=True) for piece in pieces]
            norm = torch.linalg.vector_norm(torch.cat(norms, dim=1), dim=1, keepdim=True)
            share = (self.clip / (norm + 1e-6)).clamp(max=1.0)
            pieces = [piece * share for piece in pieces]
        tick = self.tick % self.window_of_numbers
        numbers = self.numbers.gather(1, tick[:, None, None].expand(-1, 1, self.numbers.shape[2]))[:, 0]
        self.optimizer.step(pieces, numbers)
        self.tick.add_(1)
        self.loss.copy_(losses)

    def _joined(self, grads: Sequence[Tensor], span: Span) -> Tensor:
        """The gradients of a span's parameters, concatenated in the layout of a row."""
        gaps = self._gaps[span.first : span.last]
        pieces = [t for pair in zip(grads, gaps, strict=True) for t in pair if t is not None]
        return torch.cat(pieces, dim=1) if len(pieces) > 1 else pieces[0]

    # Rows.

    def fill(self, parts: Sequence[Parts]) -> Array:
        """Load a trial into every row, with the samples of its first steps; returns this array."""
        for row, one in enumerate(parts):
            self.load(row, one)
        self.refill([0] * self.rows)
        return self

    def load(self, row: int, parts: Parts) -> None:
        """Start a trial in this row, overwriting its contents."""
        if parts.structure != self.structure:
            unlike = [
                name for name in Structure._fields if getattr(parts.structure, name) != getattr(self.structure, name)
            ]
            raise ConfigError(f"trial {parts.trial.number}: must be like the array it joins, differs in {unlike}")
        params, buffers = dict(parts.model.named_parameters()), dict(parts.model.named_buffers())
        for place in self.places:
            self.flat[row, place.start : place.stop].copy_(params[place.name].detach().reshape(-1))
        for name, tensor in self.frozen.items():
            tensor[row].copy_(params[name].detach())
        for name, tensor in self.buffers.items():
            tensor[row].copy_(buffers[name])
        self.optimizer.load(row, parts)
        self._hold(row, parts)

    def _hold(self, row: int, parts: Parts) -> None:
        """Set the row's clip norm, label smoothing and timetable from this trial."""
        self.clip[row] = parts.task.clip_norm or 1.0
        self.smoothing[row] = lifted(parts.task.loss).number
        self._timetables[row] = self._timetable(parts) if self.optimizer.capturable else None
        self.parts[row] = parts

    def _timetable(self, parts: Parts) -> Timetable:
        numbers = tuple(values_of(parts.optimizer, self.columns))
        key = (callable_key(parts.task.schedule), parts.steps, numbers)
        found = self._shared.get(key)
        if found is None:
            found = self._shared[key] = Timetable(parts, self.columns)
        return found

    def change_numbers(self, row: int, parts: Parts, done: int) -> None:
        """The trial in this row continues with the numbers of `parts`; parameters and moments stay."""
        if parts.structure != self.structure:
            raise ConfigError(f"trial {parts.trial.number}: a change in mid-training must leave the structure as it is")
        if isinstance(self.optimizer, OwnOptimizers):
            self.optimizer.change_numbers(row, parts, done)
        fresh = dict(parts.model.named_buffers())
        for name in self._own_buffers:
            self.buffers[name][row].copy_(fresh[name])
        self._hold(row, parts)
        if (timetable := self._timetables[row]) is not None:
            self.numbers[row].copy_(timetable.rows(done, self.window_of_numbers).to(self.device))

    def refill(self, steps: Sequence[int | None]) -> None:
        """Give rows the samples and numbers of their next `window` steps.

        `steps`: how many each row has done; None leaves the row as it is.
        """
        for row, done in enumerate(steps):
            parts = self.parts[row]
            if done is None or parts is None:
                continue
            index, keys = upcoming(parts, done, self.window)
            self.order[row].copy_(_pinned(index, self.device), non_blocking=True)
            if self.keys is not None:
                self.keys[row].copy_(_pinned(keys.view(np.int64), self.device), non_blocking=True)
            timetable = self._timetables[row]
            if timetable is not None and (done == 0 or self.window_of_numbers > 1):
                numbers = timetable.rows(done, self.window_of_numbers)
                self.numbers[row].copy_(_pinned(numbers, self.device), non_blocking=True)
            self.tick[row] = 0

    def save(self, row: int) -> dict[str, Tensor]:
        """The row's trial as an ordinary `state_dict`, on the CPU."""
        parts = self.parts[row]
        assert parts is not None
        values = {p.name: self.flat[row, p.start : p.stop].view(p.shape) for p in self.places}
        values.update({name: tensor[row] for held in (self.frozen, self.buffers) for name, tensor in held.items()})
        values = {name: tensor.detach().cpu().clone() for name, tensor in values.items()}
        return plain_state(parts.model, values)

    def release(self, row: int) -> None:
        """The row's trial is over; the row keeps computing, and its results are ignored."""
        self.parts[row] = None
        self.optimizer.release(row)

    def copy_row(self, source: int, target: int) -> None:
        """Copy parameters, buffers and moments of one row to another, which keeps its numbers, seed and samples."""
        kept = {name: self.buffers[name][target].clone() for name in self._own_buffers}
        for tensor in [*self.tensors(), *self.frozen.values()]:
            if tensor is not self.tick:
                tensor[target].copy_(tensor[source])
        for name, value in kept.items():
            self.buffers[name][target].copy_(value)
        if isinstance(self.optimizer, OwnOptimizers):
            self.optimizer.copy(source, target)

    def narrower(self, rows: Sequence[int], steps: Sequence[int]) -> Array:
        """A new array of these rows only, as they are after `steps` steps each; refill it before its next step.

        Rows beyond `steps` have no trial. This array must not take another step: its schedules now belong to the new
        array.
        """
        first = self.recipe.make(self.parts_of(rows[0]).trial)
        new = Array(self.recipe, first, self.device_data, len(rows), **self._options)
        if new.structure != self.structure or len(rows) < 2 or not self.optimizer.capturable:
            raise ConfigError("fused: an array can be made narrower where its optimizer is stacked, down to two rows")
        chosen = torch.tensor(list(rows), device=self.device)
        for mine, theirs in zip(new._all_of_rows(), self._all_of_rows(), strict=True):
            mine.copy_(theirs.index_select(0, chosen))
        for i, (row, done) in enumerate(zip(rows, steps, strict=False)):
            new.parts[i], timetable = self.parts[row], self._timetables[row]
            assert timetable is not None
            new._timetables[i] = timetable
            new.numbers[i].copy_(timetable.rows(done, new.window_of_numbers))
        return new

    @property
    def compile_s(self) -> float:
        """Expected seconds to compile this array with another number of rows; 0 where nothing is compiled.

        torch cannot reuse the code that it compiled for this number of rows.
        """
        return seconds_to_compile(self.base) if self._options["compiled"] else 0.0

    def _all_of_rows(self) -> list[Tensor]:
        """All tensors of rows but their samples and numbers."""
        return [*self.tensors(), *self.frozen.values(), self.clip, self.smoothing, self.loss]

    def tensors(self) -> list[Tensor]:
        """All tensors that a step changes; the first dimension is rows."""
        return [self.flat, self.tick, *self.buffers.values(), *self.optimizer.tensors()]

    def evaluate(
        self, rows: Sequence[int], steps: Sequence[int], most: int | None = None
    ) -> list[Evaluation | Exception]:
        """Evaluate these rows on their validation data, or its first `most` samples; `steps`: how many each has done.

        Where a trial's loss or metric raises, the list has the exception instead of an evaluation.
        """
        return evaluate_rows(self, rows, steps, most)

    # Construction.

    def _check_data(self, first: Parts) -> None:
        data = self.device_data
        if data.train.why_not:
            raise ConfigError(f"fused: the data must lie on {self.device}, but {data.train.why_not}")
        if first.valid is None and data.test.why_not:
            raise ConfigError(f"fused: the test data must lie on {self.device}, but {data.test.why_not}")

    def _make_models(self, first: Parts, *, fast: bool) -> None:
        self.base = copy.deepcopy(first.model).to(self.device)  # no `train()`: modules keep the modes they were made in
        if self.rows > 1:
            dense = skips_zero_gradients(first)
            self.base = prepared(self.base, fast=fast, drops=self.structure.dropped, dense=dense)
        self.eval_model = copy.deepcopy(self.base).eval()
        """A copy for evaluation, so that the mode of the compiled module never changes."""

    def _make_tables(self, first: Parts) -> None:
        """Make the tables of numbers and samples, and each row's step in its window."""
        rows, device = self.rows, self.device
        self._timetables: list[Timetable | None] = [None] * rows
        self._shared: WeakValueDictionary[Hashable, Timetable] = WeakValueDictionary()
        """Timetables in use: trials with the same numbers and schedule (folds, seeds) share one."""
        self.window = self._window_of(first)
        self.order = torch.zeros(rows, self.window * self.batch_size, dtype=torch.int64, device=device)
        self.keys = torch.zeros_like(self.order) if self.device_data.train.augment is not None else None
        self.tick = torch.zeros(rows, dtype=torch.int64, device=device)
        self.clip = torch.ones(rows, 1, dtype=self.flat.dtype, device=device)
        self.smoothing = torch.zeros(rows, dtype=self.flat.dtype, device=device)
        self.loss = torch.zeros(rows, dtype=torch.float32, device=device)
        """Each row's loss at its last step."""
        self._places_in_batch = torch.arange(self.batch_size, device=device)

    def _lay_out(self, first: Parts, *, compiled: bool) -> None:
        model, rows = self.base, self.rows
        params = dict(model.named_parameters())
        self._check(params)
        if self.structure.hooked:
            raise ConfigError(
                "fused: there must be no hooks on parameters or on the optimizer, which rows of an array do not call"
            )
        names = {id(p): name for name, p in first.model.named_parameters()}
        group_of = {names[id(p)]: i for i, g in enumerate(first.optimizer.param_groups) for p in g["params"]}
        used = self._used(first, [name for name, p in params.items() if name in group_of and p.requires_grad])
        trained = sorted((name for name in params if name in used), key=lambda name: group_of[name])
        self.places, self._gaps, at = [], [], 0
        dtype = next(iter(params.values())).dtype
        for name in trained:
            size = params[name].numel()
            gap = -size % ALIGN
            self.places.append(Place(name, at, at + size, params[name].shape, group_of[name]))
            self._gaps.append(torch.zeros(rows, gap, dtype=dtype, device=self.device) if gap else None)
            at += size + gap
        self.flat = torch.zeros(rows, at, dtype=dtype, device=self.device)
        self.spans = spans_of(self.places, self.flat, compiled=compiled)
        self.leaves = [self.flat[:, p.start : p.stop].view(rows, *p.shape) for p in self.places]
        self.frozen = {name: _stacked(p.detach(), rows) for name, p in params.items() if name not in used}
        # Buffers are written in place, so rows must be contiguous, or running statistics are silently not updated.
        self.buffers = {name: _stacked(b, rows) for name, b in model.named_buffers()}
        self._own_buffers = [
            f"{name}.{own}" if name else own
            for name, module in model.named_modules()
            if isinstance(module, CountedDropout)
            for own in ("rate", "key")
        ]
        self.columns = columns_of(first.optimizer)
        self.optimizer = stack_optimizer(self.flat, self.places, self.spans, first, self.columns)
        self.window_of_numbers = 1

    def _window_of(self, first: Parts) -> int:
        per_step = self.rows * self.batch_size * 8
        window = max(_SHORTEST_WINDOW, min(_LONGEST_WINDOW, _WINDOW_BYTES // per_step, first.steps))
        self.window_of_numbers = window if self.structure.scheduled else 1
        shape = (self.rows, self.window_of_numbers, len(self.columns))
        self.numbers = torch.zeros(shape, dtype=torch.float64, device=self.device)
        return window

    def _used(self, first: Parts, names: Sequence[str]) -> set[str]:
        """The parameters that the loss depends on: the others get no gradient and no step, also in a trial alone."""
        model = copy.deepcopy(first.model).to(self.device)
        params = dict(model.named_parameters())
        index = torch.from_numpy(upcoming(first, 0, 1)[0]).to(self.device)
        keys = torch.zeros_like(index)
        inputs, targets = self.device_data.train.batch(index, keys)
        with computing(self.recipe, self.task):
            loss = on_device(self.task.loss, self.device)(model(inputs), targets)
        grads = torch.autograd.grad(loss, [params[name] for name in names], allow_unused=True)
        return {name for name, grad in zip(names, grads, strict=True) if grad is not None}

    def _check(self, params: dict[str, nn.Parameter]) -> None:
        kinds = {p.dtype for p in params.values()}
        if len(kinds) != 1 or not next(iter(kinds)).is_floating_point:
            raise ConfigError(f"fused: all parameters must have one floating type, got {sorted(map(str, kinds))}")

    def parts_of(self, row: int) -> Parts:
        parts = self.parts[row]
        if parts is None:
            raise TrainingError(f"fused: row {row} holds no trial")
        return parts


def skips_zero_gradients(parts: Parts) -> bool:
    """Whether this optimizer leaves parameters with zero gradients as they are: then sparse and dense are the same."""
    plain = all(g.get("momentum", 0) == 0 and g.get("weight_decay", 0) == 0 for g in parts.optimizer.param_groups)
    return type(parts.optimizer) in (SGD, Adagrad) and plain


def upcoming(parts: Parts, done: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples and keys of `count` steps after `done`, also beyond the trial's end."""
    index, keys = [], []
    step, left = done, count
    while left > 0:
        epoch, place = divmod(step, parts.steps_per_epoch)
        take = min(left, parts.steps_per_epoch - place)
        samples, their_keys = parts.epoch(epoch)
        cut = slice(place * parts.batch_size, (place + take) * parts.batch_size)
        index.append(samples[cut])
        keys.append(their_keys[cut])
        step, left = step + take, left - take
    return np.concatenate(index), np.concatenate(keys)


def _stacked(tensor: Tensor, rows: int) -> Tensor:
    return tensor.detach().unsqueeze(0).expand(rows, *tensor.shape).clone(memory_format=torch.contiguous_format)


def _pinned(values: np.ndarray | Tensor, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values)) if isinstance(values, np.ndarray) else values
    return tensor.pin_memory() if device.type == "cuda" else tensor
