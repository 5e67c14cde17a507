"""`podium bench step`: one training step of all-reduce against DistributedDataParallel.

All train the same model from the same start on the same batches. `podium` adds up in shared memory, as it does on one
host; `podium_over_gloo` and DDP through gloo. Each contender has ranks of its own, set up
as its users have them: Podium's as its launchers start them, DDP's as a plain script is. Rounds of a few steps go
round the contenders; whoever is not measured sleeps. A round's time is the slowest rank's. At the end all parameters
must agree, or the comparison would not be of the same work.

Podium's ranks keep freed memory (`podium.engine.allocator`); so that this is not mistaken for better communication, DDP
is also measured with the same switch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from podium.comm.arena import Arena
from podium.comm.memory import WallClock
from podium.comm.real import RealCommunicator
from podium.comm.torch_dist import Group, file_store
from podium.engine.allocator import keep_freed_memory
from podium.engine.files import load_tensors, save_tensors
from podium.engine.worker import Batch, Worker
from podium.errors import ConfigError, DataError, RankFailed, UnknownName
from podium.exchange.collectives import make_collective
from podium.lab.bench.rounds import interleave, ratio, spread_ms
from podium.launch.local import fork_server, nullified_main
from podium.launch.rendezvous import rendezvous_folder
from podium.strategies import make_strategy
from podium.task import Task, load_task

PEERS = ("ddp",)
TASKS = ("wide-mlp", "cifar10-resnet20")
_CONTENDERS = (
    "podium",
    "podium_over_gloo",
    "ddp",
    "ddp_bucket_views",
    "ddp_keeping_memory",
    "ddp_bucket_views_keeping_memory",
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
    for peer in peers:
        if peer not in PEERS:
            raise UnknownName("peer of bench step", peer, PEERS)
    if steps < 1 or ranks < 1:
        raise ConfigError(f"bench step: steps and ranks must be at least 1, got {steps} and {ranks}")
    options = {"overlap": overlap, **({} if bucket_bytes is None else {"bucket_bytes": bucket_bytes})}
    names = _CONTENDERS if peers else _CONTENDERS[:2]
    rows = [_row(Setting(task, data_dir, ranks, steps, options), names, rounds or 15) for task in tasks.split(",")]
    return {"bench": "step", "peers": list(peers), "ranks": ranks, "steps_per_round": steps, "rows": rows}


def _row(setting: Setting, names: Sequence[str], rounds: int) -> dict[str, Any]:
    with rendezvous_folder() as folder:
        teams = {name: _Team(name, setting, folder) for name in names}
        try:
            times = interleave({name: team.measure for name, team in teams.items()}, rounds, warmup=2)
            finals = {name: team.parameters() for name, team in teams.items()}
        finally:
            for team in teams.values():
                team.end()
    spread = {name: spread_ms(measured) for name, measured in times.items()}
    row: dict[str, Any] = {"task": setting.task, "ranks": setting.ranks, "step_ms": spread}
    peers = [name for name in names if name.startswith("ddp")]
    if peers:
        as_started = min(peers[:2], key=lambda name: spread[name]["median"])
        tuned = min(peers, key=lambda name: spread[name]["median"])
        row |= {**ratio(times["podium"], times[as_started]), "against": as_started}
        row["ratio_to_fastest_ddp"] = {**ratio(times["podium"], times[tuned]), "against": tuned}
        row["ratio_over_gloo"] = {**ratio(times["podium_over_gloo"], times[as_started]), "against": as_started}
        row["difference"] = max(_difference(finals["podium"], finals[name]) for name in names[1:])
    return row


def _difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Largest difference between two contenders' parameters, which DDP names with a prefix."""
    return max(float((x - y).abs().max()) for x, y in zip(a.values(), b.values(), strict=True))


class _Team:
    """The ranks of one contender, seen from the process that measures."""

    def __init__(self, name: str, setting: Setting, folder: Path) -> None:
        self.name, self._folder = name, folder
        context = fork_server()
        self._pipes, self._processes = [], []
        for rank in range(setting.ranks):
            mine, theirs = context.Pipe()
            arguments = (rank, name, setting, str(folder), theirs)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            with nullified_main():
                process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)

    def measure(self) -> float:
        """One round: seconds per step of the slowest rank."""
        return max(float(answer) for answer in self._ask("round"))

    def parameters(self) -> dict[str, Tensor]:
        self._ask("save")
        return load_tensors(self._folder / f"{self.name}.safetensors")

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5.0)
            process.kill()

    def _ask(self, what: str) -> list[Any]:
        try:
            for pipe in self._pipes:
                pipe.send(what)
            deadline = time.monotonic() + _DEADLINE_S
            for pipe in self._pipes:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise RankFailed(f"bench step: {self.name} gave no answer in {_DEADLINE_S:g} s")
            return [pipe.recv() for pipe in self._pipes]
        except (EOFError, BrokenPipeError) as error:
            raise RankFailed(f"bench step: a rank of {self.name} failed; its error is above") from error


def _rank(rank: int, name: str, setting: Setting, folder: str, pipe: Connection) -> None:
    """One rank of a contender: does what it is asked until the pipe closes."""
    torch.set_num_threads(1)
    task = load_task(setting.task, data_dir=setting.data_dir)
    batches = _batches(task, rank, setting.ranks)
    make = _podium if name.startswith("podium") else _ddp
    step, barrier, model = make(name, task, rank, setting, folder, batches)
    try:
        while True:
            if pipe.recv() == "save":
                if rank == 0:
                    save_tensors(Path(folder) / f"{name}.safetensors", dict(model.named_parameters()))
                pipe.send(None)
                continue
            barrier()
            began = time.perf_counter()
            for _ in range(setting.steps):
                step()
            pipe.send((time.perf_counter() - began) / setting.steps)
    except EOFError:
        return


Contender = tuple[Callable[[], object], Callable[[], object], torch.nn.Module]
"""Its step, its barrier, its model."""


def _podium(
    name: str, task: Task, rank: int, setting: Setting, folder: str, batches: list[tuple[Tensor, Tensor]]
) -> Contender:
    """Podium's worker and strategy, as `podium train` uses them."""
    keep_freed_memory()
    group = Group(file_store(Path(folder) / name), host="127.0.0.1", deadline_s=_DEADLINE_S)
    ranks = range(setting.ranks)
    shared = name == "podium"
    comm = RealCommunicator(
        rank,
        ranks,
        (),
        WallClock(),
        group=group,
        channel=None,
        deadline_s=_DEADLINE_S,
        arena=Arena() if shared else None,
    )
    strategy = make_strategy("all-reduce", setting.strategy, setting.ranks)
    torch.manual_seed(0)
    model = task.model()
    collective = make_collective("default" if shared else "backend")
    worker = Worker(
        model,
        task.optimizer(model),
        comm,
        loss=task.loss,
        bucket_bytes=strategy.bucket_bytes,
        collective=collective,
    )
    worker.outgoing.prepare()
    state = strategy.init(worker)
    turns = _in_turn([Batch(x, y, len(y), 1 / setting.ranks) for x, y in batches])
    return lambda: strategy.step(worker, state, turns()), comm.barrier, model


def _ddp(
    name: str, task: Task, rank: int, setting: Setting, folder: str, batches: list[tuple[Tensor, Tensor]]
) -> Contender:
    """DDP in the loop of its documentation."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from torch.nn.parallel import DistributedDataParallel

    if "keeping_memory" in name:
        keep_freed_memory()
    store = FileStore(str(Path(folder) / name), setting.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setting.ranks)
    torch.manual_seed(0)
    model = DistributedDataParallel(task.model(), gradient_as_bucket_view="bucket_views" in name)
    optimizer, turns = task.optimizer(model), _in_turn(batches)

    def step() -> None:
        x, y = turns()
        optimizer.zero_grad()
        task.loss(model(x), y).backward()
        optimizer.step()

    return step, dist.barrier, model


def _in_turn(items: list[Any]) -> Callable[[], Any]:
    at = [0]

    def take() -> Any:
        at[0] += 1
        return items[(at[0] - 1) % len(items)]

    return take


def _batches(task: Task, rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """A few fixed batches of this rank's share; random ones of the right shape where the data are not at hand."""
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
