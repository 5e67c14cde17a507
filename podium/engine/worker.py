"""A worker: one replica of the model, and what a strategy may do with it.

A strategy calls `backward` for gradients, exchanges them, and calls `apply` to move the parameters. Gradients are
weighted by samples, not by ranks: each worker scales its gradient by its part of the global step, so that a plain sum
over the workers is the gradient of the whole step, however unevenly it was divided.

    replica       model, optimizer, schedule, flat buffers, state by name
    gradients     forward and backward passes, and how long they take
    buffers       running statistics and the like, synced over the workers
    generators    random numbers
    progress      steps, position in the global order, segment, round
    votes         stop, pause, switch of phase, mean loss: requested and agreed
    leases        samples that a server lent to this worker
    sender        what is sent, how it is packed, and the residuals

Each changes through its own methods; none writes another's fields.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from podium.comm.base import Communicator, Handle
from podium.engine.batch import Batch
from podium.engine.buffers import Buffers
from podium.engine.flat import Flat
from podium.engine.generators import WorkerGenerators
from podium.engine.gradient_pass import GradientPass, PassOptions
from podium.engine.leases import Leases
from podium.engine.losses import check_loss
from podium.engine.progress import Progress, Round
from podium.engine.replica import Replica
from podium.engine.votes import Votes
from podium.errors import ConfigError
from podium.exchange.codecs.base import StepContext
from podium.exchange.codecs.dense import Dense
from podium.exchange.collectives.backend import Backend
from podium.exchange.collectives.base import Collective
from podium.exchange.packing import Packing
from podium.exchange.sender import Sender


class Worker:
    """One replica, its communicator and its progress."""

    def __init__(
        self,
        replica: Replica,
        comm: Communicator,
        options: PassOptions,
        *,
        collective: Collective | None = None,
        packing: Packing | None = None,
        seed: int = 0,
    ) -> None:
        if comm.size > 1:
            _refuse_max_norm(replica.model)
        self.replica, self.comm, self._seed = replica, comm, seed
        self.progress, self.votes, self.leases = Progress(), Votes(), Leases()
        self.generators, self.buffers = WorkerGenerators(comm, replica.device), Buffers(replica.model, comm)
        self.gradients = GradientPass(
            replica, comm, options, generators=self.generators, buffers=self.buffers, votes=self.votes
        )
        packing = packing or Packing(Dense(), feedback=False)
        self.sender = Sender(comm, replica.flat, packing, collective or Backend())
        replica.lend_momentum(packing.codec)

    # Parts.

    @property
    def model(self) -> nn.Module:
        return self.replica.model

    @property
    def optimizer(self) -> Optimizer:
        return self.replica.optimizer

    @property
    def flat(self) -> Flat:
        """How parameters and gradients lie in the flat buffers."""
        return self.replica.flat

    @property
    def params(self) -> list[Tensor]:
        """The flat parameter buffers, one per dtype."""
        return self.replica.flat.params

    @property
    def strategy_state(self) -> dict[str, list[Tensor]]:
        """A strategy's tensors that checkpoints save: flat, laid out as the parameters are."""
        return self.replica.strategy_state

    @property
    def steps_done(self) -> int:
        """Optimizer steps of this worker."""
        return self.progress.steps_done

    @property
    def position(self) -> int:
        """Samples of the global order that the parameters have seen."""
        return self.progress.position

    @property
    def round(self) -> Round:
        """What this worker has trained since the last exchange, where workers step by themselves."""
        return self.progress.round

    @property
    def context(self) -> StepContext:
        """Which step this is, for a codec."""
        return StepContext(self.steps_done, self.progress.epoch, self._seed, self.comm.rank, self.comm.size)

    # A step.

    def backward(self, batch: Batch, on_ready: Callable[[int], None] | None = None) -> Tensor:
        """Compute this batch's weighted gradients into the buckets; returns its mean loss.

        `on_ready(b)` is called once per bucket, in index order, as soon as its gradients are complete: it may issue an
        exchange and must not wait. A worker without samples contributes zeros.
        """
        return self.gradients.run(batch, on_ready)

    @property
    def buckets(self) -> int:
        """How many buckets the gradients travel in."""
        return len(self.flat.buckets)

    def bucket(self, index: int) -> Tensor:
        """The gradients of one bucket, as one flat tensor; reduce it in place."""
        return self.flat.bucket(index)

    def issue(self, bucket: int) -> None:
        """Start to sum a bucket's gradients over the workers; does not wait."""
        if self.gradients.noise is not None:
            self.gradients.noise.add_own(_squared_norm(self.sender.spans[bucket].of(self.flat.grads)))
        self.sender.issue(bucket, self.context)

    def complete(self) -> None:
        """Wait until all issued buckets hold the sums."""
        self.sender.complete(self.context)

    def apply(self, batch: Batch) -> None:
        """Move the parameters by the reduced gradients: only here does a synchronous step take effect."""
        stop, loss, changed, pause, switch = self.flat.tail.tolist()
        used = self.gradients.agree_on_used(changed=changed > 0)
        self.replica.step_check.compare(self.comm, self.steps_done + 1)
        if not self.sender.is_exact:
            # A parameter that no worker used may still receive its residual; not while it is frozen.
            each = zip(self.flat.parameters, used, self.flat.views, strict=True)
            used = [is_used or (p.requires_grad and bool(view.any())) for p, is_used, view in each]
        self.votes.set_mean_loss(loss)
        self.votes.agree((stop > 0, pause > 0, switch > 0))
        if self.gradients.noise is not None and batch.weight > 0:
            whole = sum(_squared_norm(span.of(self.flat.grads)) for span in self.sender.spans)
            self.gradients.noise.step_done(whole, batch.weight, batch.samples)
        self._move(used, batch)

    def train_locally(self, batch: Batch) -> Tensor:
        """One step by this worker's own gradient, over its own samples; no other worker takes part."""
        began = self.comm.clock.now_ns()
        loss = self.backward(batch._replace(weight=1.0))
        # Before the next exchange, which would spread it.
        check_loss(float(loss), batch, rank=self.comm.rank, step=self.steps_done + 1)
        self._move(self.gradients.used, batch)
        self.round.add(batch, float(loss), self.comm.clock.now_ns() - began)
        return loss

    def _move(self, used: Sequence[bool], batch: Batch) -> None:
        self.replica.move(used)
        self.comm.clock.touch(self.flat.nbytes)
        self.advance(batch)

    def advance(self, batch: Batch) -> None:
        """Count a step that took effect and advance the position; in synchronous training also the schedule."""
        self.progress.step_done(batch.end)
        self.sender.step_done()
        if batch.lease < 0:
            self.replica.step_schedule()

    def end_round(self, *handles: Handle) -> None:
        """End the round: wait for these exchanges, and sum the workers' votes and losses. Collective."""
        ballots = self.votes.ballot(self.progress.close_round())
        self.comm.wait(*handles, self.comm.all_reduce(ballots))
        self.votes.count(ballots)

    # Between segments.

    def state(self, *, copied: bool = True) -> dict[str, Any]:
        """All that a checkpoint saves of this worker, by name; not `copied`: the tensors themselves, to read only."""
        return {
            **self.replica.state(copied=copied),
            "steps_done": self.progress.steps_done,
            "position": self.progress.position,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state`."""
        self.replica.load_state(state)
        self.progress.count_from(state["steps_done"])
        self.progress.move_to(state["position"])


def _squared_norm(tensor: Tensor) -> float:
    return float(tensor.square().sum())


def _refuse_max_norm(model: nn.Module) -> None:
    """A worker rescales the rows that it looks up, and no other worker does: replicas would differ."""
    for name, module in model.named_modules():
        table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if table and module.max_norm is not None and module.weight.requires_grad:
            raise ConfigError(
                f"module {name or type(module).__name__}: max_norm rescales the rows that a worker has looked up, on "
                "that worker only, so replicas would differ; use one worker, or leave max_norm out and rescale all "
                "rows in forward"
            )
