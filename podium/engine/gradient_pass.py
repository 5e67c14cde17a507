"""One forward and backward pass: gradients land in the buckets, and full buckets are announced in order.

Autograd allocates each gradient; a hook copies it into its place in the flat buffer at once and frees the original.
Reducing a bucket may start while autograd still computes the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from podium.comm.base import Communicator
from podium.engine.batch import Batch
from podium.engine.buffers import Buffers
from podium.engine.generators import WorkerGenerators
from podium.engine.pass_times import PassTimes
from podium.engine.replica import Replica
from podium.engine.votes import Votes
from podium.errors import ConfigError, TrainingError
from podium.records.noise import NoiseMeter


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """How a batch becomes a loss."""

    loss: Callable[[Any, Any], Tensor]
    """(outputs, targets) to the mean loss."""
    weigh: Callable[[Any], float] | None = None
    """(targets) to the weight of a batch's mean loss; None: its number of samples."""
    accumulate: int = 1
    """Micro-batches that a batch is cut into."""
    autocast: str = "off"
    """`off`, or `bf16`."""


class UsedParameters:
    """Which parameters got a gradient on any worker: the other parameters get no step, as in plain PyTorch."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._anywhere: list[bool] | None = None
        self._own: list[bool] = []  # by this worker, when all last agreed

    def has_changed(self, used: Sequence[bool]) -> bool:
        """Whether this worker's last pass used other parameters than when all last agreed."""
        return self._anywhere is not None and used != self._own

    def agree(self, used: Sequence[bool], *, changed: bool) -> Sequence[bool]:
        """Those that any worker used. Collective in the first step, and where `changed`, which all read in the tail."""
        if self._anywhere is None or changed or self._comm.size == 1:
            self._own = list(used)
            mask = torch.tensor(self._own, dtype=torch.float32)
            if self._comm.size > 1:
                self._comm.wait(self._comm.all_reduce(mask))
            self._anywhere = [count > 0 for count in mask.tolist()]
        return self._anywhere

    def forget(self) -> None:
        self._anywhere = None


class GradientPass:
    """Forward and backward passes of one worker: gradients land in the buckets, and buckets are announced in order."""

    def __init__(
        self,
        replica: Replica,
        comm: Communicator,
        options: PassOptions,
        *,
        generators: WorkerGenerators,
        buffers: Buffers,
        votes: Votes,
    ) -> None:
        self.options, self.times = options, PassTimes()
        self.loss = options.loss
        self.noise: NoiseMeter | None = None
        """Measures the gradient noise scale, where a trigger needs it."""
        self._replica, self._comm, self._generators, self._buffers, self._votes = (
            replica,
            comm,
            generators,
            buffers,
            votes,
        )
        flat = self._flat = replica.flat
        self.used = [False] * len(flat.pieces)
        """Which parameters got a gradient in the last pass."""
        self._used_anywhere = UsedParameters(comm)
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
            _own_hook(p, self._hook(i))

    def use_loss(self, loss: Callable[[Any, Any], Tensor]) -> None:
        self.loss = loss

    def measure_noise(self, wanted: bool) -> None:
        """Start or stop to measure the gradient noise scale."""
        self.noise = NoiseMeter() if wanted else None

    def forget_step(self) -> None:
        """The step under way is undone."""
        if self.noise is not None:
            self.noise.forget()

    def forget_agreement(self) -> None:
        """After a loss the workers must agree again on which parameters are used."""
        self._used_anywhere.forget()

    def agree_on_used(self, *, changed: bool) -> Sequence[bool]:
        """Which parameters any worker used in this step; `changed`: according to the tail, some worker's changed."""
        return self._used_anywhere.agree(self.used, changed=changed)

    def unused_among(self, pieces: Iterable[int], *, exact: bool) -> list[int]:
        """Those of these pieces that got no gradient in the last pass.

        Where the codec is not `exact`, such a piece may still receive its residual, unless its parameter is frozen.
        """
        unused = [i for i in pieces if not self.used[i]]
        return unused if exact else [i for i in unused if not self._flat.parameters[i].requires_grad]

    def run(self, batch: Batch, on_ready: Callable[[int], None] | None) -> Tensor:
        """See `Worker.backward`."""
        clock, waited = self._comm.clock, self._comm.waited_ns
        began = clock.now_ns()
        means = self._passes(batch, on_ready or _ignore)
        loss = torch.zeros(())
        for part, mean in means:
            loss = loss + mean * _part_of(part, batch, weighed=self.options.weigh is not None)
        self._flush(on_ready or _ignore, batch.samples, float(loss) * batch.weight)
        waited = self._comm.waited_ns - waited  # for micro-batches that it drew
        self.times.record(clock.now_ns() - began - waited, sum(part.samples for part, _ in means))
        return loss

    def _passes(self, batch: Batch, on_ready: Callable[[int], None]) -> list[tuple[Batch, Tensor]]:
        """Run a pass over each micro-batch; returns each with its mean loss."""
        clock = self._comm.clock
        self.used = [False] * len(self.used)
        self._missing = [len(b.pieces) for b in self._flat.buckets]
        self._next = 0
        for i, p in enumerate(self._flat.parameters):
            p.grad = None
            if len(p._post_accumulate_grad_hooks) > 1:
                self._be_last(i, p)
        means: list[tuple[Batch, Tensor]] = []
        for part, is_last in self._parts(batch):
            self._fired = [False] * len(self._fired)
            self._on_ready = on_ready if is_last else None
            clock.begin_pass(part.samples)
            mean = self._pass(part)
            clock.reach(1.0)
            means.append((part, mean.detach().cpu()))  # waits for the GPU, or its worker would draw too many
        if not means:  # no forward pass has checked the storages, and parameters may arrive from servers
            self._replica.step_check.follow_storages()
        return means

    def _parts(self, batch: Batch) -> Iterator[tuple[Batch, bool]]:
        """The micro-batches, each with whether it is known to be the last.

        A micro-batch is drawn when the pass over the one before it is done, not earlier: a slow worker that holds a
        second micro-batch delays the other workers at the end of the step by more than it gains by knowing which is its
        last. So only the worker with the step's last samples sends buckets while backward still runs.
        """
        if batch.draws is None:
            weigh = self.options.weigh
            parts = batch.split(self.options.accumulate, weigh) if batch.samples else []
            if weigh is not None and batch.closure is None:  # a mean over nothing is NaN
                parts = [part for part in parts if weigh(part.targets) > 0]
            for part in parts:
                yield part, part is parts[-1]
            return
        while (drawn := batch.draws.next()) is not None:
            yield drawn, drawn.slice.position + drawn.slice.count == batch.end

    def _pass(self, part: Batch) -> Tensor:
        check, model = self._replica.step_check, self._replica.model
        with self._generators.computing():
            with self._autocast():
                loss = part.closure() if part.closure is not None else self.loss(model(part.inputs), part.targets)
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                came = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise ConfigError(f"the loss must be one number per batch, a tensor of shape (), got {came}")
            check.after_forward()
            with self._comm.backward_pass():
                loss.backward(torch.full_like(loss, part.weight))
            check.after_backward()
        return loss

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.options.autocast == "off":
            return nullcontext()
        return torch.autocast(self._replica.device.type, dtype=torch.bfloat16)

    def _be_last(self, i: int, p: nn.Parameter) -> None:
        """A hook that the user added later must run before ours, or the exchange would miss its changes."""
        held: dict[int, object] = p._post_accumulate_grad_hooks  # torch has no public way to read them
        if next(reversed(held)) != p._podium_hook.id:  # type: ignore[attr-defined]  # ours
            _own_hook(p, self._hook(i))

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        # Python's garbage collector does not see a parameter's hooks. If this hook held the worker, which holds the
        # parameter, no model would ever be freed.
        back = weakref.ref(self)

        def landed(p: Tensor) -> None:
            this = back()
            if this is not None:  # else the model is used after its training
                this._land(i, p)

        return landed

    def _land(self, i: int, p: Tensor) -> None:
        """Copy a gradient into its place in the flat buffer, and announce the buckets that are full."""
        flat = self._flat
        if self._fired[i]:
            raise TrainingError(
                f"parameter {flat.pieces[i].name} got its gradient twice in one backward pass "
                "(a module used twice under re-entrant checkpointing?): use non-re-entrant checkpointing"
            )
        self._fired[i] = True
        view = flat.views[i]
        if flat.pieces[i].row > 0:
            pass  # stays in p.grad until `Flat.touched_rows`
        elif p.grad is None:
            return  # an earlier hook set it to None: the parameter gets no step
        elif p.grad is not view:
            view.copy_(p.grad.to_dense() if p.grad.is_sparse else p.grad)
            p.grad = view
        self.used[i] = True
        if self._on_ready is not None:
            self._missing[flat.bucket_of[i]] -= 1
            self._announce(self._on_ready, keep=1)

    def _announce(self, on_ready: Callable[[int], None], keep: int) -> None:
        """Announce complete buckets in index order; the last `keep` wait for the end: the tail travels with them."""
        while self._next < len(self._missing) - keep and self._missing[self._next] == 0:
            self._comm.clock.reach(self._fraction[self._next])
            on_ready(self._next)
            self._next += 1

    def _flush(self, on_ready: Callable[[int], None], samples: int, weighted_loss: float) -> None:
        """Zero the gradients of unused parameters, write the tail, and announce the remaining buckets."""
        for view, piece, used in zip(self._flat.views, self._flat.pieces, self.used, strict=True):
            if not used and not piece.row:
                view.zero_()
        self._buffers.count(samples)
        stop, pause, switch = self._votes.requested
        changed = self._used_anywhere.has_changed(self.used)
        self._flat.tail.copy_(torch.tensor([stop, weighted_loss, float(changed), pause, switch]))
        self._missing = [0] * len(self._missing)
        self._announce(on_ready, keep=0)


def _part_of(part: Batch, batch: Batch, *, weighed: bool) -> float:
    """The part's weight in the batch's mean loss."""
    if not weighed:
        return part.samples / batch.samples
    return part.weight / batch.weight if batch.weight else 0.0


def _own_hook(p: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Register this hook in place of the one of a worker that held the model before."""
    before = getattr(p, "_podium_hook", None)
    if before is not None:
        before.remove()
    p._podium_hook = p.register_post_accumulate_grad_hook(hook)  # type: ignore[attr-defined]  # ours


def _ignore(_bucket: int) -> None:
    pass
