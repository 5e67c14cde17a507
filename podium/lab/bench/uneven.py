"""`podium bench uneven`: what uneven machines reach together, beside the sum of what they reach alone.

`rows`, one per mix of machines, strategy and balancer:

    samples_per_second         over the steps after the first ones, in which a balancer learns
    ideal_samples_per_second   the sum of the speeds: what each worker does alone, on the whole global batch, added up
    share_of_ideal             the first over the second; an ideal that nobody can reach, as it exchanges nothing
    against_equal              the throughput over that of the equal split under the same strategy
    shares, changes            how the last step was divided, and how often the division was changed
    pass_ms, wait_ms           what a step's computing and waiting took, by worker

Virtual mixes are deterministic, so one run says all. A sample takes 0.4 ms at speed 1, a pass 0.5 ms more, a global
step has 256 samples, links have 1 Gbit/s and a latency of 50 us, and the model has 88 kB of parameters in buckets of
16 kB: an exchange by ring would take 1 to 3 % of an ideal step if nothing of it were hidden, that with one server 4 to
11 %. Servers have nodes of their own. The ideal follows from the cluster.

The real mix is two workers in network namespaces with links of 1 Gbit/s, a thread each, and CPU quotas of 1 and 0.25
(`cpus`, in periods of 10 ms): they need that many free cores, or `real_cpus` must say how much the fast one may have.
A global step has 12,288 samples, so that a pass takes more than 100 ms; the model's gradients, 550 kB in buckets of
128 kB, take 4 ms of the wire's time, and processor time besides, of which the slow worker has little. The ideal is
measured: each worker alone on its node, in the same round. `ddp` is DistributedDataParallel with its equal split, the
same model and number of samples, in namespaces and under quotas like those; it has its batch at hand, where Podium
gathers each step's anew. Rounds go round the contenders, in an order that turns; ratios are taken round by round, with
intervals. `busy_cpus` is how many of the machine's `cores` were busy in each round, with us or with others: where
others take what the quotas promise, speeds change from run to run, and no division is right. A row that cannot be
measured says so in `why_absent`.

`slow_down`: four equal workers in virtual time, one of which becomes 4 times slower and recovers.
`steps_to_90_percent_after_slowdown` counts the steps that begin after the change, up to the first from which on no step
has less than 90 % of the ideal that now holds; `..._after_recovery` likewise. None: never.

`noise`: passes that vary by 20 % of their time, 300 steps. Whoever waits for the slowest of several such passes stays
below the ideal, whatever the division; `share_of_known_speeds` is the throughput over that of shares fixed as the
speeds really are, under the same noise.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from podium.balance import BALANCERS, find_balancer
from podium.config import parse_spec
from podium.engine.allocator import keep_freed_memory
from podium.errors import ConfigError, UnknownName
from podium.lab.bench.peers.stepping import share_of_data
from podium.lab.bench.peers.team import Team, answer
from podium.lab.bench.rounds import interleave, ratio
from podium.launch.clusters.description import Cluster, read_cluster
from podium.launch.clusters.namespaces import CpuQuota, ShapedNetwork, enter_namespace
from podium.launch.rendezvous import rendezvous_folder
from podium.launch.run import train
from podium.records.recorder import Record, read_records
from podium.task import load_task

PEERS = ("ddp",)
MIXES = ("2:1", "4:1", "4:2:1:1")
STRATEGIES = (
    "all-reduce",
    "all-reduce:collective=ring",
    "parameter-server:servers=1",
    "parameter-server:servers=2",
)
REAL_STRATEGIES = ("all-reduce", "parameter-server:servers=1")
REAL_MIX = "1:0.25"
EQUAL, EQUAL_FINISH = "equal", "equal-finish"
_BALANCES = ("equal", "proportional", "equal-finish", "steal")
_LEARNS_STEPS, _OTHERS_STEPS = 30, 5  # not measured, by whether the balancer learns
_REAL_LEARNS_STEPS = 60  # passes under a CPU quota are noisy
_ROUNDS = 3
_MBIT = 1000.0
_BATCH = 256
_VIRTUAL_TASK = {"features": 32, "width": 128, "depth": 2, "samples": 1024, "batch_size": _BATCH, "lr": 1e-3}
_VIRTUAL_BUCKET = 16 << 10
_SECONDS_PER_SAMPLE = 4e-4
_REAL_TASK = {"features": 128, "width": 192, "depth": 4, "lr": 1e-3}
_REAL_BUCKET = 128 << 10
_SLOWER = 4.0
_JITTER = 0.2
_NEAR = 0.9


def bench_uneven(
    peers: Sequence[str] = (),
    rounds: int | None = None,
    *,
    mixes: tuple[str, ...] = MIXES,
    strategies: tuple[str, ...] = STRATEGIES,
    balances: tuple[str, ...] = (),
    steps: int = 40,
    virtual: bool = True,
    real: bool = True,
    real_strategies: tuple[str, ...] = REAL_STRATEGIES,
    real_balances: tuple[str, ...] = (EQUAL, EQUAL_FINISH),
    real_steps: int = 24,
    real_batch: int = 12288,
    real_cpus: float = 1.0,
    slow_down: bool = True,
    noise: bool = True,
    noise_steps: int = 300,
) -> dict[str, Any]:
    """`rows` by mix, strategy and balancer, then `slow_down` and `noise`. The module says what each number means.

    `steps`, `real_steps`: how many are measured. `balances`: all that there are when not given. `real_cpus`: the fast
    worker's quota; the slow one has a quarter of it.
    """
    balances = balances or tuple(name for name in _BALANCES if name in BALANCERS)
    _check(peers, mixes, (*balances, *real_balances), steps, real_steps, noise_steps)
    document: dict[str, Any] = {"bench": "uneven", "peers": list(peers), "rows": []}
    if virtual:
        document["virtual"] = _facts(_VIRTUAL_TASK, _VIRTUAL_BUCKET)
        for mix, strategy in itertools.product(mixes, strategies):
            document["rows"] += _virtual_rows(mix, strategy, balances, steps)
    if real:
        cpus = {"fast": real_cpus, "slow": real_cpus / _SLOWER}
        wanted = (real_strategies, real_balances, tuple(peers))
        setting = Setting(*wanted, steps=real_steps, batch=real_batch, cpus=cpus, rounds=rounds or _ROUNDS)
        document["real"] = {
            **_facts(setting.task, _REAL_BUCKET),
            "cpus": cpus,
            "cores": os.cpu_count(),
            "rounds": setting.rounds,
        }
        document["rows"] += _real_rows(setting)
    following = [balance for balance in balances if balance != EQUAL]
    if slow_down:
        document["slow_down"] = [_slow_down(balance) for balance in following]
    if noise:
        document["noise"] = [row for mix in ("1:1:1:1", "4:2:1:1") for row in _noise(mix, following, noise_steps)]
    return {**document, **_summary(document["rows"])}


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


def _check(peers: Sequence[str], mixes: Sequence[str], balances: Sequence[str], *counts: int) -> None:
    for peer in peers:
        if peer not in PEERS:
            raise UnknownName("peer of bench uneven", peer, PEERS)
    for mix in mixes:
        speeds_of(mix)
    for balance in balances:
        find_balancer(parse_spec(balance, "balance")[0])
    if min(counts) < 2:
        raise ConfigError(f"bench uneven: steps must be at least 2, got {min(counts)}")


def speeds_of(mix: str) -> tuple[float, ...]:
    """`4:2:1:1` as speeds, of which the first is 1."""
    try:
        parts = [float(part) for part in mix.split(":")]
    except ValueError:
        parts = []
    if len(parts) < 2 or min(parts) <= 0:
        raise ConfigError(f"bench uneven: a mix must be two numbers above 0 or more, as 4:2:1:1, got {mix!r}")
    return tuple(part / parts[0] for part in parts)


def _facts(task: Mapping[str, Any], bucket_bytes: int) -> dict[str, Any]:
    return {"task": "wide-mlp", **task, "bucket_bytes": bucket_bytes, "mbit": _MBIT}


def _warm_steps(balance: str) -> int:
    """How many steps go by before it is measured."""
    return _LEARNS_STEPS if find_balancer(parse_spec(balance, "balance")[0]).learns else _OTHERS_STEPS


# A run, and what its records say.


@dataclass(frozen=True)
class Run:
    """The records of one run, and which of its steps count."""

    steps: Sequence[Record]
    """In order of time, of all workers."""
    changes: Sequence[Record]
    warm: int

    @property
    def batch(self) -> int:
        """Samples of a global step."""
        return sum(row["samples"] for row in self.steps if row["step"] == self.steps[-1]["step"])

    @property
    def ends_s(self) -> list[float]:
        """When each step ended: when the last worker was through with it."""
        last: dict[int, float] = {}
        for row in self.steps:
            last[row["step"]] = max(last.get(row["step"], 0.0), row["t_ns"] / 1e9)
        return [last[step] for step in sorted(last)]

    @property
    def samples_per_second(self) -> float:
        ends = self.ends_s[self.warm - 1 :]
        return float(self.batch * (len(ends) - 1) / (ends[-1] - ends[0]))

    @property
    def facts(self) -> dict[str, Any]:
        """How the work was divided, and what workers did meanwhile."""
        ranks = sorted({row["rank"] for row in self.steps})
        own = {rank: [r for r in self.steps if r["rank"] == rank and r["step"] > self.warm] for rank in ranks}
        return {
            "shares": [own[rank][-1]["samples"] for rank in ranks],
            "changes": len(self.changes),
            "last_change_at_step": max((row["step"] for row in self.changes), default=None),
            "pass_ms": [_median_ms(own[rank], "pass_ns") for rank in ranks],
            "wait_ms": [_median_ms(own[rank], "wait_ns") for rank in ranks],
            "step_ms": 1e3 * self.batch / self.samples_per_second,
        }


def _median_ms(rows: Sequence[Record], key: str) -> float:
    return float(statistics.median(row[key] for row in rows)) / 1e6


def _run(cluster: str, strategy: str, balance: str, warm: int, steps: int, bucket_bytes: int, **options: Any) -> Run:
    """Train on these machines, and read what happened. `cluster`: the text of a cluster file."""
    with rendezvous_folder() as folder:
        file = folder / "cluster.toml"
        file.write_text(cluster)
        result = train(
            "wide-mlp",
            strategy=strategy,
            strategy_options={"bucket_bytes": bucket_bytes},
            balance=balance,
            steps=warm + steps,
            epochs=warm + steps,
            eval_every=0,
            threads=1,
            cluster=str(file),
            run_dir=folder / "run",
            **options,
        )
        rows = list(read_records(Path(result.run_dir)))
    found = [row for row in rows if row["kind"] == "step"]
    return Run(found, [row for row in rows if row["kind"] == "balance"], warm)


# Virtual time.


def _cluster(speeds: Sequence[float], *, jitter: float = 0.0, changes: Sequence[tuple[float, float]] = ()) -> str:
    """A node per worker and two for servers; `changes` of the last worker's speed: when, in seconds, and to what."""
    lines = ["[cluster]", f"jitter = {jitter}", f"seconds_per_sample = {_SECONDS_PER_SAMPLE}"]
    names = [f"worker-{n}" for n in range(len(speeds))]
    for name, speed in zip((*names, "server-0", "server-1"), (*speeds, 1.0, 1.0), strict=True):
        lines += _node(name, speed=speed)
    for at_s, speed in changes:
        lines += ["[[change]]", f'node = "{names[-1]}"', f"at_s = {at_s}", f"speed = {speed}"]
    return "\n".join([*lines, "[placement]", f"workers = {names}", "servers = ['server-0', 'server-1']", ""])


def _node(name: str, **settings: float) -> list[str]:
    rates = {"up_mbit": _MBIT, "down_mbit": _MBIT}
    return ["[[node]]", f'name = "{name}"', *(f"{key} = {value}" for key, value in {**rates, **settings}.items())]


def _alone(speed: float) -> float:
    """Samples per second of one worker that has the whole global batch to itself, in virtual time."""
    return speed * _BATCH / (Cluster.seconds_per_step + _BATCH * _SECONDS_PER_SAMPLE)


def _virtual(cluster: str, speeds: Sequence[float], strategy: str, balance: str, steps: int, **options: Any) -> Run:
    return _run(
        cluster,
        strategy,
        balance,
        _warm_steps(balance),
        steps,
        _VIRTUAL_BUCKET,
        workers=len(speeds),
        task_options=_VIRTUAL_TASK,
        launcher="virtual",
        **options,
    )


def _virtual_rows(mix: str, strategy: str, balances: Sequence[str], steps: int) -> list[dict[str, Any]]:
    speeds = speeds_of(mix)
    ideal = sum(map(_alone, speeds))
    rows = []
    for balance in balances:
        run = _virtual(_cluster(speeds), speeds, strategy, balance, steps)
        row: dict[str, Any] = {"mix": mix, "world": "virtual", "strategy": strategy, "balance": balance}
        rows.append({**row, **_against(run.samples_per_second, ideal), **run.facts})
    equal = next((row["samples_per_second"] for row in rows if row["balance"] == EQUAL), None)
    if equal is not None:
        for row in rows:
            row["against_equal"] = row["samples_per_second"] / equal
    return rows


def _against(found: float, ideal: float) -> dict[str, float]:
    return {"samples_per_second": found, "ideal_samples_per_second": ideal, "share_of_ideal": found / ideal}


def _slow_down(balance: str) -> dict[str, Any]:
    """One of four equal workers becomes slower, and recovers."""
    speeds = (1.0, 1.0, 1.0, 1.0)
    before, after = sum(map(_alone, speeds)), sum(map(_alone, (1.0, 1.0, 1.0, 1 / _SLOWER)))
    batch = _BATCH
    slower_s = 40 * batch / before  # after 40 steps at most; recovered after 80 more at most
    recovers_s = slower_s + 80 * batch / after
    cluster = _cluster(speeds, changes=((slower_s, 1 / _SLOWER), (recovers_s, 1.0)))
    run = _virtual(cluster, speeds, "all-reduce", balance, 200)
    ends = run.ends_s
    return {
        "balance": balance,
        "workers": len(speeds),
        "slower_at_s": slower_s,
        "recovers_at_s": recovers_s,
        "steps_to_90_percent_after_slowdown": steps_until_near(ends, batch, after, slower_s, recovers_s),
        "steps_to_90_percent_after_recovery": steps_until_near(ends, batch, before, recovers_s),
        "share_of_ideal_after_slowdown": _share_at_end(ends, batch, after, recovers_s),
        "share_of_ideal_after_recovery": _share_at_end(ends, batch, before, ends[-1]),
        "changes": [{"step": row["step"], "after": row["after"]} for row in run.changes],
    }


def steps_until_near(
    ends_s: Sequence[float], batch: int, ideal: float, after_s: float, until_s: float = float("inf")
) -> int | None:
    """The how-manieth step that begins after this time is the first from which on all are near the ideal.

    `ends_s`: when each step ended, and so the next began. None: the last step before `until_s` is not near.
    """
    found = [
        batch / (end - began) >= _NEAR * ideal
        for began, end in itertools.pairwise((0.0, *ends_s))
        if began >= after_s and end <= until_s
    ]
    if not found or not found[-1]:
        return None
    return next((n for n in range(len(found), 0, -1) if not found[n - 1]), 0) + 1


def _share_at_end(ends_s: Sequence[float], batch: int, ideal: float, until_s: float) -> float:
    """What part of the ideal the last ten steps before this time had."""
    last = [end for end in ends_s if end <= until_s][-11:]
    return batch * (len(last) - 1) / (last[-1] - last[0]) / ideal


def _noise(mix: str, balances: Sequence[str], steps: int) -> list[dict[str, Any]]:
    speeds = speeds_of(mix)
    cluster, ideal = _cluster(speeds, jitter=_JITTER), sum(map(_alone, speeds))
    known = _virtual(cluster, speeds, "all-reduce", EQUAL, steps - _OTHERS_STEPS, shares=speeds).samples_per_second
    rows = []
    for balance in balances:
        run = _virtual(cluster, speeds, "all-reduce", balance, max(2, steps - _warm_steps(balance)))
        found = run.samples_per_second
        late = sum(row["step"] > _LEARNS_STEPS for row in run.changes)
        rows.append(
            {
                "mix": mix,
                "jitter": _JITTER,
                "steps": steps,
                "balance": balance,
                **_against(found, ideal),
                "share_of_known_speeds": found / known,
                "changes_after_step_30": late,
                **run.facts,
            }
        )
    return rows


# Real processes.


def _real_cluster(setting: Setting, nodes: Sequence[str] = ()) -> str:
    """The fast and the slow node, and one for a server; `nodes`: those that have a worker, if not both."""
    nodes = nodes or tuple(setting.cpus)
    quotas = (node for name, cpus in setting.cpus.items() for node in _node(name, cpus=cpus))
    lines = [*quotas, *_node("server"), "[placement]", f"workers = {list(nodes)}", "servers = ['server']", ""]
    return "\n".join(lines)


def _real_rows(setting: Setting) -> list[dict[str, Any]]:
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
        rates = interleave(watched, setting.rounds, warmup=0)  # each run warms up by itself
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
    """Measure, and note how many of the machine's processors were busy meanwhile, with us or with others."""
    began, before = time.monotonic(), _busy_s()
    found = measure()
    busy.append((_busy_s() - before) / (time.monotonic() - began))
    return found


def _busy_s() -> float:
    """Processor seconds that this machine has spent on anything since it was started."""
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
    """Medians, and ratios round by round."""
    found = {**row, "samples_per_second": float(np.median(rates)), "ideal_samples_per_second": float(np.median(ideal))}
    found |= _compared("share_of_ideal", rates, ideal)
    for name, other in others.items():
        if other is not None:
            found |= _compared(f"against_{name}", rates, other)
    return found


def _compared(name: str, numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, Any]:
    found = ratio(numerator, denominator)
    return {name: found["ratio"], f"{name}_interval": found["ratio_interval"]}


def _why_not(setting: Setting) -> str:
    """Why the real mix cannot be measured here; empty where it can."""
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
    """One worker on this node with the whole batch to itself."""
    steps = max(2, round(setting.steps * setting.cpus[node] / setting.cpus["fast"] / 2))
    return _shaped(setting, [node], "all-reduce", EQUAL, 2, steps).samples_per_second


def _real_run(setting: Setting, strategy: str, balance: str, runs: list[Run]) -> float:
    steps = setting.steps if balance != EQUAL else max(2, setting.steps // 2)
    warm = _OTHERS_STEPS if _warm_steps(balance) == _OTHERS_STEPS else _REAL_LEARNS_STEPS
    runs.append(_shaped(setting, list(setting.cpus), strategy, balance, warm, steps))
    return runs[-1].samples_per_second


def _shaped(setting: Setting, nodes: Sequence[str], strategy: str, balance: str, warm: int, steps: int) -> Run:
    return _run(
        _real_cluster(setting, nodes),
        strategy,
        balance,
        warm,
        steps,
        _REAL_BUCKET,
        workers=len(nodes),
        task_options=setting.task,
        launcher="shaped",
    )


@contextmanager
def _ddp(setting: Setting) -> Iterator[Callable[[], float]]:
    """Samples per second of DistributedDataParallel, on nodes like those of the shaped launcher."""
    cluster, ranks, steps = _parsed(_real_cluster(setting)), range(len(setting.cpus)), max(2, setting.steps // 2)
    with rendezvous_folder() as folder, ShapedNetwork(cluster, folder) as network, CpuQuota(cluster, folder) as quota:
        places = [(network.namespaces[rank], network.interfaces[rank]) for rank in ranks]
        members = [partial(_ddp_rank, rank, len(ranks), setting.task, folder / "ddp", *places[rank]) for rank in ranks]
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


def _ddp_rank(
    rank: int, size: int, options: dict[str, Any], store: Path, namespace: str, interface: str, pipe: Connection
) -> None:
    """One rank of DDP, in the loop of its documentation; its batch is at hand from the beginning."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore
    from torch.nn.parallel import DistributedDataParallel

    keep_freed_memory()
    enter_namespace(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group("gloo", store=FileStore(str(store), size), rank=rank, world_size=size)
    torch.manual_seed(0)
    task = load_task("wide-mlp", options)
    model = DistributedDataParallel(task.model())
    optimizer = task.optimizer(model)
    inputs, targets = share_of_data(task, rank, size)

    def steps(count: int) -> float:
        dist.barrier()
        began = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimizer.step()
        return time.perf_counter() - began

    answer(pipe, {"pid": os.getpid, "steps": steps})


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The least share of the ideal, by world and balancer."""
    least: dict[str, dict[str, float]] = {}
    for row in rows:
        if "share_of_ideal" in row:
            name = row["balance"] if row["strategy"] != "ddp" else "ddp"
            world = least.setdefault(row["world"], {})
            world[name] = min(world.get(name, float("inf")), row["share_of_ideal"])
    return {"least_share_of_ideal": least}
