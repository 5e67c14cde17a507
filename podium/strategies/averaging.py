"""Averaging replicas that trained alone: their parameters, and their optimizers' moments.

Each worker sends its drift (its parameters minus the anchor, on which all last agreed), times its part of the round's
samples. The sum over the workers is the mean drift. So a parameter that no worker moved keeps its bits, and any codec
may pack drifts: a residual is sent with the next drift. The run's codec and collective treat drifts like gradients.

Nothing here changes a parameter before all exchanges have succeeded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from podium.comm.broadcast_bytes import share_bytes
from podium.engine.files import bytes_to_tree, tree_to_bytes
from podium.engine.worker import Worker
from podium.errors import ConfigError
from podium.exchange.codecs.base import StepContext


class Anchor:
    """The parameters on which all workers last agreed, and how they agree on the next."""

    def __init__(self, worker: Worker, who: str, flats: list[Tensor] | None = None) -> None:
        """`flats`: where drifts are measured from; the present parameters when not given."""
        need_plain_codec(worker, who)
        self.flats = [flat.clone() for flat in worker.params] if flats is None else flats
        """Laid out as the parameters are."""
        self.position = worker.position
        """The sample position at which the workers agreed on it."""
        self.weight: float | None = None
        """This worker's part of the last round; None before the first is over."""

    def part_of(self, worker: Worker) -> float:
        """This worker's part of the samples since the anchor was set; 0 where it had none."""
        return worker.round.samples / max(1, worker.position - self.position)

    def drift(self, worker: Worker) -> list[Tensor]:
        """The workers' mean drift, weighted by samples. Collective, and ends the round.

        The result lies in the worker's gradient buffers, so it lasts until the next step. The caller moves the anchor.
        """
        sender, context, weight = worker.sender, round_context(worker), self.part_of(worker)
        drifts = [grad[: flat.numel()] for grad, flat in zip(worker.flat.grads, self.flats, strict=True)]
        for drift, param, anchor in zip(drifts, worker.params, self.flats, strict=True):
            torch.sub(param, anchor, out=drift).mul_(weight)
        for bucket in range(worker.buckets):
            sender.issue(bucket, context)
        worker.end_round()
        sender.complete(context)
        sender.step_done()
        worker.comm.clock.touch(worker.flat.nbytes)
        self.position, self.weight = worker.position, weight
        return drifts

    def to_mean(self, worker: Worker) -> None:
        """Set anchor and parameters to the mean of the workers' parameters. Collective, and ends the round."""
        if worker.comm.size == 1 and not worker.sender.memory.of_span:
            self.weight, self.position = 1.0, worker.position
            return worker.end_round()  # the mean of one is itself, in bits
        for anchor, drift in zip(self.flats, self.drift(worker), strict=True):
            anchor += drift
        self.pull_here(worker)

    def pull_here(self, worker: Worker) -> None:
        """Copy the anchor into the parameters."""
        for param, anchor in zip(worker.params, self.flats, strict=True):
            param.copy_(anchor)


def need_plain_codec(worker: Worker, who: str) -> None:
    """Refuse a codec that can pack only gradients."""
    codec = worker.sender.packing.codec
    if codec.takes_momentum:
        raise ConfigError(
            f"{who}: codec {codec.name} applies the optimizer's momentum, but no gradients are sent; use top-k"
        )


def need_dense(worker: Worker, who: str) -> None:
    """Refuse a codec where workers send parameters as they are."""
    codec = worker.sender.packing.codec
    if codec.name != "dense":
        raise ConfigError(
            f"{who}: workers send each other parameters as they are: codec must be dense, got {codec.name}"
        )


def round_context(worker: Worker) -> StepContext:
    """The context of a round's exchange for a codec: by global step, since workers may have taken unequal numbers."""
    return worker.context._replace(step=worker.progress.global_step)


def average(worker: Worker, samples: int, flats: Sequence[Tensor] = ()) -> None:
    """Make replicas equal after each worker has trained on `samples` of its own since `init`. Collective.

    Moments become their mean weighted by samples; parameters become the plain mean of `flats`, where given.
    """
    comm = worker.comm
    if comm.size == 1:
        return
    total = torch.tensor([samples], dtype=torch.float64)
    comm.wait(comm.all_reduce(total), *map(worker.sender.all_reduce, flats))
    for mine, flat in zip(worker.params, flats, strict=bool(flats)):
        torch.div(flat, comm.size, out=mine)
    mean_moments(worker, samples / total.item() if total.item() else 1 / comm.size)


def mean_moments(worker: Worker, weight: float) -> None:
    """Average the optimizers' moments and step counts over the workers, by these weights. Collective.

    The moments of a parameter that a worker has never stepped count as zero.
    """
    if worker.comm.size == 1:
        return
    _complete_state(worker)
    moments, counts = worker.replica.moments(), _counts(worker)
    kinds = sorted({(str(m.dtype), str(m.device)) for m in moments})
    parts = [[m for m in moments if (str(m.dtype), str(m.device)) == kind] for kind in kinds]
    sums = [joined([m * weight for m in part]) for part in parts]
    # One extra number, so that the tensor is never empty.
    told = torch.tensor([*(float(state[key]) for _, state, key in counts), 0.0], dtype=torch.float64) * weight
    worker.comm.wait(worker.comm.all_reduce(told), *map(worker.sender.all_reduce, sums))
    for flat, part in zip(sums, parts, strict=True):
        part_again(flat, part)
        worker.comm.clock.touch(flat.nbytes)
    _set_counts(worker, counts, told.tolist())


def _counts(worker: Worker) -> list[tuple[int, dict[str, Any], str]]:
    """Single numbers in the optimizer's state, such as a parameter's step count: (piece, state, key)."""
    states = [(i, worker.optimizer.state.get(p, {})) for i, p in enumerate(worker.flat.parameters)]
    found = [(i, state, key) for i, state in states for key in sorted(state)]
    return [(i, s, k) for i, s, k in found if k == "step" or (isinstance(s[k], Tensor) and s[k].dim() == 0)]


def _set_counts(worker: Worker, counts: Sequence[tuple[int, dict[str, Any], str]], means: Sequence[float]) -> None:
    """Write the mean step counts; only where they differ, since the optimizer must then reload its state."""
    new = [round(mean) if key == "step" else mean for (_, _, key), mean in zip(counts, means, strict=False)]
    # A zero-dimensional parameter has zero-dimensional moments, which look like counts: they are set here, in place.
    if all(key != "step" or float(state[key]) == mean for (_, state, key), mean in zip(counts, new, strict=True)):
        for (_, state, key), mean in zip(counts, new, strict=True):
            if key != "step":
                state[key].fill_(mean)
        return
    states = worker.state()["optimizer"]
    for (i, _, key), mean in zip(counts, new, strict=True):
        value = states[worker.flat.pieces[i].name][key]
        states[worker.flat.pieces[i].name][key] = value.fill_(mean) if isinstance(value, Tensor) else type(value)(mean)
    worker.replica.load_optimizer_state(states)


def _complete_state(worker: Worker) -> None:
    """Give workers that never stepped a parameter a zero state of the same form as on other workers. Collective."""
    comm, pieces = worker.comm, worker.flat.pieces
    mine = torch.tensor([float(bool(worker.optimizer.state.get(p))) for p in worker.flat.parameters])
    has = torch.empty((comm.size, mine.numel()))
    comm.wait(comm.all_gather(mine, has.view(-1)))
    givers: dict[int, list[int]] = {}  # the first worker that has a state -> pieces whose state other workers lack
    for i in range(len(pieces)):
        if 0 < has[:, i].sum() < comm.size:
            givers.setdefault(int(has[:, i].argmax()), []).append(i)
    if not givers:
        return
    states = worker.state()["optimizer"]
    for place, lacking in givers.items():
        names = [pieces[i].name for i in lacking]
        told = tree_to_bytes({name: states[name] for name in names}) if place == comm.index else b""
        given = bytes_to_tree(share_bytes(comm, comm.workers[place], told), f"state of rank {comm.workers[place]}")
        for name in names:
            shape = dict(worker.model.named_parameters())[name].shape
            states.setdefault(name, {k: _unstepped(k, v, shape, worker.replica.device) for k, v in given[name].items()})
    worker.replica.load_optimizer_state(
        {name: states[name] for name in (piece.name for piece in pieces) if name in states}
    )


def _unstepped(key: str, value: Any, shape: torch.Size, device: torch.device) -> Any:
    """A parameter's state before its first step, made from its state on another worker."""
    if not isinstance(value, Tensor):
        return value
    value = value.to(device) if value.dim() > 0 else value
    return torch.zeros_like(value) if key == "step" or value.shape == shape else value


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """All tensors as one flat tensor, so that they are sent together."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def part_again(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """The inverse of `joined`: copy back into the tensors."""
    for part, tensor in zip(flat.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        tensor.copy_(part.view_as(tensor))
