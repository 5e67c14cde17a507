"""`podium bench switch`: the cost of a switch between strategies in a running training.

Real processes train a synthetic task (wide-mlp, SGD with momentum, a few steps per phase) in a cycle of phases: from
all-reduce to an asynchronous parameter server and back, to local SGD and back. Each run also has phases that begin with
a broadcast of the parameters (`Transfer`), to measure one model transfer with the same clock in the same run. One row
per change of phase and setting; times in milliseconds, medians over the cycles:

    drain              until the steps under way are done; the same work would have been done without a switch
    home               fetching parameters and moments from the servers
    hand_over, begin   handing over the state; starting the next strategy, such as seeding its servers
    total              the sum of all parts, of the worker with the highest cost
    broadcast_ms       one broadcast of the parameters, in the same run
    transfer_ms        one model transfer: the broadcast, or the bytes over the link's rate if that is less
    beyond_transfer_ms total minus drain minus one transfer: negative if a switch takes less than a transfer
    first_ms           the first switch of its kind in a run, minus drain: includes new buffers and connections
    missing, repeated  samples of the whole run that no step used, or more than one, by its records

The transferred state is parameters and moments, here twice the model's size. On one host ranks share memory; with
`shaped`, ranks are in their own network namespaces and exchange over TCP at the given rate. Each worker has a server:
beside it (`colocated`), or on its own node (`dedicated`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
from torch import Tensor

from podium.engine.batch import Batch
from podium.engine.worker import Worker
from podium.errors import ConfigError
from podium.lab.bench.harness import check_names, why_no_links
from podium.launch.rendezvous import rendezvous_folder
from podium.launch.run import train
from podium.records.phases import COST
from podium.records.recorder import Record, read_records
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.strategies.parameter_server import ParameterServer
from podium.strategies.traits import Cadence
from podium.task import load_task

MODELS: dict[str, dict[str, Any]] = {
    "1m": {"features": 256, "width": 256, "depth": 4},
    "25m": {"features": 1248, "width": 1248, "depth": 4},
    "100m": {},
}
"""Options of wide-mlp by the approximate size of its parameters in megabytes."""
PLACES = ("local", "shaped")
SERVERS = ("colocated", "dedicated")
CLAIM_MS = 100.0
"""The most that a switch may take beyond one model transfer."""

Change = tuple[str, str]
"""The strategies before and after a switch."""

_LINK_MBIT = 1000.0
_LR = 1e-6  # the parameters hardly move, so that all steps are alike
_TRANSFER = "podium.lab.bench.switch:Transfer"


@final
@dataclass(frozen=True, kw_only=True)
class Transfer(Strategy[None]):
    """All-reduce that begins with a broadcast of the parameters, to time it."""

    name: ClassVar[str] = "transfer"
    cadence: ClassVar[Cadence] = Cadence(survives_loss=True)

    def init(self, worker: Worker) -> None:
        comm = worker.comm
        comm.barrier()
        comm.wait(*(comm.broadcast(params, comm.workers[0]) for params in worker.params))

    def step(self, worker: Worker, state: None, batch: Batch) -> Tensor:
        return AllReduce().step(worker, state, batch)

    def finish(self, worker: Worker, state: None) -> None:
        """There is no state."""


class Setting(NamedTuple):
    """One run."""

    model: str
    workers: int
    place: str
    servers: str
    link_mbit: float
    momentum: float
    cycles: int
    steps: int  # of a phase
    snapshot_every: int


def bench_switch(
    peers: Sequence[str] = (),
    rounds: int | None = None,
    *,
    models: tuple[str, ...] = tuple(MODELS),
    workers: tuple[int, ...] = (2, 4),
    places: tuple[str, ...] | None = None,
    servers: tuple[str, ...] = SERVERS,
    link_mbit: float = _LINK_MBIT,
    momentum: float = 0.9,
    steps: int = 2,
    snapshot_every: int = ParameterServer.snapshot_every,
) -> dict[str, Any]:
    """Rows by model, workers, place and change of phase; `rounds` is the number of cycles in a run, by default 5.

    `places`: by default both, `shaped` only if this machine can make namespaces. `steps`: of each phase.
    `snapshot_every`: the parameter server's option; with 0, servers write nothing to disk when they are seeded.
    """
    _check(peers, models, workers, places or (), servers, steps)
    if not link_mbit > 0:
        raise ConfigError(f"bench switch: link_mbit must be above 0, got {link_mbit}")
    if not 0 <= momentum < 1:
        raise ConfigError(f"bench switch: momentum must be at least 0 and below 1, got {momentum}")
    chosen, skipped = places or PLACES, {}
    if places is None and (reason := why_no_links(2, _LINK_MBIT)):
        chosen, skipped = ("local",), {"shaped_skipped": reason}
    rows = [
        row
        for model in models
        for place in chosen
        for count in workers
        for kind in servers
        for row in _rows(Setting(model, count, place, kind, link_mbit, momentum, rounds or 5, steps, snapshot_every))
    ]
    beyond = [row["beyond_transfer_ms"] for row in rows]
    summary = {
        "claim_ms": CLAIM_MS,
        "within_claim": sum(ms <= CLAIM_MS for ms in beyond),
        "beyond_claim": sum(ms > CLAIM_MS for ms in beyond),
        "worst_beyond_transfer_ms": max(beyond, default=0.0),
        "lost_or_repeated": sum(row["missing"] + row["repeated"] for row in rows),
    }
    return {"bench": "switch", **summary, "rows": rows, **skipped}


def _check(
    peers: Sequence[str],
    models: Sequence[str],
    workers: Sequence[int],
    places: Sequence[str],
    servers: Sequence[str],
    steps: int,
) -> None:
    if peers:
        raise ConfigError(f"bench switch: it measures Podium alone, got peers {', '.join(peers)}")
    for what, names, known in (("model", models, MODELS), ("place", places, PLACES), ("servers", servers, SERVERS)):
        check_names(f"{what} of bench switch", names, known)
    if min(workers, default=0) < 2 or steps < 1:
        raise ConfigError(f"bench switch: workers must be at least 2 and steps 1, got {workers} and {steps}")


def _rows(setting: Setting) -> list[dict[str, Any]]:
    options = {**MODELS[setting.model], "lr": _LR, "momentum": setting.momentum}
    nbytes = 4 * sum(p.numel() for p in load_task("wide-mlp", options).model().parameters())
    found, audit = _run(setting, options)
    begins = [told for (_, after), switches in found.items() if after == "transfer" for told in switches]
    broadcast = float(np.median([max(row["begin_ns"] for row in told) for told in begins])) / 1e6
    shared = {"model": setting.model, "model_bytes": nbytes, "workers": setting.workers, "place": setting.place}
    transfer = broadcast
    if setting.place == "shaped":
        shared["link_mbit"] = setting.link_mbit
        transfer = min(broadcast, nbytes * 8 / setting.link_mbit / 1e3)
    rows = []
    for (before, after), switches in found.items():
        if "transfer" not in (before, after):
            names = {"from": _named(before, setting), "to": _named(after, setting)}
            rows.append({**shared, **names, "broadcast_ms": broadcast, **_cost(switches, transfer), **audit})
    return rows


def _run(setting: Setting, options: dict[str, Any]) -> tuple[dict[Change, list[list[Record]]], Mapping[str, int]]:
    """The records of each switch, one per worker, by change of strategy; and the audit of the run."""
    server = f"servers={setting.workers};placement={setting.servers};snapshot_every={setting.snapshot_every}"
    relaxed = [f"parameter-server:mode=async;{server}"]
    if setting.servers == "colocated":  # local SGD has no servers: measuring it once is enough
        relaxed.append("local-sgd:period=2")
    phases = [name for one in relaxed for name in ("all-reduce", one)] + ["all-reduce", _TRANSFER]
    cycle = " | ".join(f"{phase} until step:after={setting.steps}" for phase in phases)
    with rendezvous_folder() as folder:
        result = train(
            "wide-mlp",
            workers=setting.workers,
            strategy="phases",
            strategy_options={"run": cycle, "repeat": True},
            task_options=options,
            epochs=10_000,
            steps=(setting.cycles * len(phases) + 1) * setting.steps,
            eval_every=0,
            threads=1,
            run_dir=folder / "run",
            **_where(setting, folder),
        )
        records = [row for row in read_records(Path(result.run_dir)) if row["kind"] == "switch"]
    return _by_change(records), result.audit


def _named(strategy: str, setting: Setting) -> str:
    return f"{strategy} ({setting.servers})" if strategy == "parameter-server" else strategy


def _where(setting: Setting, folder: Path) -> dict[str, Any]:
    if setting.place == "local":
        return {"launcher": "local"}
    nodes = setting.workers * (2 if setting.servers == "dedicated" else 1)
    rate = f"up_mbit = {setting.link_mbit}\ndown_mbit = {setting.link_mbit}\n"
    path = folder / "cluster.toml"
    path.write_text(f'[[node]]\nname = "node"\ncount = {nodes}\n{rate}')
    return {"launcher": "shaped", "cluster": path}


def _by_change(records: Sequence[Record]) -> dict[Change, list[list[Record]]]:
    """All workers' records of each switch, in order, by the strategies before and after it."""
    found: dict[Change, dict[int, list[Record]]] = {}
    for row in records:
        before, after = (_strategy_of(row[name]) for name in ("before", "after"))
        found.setdefault((before, after), {}).setdefault(row["position"], []).append(row)
    return {change: [told[at] for at in sorted(told)] for change, told in found.items()}


def _strategy_of(phase: str) -> str:
    text = phase.partition(" until ")[0]
    return "transfer" if text == _TRANSFER else text.partition(":")[0]


def _cost(switches: Sequence[Sequence[Record]], transfer: float) -> dict[str, Any]:
    parts = [{part: max(row[f"{part}_ns"] for row in told) / 1e6 for part in COST} for told in switches]
    totals = [max(sum(row[f"{part}_ns"] for part in COST) for row in told) / 1e6 for told in switches]
    moved = [max(sum(row[f"{part}_ns"] for part in COST[1:]) for row in told) / 1e6 for told in switches]
    beyond = [ms - transfer for ms in moved]
    medians = {part: float(np.median([one[part] for one in parts])) for part in COST}
    return {
        "cost_ms": {**medians, "total": float(np.median(totals))},
        "transfer_ms": transfer,
        "beyond_transfer_ms": float(np.median(beyond)),
        "beyond_transfer_range": [min(beyond), max(beyond)],
        "first_ms": moved[0],
        "switches": len(switches),
    }
