"""The user's own training loop, under any strategy: the difference from plain PyTorch is a few lines.

    run = podium.join(model, optimizer)
    for x, y in run.batches(train_set, batch_size=64, epochs=5):
        loss = run.step(lambda: F.cross_entropy(model(x), y))

Started as `python script.py` it is one worker; by `podium run script.py --workers 4 --strategy …` or
`torchrun … -m podium.node --script script.py` it is one of many. A process that is to be a server serves inside `join`
and ends there.
"""

from __future__ import annotations

import logging
import os
import random
import runpy
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from podium.balance import balancer_of
from podium.balance.runtime import Balancing
from podium.comm.base import Communicator, Meta
from podium.comm.memory import MemoryWorld
from podium.config import RunConfig, devices_in
from podium.data.base import Dataset, as_dataset
from podium.data.order import GlobalOrder, Slice
from podium.engine.build import check_parts, derived_seed, fitted, packing_for
from podium.engine.feed import Feed, make_feed
from podium.engine.files import save_tensors
from podium.engine.fingerprints import Digest, compare, model_facts
from podium.engine.flat import Flat
from podium.engine.generators import seed_numpy, seed_others
from podium.engine.phase_runner import Phasing
from podium.engine.recovery import Control, recover
from podium.engine.training import run_server
from podium.engine.worker import Batch, Worker
from podium.errors import ConfigError, Lost, PodiumError, TrainingError
from podium.exchange.collectives import collective_of
from podium.launch.notices import rules_that_cannot_fire
from podium.launch.process import Node, NodeSpec, settle_in
from podium.records.recorder import Recorder
from podium.records.steps import StepMeter, progress_of
from podium.servers import client
from podium.servers.server import Server
from podium.strategies import make_strategy
from podium.strategies.base import Strategy
from podium.strategies.rounds import Round
from podium.strategies.triggers.base import Course
from podium.task import BufferPolicy, Task


@dataclass
class _Started:
    """What `run_user_script` made of this process."""

    node: Node
    given: frozenset[str]
    """Settings that were named, if only by their default."""
    numpy_key: bytes
    python_key: tuple[int, ...]
    """The generators' state before the script began: whether it has seeded them."""
    joined_at: str | None = None
    """Where the script called `join`."""


_STARTED_AS: list[_Started] = []
"""What this process was started as, for `join` to take up; empty when it was started by itself."""


class Run:
    """One worker of a run whose loop is the user's."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        comm: Communicator,
        strategy: Strategy[Any],
        control: Control,
        recorder: Recorder,
        *,
        seed: int = 0,
        schedule: LRScheduler | None = None,
        clip_norm: float | None = None,
        weigh: Callable[[Any], float] | None = None,
        config: RunConfig | None = None,
    ) -> None:
        """`config`: what the run was asked for; where there is none, this worker is alone."""
        asked = config or RunConfig()
        self.comm, self.seed, self._plan = comm, seed, strategy
        self._buffers: BufferPolicy = asked.buffers or "mean"
        self.worker = Worker(
            model,
            optimizer,
            comm,
            loss=_no_loss,
            schedule=schedule,
            bucket_bytes=strategy.bucket_bytes,
            clip_norm=clip_norm,
            autocast=asked.autocast or "off",
            collective=collective_of(asked),
            packing=fitted(packing_for(asked, strategy), optimizer),
            weigh=weigh,
            seed=seed,
        )
        self._control, self._recorder, self._codec = control, recorder, asked.codec
        self._balancing = Balancing(balancer_of(asked), self.worker, recorder)
        self._phasing: Phasing | None = None
        self._batch: Batch | None = None
        self._fed_s = 0.0
        self._step_failed = False
        self._state: Any = None
        self.failure: PodiumError | None = None
        """What went wrong when the user broke out of the loop; raised by the next call, or at the script's end."""
        self._digested: tuple[tuple[Any, ...], Digest] | None = None  # the data of the last comparison

    @property
    def strategy(self) -> Strategy[Any]:
        """How replicas come to agree just now."""
        return self._plan.phases[0].strategy if self._phasing is None else self._phasing.strategy

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        """How many workers train together now."""
        return self.comm.size

    @property
    def is_first(self) -> bool:
        """Whether this worker is the one to print, validate and save."""
        return self.comm.index == 0

    def batches(
        self, data: Any, *, batch_size: int, epochs: int = 1, total_epochs: int | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """This worker's part of every global step of `batch_size` samples, for this many further epochs.

        `total_epochs`: how many there will be in all, where this is called for a few of them at a time: shares of the
        budget, at which phases may end, are shares of this. Without it, of the epochs of this call.

        `data` is a map-style data set, a pair of arrays or a `podium.Dataset`. Each batch wants one call of `step`.
        """
        self.check()
        dataset = as_dataset(data)
        order, worker = GlobalOrder(len(dataset), self.seed), self.worker
        if batch_size < self.size:
            raise ConfigError(f"batch_size must be at least one sample per worker ({self.size}), got {batch_size}")
        if worker.samples not in (0, order.samples):
            raise ConfigError(
                f"run.batches: the data must stay the same: {worker.samples} samples, now {order.samples}"
            )
        worker.samples, worker.batch_size = order.samples, batch_size
        worker.flat.check()
        told = {"batch_size": batch_size, "epochs": epochs, "total_epochs": total_epochs}
        if worker.steps_done == 0:
            self._compare(data, dataset, told)
            worker.share_from_first()
        else:
            with self._going_on():
                self._compare(data, dataset, told)
        if self.strategy.survives_loss and self.size > 1:
            worker.check_state()
        end = worker.position + epochs * order.samples
        last = max(end, (total_epochs or 0) * order.samples)
        phasing = self._lead(Course(order.samples, batch_size, last, eval_every=0))  # the script validates, if anybody
        over = False
        while worker.position < end and not worker.stop_agreed and not over:
            weighed = not self.strategy.by_rounds
            parts = (dataset, order, worker, worker.device, self._balancing)
            feed = make_feed(self.strategy.feed, *parts, weighed=weighed)
            worker.horizon = min(end, phasing.horizon)
            worker.outgoing.prepare()
            if self.strategy.by_rounds and self.strategy.survives_loss:
                worker.mark()
            began = self.comm.clock.now_ns()
            self._state = self.strategy.init(worker)
            phasing.has_begun(began)
            try:
                yield from self._until_horizon(feed)
            except GeneratorExit:  # the user breaks out of the loop, as all workers must; in step, after the same step
                try:
                    if not self._step_failed:  # otherwise the others may be gone, and nobody would answer
                        self._finish(broke=True)
                except PodiumError as error:  # Python drops what is raised here, so it is kept for the next call
                    self.failure = error
                raise
            over = self._finish()
            if phasing.is_over:
                phasing.advance()

    def _finish(self, *, broke: bool = False) -> bool:
        """The stretch is over: everything comes home, and buffers are made alike. Whether the user's loop ends with it.

        Where workers lease samples, one may break out while another is still at it. What the first was lent goes back,
        for the other to take; what nobody has taken by then is left out of this epoch. The order goes on behind the
        furthest sample that was lent.
        """
        worker, in_hand = self.worker, self._batch
        self._batch = None
        if broke and self.strategy.feed == "round" and worker.round.steps:
            raise ConfigError(
                f"rank {self.rank}: run.batches was left in mid-round. Under steps=speed workers do unequal "
                "numbers of steps between two exchanges, so the loop must end by itself: give it fewer epochs"
            )
        furthest = max(worker.position, 0 if in_hand is None else in_hand.end, _end_of(worker.next_lease))
        if broke and self.strategy.feed == "cursor":
            self.strategy.settle(worker, self._state)
            client.break_out(worker)
        self.strategy.finish(worker, self._state)
        if self.strategy.feed != "step" and self.size > 1:
            rows = self.comm.gather_aside(torch.tensor([max(furthest, worker.position), broke], dtype=torch.int64))
            worker.position, broke = int(rows[:, 0].max()), bool(rows[:, 1].any())
        worker.next_lease, worker.round = None, Round()
        self.sync_buffers()
        self._check_parameters()
        return broke

    def _check_parameters(self) -> None:
        """Raise where a gradient that was no number has spoilt the parameters, though no loss has shown it yet."""
        for p, piece in zip(self.worker.flat.parameters, self.worker.flat.pieces, strict=True):
            if not torch.isfinite(p.detach()).all():
                raise TrainingError(
                    f"rank {self.rank}: parameter {piece.name} is not finite after step {self.worker.steps_done}: a "
                    "gradient was not; lower the rate, clip gradients (--set clip_norm=1), check the data"
                )

    def sync_buffers(self) -> None:
        """Make buffers that training changes (BatchNorm's running statistics) the same on all workers, now. Collective.

        `run.batches` does so whenever it ends; call it where you use the model before that, on all workers. Does
        nothing under `buffers=local`.
        """
        apart = self.strategy.by_rounds or self.strategy.feed != "step"  # they cannot be broadcast before every step
        if self._buffers == "mean" or (self._buffers == "broadcast" and apart):
            with self._going_on():
                self.worker.mean_buffers()
        elif self._buffers == "broadcast":
            with self._going_on():
                self.worker.broadcast_frozen()

    def _compare(self, data: Any, dataset: Dataset, told: Mapping[str, Any]) -> None:
        """Refuse to go on where ranks have different data, or were told different things. Collective."""
        held, worker = tuple(data) if isinstance(data, tuple) else (data,), self.worker
        if self._digested is None or not _same_objects(held, self._digested[0]):
            self._digested = held, Digest.of(dataset) if self.size > 1 else Digest(len(dataset), 0, ())
        facts = {**told, "seed": self.seed, "clip_norm": worker.clip_norm, "schedule": type(worker.schedule).__name__}
        facts |= {"weigh": worker.weigh is not None, **model_facts(worker.model, worker.optimizer)}
        compare(self.comm, facts, {"training data": self._digested[1]})

    def _lead(self, course: Course) -> Phasing:
        """The phases of the run; from one call of `batches` to the next they go on where they were."""
        if self._phasing is None:
            packing = self.worker.outgoing.packing
            for text in rules_that_cannot_fire(self._plan, course, self.size) if self.is_first else ():
                logging.getLogger("podium").warning(text)
            self._phasing = Phasing(self._plan, self.worker, course, self._recorder, self._codec, packing)
        self._phasing.course = course._replace(began=self._phasing.course.began)
        return self._phasing

    def _until_horizon(self, feed: Feed) -> Iterator[tuple[Any, Any]]:
        worker = self.worker
        while True:
            worker.stop_requested = self._control.stop_requested()
            batch = None if worker.stop_agreed or worker.switch_agreed else feed.fetch()
            if batch is None:
                break
            if worker.weigh is not None and self.strategy.feed == "step" and batch.weight == 0:
                batch = batch._replace(samples=0)  # all of it is padding: the mean over nothing is no number
            self._batch, self._fed_s = batch, feed.took_s
            if batch.samples == 0:
                self.step(None)
                continue
            yield batch.inputs, batch.targets
            if self._batch is not None:
                raise ConfigError("run.batches: every batch needs one call of run.step before the next")
        with self._going_on():
            self._balancing.settle()

    def step(self, closure: Callable[[], Tensor] | None) -> Tensor:
        """One step of the strategy on the batch in hand; `closure` computes its mean loss.

        When a peer is lost meanwhile, the survivors regroup, this returns nan, and the step's samples come again.
        """
        self.check()
        batch, self._batch = self._batch, None
        if batch is None:
            raise ConfigError("run.step: there is no batch in hand; call it once for each batch of run.batches")
        meter, worker, strategy = StepMeter(self.worker), self.worker, self.strategy
        retried = strategy.survives_loss and self.comm.size > 1
        if retried and not strategy.by_rounds:
            worker.remember()
        self._step_failed = True
        try:
            if self._buffers == "broadcast" and strategy.feed == "step" and not strategy.by_rounds:
                worker.broadcast_buffers()
            loss = strategy.step(worker, self._state, batch._replace(closure=closure))
        except Lost:
            if not strategy.survives_loss:
                raise
            self._recover()
            self._step_failed = False
            return torch.tensor(float("nan"))
        self._step_failed = False
        if retried:
            worker.check_state()  # a survivor of a loss will have to send it
        if retried and strategy.by_rounds and worker.round.steps == 0:
            worker.mark()
        took_ns = meter.record(self._recorder, batch, float(loss))
        if strategy.feed == "step":
            together = not strategy.by_rounds or worker.round.steps == 0
            with self._going_on():
                pass_s = self._fed_s + worker.pass_ns / 1e9
                self._balancing.saw_step(worker.pass_samples, pass_s, took_ns / 1e9, may_tell=together)
        worker.check_loss(float(loss), batch, worker.steps_done)
        if self._phasing is not None:
            self._phasing.step_s = took_ns / 1e9
            self._phasing.saw_step(float(loss))
        self.worker.outgoing.tell_news(self._recorder, self.worker.steps_done)
        self._control.progress(progress_of(self.worker, float(loss), total_samples=self.worker.horizon))
        return loss

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Between two steps: should a peer be lost here, the survivors regroup and nothing is undone."""
        try:
            yield
        except Lost:
            if not self.strategy.survives_loss:
                raise
            self._recover(in_step=False)

    def _recover(self, *, in_step: bool = True) -> None:
        """Go on with whoever is left: from the last step, or from where the round began."""
        worker, phasing = self.worker, self._phasing
        assert phasing is not None
        self._balancing.drop()
        if self.strategy.by_rounds:
            worker.return_to_mark()
        carried = {"phasing": phasing.state()}
        by_rounds = self.strategy.by_rounds
        recover(worker, self._control, in_step=in_step and not by_rounds, in_round=by_rounds, carried=carried)
        phasing.load_state(carried["phasing"])
        worker.outgoing.prepare()
        self._state = self.strategy.init(worker)

    def save(self, path: str | Path) -> None:
        """Write the model as safetensors; does nothing except on the first worker."""
        self.check()
        if self.is_first:
            save_tensors(Path(path), self.worker.model.state_dict())

    def check(self) -> None:
        """Raise what went wrong when the user broke out of the loop."""
        if self.failure is not None:
            raise self.failure

    def param_hash(self) -> str:
        self.check()
        return self.worker.param_hash()


def join(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    schedule: LRScheduler | None = None,
    clip_norm: float | None = None,
    seed: int | None = None,
    weigh: Callable[[Any], float] | None = None,
) -> Run:
    """Take part in a run with this model and optimizer; the other workers' parameters become the first one's.

    Whoever started this process named the strategy; started by itself, it trains alone. `schedule` is stepped once per
    global step. `seed` fixes the order of samples, `clip_norm` is the largest norm of a gradient: where the script
    leaves them open, they are what `podium run --set seed=… --set clip_norm=…` says. `weigh` as in `podium.Task`:
    (targets) to how much a batch's mean loss counts, where that is not by its samples.

    A process joins once.
    """
    check_parts("podium.join", model, optimizer, schedule)
    options = {"schedule": schedule, "clip_norm": clip_norm, "seed": seed or 0, "weigh": weigh}
    if not _STARTED_AS:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "podium.join: this process is one of several of torchrun's, but was not started as a Podium rank; "
                "use: torchrun … -m podium.node --script SCRIPT"
            )
        (comm,) = MemoryWorld(1).ranks
        # Alone in this process: torch's generator is the user's, and stays.
        comm.shares_process = False
        return Run(model, optimizer, comm, make_strategy("solo"), _Alone(), Recorder(0), **options)  # type: ignore[arg-type]  # each option has its own type
    started = _STARTED_AS[0]
    if started.joined_at is not None:
        raise ConfigError(
            f"podium.join: this process has joined the run already, at {started.joined_at}: under podium run and "
            "torchrun one script trains one model, in one run; go on with the first join's result, put what is trained "
            "together into one nn.Module, or start a script for each model"
        )
    started.joined_at = _caller()
    config = started.node.config
    options["seed"] = _one_of("seed", seed, config.seed, given="seed" in started.given or config.seed != 0)
    options["clip_norm"] = _one_of("clip_norm", clip_norm, config.clip_norm, given=config.clip_norm is not None)
    _check_device(config, model)
    return _join_others(started, model, optimizer, options)


def _one_of(name: str, in_script: Any, in_run: Any, *, given: bool) -> Any:
    """A setting that the script may have, or the run: not both, where they differ."""
    if in_script is None:
        return in_run
    if given and in_script != in_run:
        raise ConfigError(
            f"podium.join({name}={in_script!r}): the run was started with {name}={in_run!r}; say it in one place"
        )
    return in_script


def _check_device(config: RunConfig, model: nn.Module) -> None:
    """The script moves its model by itself; where the run was given a device, it must be of that kind."""
    kinds = {name.partition(":")[0] for name in devices_in(config.device)}
    found = next((p.device.type for p in model.parameters()), "cpu")
    if config.device != RunConfig.device and "auto" not in kinds and found not in kinds:
        raise ConfigError(
            f"podium.join: the run was started with device={config.device}, and the model lies on {found}: the script "
            "moves it by itself, before podium.join"
        )


def _caller() -> str:
    """The line that called `podium.join`."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _join_others(started: _Started, model: nn.Module, optimizer: Optimizer, options: dict[str, Any]) -> Run:
    node = started.node
    config, spec = node.config, node.spec
    strategy = make_strategy(config.strategy, config.strategy_options, config.workers)
    comms = node.connect()
    node.membership.begun()
    node.on_end.append(comms[spec.rank].close)
    for endpoint in spec.endpoints:
        if endpoint >= spec.workers:
            _serve(node, comms[endpoint], model, optimizer, strategy, alone=spec.rank >= spec.workers)
    _seed_by_rank(started, spec.rank, options["seed"])
    run = Run(
        model,
        optimizer,
        comms[spec.rank],
        strategy,
        node.membership,
        node.recorder(spec.rank),
        config=config,
        **options,
    )
    node.on_end.insert(0, run.check)
    return run


def _seed_by_rank(started: _Started, rank: int, seed: int) -> None:
    """A random stream of its own for each rank; rank 0 goes on with the script's, as plain PyTorch would.

    A script that has not seeded numpy or Python's `random` gets rank 0's from the run's seed.
    """
    if rank:
        own = derived_seed(torch.initial_seed() % 2**63, rank)
        torch.manual_seed(own)
        seed_others(derived_seed(own, seed))
        return
    if started.numpy_key == _numpy_key():
        seed_numpy(seed)
    if started.python_key == _python_key():
        random.seed(seed)


def _numpy_key() -> bytes:
    """What seeding numpy changes, and a few draws do not."""
    return bytes(np.random.get_state()[1].tobytes())  # type: ignore[index]  # the legacy tuple


def _python_key() -> tuple[int, ...]:
    return random.getstate()[1][:-1]  # type: ignore[no-any-return]  # its last word says how many were drawn


def _serve(
    node: Node, comm: Communicator, model: nn.Module, optimizer: Optimizer, strategy: Strategy[Any], alone: bool
) -> None:
    """Serve in a thread beside the worker, or, in a process without one, here and to the end."""
    import copy

    own_model, own_optimizer = copy.deepcopy((model, optimizer))  # the worker's own stay untouched
    flat = Flat(own_model, own_optimizer, strategy.bucket_bytes)  # laid out as the workers' is
    packing = packing_for(node.config, strategy)
    recorder = node.recorder(comm.rank)
    server = Server(
        comm,
        flat,
        own_optimizer,
        recorder=recorder,
        codec=packing.codec,
        pull=strategy.pull_codec,
        takes_gradients=any(p.strategy.takes_gradients for p in strategy.phases if p.strategy.server_count),
        tell_awaits=node.membership.awaits,
    )
    if alone:
        run_server(server)
        raise SystemExit(0)
    node.serve_beside(server)


def run_user_script(
    spec: NodeSpec, task: Task | None, *, script: str, args: tuple[str, ...], given: Collection[str] = ()
) -> None:
    """The body of a process that runs the user's script as one rank.

    `given`: settings of the run that were named, if only by their default.
    """
    settle_in(spec)
    node = Node.from_spec(spec)
    _STARTED_AS.append(_Started(node, frozenset(given), _numpy_key(), _python_key()))

    def body() -> None:
        sys.argv = [script, *args]
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise TrainingError(f"{script} ended with exit code {end.code}") from end

    node.run(body)


def _end_of(lease: Meta | None) -> int:
    """Where in the order a lease ends that a worker was given and has not begun."""
    if lease is None or "piece" not in lease:
        return 0
    piece = Slice(*lease["piece"])
    return piece.position + piece.count


def _same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class _Alone(Control):
    """Nobody outside."""

    def stop_requested(self) -> bool:
        return False

    def progress(self, facts: dict[str, Any]) -> None:
        pass


def _no_loss(outputs: Any, targets: Any) -> Tensor:
    raise ConfigError("run.step needs a closure that computes the loss")
