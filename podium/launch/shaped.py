"""The shaped launcher: local processes, each in its node's network namespace, with links and CPUs of the cluster file.

A node's `speed` below 1 slows its workers' passes down by sleeping (`podium.comm.clocks.SlowClock`), as a slower
accelerator would. Changes of speed take effect from their time on. Its servers and its network are not slowed, and
other ranks have the processor meanwhile. `cpus` limits all of the node's ranks together, servers too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podium.comm.base import Ground
from podium.engine.build import Job
from podium.launch.base import LaunchResult, hosts_of
from podium.launch.clusters.cpu_quota import CpuQuota
from podium.launch.clusters.description import Cluster, read_cluster
from podium.launch.clusters.namespaces import ShapedNetwork
from podium.launch.coordination.rules import Role
from podium.launch.event import Event
from podium.launch.local import Meeting, Processes, sendable_task
from podium.launch.rank_processes import RankProcesses
from podium.launch.rendezvous import rendezvous_folder


def run_shaped(job: Job, on_event: Callable[[Event], None] | None, stop: threading.Event | None) -> LaunchResult:
    """All ranks on this machine, with network and CPU limited as in the cluster file. Needs root.

    Heartbeats and the store go through files and Unix sockets, which namespaces share, so only training's own traffic
    uses the shaped links.
    """
    assert job.config.cluster is not None
    cluster = read_cluster(Path(job.config.cluster))
    placed = cluster.place(
        job.config.workers,
        job.strategy.server_spec.count,
        job.strategy.server_spec.colocated,
        hosts_of(job.strategy, job.config.workers),
    )

    def node_of(rank: int, role: Role) -> int:
        """Ranks that join later are placed round-robin, as the first were."""
        if rank < len(placed):
            return placed[rank]
        turns = (cluster.workers if role == "worker" else cluster.servers) or range(len(cluster.nodes))
        return turns[rank % len(turns)]

    with rendezvous_folder() as folder, ShapedNetwork(cluster, folder) as network, CpuQuota(cluster, folder) as quota:
        network.facts["warnings"] = [*network.facts["warnings"], *too_fast(cluster)]

        def place(rank: int, role: Role) -> dict[str, Any]:
            node = node_of(rank, role)
            where = {"host": network.addresses[node], "namespace": network.namespaces[node], "same_host": False}
            where["ground"] = Ground(cluster, placed, node)
            return {**where, **speeds_of(cluster, node)} if role == "worker" else where

        ranks = RankProcesses(task=sendable_task(job), task_name=job.config.task)
        ranks.on_started = lambda spec, pid: quota.add(node_of(spec.rank, spec.role), pid)
        launched = Processes(job, ranks, Meeting.in_folder(folder), on_event, place=place).run(stop)
        return launched._replace(facts={"cluster": cluster.to_dict(), "network": network.facts, "quota": quota.facts()})


def speeds_of(cluster: Cluster, node: int) -> dict[str, Any]:
    """A worker's speed on this node, and its changes; never faster than this machine."""
    changes = tuple((round(x.at_s * 1e9), min(1.0, x.speed)) for x in cluster.changes_of(node))
    return {"speed": min(1.0, cluster.nodes[node].speed), "speed_changes": changes}


def too_fast(cluster: Cluster) -> list[str]:
    """A warning where the file has a speed above 1, faster than this machine."""
    asked = [(node.name, node.speed) for node in cluster.nodes]
    asked += [(cluster.names[change.node], change.speed) for change in cluster.changes]
    nodes = ", ".join(f"{name} ({speed:g})" for name, speed in asked if speed > 1)
    return [f"no node is faster than this machine: speed above 1 counts as 1, got {nodes}"] if nodes else []
