"""Checks in every step, between forward and backward, what the model and the loop did to parameters and optimizer.

    a parameter left its flat buffer      its values are copied back, and it is made a view of the buffer again
    a parameter became trainable          refused: the flat buffers have no place for its gradient
    a parameter was frozen                followed: it gets no gradient, and no step
    a parameter was replaced or added     refused: the optimizer holds another one
    the optimizer's groups changed        refused
    values changed, servers hold them     refused: the servers' next answer would undo it
    values differ between workers         refused: all workers take the same steps, so the difference would stay

The parameters of all modules are compared by identity with those that training began with, their storages by address.
That takes 5 µs per step for two linear layers and 140 µs for 53 convolutions with BatchNorm (212 parameters), 2 % of
the smallest pass through them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from podium.comm.base import Communicator
from podium.engine.bits import bits_added_up
from podium.engine.flat import Flat
from podium.engine.optim import refuse_step_hooks
from podium.errors import TrainingError

_requires_grad, _version, _values = attrgetter("requires_grad"), attrgetter("_version"), methodcaller("values")


class StepCheck:
    """Watches one worker's model and optimizer."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, flat: Flat) -> None:
        self._model, self._optimizer, self._flat = model, optimizer, flat
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._strides = [piece.stride for piece in flat.pieces]
        self.served = False
        """Whether servers hold parameters and moments, so that a change made here would be lost."""
        self._state: tuple[Any, list[Any]] = (None, [])
        self._steps_served = 0
        self._versions: list[int] = []
        self._sums: list[int] | None = None
        self._note_structure()

    def _note_structure(self) -> None:
        """Remember which parameters and modules each module has."""
        self._holders: list[Any] = [each for m in self._model.modules() for each in (m._parameters, m._modules)]
        self._held = list(chain.from_iterable(map(_values, self._holders)))
        trained = set(map(id, self._flat.parameters))
        self._frozen = [p for p in self._model.parameters() if id(p) not in trained and p.numel()]

    # In every step.

    def after_forward(self) -> None:
        """Follow or refuse the changes that the model, its hooks and the user's loop made since the last step."""
        if not self._has_same_structure():
            self._refuse_other_parameters()
            self._note_structure()
        if any(map(_requires_grad, self._frozen)):
            self._refuse_unfrozen()
        if not self._has_same_groups():
            self._refuse_other_groups()
        if self.served:
            refuse_step_hooks(self._optimizer, "parameter-server")
            self._refuse_other_state()
        if list(map(Tensor.stride, self._flat.parameters)) != self._strides:
            self._flat.follow(may_change=not self.served)
        self.follow_storages()
        if self.served:
            self._refuse_changed_values()

    def follow_storages(self) -> None:
        if not self._flat.holds_all():
            self._flat.follow(may_change=not self.served)

    def after_backward(self) -> None:
        """Refuse a storage that changed during backward: a server's answer may have overwritten the flat buffer."""
        if self.served and not self._flat.holds_all():
            raise TrainingError(
                f"parameter {self._flat.left()} got another storage (p.data = …) in the backward pass, and servers "
                "hold the parameters; change it elsewhere, or use a strategy without servers, such as all-reduce"
            )

    def after_validation(self) -> None:
        """Accept what a validation did to parameters: new storages, values changed and changed back."""
        self.follow_storages()
        self._versions = list(map(_version, self._flat.parameters))

    def compare(self, comm: Communicator, step: int) -> None:
        """Raise where workers that take the same steps hold different parameters. Collective.

        Reads all parameters, so it is done in steps 1, 2, 4, 8 and so on, and in every 256th; where time is simulated,
        only in the first, in which workers wait for each other anyway. A difference in the last bits does not count:
        hosts of different kinds round differently.
        """
        rare = step == 1 if comm.clock.is_simulated else not step & (step - 1) or step % 256 == 0
        if comm.size == 1 or not rare:
            return
        rows = comm.gather_aside(torch.tensor(self._added_up(), dtype=torch.int64))
        if (rows == rows[0]).all():
            return
        facts = torch.stack([_summary(p) for p in self._flat.parameters])
        rows = comm.gather_aside(facts.reshape(-1)).view(comm.size, -1, 3)
        apart = ((rows - rows[0]).abs() > 1e-4 * rows[:, :, :1].abs().amax(dim=0)).any(dim=2)
        if apart.any():
            place, number = apart.nonzero()[0].tolist()
            raise TrainingError(
                f"parameter {self._flat.pieces[number].name} is not the same on rank {comm.workers[0]} and rank "
                f"{comm.workers[place]} in step {step}: the model or the training loop changed it by what one worker "
                "alone has seen or drawn; change it alike on all workers, before training begins, or use a buffer, "
                "which workers average"
            )

    # Where servers hold the parameters.

    def servers_begin(self) -> None:
        """From here until `servers_end`, the servers hold the parameters and the optimizer's state."""
        self.served = True
        self._state = (self._optimizer.state, list(self._optimizer.state.values()))
        self.parameters_came()

    def servers_end(self) -> None:
        """The worker holds the parameters and the optimizer's state again."""
        self.served = False

    def parameters_came(self) -> None:
        """The servers' parameters have arrived: from here on neither model nor loop may change them.

        PyTorch's version counter counts changes of a parameter, but not those through `p.data`; for these the bits are
        summed, which reads all parameters, so this is done after steps 1, 2, 4, 8 and so on.
        """
        self._versions = list(map(_version, self._flat.parameters))
        self._steps_served += 1
        rare = self._steps_served & (self._steps_served - 1) == 0
        self._sums = self._added_up() if rare else None

    def _refuse_other_state(self) -> None:
        state, each = self._state
        now = self._optimizer.state
        if now is not state or len(now) != len(each) or not all(map(is_, now.values(), each)):
            raise TrainingError(
                "the optimizer's state was replaced (load_state_dict?) while servers hold it, and would not be used; "
                "replace it before training begins, or use a strategy without servers, such as all-reduce"
            )

    def _refuse_changed_values(self) -> None:
        changed: Sequence[str] = ()
        if list(map(_version, self._flat.parameters)) != self._versions:
            both = zip(self._flat.pieces, self._flat.parameters, self._versions, strict=True)
            changed = [piece.name for piece, p, before in both if p._version != before]
        elif self._sums is not None:
            sums = zip(self._flat.pieces, self._added_up(), self._sums, strict=True)
            changed = [piece.name for piece, now, before in sums if now != before]
        self._sums = None
        if changed:
            raise TrainingError(
                f"parameter {changed[-1]} was changed by the model or the training loop, and servers hold the "
                "parameters: their next answer would undo it; use a strategy without servers, such as all-reduce"
            )

    def _added_up(self) -> list[int]:
        return list(map(bits_added_up, self._flat.parameters))

    # Inside.

    def _has_same_structure(self) -> bool:
        now = list(chain.from_iterable(map(_values, self._holders)))
        return len(now) == len(self._held) and all(map(is_, now, self._held))

    def _refuse_other_parameters(self) -> None:
        named: dict[str, Any] = dict(self._model.named_parameters())
        expected = {piece.name: p for piece, p in zip(self._flat.pieces, self._flat.parameters, strict=True)}
        for name, p in expected.items():
            if named.get(name) is not p:
                what = "was replaced by another object" if name in named else "is gone"
                raise TrainingError(
                    f"parameter {name} {what} after training began, and the optimizer still holds the one before; "
                    "change its values in place, under torch.no_grad()"
                )
        for name, p in named.items():
            if name not in expected and p.requires_grad and p.numel():
                raise TrainingError(
                    f"parameter {name} was added after training began; register all parameters before that"
                )

    def _refuse_unfrozen(self) -> None:
        name = next(
            name for name, p in self._model.named_parameters() if any(p is q for q in self._frozen) and p.requires_grad
        )
        raise TrainingError(
            f"parameter {name} was frozen when training began and now requires a gradient; let it require one from "
            "the beginning and freeze it afterwards, before the first step: freezing and unfreezing are then followed"
        )

    def _has_same_groups(self) -> bool:
        groups = self._optimizer.param_groups
        if len(groups) != len(self._groups):
            return False
        both = [(group["params"], then) for group, then in zip(groups, self._groups, strict=True)]
        return all(len(now) == len(then) and all(map(is_, now, then)) for now, then in both)

    def _refuse_other_groups(self) -> None:
        before, now = len(self._groups), len(self._optimizer.param_groups)
        raise TrainingError(
            f"the optimizer's parameter groups changed after training began (there were {before}, now {now}, or one "
            "holds other parameters); make all groups before training begins"
        )


def _summary(p: Tensor) -> Tensor:
    """Three sums that tell parameters apart: of absolute values, of values, and of values weighted by index."""
    flat = p.detach().reshape(-1).to(torch.float64).cpu()
    return torch.stack([flat.abs().sum(), flat.sum(), flat @ torch.linspace(-1, 1, flat.numel(), dtype=torch.float64)])
