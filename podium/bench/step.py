"""`podium bench step`: one training step of all-reduce against DistributedDataParallel, on the same ranks.

Both train the same model from the same start on the same batches, in the same processes, over gloo. Rounds of a few
steps alternate between them; a round's time is the slowest rank's. At the end their parameters must agree, or the
comparison would not be of the same work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from podium.bench.rounds import interleave, ratio, spread_ms
from podium.cluster.local import fork_server, nullified_main
from podium.cluster.rendezvous import rendezvous_folder
from podium.comm.memory import WallClock
from podium.comm.real import RealCommunicator
from podium.comm.torch_dist import Group, file_store
from podium.errors import ConfigError, DataError, RankFailed, UnknownName
from podium.strategies import make_strategy
from podium.task import Task, load_task
from podium.worker import Batch, Worker

PEERS = ("ddp",)
TASKS = ("wide-mlp", "cifar10-resnet20")
_SHAPES = {"cifar10-resnet20": (3, 32, 32), "mnist-lenet5": (1, 28, 28)}
_CLASSES = 10
_DEADLINE_S = 900.0


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
    """Rows with `task`, `ratio` (Podium's time / DDP's, median over rounds), its interval, and each one's times."""
    for peer in peers:
        if peer not in PEERS:
            raise UnknownName("peer of bench step", peer, PEERS)
    if steps < 1 or ranks < 1:
        raise ConfigError(f"bench step: steps and ranks must be at least 1, got {steps} and {ranks}")
    options = {"overlap": overlap, **({} if bucket_bytes is None else {"bucket_bytes": bucket_bytes})}
    rows = [
        _row(_run_ranks(name, data_dir, ranks, rounds or 15, steps, options), name, ranks, bool(peers))
        for name in tasks.split(",")
    ]
    return {"bench": "step", "peers": list(peers), "ranks": ranks, "steps_per_round": steps, "rows": rows}


def _row(times: dict[str, Any], name: str, ranks: int, with_peer: bool) -> dict[str, Any]:
    podium, ddp, views = times["podium"], times["ddp"], times["ddp_bucket_views"]
    best = min((ddp, views), key=lambda t: sorted(t)[len(t) // 2])
    row = {"task": name, "ranks": ranks, "step_ms": {k: spread_ms(v) for k, v in times.items() if isinstance(v, list)}}
    if with_peer:
        row |= ratio(podium, best)
        row |= {"ratio_to_default_ddp": ratio(podium, ddp)["ratio"], "difference": times["difference"]}
    return row


def _run_ranks(
    name: str, data_dir: str, ranks: int, rounds: int, steps: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Start the ranks, let each measure, and return the first one's times (they agree on the slowest)."""
    context = fork_server()
    with rendezvous_folder() as folder, nullified_main():
        results = context.Queue()
        arguments = [(r, ranks, str(folder), (name, data_dir), rounds, steps, options, results) for r in range(ranks)]
        processes = [context.Process(target=_rank, args=a, daemon=True) for a in arguments]
        for process in processes:
            process.start()
        try:
            deadline = time.monotonic() + _DEADLINE_S
            while results.empty():
                if any(p.exitcode not in (None, 0) for p in processes) or time.monotonic() > deadline:
                    raise RankFailed(f"bench step: a rank failed on {name}; its error is above")
                time.sleep(0.05)
            times: dict[str, Any] = results.get()
        finally:
            for process in processes:
                process.join(timeout=5.0)
                process.kill()
    return times


def _rank(
    rank: int,
    ranks: int,
    folder: str,
    named: tuple[str, str],
    rounds: int,
    steps: int,
    options: dict[str, Any],
    results: Any,
) -> None:
    torch.set_num_threads(1)
    task = load_task(named[0], data_dir=named[1])
    group = Group(file_store(Path(folder) / "podium"), host="127.0.0.1", deadline_s=120.0)
    comm = RealCommunicator(rank, range(ranks), (), WallClock(), group=group, channel=None, deadline_s=120.0)
    batches = _batches(task, rank, ranks)
    ours = _Podium(task, comm, make_strategy("all-reduce", options, ranks), batches)
    theirs = _ddp_contenders(task, rank, ranks, folder, batches)

    def timed(step: Callable[[], None]) -> Callable[[], float]:
        def run() -> float:
            comm.barrier()
            began = time.perf_counter()
            for _ in range(steps):
                step()
            seconds = torch.tensor([0.0] * ranks, dtype=torch.float64)
            seconds[rank] = (time.perf_counter() - began) / steps
            comm.wait(comm.all_reduce(seconds))
            return float(seconds.max())

        return run

    contenders = {"podium": timed(ours.step), **{k: timed(peer.step) for k, peer in theirs.items()}}
    times: dict[str, Any] = dict(interleave(contenders, rounds, warmup=2))
    peer = theirs["ddp"].model
    differences = [
        float((a - b).detach().abs().max()) for a, b in zip(ours.model.parameters(), peer.parameters(), strict=True)
    ]
    times["difference"] = max(differences)
    if rank == 0:
        results.put(times)
    comm.barrier()


def _batches(task: Task, rank: int, ranks: int) -> list[tuple[Tensor, Tensor]]:
    """A few fixed batches of this rank's share; random ones of the right shape where the data are not at hand."""
    share = task.batch_size // ranks
    try:
        data = task.data().train
        from numpy import arange

        wanted = [arange((k * ranks + rank) * share, (k * ranks + rank + 1) * share) % len(data) for k in range(4)]
        return [data.gather(indices) for indices in wanted]
    except DataError:
        draw = torch.Generator().manual_seed(rank)
        shape = (share, *_SHAPES[task.name])
        return [
            (torch.randn(shape, generator=draw), torch.randint(_CLASSES, (share,), generator=draw)) for _ in range(4)
        ]


class _Podium:
    """Podium's side: the worker and the strategy, as `podium train` uses them."""

    def __init__(self, task: Task, comm: RealCommunicator, strategy: Any, batches: list[tuple[Tensor, Tensor]]) -> None:
        torch.manual_seed(0)
        self.model = task.model()
        self.strategy, self._turn = strategy, 0
        optimizer = task.optimizer(self.model)
        self.worker = Worker(self.model, optimizer, comm, loss=task.loss, bucket_bytes=strategy.bucket_bytes)
        self._batches = [Batch(x, y, len(y), 1 / comm.size) for x, y in batches]
        self._state = strategy.init(self.worker)

    def step(self) -> None:
        batch = self._batches[self._turn % len(self._batches)]
        self._turn += 1
        self.strategy.step(self.worker, self._state, batch)


class _Peer:
    """DDP's side: the loop of its documentation."""

    def __init__(self, task: Task, model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
        self.model, self.loss = model, task.loss
        self.optimizer = task.optimizer(model)
        self._batches, self._turn = batches, 0

    def step(self) -> None:
        x, y = self._batches[self._turn % len(self._batches)]
        self._turn += 1
        self.optimizer.zero_grad()
        self.loss(self.model(x), y).backward()
        self.optimizer.step()


def _ddp_contenders(
    task: Task, rank: int, ranks: int, folder: str, batches: list[tuple[Tensor, Tensor]]
) -> dict[str, _Peer]:
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=FileStore(f"{folder}/ddp", ranks), rank=rank, world_size=ranks)
    peers = {}
    for name, views in (("ddp", False), ("ddp_bucket_views", True)):
        torch.manual_seed(0)
        model = DistributedDataParallel(task.model(), gradient_as_bucket_view=views)
        peers[name] = _Peer(task, model, batches)
    return peers
