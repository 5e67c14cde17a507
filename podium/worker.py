"""A worker: one replica of the model, and the only hand that touches its gradients and parameters.

A strategy asks it for gradients (`backward`), exchanges them, and lets it move the parameters (`apply`). Gradients are
weighted by samples, not by ranks: each worker scales its own by its part of the global step, so that a plain sum over
the workers is the gradient of the whole step, however unevenly it was divided.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from podium.comm.base import Communicator
from podium.data.order import Slice
from podium.errors import TrainingError
from podium.flat import Flat
from podium.optim import FlatOptimizer


class Batch(NamedTuple):
    """One worker's part of a step."""

    inputs: Any
    targets: Any
    samples: int
    weight: float  # this part's share of the step's samples
    piece: Slice = Slice(0, 0, 0, 0)  # where in the global order it lies
    end: int = 0  # the position once the whole step is done
    lease: int = -1  # names the slice when it was leased from a cursor
    closure: Callable[[], Tensor] | None = None  # the user's own forward pass, in place of model and loss

    def split(self, parts: int) -> list[Batch]:
        """Micro-batches whose weights add up to this one's."""
        if parts == 1 or self.samples < 2 or self.closure is not None:
            return [self]
        cuts = [self.samples * i // parts for i in range(parts + 1)]
        return [
            self._replace(
                inputs=_rows(self.inputs, a, b),
                targets=_rows(self.targets, a, b),
                samples=b - a,
                weight=self.weight * ((b - a) / self.samples),
            )
            for a, b in itertools.pairwise(cuts)
            if b > a
        ]


class Worker:
    """One replica, its optimizer and its communicator."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        comm: Communicator,
        *,
        loss: Callable[[Any, Any], Tensor],
        schedule: LRScheduler | None = None,
        bucket_bytes: int = 8 << 20,
        clip_norm: float | None = None,
        accumulate: int = 1,
        autocast: str = "off",
        dynamic_graph: bool = False,
    ) -> None:
        """Moves the model's parameters into flat buffers; cast and move the model before, not after."""
        self.model, self.optimizer, self.comm, self.schedule = model, optimizer, comm, schedule
        self.loss, self.clip_norm, self.accumulate = loss, clip_norm, accumulate
        self.dynamic_graph = dynamic_graph
        self.flat = Flat(model, optimizer, bucket_bytes)
        self.steps_done = 0
        self.position = 0
        """Samples of the global order that the parameters have seen."""
        self.horizon = 0
        """Where in the order the present stretch of training ends."""
        self.samples = 0
        """Samples in the training data."""
        self.batch_size = 0
        """Samples per global step."""
        self.stop_requested = False
        """This worker wants the run to end; it says so with its next exchange."""
        self.stop_agreed = False
        """The workers agreed to end the run after the step that set this."""
        self.step_loss: float | None = None
        """Mean loss over the whole of the last synchronous step, from all workers."""
        self.rng: Tensor | None = None
        """Where ranks share a process: this worker's state of torch's generator."""
        self._autocast = autocast
        self._fast = FlatOptimizer(optimizer, self.flat.parameters, self.flat.pieces, self.flat.params, self.flat.grads)
        self._used_anywhere: list[bool] | None = None
        self._backward = _Backward(self)
        self._buffers = [b for b in model.buffers() if b.is_floating_point()]
        self._before: tuple[Tensor, list[Tensor]] | None = None

    # What strategies use.

    @property
    def params(self) -> list[Tensor]:
        """The flat parameter buffers, one per dtype."""
        return self.flat.params

    @property
    def buckets(self) -> int:
        """How many buckets the gradients travel in."""
        return len(self.flat.buckets)

    def bucket(self, index: int) -> Tensor:
        """The gradients of one bucket, as one flat tensor; reduce it in place."""
        return self.flat.bucket(index)

    def backward(self, batch: Batch, on_ready: Callable[[int], None] | None = None) -> Tensor:
        """Weighted gradients of this batch into the buckets; returns its mean loss.

        `on_ready(b)` is called once per bucket, in index order, as soon as its gradients are there: it may issue an
        exchange and must not wait. A worker without samples contributes zeros.
        """
        return self._backward.run(batch, on_ready or _ignore)

    def apply(self, batch: Batch) -> None:
        """Move the parameters by the reduced gradients: the one place where a synchronous step becomes true."""
        used = self._agree_on_used()
        self._read_tail()
        self._move(used, batch)

    def train_locally(self, batch: Batch) -> Tensor:
        """One step by this worker's own gradient, over its own samples; nobody else takes part."""
        loss = self.backward(batch._replace(weight=1.0))
        self._move(self._backward.used, batch)
        return loss

    def agree_to_stop(self) -> None:
        """Put the workers' wishes to stop together, where no reduced gradient carries them. Collective."""
        votes = torch.tensor([float(self.stop_requested)])
        self.comm.wait(self.comm.all_reduce(votes))
        self.stop_agreed = bool(votes > 0)

    def _move(self, used: Sequence[bool], batch: Batch) -> None:
        for p, view, is_used in zip(self.flat.parameters, self.flat.views, used, strict=True):
            p.grad = view if is_used else None
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.flat.parameters[::-1], self.clip_norm)
        self._fast.step(all_used=all(used))
        self.comm.clock.touch(self.flat.nbytes)
        self.advance(batch)

    def advance(self, batch: Batch) -> None:
        """A step became true: count it and move on in the order; in synchronous training the schedule follows."""
        self.steps_done += 1
        self.position = max(self.position, batch.end)
        if batch.lease < 0:
            self.step_schedule()

    def step_schedule(self) -> None:
        if self.schedule is not None:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a server may have stepped in its place
            self.schedule.step()

    def clip_own(self) -> None:
        """Clip this worker's own gradient, where each is a step of its own."""
        assert self.clip_norm is not None
        nn.utils.clip_grad_norm_(self.flat.parameters[::-1], self.clip_norm)

    def unused(self) -> list[int]:
        """Pieces that the last backward of this worker did not reach."""
        return [i for i, fired in enumerate(self._backward.used) if not fired]

    # What the training loop uses.

    def remember(self) -> None:
        """Keep what a step changes besides parameters, so that a failed step leaves no trace."""
        buffers = [b.clone() for b in self.model.buffers()]
        self._before = (torch.get_rng_state() if self.rng is None else self.rng, buffers)

    def forget_step(self) -> None:
        """The step in flight did not happen: generator and buffers go back to where it began."""
        assert self._before is not None
        rng, buffers = self._before
        if self.rng is None:
            torch.set_rng_state(rng)
        else:
            self.rng = rng
        for buffer, kept in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(kept)

    def forget_agreements(self) -> None:
        """What the workers once agreed on for good they must agree on anew: some may have been in mid-agreement."""
        self._used_anywhere = None

    def mean_buffers(self) -> None:
        """Average floating-point buffers over the workers. Collective."""
        if self._buffers and self.comm.size > 1:
            joined = torch.cat([b.reshape(-1).to(torch.float64) for b in self._buffers]) / self.comm.size
            self.comm.wait(self.comm.all_reduce(joined))
            self._scatter_buffers(joined)

    def broadcast_buffers(self) -> None:
        """Take the first worker's floating-point buffers. Collective."""
        if self._buffers and self.comm.size > 1:
            joined = torch.cat([b.reshape(-1).to(torch.float64) for b in self._buffers])
            self.comm.wait(self.comm.broadcast(joined, self.comm.workers[0]))
            self._scatter_buffers(joined)

    def param_hash(self) -> str:
        """Hash of the parameters by name, whatever their layout."""
        digest = hashlib.sha256()
        for name, p in self.model.named_parameters():
            digest.update(name.encode())
            digest.update(p.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    def computing(self) -> AbstractContextManager[None]:
        """Around forward and backward: this worker's generator, and alone where ranks share a process."""
        return _Computing(self) if self.comm.shares_process else nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        if self._autocast == "off":
            return nullcontext()
        return torch.autocast(self.flat.params[0].device.type, dtype=torch.bfloat16)

    # State by name.

    def state(self) -> dict[str, Any]:
        """All that a checkpoint keeps of this worker: clones, by name."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        return {
            "model": {k: v.detach().clone() for k, v in self.model.state_dict().items()},
            "optimizer_class": type(self.optimizer).__name__,
            "optimizer": {names[id(p)]: _cloned(s) for p, s in self.optimizer.state.items()},
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups],
            "schedule": None if self.schedule is None else _plain_state(self.schedule.state_dict()),
            "steps_done": self.steps_done,
            "position": self.position,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Become what `state` says; the inverse of `state`."""
        if state["optimizer_class"] != type(self.optimizer).__name__:
            raise ValueError(f"state of {state['optimizer_class']} cannot go on in {type(self.optimizer).__name__}")
        self.model.load_state_dict(state["model"])
        self.load_optimizer_state(state["optimizer"])
        for group, kept in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update(kept)
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        self.steps_done, self.position = state["steps_done"], state["position"]
        self.flat.check()

    def load_optimizer_state(self, by_name: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the optimizer's state, parameter by parameter."""
        params = dict(self.model.named_parameters())
        self.optimizer.state.clear()
        for name, kept in by_name.items():
            self.optimizer.state[params[name]] = _cloned(kept)
        self._fast.reload()

    # Inside.

    def _agree_on_used(self) -> Sequence[bool]:
        """Which parameters any worker used. Collective in the first step, and in each where the graph may change."""
        if self._used_anywhere is None or self.dynamic_graph:
            mask = torch.tensor(self._backward.used, dtype=torch.float32)
            if self.comm.size > 1:
                self.comm.wait(self.comm.all_reduce(mask))
            self._used_anywhere = [count > 0 for count in mask.tolist()]
        return self._used_anywhere

    def _read_tail(self) -> None:
        votes, loss = self.flat.tail.tolist()
        self.stop_agreed = self.stop_agreed or votes > 0
        self.step_loss = loss

    def _scatter_buffers(self, joined: Tensor) -> None:
        for buffer, part in zip(self._buffers, joined.split([b.numel() for b in self._buffers]), strict=True):
            buffer.copy_(part.view_as(buffer))


class _Backward:
    """One forward and backward pass: gradients land in the buckets, and buckets are announced in order."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        flat = self.flat = worker.flat
        self.used = [False] * len(flat.pieces)
        self._fired = [False] * len(flat.pieces)
        self._missing = [len(b.pieces) for b in flat.buckets]
        self._next = 0
        self._on_ready: Callable[[int], None] | None = None
        total = sum(b.nbytes for b in flat.buckets)
        done = 0
        self._fraction: list[float] = []
        for bucket in flat.buckets:
            done += bucket.nbytes
            self._fraction.append(done / total)
        for i, p in enumerate(flat.parameters):
            p.register_post_accumulate_grad_hook(self._hook(i))

    def run(self, batch: Batch, on_ready: Callable[[int], None]) -> Tensor:
        worker = self.worker
        self.used = [False] * len(self.used)
        self._missing = [len(b.pieces) for b in self.flat.buckets]
        self._next = 0
        for p in self.flat.parameters:
            p.grad = None
        loss = torch.zeros(())
        parts = batch.split(worker.accumulate) if batch.samples else []
        for part in parts:
            self._fired = [False] * len(self._fired)
            self._on_ready = on_ready if part is parts[-1] else None
            worker.comm.clock.begin_pass(part.samples)
            mean = self._pass(part)
            worker.comm.clock.reach(1.0)
            loss = loss + mean.detach().cpu() * (part.samples / batch.samples)
        self._flush(on_ready, float(loss) * batch.weight)
        return loss

    def _pass(self, part: Batch) -> Tensor:
        worker = self.worker
        with worker.computing():
            with worker.autocast():
                loss = (
                    part.closure() if part.closure is not None else worker.loss(worker.model(part.inputs), part.targets)
                )
            worker.comm.in_backward = True
            try:
                loss.backward(torch.full_like(loss, part.weight))
            finally:
                worker.comm.in_backward = False
        return loss

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        view, bucket = self.flat.views[i], self.flat.bucket_of[i]

        def landed(p: Tensor) -> None:
            if self._fired[i]:
                raise TrainingError(
                    f"parameter {self.flat.pieces[i].name} got its gradient twice in one backward pass "
                    "(a module used twice under re-entrant checkpointing?): use non-re-entrant checkpointing"
                )
            self._fired[i] = True
            if p.grad is not view:
                assert p.grad is not None
                view.copy_(p.grad.to_dense() if p.grad.is_sparse else p.grad)
                p.grad = view
            self.used[i] = True
            if self._on_ready is not None:
                self._missing[bucket] -= 1
                self._announce(self._on_ready, keep=1)

        return landed

    def _announce(self, on_ready: Callable[[int], None], keep: int) -> None:
        """Announce complete buckets in index order; the last `keep` wait for the end: the tail travels with them."""
        while self._next < len(self._missing) - keep and self._missing[self._next] == 0:
            self.worker.comm.clock.reach(self._fraction[self._next])
            on_ready(self._next)
            self._next += 1

    def _flush(self, on_ready: Callable[[int], None], weighted_loss: float) -> None:
        """What no gradient reached holds zeros; the tail is written; the rest is announced."""
        for view, used in zip(self.flat.views, self.used, strict=True):
            if not used:
                view.zero_()
        self.flat.tail.copy_(torch.tensor([float(self.worker.stop_requested), weighted_loss]))
        self._missing = [0] * len(self._missing)
        self._announce(on_ready, keep=0)


class _Computing:
    """This worker's generator in place of the global one, and the compute lock of its world."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._lock = worker.comm.computing()
        self._outer: Tensor | None = None

    def __enter__(self) -> None:
        self._lock.__enter__()
        self._outer = torch.get_rng_state()
        assert self.worker.rng is not None
        torch.set_rng_state(self.worker.rng)

    def __exit__(self, *error: Any) -> None:
        self.worker.rng = torch.get_rng_state()
        assert self._outer is not None
        torch.set_rng_state(self._outer)
        self._lock.__exit__(*error)


def _ignore(_bucket: int) -> None:
    pass


def _rows(value: Any, start: int, stop: int) -> Any:
    """Rows of every tensor in a nest of tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return value[start:stop]
    if isinstance(value, dict):
        return {k: _rows(v, start, stop) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_rows(v, start, stop) for v in value)
    return value


def _cloned(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone() if isinstance(v, Tensor) else v for k, v in state.items()}


def _plain_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """A scheduler's state without the functions in it, which a checkpoint cannot hold."""
    return {k: v for k, v in state.items() if not callable(v) and not (isinstance(v, list) and any(map(callable, v)))}
