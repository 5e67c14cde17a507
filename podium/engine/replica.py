"""A replica: one worker's model and optimizer, with parameters and gradients in flat buffers.

It moves the parameters, returns its state by name for checkpoints, and checks that the model keeps the parameters that
training began with. It knows no other worker.
"""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from podium.engine.flat import Allocate, Flat
from podium.engine.optim import FlatOptimizer
from podium.engine.step_check import StepCheck
from podium.errors import ConfigError
from podium.exchange.codecs.base import Codec


class Replica:
    """A model, its optimizer and its schedule."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        schedule: LRScheduler | None = None,
        clip_norm: float | None = None,
        bucket_bytes: int = 8 << 20,
        rows: bool = False,
        allocate: Allocate | None = None,
    ) -> None:
        """Moves the model's parameters into flat buffers; cast and move the model before, not after.

        `rows` and `allocate`: see `Flat`.
        """
        self.model, self.optimizer, self.schedule, self.clip_norm = model, optimizer, schedule, clip_norm
        self.flat = Flat(model, optimizer, bucket_bytes, allocate=allocate, rows=rows)
        self.device = self.flat.params[0].device
        self.step_check = StepCheck(model, optimizer, self.flat)
        self.strategy_state: dict[str, list[Tensor]] = {}
        """A strategy's tensors that checkpoints save: flat, laid out as the parameters are."""
        flat = self.flat
        self._flat_optimizer = FlatOptimizer(optimizer, flat.parameters, flat.pieces, flat.params, flat.grads)
        self._codec: Codec | None = None
        self._momentum: list[float] | None = None  # of each group, where a codec does the momentum

    # A step.

    def move(self, used: Sequence[bool]) -> None:
        """One step of the optimizer by the flat gradients; parameters that are not `used` are left alone."""
        self.step_check.follow_storages()  # a hook in the backward pass may have given a parameter another storage
        for p, view, is_used in zip(self.flat.parameters, self.flat.views, used, strict=True):
            p.grad = view if is_used else None
        self.clip()
        self._flat_optimizer.step(all_used=all(used))
        self.step_check.follow_storages()  # or one around the optimizer's step

    def clip(self) -> None:
        """Scale the gradient down to `clip_norm`, where there is one."""
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.flat.parameters[::-1], self.clip_norm)

    def follow_schedule(self, step: int) -> None:
        """Bring the schedule to this global step, where it is behind."""
        while self.schedule is not None and self.schedule.last_epoch < step:
            self.step_schedule()

    def step_schedule(self) -> None:
        if self.schedule is not None:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a server may have stepped in its place
            self.schedule.step()

    def moments(self) -> list[Tensor]:
        """The optimizer's state that is as large as the parameters, such as momentum: the tensors, not copies.

        Number and order are the same on all workers, once all have stepped all parameters.
        """
        states = (self.optimizer.state.get(p, {}) for p in self.flat.parameters)
        found = [state[key] for state in states for key in sorted(state)]
        return [value for value in found if isinstance(value, Tensor) and value.dim() > 0]

    # A codec that applies the momentum.

    def reclaim_momentum(self) -> None:
        """Give the momentum back from the codec to the optimizer."""
        for group, momentum in zip(self.optimizer.param_groups, self._momentum or (), strict=False):
            group["momentum"] = momentum
        self._momentum = None

    def lend_momentum(self, codec: Codec) -> None:
        """Where this codec applies the momentum itself, switch off the optimizer's."""
        self._codec, self._momentum = codec, None
        if not codec.takes_momentum:
            return
        if getattr(self.schedule, "cycle_momentum", False):
            raise ConfigError(
                f"codec {codec.name} applies the momentum itself, and the schedule would cycle the optimizer's: "
                "give it cycle_momentum=False"
            )
        self._momentum = []
        for group in self.optimizer.param_groups:
            codec.check(group)
            self._momentum.append(group["momentum"])
            group["momentum"] = 0.0
            for p in group["params"]:  # or the optimizer would later resume with this old momentum
                self.optimizer.state.get(p, {}).pop("momentum_buffer", None)
        self._flat_optimizer.reload()

    def _settings(self, g: int) -> dict[str, Any]:
        """A parameter group's settings as the user chose them."""
        settings = _plain_state({k: v for k, v in self.optimizer.param_groups[g].items() if k != "params"})
        return settings if self._momentum is None else {**settings, "momentum": self._momentum[g]}

    # State by name.

    def hash(self) -> str:
        """Hash of the parameters by name, whatever their layout."""
        digest = hashlib.sha256()
        for name, p in self.model.named_parameters():
            digest.update(name.encode())
            digest.update(as_bytes(p).numpy().tobytes())
        return digest.hexdigest()[:16]

    def state(self, *, copied: bool = True) -> dict[str, Any]:
        """All that a checkpoint saves of this replica, by name; not `copied`: the tensors themselves, to read only."""
        copy_of: Callable[[Any], Any] = _copy if copied else _as_it_is
        names = {id(p): name for name, p in self.model.named_parameters()}
        states = self.optimizer.state.items()
        return {
            "model": {k: copy_of(v) for k, v in self.model.state_dict().items()},
            "optimizer_class": type(self.optimizer).__name__,
            "optimizer": {names[id(p)]: copy_of(s) for p, s in states if isinstance(p, Tensor)},
            # State that an optimizer has for all parameters together, under its own key.
            "optimizer_common": {key: copy_of(s) for key, s in states if not isinstance(key, Tensor)},
            "groups": [copy_of(self._settings(g)) for g in range(len(self.optimizer.param_groups))],
            "schedule": None if self.schedule is None else copy_of(_plain_state(self.schedule.state_dict())),
            "kept": {name: self.flat.by_name(self._laid_out(name)) for name in self.strategy_state},
        }

    def _laid_out(self, name: str) -> list[Tensor]:
        """A strategy's state of this name, checked to be laid out as the parameters are."""
        flats = self.strategy_state[name]
        shapes = [tuple(flat.shape) for flat in self.flat.params]
        if not isinstance(flats, list | tuple) or [tuple(getattr(flat, "shape", ())) for flat in flats] != shapes:
            raise ConfigError(
                f"worker.strategy_state[{name!r}] must be a list of tensors of the shapes of worker.params, {shapes}, "
                f"got {type(flats).__name__}"
            )
        return list(flats)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self._check_fits(state)
        self.model.load_state_dict(state["model"])
        self.load_optimizer_state(state["optimizer"])
        for key, kept in state.get("optimizer_common", {}).items():  # older checkpoints have none
            self.optimizer.state[key] = _copy(kept)
        for group, kept in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update(_copy(kept))
        if self._codec is not None:
            self.lend_momentum(self._codec)
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(_copy(state["schedule"]))
        self.strategy_state = {}
        for name, parts in state.get("kept", {}).items():  # older checkpoints have none
            self.strategy_state[name] = [torch.zeros_like(flat) for flat in self.flat.params]
            self.flat.add_by_name(self.strategy_state[name], parts)
        self.flat.check()

    def _check_fits(self, state: Mapping[str, Any]) -> None:
        if state["optimizer_class"] != type(self.optimizer).__name__:
            raise ValueError(
                f"state of {state['optimizer_class']} cannot be loaded into {type(self.optimizer).__name__}"
            )
        if (state["schedule"] is None) != (self.schedule is None):
            raise ValueError(
                f"it was saved {'without' if state['schedule'] is None else 'with'} a schedule, unlike this run"
            )
        if len(state["groups"]) != len(self.optimizer.param_groups):
            raise ValueError(f"{len(state['groups'])} parameter groups saved, {len(self.optimizer.param_groups)} here")

    def load_optimizer_state(self, by_name: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the optimizer's state, parameter by parameter."""
        params = dict(self.model.named_parameters())
        for key in [key for key in self.optimizer.state if isinstance(key, Tensor)]:
            del self.optimizer.state[key]
        for name, kept in by_name.items():
            self.optimizer.state[params[name]] = _copy(kept)
        self._flat_optimizer.reload()


def as_bytes(tensor: Tensor) -> Tensor:
    """A tensor's bytes, on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _copy(value: Any) -> Any:
    """A deep copy of a state, without gradients."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) in (dict, OrderedDict):
        return {k: _copy(v) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copy(v) for v in value)
    return copy.deepcopy(value)


def _as_it_is(value: Any) -> Any:
    return value


def _plain_state(state: Any) -> Any:
    """A scheduler's or a group's state without its functions: a checkpoint cannot hold them, and the run that resumes
    has made them again with the scheduler."""
    if isinstance(state, dict):
        return {k: _plain_state(v) for k, v in state.items() if not _has_functions(v)}
    return [_plain_state(v) for v in state] if isinstance(state, list) else state


def _has_functions(value: Any) -> bool:
    return callable(value) or (isinstance(value, list | tuple) and any(map(callable, value)))
