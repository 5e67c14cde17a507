"""`podium bench step`: one training step of all-reduce against DistributedDataParallel.

All train the same model from the same start on the same batches. `podium` sums in shared memory, as it does on one
host; `podium_over_gloo` and DDP sum through gloo. Each contender has its own ranks, set up as its users have them:
Podium's as its launchers start them, DDP's as in a plain script. Contenders take turns in rounds of a few steps; those
that are not measured sleep. A round's time is the slowest rank's. At the end `difference` compares all parameters: the
contenders must have done the same work.

Podium's ranks keep freed memory (`podium.engine.allocator`) and send no buffers (those of batch norm); so that this is
not mistaken for better communication, DDP is also measured with the same settings: `ddp_tuned`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from podium.comm.clocks import WallClock
from podium.comm.real.arena import Arena
from podium.comm.real.communicator import RealCommunicator
from podium.comm.real.process_group import Group, file_store
from podium.config import parse_spec
from podium.engine.allocator import keep_freed_memory
from podium.engine.batch import Batch
from podium.engine.files import load_tensors, save_tensors
from podium.engine.gradient_pass import PassOptions
from podium.engine.replica import Replica
from podium.engine.worker import Worker
from podium.errors import DataError
from podium.exchange.collectives import make_collective
from podium.lab.bench.harness import check_at_least, check_names, interleave, ratio, spread_ms
from podium.lab.bench.peers.ddp import DDP_OPTIONS, DDP_TUNED, ddp_step, join_gloo
from podium.lab.bench.peers.team import Team, answer
from podium.launch.rendezvous import rendezvous_folder
from podium.strategies import make_strategy
from podium.task import Task, load_task

PEERS = ("ddp",)
TASKS = ("wide-mlp", "cifar10-resnet20")
_CONTENDERS = (
    "podium",
    "podium_over_gloo",
    *DDP_OPTIONS,
)
_SHAPES = {"cifar10-resnet20": (3, 32, 32), "mnist-lenet5": (1, 28, 28)}
_CLASSES = 10
_DEADLINE_S = 300.0
_BATCHES = 4


class Setting(NamedTuple):
    """What is measured."""

    task: str
    data_dir: str
    ranks: int
    steps: int
    strategy: dict[str, Any]


def bench_step(
    peers: Sequence[str] = PEERS,
    rounds: int | None = None,
    *,
    tasks: str = ",".join(TASKS),
    steps: int = 3,
    ranks: int = 2,
    data_dir: str = ".",
    bucket_bytes: int | None = None,
    overlap: bool = True,
) -> dict[str, Any]:
    """Rows with `task`, `ratio` (Podium's time / the faster DDP's, median over rounds), its interval, and all times."""
    check_names("peer of bench step", peers, PEERS)
    check_at_least("step", 1, steps=steps, ranks=ranks)
    options = {"overlap": overlap, **({} if bucket_bytes is None else {"bucket_bytes": bucket_bytes})}
    names = _CONTENDERS if peers else _CONTENDERS[:2]
    rows = [_row(Setting(task, data_dir, ranks, steps, options), names, rounds or 15) for task in tasks.split(",")]
    return {"bench": "step", "peers": list(peers), "ranks": ranks, "steps_per_round": steps, "rows": rows}


def _row(setting: Setting, names: Sequence[str], rounds: int) -> dict[str, Any]:
    with rendezvous_folder() as folder:
        ranks = range(setting.ranks)
        with ExitStack() as ends:
            teams: dict[str, Team] = {}
            for name in names:
                teams[name] = Team(name, [partial(_rank, rank, name, setting, folder) for rank in ranks])
                ends.callback(teams[name].end)
            times = interleave({name: partial(_measure, team, ranks) for name, team in teams.items()}, rounds, warmup=2)
            for team in teams.values():
                team.ask("save", members=[0])
        finals = {name: load_tensors(folder / f"{name}.safetensors") for name in names}
    spread = {name: spread_ms(measured) for name, measured in times.items()}
    row: dict[str, Any] = {"task": setting.task, "ranks": setting.ranks, "step_ms": spread}
    peers = [name for name in names if name.startswith("ddp")]
    if peers:
        as_started = min(set(peers) - {DDP_TUNED}, key=lambda name: spread[name]["median"])
        tuned = min(peers, key=lambda name: spread[name]["median"])
        row |= {**ratio(times["podium"], times[as_started]), "against": as_started}
        row["ratio_to_fastest_ddp"] = {**ratio(times["podium"], times[tuned]), "against": tuned}
        row["ratio_over_gloo"] = {**ratio(times["podium_over_gloo"], times[as_started]), "against": as_started}
        row["difference"] = max(difference(finals["podium"], finals[name]) for name in names[1:])
    return row


def _measure(team: Team, ranks: Sequence[int]) -> float:
    """One round: seconds per step of the slowest rank."""
    return max(float(took) for took in team.ask("round", members=ranks))


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference between two contenders' parameters, which DDP names with a prefix."""
    return max(float((x - y).abs().max()) for x, y in zip(a.values(), b.values(), strict=True))


def _rank(rank: int, name: str, setting: Setting, folder: Path, pipe: Connection) -> None:
    """One rank of a contender."""
    task = load_task(setting.task, data_dir=setting.data_dir)
    batches = itertools.cycle(batches_of(task, rank, setting.ranks))
    make = _podium if name.startswith("podium") else _ddp
    step, barrier, model = make(name, task, rank, setting, folder, batches)

    def measure() -> float:
        barrier()
        began = time.perf_counter()
        for _ in range(setting.steps):
            step()
        return (time.perf_counter() - began) / setting.steps

    def save() -> None:
        save_tensors(folder / f"{name}.safetensors", dict(model.named_parameters()))

    answer(pipe, {"round": measure, "save": save})


Contender = tuple[Callable[[], object], Callable[[], object], torch.nn.Module]
"""(step, barrier, model)"""


def _podium(
    name: str, task: Task, rank: int, setting: Setting, folder: Path, batches: Iterator[tuple[Tensor, Tensor]]
) -> Contender:
    keep_freed_memory()
    shared = name == "podium"
    comm = RealCommunicator(
        rank,
        range(setting.ranks),
        (),
        WallClock(),
        group=Group(file_store(folder / name), host="127.0.0.1", deadline_s=_DEADLINE_S),
        channel=None,
        deadline_s=_DEADLINE_S,
        arena=Arena() if shared else None,
    )
    return podium_step(comm, task, setting.strategy, batches, "default" if shared else "backend")


def podium_step(
    comm: RealCommunicator,
    task: Task,
    options: Mapping[str, Any],
    batches: Iterator[tuple[Tensor, Tensor]],
    collective: str,
) -> Contender:
    """Podium's worker and strategy, as `podium train` uses them; `options` are all-reduce's."""
    strategy = make_strategy("all-reduce", options, comm.size)
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model)
    replica = Replica(model, optimizer, bucket_bytes=strategy.bucket_bytes, allocate=comm.allocate)
    worker = Worker(replica, comm, PassOptions(loss=task.loss), collective=make_collective(*parse_spec(collective)))
    worker.sender.prepare()
    state = strategy.init(worker)
    own = (Batch(x, y, len(y), 1 / comm.size) for x, y in batches)
    return lambda: strategy.step(worker, state, next(own)), comm.barrier, model


def _ddp(
    name: str, task: Task, rank: int, setting: Setting, folder: Path, batches: Iterator[tuple[Tensor, Tensor]]
) -> Contender:
    import torch.distributed as dist

    if name == DDP_TUNED:
        keep_freed_memory()
    join_gloo(rank, setting.ranks, folder / name)
    step, model = ddp_step(task, batches, **DDP_OPTIONS[name])
    return step, dist.barrier, model


def batches_of(task: Task, rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """A few fixed batches of this rank's share; random ones of the right shape if the data are missing."""
    share = task.batch_size // ranks
    try:
        data = task.data().train
        from numpy import arange

        firsts = [(k * ranks + rank) * share for k in range(_BATCHES)]
        return [data.gather(arange(first, first + share) % len(data)) for first in firsts]
    except DataError:
        draw = torch.Generator().manual_seed(rank)
        shape = (share, *_SHAPES[task.name])
        return [
            (torch.randn(shape, generator=draw), torch.randint(_CLASSES, (share,), generator=draw))
            for _ in range(_BATCHES)
        ]
