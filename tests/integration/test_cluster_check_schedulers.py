"""`podium cluster check` of the nodes that SLURM or Ray gives, as a run with these launchers would get them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from podium.testing import Hosts, RayCluster, SlurmCluster, make_hosts, start_ray, start_slurm

pytestmark = [pytest.mark.root, pytest.mark.slow]
__all__ = ["make_hosts", "start_ray", "start_slurm"]  # the fixtures
Make = Callable[..., Hosts]

CHECK = (sys.executable, "-m", "podium", "cluster", "check", "--json", "--launcher")


def need_two_hosts(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, (done.stdout, done.stderr)
    found = json.loads(done.stdout)
    assert found["ok"] and sorted(host["host"] for host in found["hosts"]) == ["host0", "host1"]
    assert {(link["source"], link["target"]) for link in found["links"] if link["mbit"] > 0} == {
        ("host0", "host1"),
        ("host1", "host0"),
    }


def test_the_nodes_of_an_allocation(make_hosts: Make, start_slurm: Callable[..., SlurmCluster]) -> None:
    hosts = make_hosts(2)
    slurm = start_slurm(hosts)
    need_two_hosts(hosts[0].run("salloc", "--quiet", "--nodes=2", *CHECK, "slurm", env=slurm.env, timeout_s=90))
    alone = hosts[0].run(*CHECK, "slurm", env=slurm.env)
    assert alone.returncode == 2 and "salloc --nodes=N podium cluster check" in alone.stderr


def test_the_nodes_of_a_ray_cluster(make_hosts: Make, start_ray: Callable[..., RayCluster]) -> None:
    hosts = make_hosts(2)
    ray = start_ray(hosts, cpus=2)
    need_two_hosts(hosts[0].run(*CHECK, "ray", env=ray.env, timeout_s=90))
