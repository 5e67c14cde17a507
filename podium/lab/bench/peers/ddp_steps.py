"""DistributedDataParallel with its own communication hooks, in the loop of its documentation.

    none        uncompressed gradients
    fp16        `fp16_compress_hook`
    power-sgd   `powerSGD_hook`, rank 1, which begins after two plain steps, the fewest it accepts

PowerSGD gets one bucket for all gradients: with DDP's usual buckets its hook never returns over gloo. The ranks have
the allocator setting of Podium's ranks (`podium.engine.allocator`), so that its effect is not mistaken for better
communication.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, final

import torch.distributed as dist

from podium.lab.bench.peers.ddp import ddp_step, join_gloo
from podium.lab.bench.peers.place import Place
from podium.lab.bench.peers.stepping import Ranks, Steps, run_steps, share_of_data
from podium.lab.bench.peers.team import Team, answer
from podium.task import load_task

HOOKS = ("none", "fp16", "power-sgd")
_PLAIN_STEPS = 2  # the fewest that PowerSGD's hook accepts
_ONE_BUCKET_MB = 200


@final
class DdpSteps(Ranks):
    """A replica per hook and rank, made at the hook's first round and reused."""

    def __init__(self, payload: Mapping[str, Any], folder: Path, places: tuple[Place, ...]) -> None:
        size = len(places)
        members = [
            partial(_rank, rank, size, dict(payload), folder / "ddp", place) for rank, place in enumerate(places)
        ]
        super().__init__(Team("ddp", members), size)


def _rank(rank: int, size: int, payload: dict[str, Any], store: Path, place: Place, pipe: Connection) -> None:
    place.enter()
    join_gloo(rank, size, store)
    task = load_task("wide-mlp", payload)
    made: dict[str, Callable[[], None]] = {}

    def ready(hook: str) -> None:
        if hook not in made:
            batches = itertools.repeat(share_of_data(task, rank, size))
            options = {"bucket_cap_mb": _ONE_BUCKET_MB} if hook == "power-sgd" else {}
            made[hook], _ = ddp_step(task, batches, lambda model: _register(model, hook), **options)
            for _ in range(_PLAIN_STEPS if hook == "power-sgd" else 0):
                made[hook]()

    def steps(hook: str, count: int) -> Steps:
        return run_steps(count, made[hook], dist.barrier, place.interface)

    answer(pipe, {"ready": ready, "steps": steps})


def _register(model: Any, hook: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing the hooks warns about parts not used here
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "power-sgd":
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=_PLAIN_STEPS
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
