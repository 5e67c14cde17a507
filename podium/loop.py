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
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from podium.balance import balancer_of
from podium.balancing import Balancing
from podium.building import derived_seed, fitted, packing_for
from podium.cluster.process import Node, NodeSpec, settle_in
from podium.collectives import collective_of
from podium.comm.base import Communicator
from podium.comm.memory import MemoryWorld
from podium.config import RunConfig
from podium.data.base import as_dataset
from podium.data.order import GlobalOrder
from podium.errors import ConfigError, Lost, TrainingError
from podium.feed import Feed, make_feed
from podium.files import save_tensors
from podium.flat import Flat
from podium.measure.records import Recorder
from podium.measure.steps import StepMeter, progress_of
from podium.notices import rules_that_cannot_fire
from podium.phasing import Phasing
from podium.recovery import Control, recover
from podium.servers.server import Server
from podium.strategies import make_strategy
from podium.strategies.base import Strategy
from podium.task import Task
from podium.training import run_server
from podium.triggers.base import Course
from podium.worker import Batch, Worker

_STARTED_AS: list[Node] = []
"""The node that `run_user_script` made of this process, for `join` to take up; empty when it was started by itself."""


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
        config: RunConfig | None = None,
    ) -> None:
        """`config`: what the run was asked for; where there is none, this worker is alone."""
        asked = config or RunConfig()
        self.comm, self.seed, self._plan = comm, seed, strategy
        self.worker = Worker(
            model,
            optimizer,
            comm,
            loss=_no_loss,
            schedule=schedule,
            bucket_bytes=strategy.bucket_bytes,
            clip_norm=clip_norm,
            collective=collective_of(asked),
            packing=fitted(packing_for(asked, strategy), optimizer),
            seed=seed,
        )
        self._control, self._recorder, self._codec = control, recorder, asked.codec
        self._balancing = Balancing(balancer_of(asked), self.worker, recorder)
        self._phasing: Phasing | None = None
        self._batch: Batch | None = None
        self._fed_s = 0.0
        self._step_failed = False
        self._state: Any = None

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
        if worker.steps_done == 0:
            worker.share_from_first()
        if self.strategy.survives_loss and self.size > 1:
            worker.check_state()
        end = worker.position + epochs * order.samples
        last = max(end, (total_epochs or 0) * order.samples)
        phasing = self._lead(Course(order.samples, batch_size, last, eval_every=0))  # the script validates, if anybody
        while worker.position < end and not worker.stop_agreed:
            feed = make_feed(self.strategy.feed, dataset, order, worker, worker.device, self._balancing)
            worker.horizon = min(end, phasing.horizon)
            worker.outgoing.prepare()
            if self.strategy.by_rounds and self.strategy.survives_loss:
                worker.mark()
            began = self.comm.clock.now_ns()
            self._state = self.strategy.init(worker)
            phasing.has_begun(began)
            try:
                yield from self._until_horizon(feed)
            finally:  # also when the user breaks out of the loop, which all workers must do after the same step
                if not self._step_failed:  # otherwise the others may be gone, and nobody would answer
                    self.strategy.finish(worker, self._state)
            if phasing.is_over:
                phasing.advance()

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
        batch, self._batch = self._batch, None
        if batch is None:
            raise ConfigError("run.step: there is no batch in hand; call it once for each batch of run.batches")
        meter, worker, strategy = StepMeter(self.worker), self.worker, self.strategy
        retried = strategy.survives_loss and self.comm.size > 1
        if retried and not strategy.by_rounds:
            worker.remember()
        self._step_failed = True
        try:
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
        if self.is_first:
            save_tensors(Path(path), self.worker.model.state_dict())

    def param_hash(self) -> str:
        return self.worker.param_hash()


def join(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    schedule: LRScheduler | None = None,
    clip_norm: float | None = None,
    seed: int = 0,
) -> Run:
    """Take part in a run with this model and optimizer; the other workers' parameters become the first one's.

    Whoever started this process named the strategy; started by itself, it trains alone. `schedule` is stepped once per
    global step.
    """
    options = {"schedule": schedule, "clip_norm": clip_norm, "seed": seed}
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
    return _join_others(_STARTED_AS[0], model, optimizer, options)


def _join_others(node: Node, model: nn.Module, optimizer: Optimizer, options: dict[str, Any]) -> Run:
    config, spec = node.config, node.spec
    strategy = make_strategy(config.strategy, config.strategy_options, config.workers)
    comms = node.connect()
    node.membership.begun()
    node.on_end.append(comms[spec.rank].close)
    for endpoint in spec.endpoints:
        if endpoint >= spec.workers:
            _serve(node, comms[endpoint], model, optimizer, strategy, alone=spec.rank >= spec.workers)
    if spec.rank:
        torch.manual_seed(derived_seed(torch.initial_seed() % 2**63, spec.rank))
    return Run(
        model,
        optimizer,
        comms[spec.rank],
        strategy,
        node.membership,
        node.recorder(spec.rank),
        config=config,
        **options,
    )


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


def run_user_script(spec: NodeSpec, task: Task | None, *, script: str, args: tuple[str, ...]) -> None:
    """The body of a process that runs the user's script as one rank."""
    settle_in(spec)
    node = Node.from_spec(spec)
    _STARTED_AS.append(node)

    def body() -> None:
        sys.argv = [script, *args]
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise TrainingError(f"{script} ended with exit code {end.code}") from end

    node.run(body)


class _Alone(Control):
    """Nobody outside."""

    def stop_requested(self) -> bool:
        return False

    def progress(self, facts: dict[str, Any]) -> None:
        pass


def _no_loss(outputs: Any, targets: Any) -> Tensor:
    raise ConfigError("run.step needs a closure that computes the loss")
