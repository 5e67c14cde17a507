"""`podium.join`: a script takes part in a run with its own training loop.

    run = podium.join(model, optimizer)
    for x, y in run.batches(train_set, batch_size=64, epochs=5):
        loss = run.step(lambda: F.cross_entropy(model(x), y))

Started as `python script.py` it is one worker; by `podium run script.py --workers 4 --strategy …` or
`torchrun … -m podium.node --script script.py` it is one of many. A process that is a server serves inside `join` and
ends there.
"""

from __future__ import annotations

import copy
import os
import random
import runpy
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from podium.comm.base import Communicator
from podium.comm.memory import MemoryWorld
from podium.config import RunConfig, devices_in
from podium.engine.build import fitted, packing_for
from podium.engine.flat import Flat
from podium.engine.generators import derived_seed, seed_numpy, seed_others
from podium.engine.gradient_pass import PassOptions
from podium.engine.own_loop import Run
from podium.engine.parts import check_parts
from podium.engine.recovery import Control
from podium.engine.replica import Replica
from podium.engine.training import run_server
from podium.engine.worker import Worker
from podium.errors import ConfigError, TrainingError
from podium.exchange.collectives import collective_of
from podium.launch.notices import rules_that_cannot_fire
from podium.launch.process import Node, NodeSpec, settle_in
from podium.records.recorder import Recorder
from podium.servers.server import Server, ServerOptions
from podium.strategies import make_strategy
from podium.strategies.base import Strategy
from podium.task import Task


@dataclass
class _Started:
    """This process as a rank, made by `run_user_script`."""

    node: Node
    given: frozenset[str]
    """Settings that the user set, even to their default."""
    numpy_key: bytes
    python_key: tuple[int, ...]
    """The generators' states before the script began, to find out whether it has seeded them."""
    joined_at: str | None = None
    """Where the script called `join`."""


_STARTED_AS: list[_Started] = []
"""For `join`: this process's rank; empty when the script was started by itself."""


def join(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    schedule: LRScheduler | None = None,
    clip_norm: float | None = None,
    seed: int | None = None,
    weigh: Callable[[Any], float] | None = None,
) -> Run:
    """Take part in a run with this model and optimizer; all workers begin with the first worker's parameters.

    `podium run` or torchrun sets the strategy; a script started by itself trains alone. `schedule` is stepped once per
    global step. `seed` fixes the order of samples, `clip_norm` is the largest norm of a gradient: where the script
    leaves them None, the values of `podium run --set seed=… --set clip_norm=…` hold. `weigh` as in `podium.Task`:
    (targets) to the weight of a batch's mean loss, where that is not its number of samples.

    A process joins once.
    """
    check_parts("podium.join", model, optimizer, schedule)
    parts = Parts(model, optimizer, schedule, weigh)
    if not _STARTED_AS:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                "podium.join: this process is one of several of torchrun's, but was not started as a Podium rank; "
                "use: torchrun … -m podium.node --script SCRIPT"
            )
        (comm,) = MemoryWorld(1).ranks
        # One rank in this process: torch's generator is the user's, and is not swapped.
        comm.shares_process = False
        options = Options(seed or 0, clip_norm)
        return make_run(parts, options, comm, make_strategy("solo"), RunConfig(), Recorder(0), _Alone())
    started = _STARTED_AS[0]
    if started.joined_at is not None:
        raise ConfigError(
            f"podium.join: this process has joined the run already, at {started.joined_at}: under podium run and "
            "torchrun one script trains one model, in one run; use the first join's result, put what is trained "
            "together into one nn.Module, or start a script for each model"
        )
    started.joined_at = _caller()
    config = started.node.config
    options = Options(
        _one_of("seed", seed, config.seed, given="seed" in started.given or config.seed != 0),
        _one_of("clip_norm", clip_norm, config.clip_norm, given=config.clip_norm is not None),
    )
    _check_device(config, model)
    return _join_others(started, parts, options)


class Parts(NamedTuple):
    """What the script trains."""

    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler | None = None
    weigh: Callable[[Any], float] | None = None


class Options(NamedTuple):
    """Settings from the script or from the run."""

    seed: int = 0
    clip_norm: float | None = None


def make_run(
    parts: Parts,
    options: Options,
    comm: Communicator,
    strategy: Strategy[Any],
    config: RunConfig,
    recorder: Recorder,
    control: Control,
) -> Run:
    """The worker of a script's run, and its loop."""
    replica = Replica(
        parts.model,
        parts.optimizer,
        schedule=parts.schedule,
        clip_norm=options.clip_norm,
        bucket_bytes=strategy.bucket_bytes,
        allocate=comm.allocate,
    )
    worker = Worker(
        replica,
        comm,
        PassOptions(loss=_no_loss, weigh=parts.weigh, autocast=config.autocast or "off"),
        collective=collective_of(config),
        packing=fitted(packing_for(config, strategy), parts.optimizer),
        seed=options.seed,
    )
    return Run(worker, strategy, config, recorder, control, notices=rules_that_cannot_fire)


def _one_of(name: str, in_script: Any, in_run: Any, *, given: bool) -> Any:
    """A setting of the script or of the run; raises where both set it to different values."""
    if in_script is None:
        return in_run
    if given and in_script != in_run:
        raise ConfigError(
            f"podium.join({name}={in_script!r}): the run was started with {name}={in_run!r}; set it in one place"
        )
    return in_script


def _check_device(config: RunConfig, model: nn.Module) -> None:
    """The script moves its model by itself; where the run has a device setting, the model must be on that kind."""
    kinds = {name.partition(":")[0] for name in devices_in(config.device)}
    found = next((p.device.type for p in model.parameters()), "cpu")
    if config.device != RunConfig.device and "auto" not in kinds and found not in kinds:
        raise ConfigError(
            f"podium.join: the run was started with device={config.device}, and the model is on {found}: the script "
            "must move it, before podium.join"
        )


def _caller() -> str:
    """The line that called `podium.join`."""
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _join_others(started: _Started, parts: Parts, options: Options) -> Run:
    node = started.node
    config, spec = node.config, node.spec
    strategy = make_strategy(config.strategy, config.strategy_options, config.workers)
    comms = node.connect(next((p.device for p in parts.model.parameters()), None))
    node.membership.begun()
    node.on_end.append(comms[spec.rank].close)
    for endpoint in spec.endpoints:
        if endpoint >= spec.workers:
            alone = spec.rank >= spec.workers
            _serve(node, comms[endpoint], parts.model, parts.optimizer, strategy, alone=alone)
    _seed_by_rank(started, spec.rank, options.seed)
    recorder = node.recorder(spec.rank)
    run = make_run(parts, options, comms[spec.rank], strategy, config, recorder, node.membership)
    node.on_end.insert(0, run.check)
    return run


def _seed_by_rank(started: _Started, rank: int, seed: int) -> None:
    """Give each rank its own random stream; rank 0 continues the script's, as plain PyTorch would.

    Where the script has not seeded numpy or Python's `random`, rank 0's are seeded with the run's seed.
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
    """The part of numpy's state that seeding changes, and a few draws do not."""
    return bytes(np.random.get_state()[1].tobytes())  # type: ignore[index]  # the legacy tuple


def _python_key() -> tuple[int, ...]:
    return random.getstate()[1][:-1]  # type: ignore[no-any-return]  # its last word says how many were drawn


def _serve(
    node: Node, comm: Communicator, model: nn.Module, optimizer: Optimizer, strategy: Strategy[Any], alone: bool
) -> None:
    """Serve in a thread beside the worker; `alone`, in a process without a worker: in this thread, to the end."""
    own_model, own_optimizer = copy.deepcopy((model, optimizer))  # the worker uses the originals
    flat = Flat(own_model, own_optimizer, strategy.bucket_bytes)  # laid out as the workers' is
    packing = packing_for(node.config, strategy)
    recorder = node.recorder(comm.rank)
    options = ServerOptions(
        codec=packing.codec,
        pull=strategy.server_spec.pull_codec,
        takes_gradients=strategy.server_spec.role == "optimizer",
        tell_awaits=node.membership.awaits,
    )
    server = Server(comm, flat, own_optimizer, recorder=recorder, options=options)
    if alone:
        run_server(server)
        raise SystemExit(0)
    node.serve_beside(server)


def run_user_script(
    spec: NodeSpec, task: Task | None, *, script: str, args: tuple[str, ...], given: Collection[str] = ()
) -> None:
    """The body of a process that runs the user's script as one rank.

    `given`: settings of the run that the user set, even to their default.
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


class _Alone(Control):
    """No launcher: never stops, reports nothing."""

    def stop_requested(self) -> bool:
        return False

    def progress(self, facts: dict[str, Any]) -> None:
        pass


def _no_loss(outputs: Any, targets: Any) -> Tensor:
    raise ConfigError("run.step needs a closure that computes the loss")
