"""DistributedDataParallel with its own communication hooks, in the loop of its documentation.

    none        gradients as they are
    fp16        `fp16_compress_hook`
    power-sgd   `powerSGD_hook`, rank 1, which begins after two plain steps, the fewest it takes

PowerSGD gets one bucket for all: with DDP's usual buckets its hook does not come to an end over gloo. The ranks have
the allocator's switch that Podium's set (`podium.engine.allocator`), so that it is not mistaken for better
communication.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from podium.engine.allocator import keep_freed_memory
from podium.lab.bench.peers.podium_ps import Place
from podium.lab.bench.peers.stepping import Ranks, Stepping, Steps, in_turn, run_steps, share_of_data
from podium.lab.bench.peers.team import Team, answer
from podium.launch.clusters.namespaces import enter_namespace
from podium.task import Task, load_task

HOOKS = ("none", "fp16", "power-sgd")
_PLAIN_STEPS = 2  # PowerSGD's hook asks for at least so many
_ONE_BUCKET_MB = 200


@final
class DdpSteps(Stepping):
    """A replica per hook and rank, made when first asked for and kept."""

    def __init__(
        self, payload: Mapping[str, Any], folder: Path, places: tuple[Place, ...], interfaces: Sequence[str] = ()
    ) -> None:
        size = len(places)
        ranks = enumerate(zip(places, in_turn(interfaces, size), strict=True))
        members = [partial(_rank, rank, size, dict(payload), folder / "ddp", *where) for rank, where in ranks]
        self._ranks = Ranks(Team("ddp", members), size)

    def measure(self, how: str, seconds: float, most: int, warmup: int = 0) -> Steps:
        return self._ranks.measure(how, seconds, most, warmup)

    def end(self) -> None:
        self._ranks.end()


def _rank(
    rank: int, size: int, payload: dict[str, Any], store: Path, place: Place, interface: str, pipe: Connection
) -> None:
    keep_freed_memory()
    if place.namespace is not None:
        enter_namespace(place.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group("gloo", store=FileStore(str(store), size), rank=rank, world_size=size)
    task = load_task("wide-mlp", payload)
    made: dict[str, Callable[[], None]] = {}

    def ready(hook: str) -> None:
        if hook not in made:
            made[hook] = _replica(hook, task, rank, size)
            for _ in range(_PLAIN_STEPS if hook == "power-sgd" else 0):
                made[hook]()

    def steps(hook: str, count: int) -> Steps:
        return run_steps(count, made[hook], dist.barrier, interface)

    answer(pipe, {"ready": ready, "steps": steps})


def _replica(hook: str, task: Task, rank: int, size: int) -> Callable[[], None]:
    """Its step."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    plain = task.model()
    if hook == "power-sgd":
        model = DistributedDataParallel(plain, bucket_cap_mb=_ONE_BUCKET_MB)
    else:
        model = DistributedDataParallel(plain)
    _register(model, hook)
    optimizer = task.optimizer(model)
    inputs, targets = share_of_data(task, rank, size)

    def step() -> None:
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def _register(model: Any, hook: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing the hooks warns of parts that are not used here
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "power-sgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=_PLAIN_STEPS
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
