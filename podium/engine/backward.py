"""One forward and backward pass: gradients land in the buckets, and full buckets are announced in order.

Autograd makes each gradient afresh; a hook copies it into its place in the flat buffer at once and lets the original
go. Reducing may begin on a bucket while autograd is still busy with the next.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from podium.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from podium.engine.worker import Batch, Worker


class Backward:
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
            _own_hook(p, self._hook(i))

    def run(self, batch: Batch, on_ready: Callable[[int], None] | None) -> Tensor:
        worker, on_ready = self.worker, on_ready or _ignore
        self.used = [False] * len(self.used)
        self._missing = [len(b.pieces) for b in self.flat.buckets]
        self._next = 0
        for i, p in enumerate(self.flat.parameters):
            p.grad = None
            if len(p._post_accumulate_grad_hooks) > 1:
                self._be_last(i, p)
        means: list[tuple[Batch, Tensor]] = []
        for part, is_last in self._parts(batch):
            self._fired = [False] * len(self._fired)
            self._on_ready = on_ready if is_last else None
            worker.comm.clock.begin_pass(part.samples)
            mean = self._pass(part)
            worker.comm.clock.reach(1.0)
            means.append((part, mean.detach().cpu()))  # waits for a GPU, which would draw more than it can compute
        if not means:
            worker.step_check.follow_storages()  # no forward pass has looked at them, and parameters may land
        worker.pass_samples = sum(part.samples for part, _ in means)
        loss = torch.zeros(())
        for part, mean in means:
            loss = loss + mean * _part_of(part, batch, weighed=worker.weigh is not None)
        self._flush(on_ready, batch.samples, float(loss) * batch.weight)
        return loss

    def _parts(self, batch: Batch) -> Iterator[tuple[Batch, bool]]:
        """What to pass over, and whether nothing can follow it.

        A micro-batch is drawn when the one before it is through, not earlier: a slow worker that has one in hand
        beside the one it is at would hold up the others at the end of the step for longer than it would gain by
        knowing which is its last. So only who has the step's last samples sends buckets while backward still runs.
        """
        if batch.draws is None:
            parts = batch.split(self.worker.accumulate, self.worker.weigh) if batch.samples else []
            weigh = self.worker.weigh
            if weigh is not None and batch.closure is None:  # the mean over nothing is no number
                parts = [part for part in parts if weigh(part.targets) > 0]
            for part in parts:
                yield part, part is parts[-1]
            return
        while (drawn := batch.draws.next()) is not None:
            yield drawn, drawn.piece.position + drawn.piece.count == batch.end

    def _pass(self, part: Batch) -> Tensor:
        worker = self.worker
        with worker.computing():
            with worker.autocast():
                loss = (
                    part.closure() if part.closure is not None else worker.loss(worker.model(part.inputs), part.targets)
                )
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                came = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
                raise ConfigError(f"the loss must be one number per batch, a tensor of shape (), got {came}")
            worker.step_check.after_forward()
            worker.comm.in_backward = True
            try:
                loss.backward(torch.full_like(loss, part.weight))
            finally:
                worker.comm.in_backward = False
            worker.step_check.after_backward()
        return loss

    def _be_last(self, i: int, p: nn.Parameter) -> None:
        """A hook that the user added later must come first: what it does to a gradient would miss the exchange."""
        held: dict[int, object] = p._post_accumulate_grad_hooks  # torch has no public way to ask
        if next(reversed(held)) != p._podium_hook.id:  # type: ignore[attr-defined]  # ours
            _own_hook(p, self._hook(i))

    def _hook(self, i: int) -> Callable[[Tensor], None]:
        # A parameter holds its hooks where Python's collector cannot look. Were this one to hold the parameter in turn,
        # by way of the worker, no model would ever be let go.
        back = weakref.ref(self)

        def landed(p: Tensor) -> None:
            this = back()
            if this is not None:  # else the model is used by somebody after its training
                this._land(i, p)

        return landed

    def _land(self, i: int, p: Tensor) -> None:
        """A gradient is there: put it into its place, and announce the buckets that are full."""
        flat = self.flat
        if self._fired[i]:
            raise TrainingError(
                f"parameter {flat.pieces[i].name} got its gradient twice in one backward pass "
                "(a module used twice under re-entrant checkpointing?): use non-re-entrant checkpointing"
            )
        self._fired[i] = True
        view = flat.views[i]
        if flat.pieces[i].row > 0:
            pass  # stays where it is until its rows are asked for
        elif p.grad is None:
            return  # a hook before this one took it away: the parameter gets no step
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
            self.worker.comm.clock.reach(self._fraction[self._next])
            on_ready(self._next)
            self._next += 1

    def _flush(self, on_ready: Callable[[int], None], samples: int, weighted_loss: float) -> None:
        """What no gradient reached holds zeros; the tail is written; the rest is announced."""
        for view, piece, used in zip(self.flat.views, self.flat.pieces, self.used, strict=True):
            if not used and not piece.row:
                view.zero_()
        worker = self.worker
        worker.count_samples(samples)
        stop, pause, switch = worker.wishes
        tail = [stop, weighted_loss, float(worker.used_otherwise()), pause, switch]
        self.flat.tail.copy_(torch.tensor(tail))
        self._missing = [0] * len(self._missing)
        self._announce(on_ready, keep=0)


def _part_of(part: Batch, batch: Batch, *, weighed: bool) -> float:
    """How much of the batch's mean loss is the part's."""
    if not weighed:
        return part.samples / batch.samples
    return part.weight / batch.weight if batch.weight else 0.0


def _own_hook(p: nn.Parameter, hook: Callable[[Tensor], None]) -> None:
    """Be the one who lands this parameter's gradient; a worker that held the model before no longer is."""
    before = getattr(p, "_podium_hook", None)
    if before is not None:
        before.remove()
    p._podium_hook = p.register_post_accumulate_grad_hook(hook)  # type: ignore[attr-defined]  # ours


def _ignore(_bucket: int) -> None:
    pass
