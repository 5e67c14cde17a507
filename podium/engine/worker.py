"""A worker: one replica of the model, and the only hand that touches its gradients and parameters.

A strategy asks it for gradients (`backward`), exchanges them, and lets it move the parameters (`apply`). Gradients are
weighted by samples, not by ranks: each worker scales its own by its part of the global step, so that a plain sum over
the workers is the gradient of the whole step, however unevenly it was divided.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from podium.comm.base import Communicator, Handle, Meta
from podium.data.order import Slice
from podium.engine.backward import Backward
from podium.engine.buffers import Buffers, Snapshot, write
from podium.engine.files import check_tree
from podium.engine.flat import Flat
from podium.engine.generators import (
    Others,
    State,
    generator_state,
    others_state,
    set_generator_state,
    set_others_state,
)
from podium.engine.optim import FlatOptimizer
from podium.engine.pytree import map_tensors
from podium.engine.step_check import StepCheck
from podium.errors import CheckpointError, ConfigError, TrainingError
from podium.exchange.codecs.base import Turn
from podium.exchange.codecs.dense import Dense
from podium.exchange.collectives.backend import Backend
from podium.exchange.collectives.base import Collective
from podium.exchange.reducing import Packing
from podium.exchange.sender import Outgoing
from podium.records.noise import NoiseMeter
from podium.strategies.rounds import Mark, Round


class Draws(ABC):
    """What a worker draws of a step that all share, one micro-batch after the other."""

    def __init__(self) -> None:
        self.samples = 0
        self.weight = 0.0
        self.pieces: list[Slice] = []
        """What was drawn so far; neighbours in the global order are one piece."""

    def next(self) -> Batch | None:
        """The next micro-batch, or None where the step has none left. Asks for it, so it may wait and raise Lost."""
        batch = self._draw()
        if batch is not None:
            self.samples, self.weight = self.samples + batch.samples, self.weight + batch.weight
            last = self.pieces[-1] if self.pieces else None
            if last is not None and last.position + last.count == batch.piece.position:
                self.pieces[-1] = last._replace(count=last.count + batch.piece.count)
            else:
                self.pieces.append(batch.piece)
        return batch

    @abstractmethod
    def _draw(self) -> Batch | None: ...


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
    draws: Draws | None = None  # where more comes from while the step lasts; see `OpenBatch`

    def split(self, parts: int, weigh: Callable[[Any], float] | None = None) -> list[Batch]:
        """Micro-batches whose weights add up to this one's: in proportion to their samples, or to what they weigh."""
        if parts == 1 or self.samples < 2 or self.closure is not None:
            return [self]
        cuts = [self.samples * i // parts for i in range(parts + 1)]
        found = [
            self._replace(
                inputs=map_tensors(lambda rows, a=a, b=b: rows[a:b], self.inputs),  # type: ignore[misc]  # bound now
                targets=map_tensors(lambda rows, a=a, b=b: rows[a:b], self.targets),  # type: ignore[misc]  # bound now
                samples=b - a,
                weight=self.weight * ((b - a) / self.samples),
            )
            for a, b in itertools.pairwise(cuts)
            if b > a
        ]
        if weigh is None:
            return found
        weights = [float(weigh(part.targets)) for part in found]
        total = sum(weights) or 1.0
        return [part._replace(weight=self.weight * w / total) for part, w in zip(found, weights, strict=True)]


class OpenBatch(Batch):
    """A part of a step that grows while the worker is at it: samples and weight are those of what it has drawn so far.

    `piece` is the whole step.
    """

    __slots__ = ()

    @classmethod
    def of(cls, step: Slice, draws: Draws) -> OpenBatch:
        """The part of this step that is still to be drawn."""
        return cls(None, None, 0, 0.0, step, step.position + step.count, draws=draws)

    @property
    def samples(self) -> int:  # in place of the field
        return self._drawn.samples

    @property
    def weight(self) -> float:  # in place of the field
        return self._drawn.weight

    @property
    def _drawn(self) -> Draws:
        assert self.draws is not None
        return self.draws


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
        rows: bool = False,
        collective: Collective | None = None,
        packing: Packing | None = None,
        weigh: Callable[[Any], float] | None = None,
        seed: int = 0,
    ) -> None:
        """Moves the model's parameters into flat buffers; cast and move the model before, not after."""
        self.model, self.optimizer, self.comm, self.schedule = model, optimizer, comm, schedule
        self.loss, self.weigh, self.clip_norm, self.accumulate = loss, weigh, clip_norm, accumulate
        self.flat = Flat(model, optimizer, bucket_bytes, allocate=comm.allocate, rows=rows)
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
        self.pause_requested = False
        """This worker was told that somebody wants to join or leave; it says so with its next exchange."""
        self.pause_agreed = False
        """The workers agreed to end the stretch here, to regroup and go on."""
        self.switch_requested = False
        """This worker has seen that the phase is over; it says so with its next exchange."""
        self.switch_agreed = False
        """The workers agreed to end the stretch here, and to go on with the next phase."""
        self.stretch = (-1, 0)
        """Names the present stretch of training with servers: the generation, and which one of it."""
        self.next_lease: Meta | None = None
        """What to train on next, where a server has said so already."""
        self.lease_done = -1
        """The last lease that all servers have applied."""
        self.step_loss: float | None = None
        """Mean loss over the whole of the last synchronous step, from all workers."""
        self.device = self.flat.params[0].device
        if comm.size > 1:
            _refuse_max_norm(model)
        self.rng: State | None = None
        """Where ranks share a process: this worker's state of torch's generators."""
        self.others: Others | None = None
        """Where ranks share a process: this worker's numpy and Python generators."""
        self._autocast = autocast
        self._fast = FlatOptimizer(optimizer, self.flat.parameters, self.flat.pieces, self.flat.params, self.flat.grads)
        self._used_anywhere: list[bool] | None = None
        self._used_then: list[bool] = []  # by this worker, when that was agreed
        self._samples_since = 0  # since buffers were last made alike
        self._backward = Backward(self)
        self.step_check = StepCheck(model, optimizer, self.flat)
        """Looks in every step at what the model has done to itself."""
        self._buffers = Buffers(model, comm)
        self._seed = seed
        self.outgoing = Outgoing(comm, self.flat, packing or Packing(Dense(), feedback=False), collective or Backend())
        """What this worker sends: how it is packed, and what was left out."""
        self._momentum = self._give_momentum_away()
        self.round = Round()
        """What was trained since the last exchange, where workers step by themselves."""
        self.round_steps: Sequence[int] = ()
        """How many steps each worker does in the present round, in order of their places, where these differ."""
        self.kept: dict[str, list[Tensor]] = {}
        """What a strategy wants to find again after a checkpoint: flat tensors, laid out as the parameters are."""
        self._mark: Mark | None = None
        self.pass_ns = 0
        """What the last step's forward and backward passes took."""
        self.pass_samples = 0
        """How many samples these went through."""
        self.exposure: Callable[[], float] | None = None
        """Set by a strategy that can say what `exchange_s` is; asked between two steps, and may measure."""
        self.busy_ns = self.busy_samples = 0
        """Time spent on gradients since somebody asked, and on how many samples."""
        self.tells_pace = False
        """Whether servers are told how fast this worker is, for the first worker to hear."""
        self.paces: dict[int, float] = {}
        """All workers' seconds of computing per sample, where servers have said so."""
        self.noise: NoiseMeter | None = None
        self.noise_scale: float | None = None
        """The gradient noise scale, where it is measured."""
        self._before: tuple[State, Snapshot, int] | None = None

    # What strategies use.

    @property
    def params(self) -> list[Tensor]:
        """The flat parameter buffers, one per dtype."""
        return self.flat.params

    @property
    def exchange_s(self) -> float:
        """Seconds of an exchange that this worker's own link takes and its computing does not hide; 0: not known."""
        return 0.0 if self.exposure is None else self.exposure()

    @property
    def global_step(self) -> int:
        """How many whole global steps the samples used so far make up: the same on all workers."""
        if not self.samples or not self.batch_size:
            return self.steps_done
        epochs, offset = divmod(self.position, self.samples)
        return epochs * -(-self.samples // self.batch_size) + offset // self.batch_size

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
        began, waited = self.comm.clock.now_ns(), self.comm.waited_ns
        loss = self._backward.run(batch, on_ready)
        self.pass_ns = self.comm.clock.now_ns() - began - (self.comm.waited_ns - waited)  # it may have waited to draw
        self.busy_ns += self.pass_ns
        self.busy_samples += self.pass_samples
        return loss

    def issue(self, bucket: int) -> None:
        """Begin to sum a bucket's gradients over the workers; never waits."""
        if self.noise is not None:
            self.noise.add_own(float(self.outgoing.spans[bucket].of(self.flat.grads).square().sum()))
        self.outgoing.issue(bucket, self.turn)

    def complete(self) -> None:
        """Wait until all issued buckets hold the sums."""
        self.outgoing.complete(self.turn)

    @property
    def turn(self) -> Turn:
        """Which step this is, for a codec."""
        epoch = self.position / max(1, self.samples)
        return Turn(self.steps_done, epoch, self._seed, self.comm.rank, self.comm.size)

    def apply(self, batch: Batch) -> None:
        """Move the parameters by the reduced gradients: the one place where a synchronous step becomes true."""
        stop, self.step_loss, changed, pause, switch = self.flat.tail.tolist()
        used = self._agree_on_used(changed=changed > 0)
        self.step_check.compare(self.comm, self.steps_done + 1)
        if not self.outgoing.is_exact:
            # What was left out of a parameter's gradient may come when nobody has used it; not while it is frozen.
            each = zip(self.flat.parameters, used, self.flat.views, strict=True)
            used = [is_used or (p.requires_grad and bool(view.any())) for p, is_used, view in each]
        self.heed((stop > 0, pause > 0, switch > 0))
        if self.noise is not None and batch.weight > 0:
            whole = sum(float(span.of(self.flat.grads).square().sum()) for span in self.outgoing.spans)
            self.noise_scale = self.noise.step_done(whole, batch.weight, batch.samples)
        self._move(used, batch)

    def train_locally(self, batch: Batch) -> Tensor:
        """One step by this worker's own gradient, over its own samples; nobody else takes part."""
        began = self.comm.clock.now_ns()
        loss = self.backward(batch._replace(weight=1.0))
        self.check_loss(float(loss), batch, self.steps_done + 1)  # now: the next exchange would spread it
        self._move(self._backward.used, batch)
        self.round.add(batch, float(loss), self.comm.clock.now_ns() - began)
        return loss

    def check_loss(self, loss: float, batch: Batch, step: int) -> None:
        """Raise where a loss is no number."""
        if not math.isfinite(loss):
            raise TrainingError(
                f"rank {self.comm.rank}: the loss became {loss} at step {step} (sample position "
                f"{batch.piece.position}); lower the rate, clip gradients (--set clip_norm=1), check the data"
            )

    def agree(self, *handles: Handle) -> None:
        """The round is over: wait for these exchanges and put the workers' wishes and losses together. Collective."""
        words = torch.tensor([*self.wishes, self.round.loss, self.round.samples], dtype=torch.float64)
        self.comm.wait(*handles, self.comm.all_reduce(words))
        stop, pause, switch, loss, samples = words.tolist()
        self.heed((stop > 0, pause > 0, switch > 0))
        self.step_loss = loss / samples if samples else None
        self.round = Round()

    @property
    def wishes(self) -> tuple[bool, bool, bool]:
        """Whether this worker wants to stop, to pause, and to go on to the next phase."""
        return self.stop_requested, self.pause_requested, self.switch_requested

    @property
    def agreed(self) -> list[bool]:
        """What the workers have agreed on and not done yet, in the order of `wishes`."""
        return [self.stop_agreed, self.pause_agreed, self.switch_agreed]

    def heed(self, agreed: Sequence[bool]) -> None:
        """What the workers agreed on, in the order of `wishes`; once agreed it stays so until it is done."""
        stop, pause, switch = agreed
        self.stop_agreed, self.pause_agreed = self.stop_agreed or stop, self.pause_agreed or pause
        self.switch_agreed = self.switch_agreed or switch

    def moments(self) -> list[Tensor]:
        """The optimizer's state that is as large as the parameters, such as momentum: the tensors themselves.

        The same on all workers in number and order, where all have stepped all parameters.
        """
        states = (self.optimizer.state.get(p, {}) for p in self.flat.parameters)
        found = [state[key] for state in states for key in sorted(state)]
        return [value for value in found if isinstance(value, Tensor) and value.dim() > 0]

    def _move(self, used: Sequence[bool], batch: Batch) -> None:
        self.step_check.follow_storages()  # a hook in the backward pass may have given a parameter another storage
        for p, view, is_used in zip(self.flat.parameters, self.flat.views, used, strict=True):
            p.grad = view if is_used else None
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.flat.parameters[::-1], self.clip_norm)
        self._fast.step(all_used=all(used))
        self.step_check.follow_storages()  # or one around the optimizer's step
        self.comm.clock.touch(self.flat.nbytes)
        self.advance(batch)

    def advance(self, batch: Batch) -> None:
        """A step became true: count it and move on in the order; in synchronous training the schedule follows."""
        self.steps_done += 1
        self.outgoing.step_done()
        self.position = max(self.position, batch.end)
        if batch.lease < 0:
            self.step_schedule()

    def follow_schedule(self, step: int) -> None:
        """Bring the schedule to this global step, where it is behind."""
        while self.schedule is not None and self.schedule.last_epoch < step:
            self.step_schedule()

    def step_schedule(self) -> None:
        if self.schedule is not None:
            self.optimizer._opt_called = True  # type: ignore[attr-defined]  # a server may have stepped in its place
            self.schedule.step()

    def clip_own(self) -> None:
        """Clip this worker's own gradient, where each is a step of its own."""
        assert self.clip_norm is not None
        nn.utils.clip_grad_norm_(self.flat.parameters[::-1], self.clip_norm)

    def compare_times(self) -> dict[int, float]:
        """Seconds of computing per sample since the last comparison, by worker. Collective."""
        mine = torch.zeros(self.comm.size, dtype=torch.float64)
        mine[self.comm.index] = self.take_pace()
        self.comm.wait(self.comm.all_reduce(mine))
        return {rank: seconds for rank, seconds in zip(self.comm.workers, mine.tolist(), strict=True) if seconds > 0}

    def take_pace(self) -> float:
        """This worker's seconds of computing per sample since it was last asked; 0 where it has done nothing."""
        pace = self.busy_ns / self.busy_samples / 1e9 if self.busy_samples else 0.0
        self.busy_ns = self.busy_samples = 0
        return pace

    def take_times(self) -> dict[int, float]:
        """What the servers last said of all workers' seconds per sample, once."""
        times, self.paces = self.paces, {}
        return times

    def touched_rows(self, piece: int) -> tuple[Tensor, Tensor]:
        """Of a parameter that travels by rows: which rows have a gradient, in order, and what it is."""
        p, row = self.flat.parameters[piece], self.flat.pieces[piece].row
        if p.grad is None:
            return torch.empty(0, dtype=torch.int64), torch.empty((0, row), dtype=p.dtype)
        if p.grad.is_sparse:
            grad = p.grad.coalesce()
            return grad.indices()[0].cpu(), grad.values().cpu()
        rows = p.grad.abs().amax(dim=1).nonzero()[:, 0]  # tied to something dense
        return rows.cpu(), p.grad[rows].cpu()

    def unused_among(self, pieces: Iterable[int]) -> list[int]:
        """Those of these pieces that this worker's backward has not reached."""
        used = self._backward.used
        if not self.outgoing.push[1].codec.exact:  # what was left out may come, unless it is frozen
            return [i for i in pieces if not used[i] and not self.flat.parameters[i].requires_grad]
        return [i for i in pieces if not used[i]]

    # What the training loop uses.

    def remember(self) -> None:
        """Keep what a step changes besides parameters, so that a failed step leaves no trace."""
        self._before = (self.generators(), Snapshot(self.model), self._samples_since)

    def forget_step(self) -> None:
        """The step in flight did not happen: generator and buffers go back to where it began."""
        assert self._before is not None
        generators, buffers, self._samples_since = self._before
        self.set_generators(generators)
        buffers.restore()
        self.outgoing.reducer.drop()
        if self.noise is not None:
            self.noise.forget()

    def forget_agreements(self) -> None:
        """What the workers once agreed on for good they must agree on anew: some may have been in mid-agreement."""
        self._used_anywhere = None
        self._buffers.forget_agreement()

    def generators(self) -> State:
        """The state of this worker's random generators."""
        return generator_state(self.device) if self.rng is None else self.rng

    def set_generators(self, state: State) -> None:
        if self.rng is None:
            set_generator_state(state, self.device)
        else:
            self.rng = state

    def other_generators(self) -> dict[str, Any]:
        """The state of numpy's and Python's generators, as a checkpoint can hold it."""
        with self.computing():
            return others_state()

    def set_other_generators(self, state: Mapping[str, Any]) -> None:
        with self.computing():
            set_others_state(state)

    def share_from_first(self) -> None:
        """All that a replica is made of, as the first worker has it: parameters, frozen ones too, and buffers.

        Collective. A task may draw them from elsewhere than the seed.
        """
        if self.comm.size == 1:
            return
        first = self.comm.workers[0]
        frozen = [p.data for p in self.model.parameters() if not p.requires_grad]
        buffers = list(self.model.named_buffers())
        others = frozen + [buffer for _, buffer in buffers]
        joined = torch.cat([_as_bytes(t) for t in others]) if others else torch.empty(0, dtype=torch.uint8)
        exchanged = [*self.params, joined] if others else self.params
        self.comm.wait(*(self.comm.broadcast(tensor, first) for tensor in exchanged))
        parts = joined.split([t.nbytes for t in others])
        values = [part.clone().view(t.dtype).reshape(t.shape) for t, part in zip(others, parts, strict=True)]
        for tensor, value in zip(frozen, values, strict=False):
            tensor.copy_(value)
        for (name, buffer), value in zip(buffers, values[len(frozen) :], strict=True):
            write(self.model, name, buffer, value)

    def mean_buffers(self) -> None:
        """Average floating-point buffers over the workers, by the samples each has seen since last time. Collective.

        Frozen parameters too, where a worker has written into them.
        """
        if self.comm.size > 1:
            self._buffers.mean(self._samples_since)
            self._buffers.mean_frozen(self._samples_since)
            self._samples_since = 0

    def broadcast_frozen(self) -> None:
        """Take the first worker's frozen parameters, where workers have written into theirs. Collective."""
        if self.comm.size > 1:
            self._buffers.mean_frozen(int(self.comm.index == 0))

    def broadcast_buffers(self) -> None:
        """Take the first worker's floating-point buffers. Collective."""
        if self.comm.size > 1:
            self._buffers.broadcast()

    def param_hash(self) -> str:
        """Hash of the parameters by name, whatever their layout."""
        digest = hashlib.sha256()
        for name, p in self.model.named_parameters():
            digest.update(name.encode())
            digest.update(_as_bytes(p).numpy().tobytes())
        return digest.hexdigest()[:16]

    def computing(self) -> AbstractContextManager[None]:
        """Around forward and backward: this worker's generator, and alone where ranks share a process."""
        return _Computing(self) if self.comm.shares_process else nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        if self._autocast == "off":
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)

    # Rounds.

    def mark(self) -> None:
        """All agree here: this is where to go back to, should the next round fail."""
        self._mark = Mark(self.state(), self.generators(), Snapshot(self.model), self._samples_since)

    def return_to_mark(self) -> None:
        """The round under way did not happen."""
        assert self._mark is not None
        self._mark.buffers.restore()  # first: their shapes may have changed
        self.load_state(self._mark.state)
        self.set_generators(self._mark.generators)
        self._samples_since = self._mark.samples_since
        self.outgoing.reducer.drop()
        self.round = Round()

    # State by name.

    def state(self, *, copied: bool = True) -> dict[str, Any]:
        """All that a checkpoint keeps of this worker, by name: copies, unless it is only to be looked at."""
        copy_of: Callable[[Any], Any] = _copy if copied else _as_it_is
        names = {id(p): name for name, p in self.model.named_parameters()}
        states = self.optimizer.state.items()
        return {
            "model": {k: copy_of(v) for k, v in self.model.state_dict().items()},
            "optimizer_class": type(self.optimizer).__name__,
            "optimizer": {names[id(p)]: copy_of(s) for p, s in states if isinstance(p, Tensor)},
            # What an optimizer keeps for all parameters together, under a key of its own.
            "optimizer_common": {key: copy_of(s) for key, s in states if not isinstance(key, Tensor)},
            "groups": [copy_of(self._settings(g)) for g in range(len(self.optimizer.param_groups))],
            "schedule": None if self.schedule is None else copy_of(_plain_state(self.schedule.state_dict())),
            "steps_done": self.steps_done,
            "position": self.position,
            "kept": {name: self.flat.by_name(flats) for name, flats in self.kept.items()},
        }

    def check_state(self) -> None:
        """Raise where this worker's state could not be saved, or sent to a worker that takes it over.

        Cheap, since nothing is copied: called before the first step, and again as optimizer and schedule fill theirs.
        """
        if self.steps_done & (self.steps_done - 1) == 0:  # after 0, 1, 2, 4, 8 … steps
            buffers = dict(self.model.named_buffers())
            try:
                check_tree({**self.state(copied=False), "buffers": buffers})
            except CheckpointError as error:
                raise CheckpointError(
                    f"rank {self.comm.rank}: the state of this run cannot be saved (looked at after "
                    f"{self.steps_done} steps): {error}"
                ) from error

    def pack_by(self, name: str | None, make: Callable[[], Packing]) -> None:
        """Pack otherwise from here on; `name` tells servers of it, where it is not what the run began with."""
        for group, momentum in zip(self.optimizer.param_groups, self._momentum or (), strict=False):
            group["momentum"] = momentum
        self.outgoing.use(make(), name)
        self._momentum = self._give_momentum_away()

    def _settings(self, g: int) -> dict[str, Any]:
        """A parameter group's settings as the user chose them."""
        settings = _plain_state({k: v for k, v in self.optimizer.param_groups[g].items() if k != "params"})
        return settings if self._momentum is None else {**settings, "momentum": self._momentum[g]}

    def _give_momentum_away(self) -> list[float] | None:
        """Where the codec does the momentum, the optimizer does none; what it would have done."""
        codec = self.outgoing.packing.codec
        if not codec.takes_momentum:
            return None
        if getattr(self.schedule, "cycle_momentum", False):
            raise ConfigError(
                f"codec {codec.name} does the momentum itself, and the schedule would cycle the optimizer's: "
                "give it cycle_momentum=False"
            )
        before = []
        for group in self.optimizer.param_groups:
            codec.check(group)
            before.append(group["momentum"])
            group["momentum"] = 0.0
            for p in group["params"]:  # or it would come back as it was, however long the codec lasts
                self.optimizer.state.get(p, {}).pop("momentum_buffer", None)
        self._fast.reload()
        return before

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Become what `state` says; the inverse of `state`."""
        if state["optimizer_class"] != type(self.optimizer).__name__:
            raise ValueError(f"state of {state['optimizer_class']} cannot go on in {type(self.optimizer).__name__}")
        if (state["schedule"] is None) != (self.schedule is None):
            raise ValueError(
                f"a schedule was {'not ' if state['schedule'] is None else ''}used, and now is the other way"
            )
        if len(state["groups"]) != len(self.optimizer.param_groups):
            raise ValueError(f"{len(state['groups'])} parameter groups saved, {len(self.optimizer.param_groups)} here")
        self.model.load_state_dict(state["model"])
        self.load_optimizer_state(state["optimizer"])
        for key, kept in state.get("optimizer_common", {}).items():  # older checkpoints have none
            self.optimizer.state[key] = _copy(kept)
        for group, kept in zip(self.optimizer.param_groups, state["groups"], strict=True):
            group.update(_copy(kept))
        self._momentum = self._give_momentum_away()
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(_copy(state["schedule"]))
        self.steps_done, self.position = state["steps_done"], state["position"]
        self.kept = {}
        for name, parts in state.get("kept", {}).items():  # older checkpoints have none
            self.kept[name] = [torch.zeros_like(flat) for flat in self.params]
            self.flat.add_by_name(self.kept[name], parts)
        self.flat.check()

    def load_optimizer_state(self, by_name: Mapping[str, Mapping[str, Any]]) -> None:
        """Replace the optimizer's state, parameter by parameter."""
        params = dict(self.model.named_parameters())
        for key in [key for key in self.optimizer.state if isinstance(key, Tensor)]:
            del self.optimizer.state[key]
        for name, kept in by_name.items():
            self.optimizer.state[params[name]] = _copy(kept)
        self._fast.reload()

    # Inside.

    def count_samples(self, samples: int) -> None:
        """This many samples went through the model in training, and into its buffers."""
        self._samples_since += samples

    def used_otherwise(self) -> bool:
        """Whether this worker's last backward reached other parameters than when the used ones were agreed on."""
        return self._used_anywhere is not None and self._backward.used != self._used_then

    def _agree_on_used(self, changed: bool) -> Sequence[bool]:
        """Which parameters any worker used: the others are left alone, as plain PyTorch would.

        Collective in the first step, and whenever some worker used others than before, which the tail told all.
        """
        if self._used_anywhere is None or changed or self.comm.size == 1:
            self._used_then = list(self._backward.used)
            mask = torch.tensor(self._used_then, dtype=torch.float32)
            if self.comm.size > 1:
                self.comm.wait(self.comm.all_reduce(mask))
            self._used_anywhere = [count > 0 for count in mask.tolist()]
        return self._used_anywhere


class _Computing:
    """This worker's generator in place of the global one, and the compute lock of its world."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._lock = worker.comm.computing()
        self._outer: State | None = None

    def __enter__(self) -> None:
        assert self.worker.rng is not None
        self._lock.__enter__()
        self._outer = generator_state(self.worker.device)
        set_generator_state(self.worker.rng, self.worker.device)
        if self.worker.others is not None:
            self.worker.others.put_in_place()

    def __exit__(self, *error: Any) -> None:
        self.worker.rng = generator_state(self.worker.device)
        assert self._outer is not None
        set_generator_state(self._outer, self.worker.device)
        self._lock.__exit__(*error)


def _refuse_max_norm(model: nn.Module) -> None:
    """Rows that one worker looks up are rescaled there and nowhere else: replicas would differ."""
    for name, module in model.named_modules():
        table = isinstance(module, nn.Embedding | nn.EmbeddingBag)
        if table and module.max_norm is not None and module.weight.requires_grad:
            raise ConfigError(
                f"module {name or type(module).__name__}: max_norm rescales the rows that a worker has looked up, on "
                "that worker only, so workers would come apart; use one worker, or leave max_norm out and rescale all "
                "rows in forward"
            )


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _copy(value: Any) -> Any:
    """A state that does not change when the one that it was taken from does."""
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
    """A scheduler's or a group's state without the functions in it: a checkpoint cannot hold them, and who made the
    scheduler has made them anew."""
    if isinstance(state, dict):
        return {k: _plain_state(v) for k, v in state.items() if not _has_functions(v)}
    return [_plain_state(v) for v in state] if isinstance(state, list) else state


def _has_functions(value: Any) -> bool:
    return callable(value) or (isinstance(value, list | tuple) and any(map(callable, value)))
