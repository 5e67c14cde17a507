"""`podium bench uneven` on real processes: two workers in network namespaces with CPU quotas, beside DDP."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from podium.errors import ConfigError
from podium.lab.bench.harness import compared, interleave
from podium.lab.bench.peers.ddp import ddp_step, join_gloo
from podium.lab.bench.peers.place import Place, places_on
from podium.lab.bench.peers.stepping import share_of_data
from podium.lab.bench.peers.team import Team, answer
from podium.lab.bench.uneven_runs import EQUAL, OTHERS_STEPS, Run, node_lines, run_training, warm_steps
from podium.launch.clusters.cpu_quota import CpuQuota
from podium.launch.clusters.description import Cluster, read_cluster
from podium.launch.clusters.namespaces import ShapedNetwork
from podium.launch.rendezvous import rendezvous_folder
from podium.task import load_task

REAL_MIX = "1:0.25"
REAL_BUCKET = 128 << 10
_REAL_TASK = {"features": 128, "width": 192, "depth": 4, "lr": 1e-3}
_REAL_LEARNS_STEPS = 60  # passes under a CPU quota are noisy


class Setting(NamedTuple):
    """What is measured on real processes."""

    strategies: tuple[str, ...]
    balances: tuple[str, ...]
    peers: tuple[str, ...]
    steps: int
    batch: int
    cpus: dict[str, float]
    """Of each worker's node, by its name."""
    rounds: int

    @property
    def task(self) -> dict[str, Any]:
        return {**_REAL_TASK, "batch_size": self.batch, "samples": 4 * self.batch}


def _real_cluster(setting: Setting, nodes: Sequence[str] = ()) -> str:
    """The fast and the slow node, and one for a server; `nodes`: which of the two have a worker, by default both."""
    nodes = nodes or tuple(setting.cpus)
    quotas = (node for name, cpus in setting.cpus.items() for node in node_lines(name, cpus=cpus))
    lines = [*quotas, *node_lines("server"), "[placement]", f"workers = {list(nodes)}", "servers = ['server']", ""]
    return "\n".join(lines)


def real_rows(setting: Setting) -> list[dict[str, Any]]:
    reason = _why_not(setting)
    pairs = [(strategy, balance) for strategy in setting.strategies for balance in setting.balances]
    if reason:
        return [{**_real_row(*pair), "why_absent": reason} for pair in pairs]
    runs: dict[tuple[str, str], list[Run]] = {pair: [] for pair in pairs}
    busy: dict[str, list[float]] = {}
    alone = {name: f"alone on {name}" for name in setting.cpus}
    contenders: dict[str, Callable[[], float]] = {
        label: partial(_real_alone, setting, name) for name, label in alone.items()
    }
    contenders |= {" ".join(pair): partial(_real_run, setting, *pair, runs[pair]) for pair in pairs}
    with ExitStack() as ends:
        if "ddp" in setting.peers:
            contenders["ddp"] = ends.enter_context(_ddp(setting))
        watched = {name: partial(_watched, measure, busy.setdefault(name, [])) for name, measure in contenders.items()}
        rates = interleave(watched, setting.rounds, warmup=0)  # each run has its own warm-up
    ideal = np.sum([rates[label] for label in alone.values()], axis=0)
    rows = []
    for pair in pairs:
        others = {"equal": rates.get(f"{pair[0]} {EQUAL}"), "ddp": rates.get("ddp")}
        row = _measured(_real_row(*pair), rates[" ".join(pair)], ideal, others)
        rows.append({**row, "busy_cpus": busy[" ".join(pair)], **runs[pair][-1].facts})
    if "ddp" in rates:
        rows.append({**_measured(_real_row("ddp", EQUAL), rates["ddp"], ideal, {}), "busy_cpus": busy["ddp"]})
    for row in rows:
        row["alone_samples_per_second"] = {name: float(np.median(rates[label])) for name, label in alone.items()}
    return rows


def _watched(measure: Callable[[], float], busy: list[float]) -> float:
    """Measure, and append to `busy` how many of the machine's processors were busy, with any process."""
    began, before = time.monotonic(), _busy_s()
    found = measure()
    busy.append((_busy_s() - before) / (time.monotonic() - began))
    return found


def _busy_s() -> float:
    """Processor seconds of the whole machine since it booted."""
    user, nice, system, _, _, irq, softirq, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _real_row(strategy: str, balance: str) -> dict[str, Any]:
    return {"mix": REAL_MIX, "world": "real", "strategy": strategy, "balance": balance}


def _measured(
    row: Mapping[str, Any],
    rates: Sequence[float],
    ideal: Sequence[float],
    others: Mapping[str, Sequence[float] | None],
) -> dict[str, Any]:
    """The row with medians, and with ratios taken round by round."""
    found = {**row, "samples_per_second": float(np.median(rates)), "ideal_samples_per_second": float(np.median(ideal))}
    found |= compared("share_of_ideal", rates, ideal)
    for name, other in others.items():
        if other is not None:
            found |= compared(f"against_{name}", rates, other)
    return found


def _why_not(setting: Setting) -> str:
    """Why the real mix cannot be measured here; empty if it can."""
    if os.geteuid() != 0:
        return "shaped links and CPU quotas need root"
    try:
        cluster = _parsed(_real_cluster(setting))
        with ShapedNetwork(cluster), CpuQuota(cluster):
            return ""
    except ConfigError as error:
        return str(error)


def _parsed(text: str) -> Cluster:
    with rendezvous_folder() as folder:
        (folder / "cluster.toml").write_text(text)
        return read_cluster(folder / "cluster.toml")


def _real_alone(setting: Setting, node: str) -> float:
    """Samples per second of one worker on this node with the whole batch."""
    steps = max(2, round(setting.steps * setting.cpus[node] / setting.cpus["fast"] / 2))
    return _shaped(setting, [node], "all-reduce", EQUAL, 2, steps).samples_per_second


def _real_run(setting: Setting, strategy: str, balance: str, runs: list[Run]) -> float:
    steps = setting.steps if balance != EQUAL else max(2, setting.steps // 2)
    warm = OTHERS_STEPS if warm_steps(balance) == OTHERS_STEPS else _REAL_LEARNS_STEPS
    runs.append(_shaped(setting, list(setting.cpus), strategy, balance, warm, steps))
    return runs[-1].samples_per_second


def _shaped(setting: Setting, nodes: Sequence[str], strategy: str, balance: str, warm: int, steps: int) -> Run:
    return run_training(
        _real_cluster(setting, nodes),
        strategy,
        balance,
        warm,
        steps,
        REAL_BUCKET,
        workers=len(nodes),
        task_options=setting.task,
        launcher="shaped",
    )


@contextmanager
def _ddp(setting: Setting) -> Iterator[Callable[[], float]]:
    """A function that measures DistributedDataParallel's samples per second, on nodes like the shaped launcher's."""
    cluster, ranks, steps = _parsed(_real_cluster(setting)), range(len(setting.cpus)), max(2, setting.steps // 2)
    with rendezvous_folder() as folder, ShapedNetwork(cluster, folder) as network, CpuQuota(cluster, folder) as quota:
        places = places_on(network)
        members = [partial(_ddp_rank, rank, len(ranks), setting.task, folder / "ddp", places[rank]) for rank in ranks]
        team = Team("ddp", members)
        try:
            for node, pid in enumerate(team.ask("pid", members=ranks)):
                quota.add(node, pid)

            def measure() -> float:
                team.ask("steps", 2, members=ranks)
                return float(setting.batch * steps / max(team.ask("steps", steps, members=ranks)))

            yield measure
        finally:
            team.end()


def _ddp_rank(rank: int, size: int, options: dict[str, Any], store: Path, place: Place, pipe: Connection) -> None:
    """One rank of DDP; its batch is in memory from the start."""
    import torch.distributed as dist

    place.enter()
    join_gloo(rank, size, store)
    task = load_task("wide-mlp", options)
    step, _ = ddp_step(task, itertools.repeat(share_of_data(task, rank, size)))

    def steps(count: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            step()
        return time.perf_counter() - began

    answer(pipe, {"pid": os.getpid, "steps": steps})
