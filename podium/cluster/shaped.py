"""The shaped launcher: local processes, each in its node's network namespace, on links and CPUs as the file says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from podium.building import Job
from podium.cluster.base import Event, Launched
from podium.cluster.description import read_cluster
from podium.cluster.local import Processes, endpoints_of, sendable_task
from podium.cluster.netns import CpuQuota, ShapedNetwork
from podium.cluster.rendezvous import note_what_was_made, rendezvous_folder


def run_shaped(job: Job, on_event: Callable[[Event], None] | None, stop: threading.Event | None) -> Launched:
    """All ranks on this machine, with network and CPU held to the cluster file. Needs root.

    Heartbeats and the store go through files and Unix sockets, which namespaces share, so only training's own traffic
    uses the shaped links.
    """
    assert job.config.cluster is not None
    cluster = read_cluster(Path(job.config.cluster))
    placed = cluster.place(job.config.workers, job.strategy.server_count, job.strategy.colocated)
    nodes = [placed[endpoints[0]] for endpoints in endpoints_of(job)]
    with rendezvous_folder() as folder, ShapedNetwork(cluster) as network, CpuQuota(cluster) as quota:
        made = [*network.namespaces, f"podium-{network.facts['run']}-hub"]
        note_what_was_made(folder, made, quota.groups.values())
        processes = Processes(
            job,
            folder,
            on_event,
            task=sendable_task(job),
            host=[network.addresses[n] for n in nodes],
            namespace=[network.namespaces[n] for n in nodes],
            same_host=[False] * len(nodes),
        )
        processes.on_started = lambda n, pid: quota.add(nodes[n], pid)
        launched = processes.run(stop)
        return launched._replace(facts={"cluster": cluster.to_dict(), "network": network.facts, "quota": quota.facts()})
