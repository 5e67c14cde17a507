"""Runs that a real Ray cluster starts on hosts that share nothing."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

from podium.testing import Hosts, RayCluster, make_hosts, start_ray
from tests.integration.on_hosts import (
    CLEAN,
    by_ray,
    ended,
    folder_on,
    podium,
    processes_of,
    request,
    result_of,
    steps_at_home,
    wait_for,
)

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(240)]
__all__ = ["make_hosts", "start_ray"]  # the fixtures
Make = Callable[..., Hosts]
StartRay = Callable[..., RayCluster]


def test_the_driver_may_be_outside_the_cluster(make_hosts: Make, start_ray: StartRay) -> None:
    *nodes, outside = make_hosts(3)
    ray = start_ray(nodes)
    client = {"RAY_ADDRESS": f"ray://{nodes[0].address}:10001"}
    result = result_of(by_ray(ray, outside, workers=4, steps=6, env=client))
    assert len(set(result["param_hash"].values())) == 1 and result["audit"] == CLEAN
    manifest = json.loads((folder_on(outside, result["run_dir"]) / "manifest.json").read_text())
    assert sorted(manifest["placed"].values()) == ["host0", "host0", "host1", "host1"]
    code, out, _ = ended(by_ray(ray, outside, workers=2, steps=6))
    assert code == 2 and "this machine is no node of the Ray cluster at 10.77.0.1:6379" in out
    assert "RAY_ADDRESS=ray://10.77.0.1:10001" in out
    one = result_of(by_ray(ray, nodes[1], "--nodes", "2", workers=2, steps=4, placement="pack"))
    placed = json.loads((folder_on(nodes[1], one["run_dir"]) / "manifest.json").read_text())["placed"]
    assert len(set(placed.values())) == 1 and one["audit"] == CLEAN


def test_the_loss_of_a_node_is_the_loss_of_a_host_and_another_one_joins(make_hosts: Make, start_ray: StartRay) -> None:
    hosts = make_hosts(3)
    ray = start_ray(hosts)
    process = by_ray(ray, hosts[0], "--nodes", "2", workers=2, epochs=100_000, eval_every=1000, heartbeat_s=1)
    wait_for(lambda: min(steps_at_home(hosts[0], rank) for rank in (0, 1)) > 20, process)
    (run,) = (path.name for path in hosts[0].folder.glob("runs/*"))
    (control,) = hosts[0].folder.glob("runs/*/control.json")
    secret = json.loads(control.read_text())["secret"]
    busy = {host.name: "podium.node" in processes_of(host) for host in hosts}
    (idle,) = (host for host in hosts if not busy[host.name])
    lost = next(host for host in hosts[1:] if host is not idle)
    assert not any(secret in processes_of(host) for host in hosts)
    code, out, err = ended(podium(hosts[0], "scale", f"/tmp/runs/{run}", "--host", f"{idle.name} slots=1"))
    assert code == 0, (out, err)
    wait_for(lambda: steps_at_home(hosts[0], 2) > 0, process)
    at = steps_at_home(hosts[0])
    lost.lose()
    wait_for(lambda: max(steps_at_home(hosts[0], rank) for rank in (0, 1)) > at + 500, process)
    hosts[0].run("pkill", "-INT", "-f", "podium train")
    code, out, err = ended(process)
    result = json.loads(out)
    assert code == 130 and len(result["lost"]) == 1 and result["audit"] == CLEAN, (out, err)
    assert len(set(result["param_hash"].values())) == 1


PEEK = """
import json, ray
from podium.launch.hosts.ray import _agent_class
ray.init(log_to_driver=False)
show = '''
import json, os, sys
print(json.dumps([sys.stdin.readline(), dict(os.environ)]), flush=True)
sys.exit("last words")
'''
actor = ray.remote(_agent_class()).options(num_cpus=1, num_gpus=2).remote()
print(json.dumps(ray.get(actor.run.remote(["-c", show], "the invitation\\n"))))
"""


def test_an_agent_sees_its_gpus_and_nothing_of_ray(make_hosts: Make, start_ray: StartRay) -> None:
    (host,) = hosts = make_hosts(1)
    ray = start_ray(hosts, gpus=2)
    done = host.run("python", "-c", PEEK, env=ray.env)
    assert done.returncode == 0, done.stderr
    code, (shown, last) = json.loads(done.stdout)
    line, env = json.loads(shown)
    assert (code, line, last) == (1, "the invitation\n", "last words")
    assert sorted(env["CUDA_VISIBLE_DEVICES"].split(",")) == ["0", "1"]
    assert not [name for name in env if name.startswith("RAY_")]


def test_what_is_wrong_is_told_within_seconds(make_hosts: Make, start_ray: StartRay) -> None:
    a, b = hosts = make_hosts(2)
    ray = start_ray(hosts, cpus=2)

    def told(limit_s: float = 30.0, **options: Any) -> str:
        began = time.monotonic()
        env, asked = {**ray.env, **options.pop("env", {})}, {"workers": 2, "steps": 4, **options}
        code, out, err = ended(podium(a, *request(**asked), "--launcher", "ray", env=env))
        assert code in (1, 2) and time.monotonic() - began < limit_s, (out, err)
        return out + err

    text = told(workers=6, start_deadline_s=5)
    assert "Ray looks for hosts: 2 with 3 CPU (STRICT_SPREAD); if it has an autoscaler, that may be adding" in text
    assert "has not found hosts: 2 with 3 CPU" in text and "host0: 2 CPU; host1: 2 CPU; free: 4 CPU" in text
    text = told(env={"RAY_AUTH_TOKEN": "0" * 64})
    assert "does not accept this process's token: set RAY_AUTH_MODE=token" in text
    text = told(env={"RAY_ADDRESS": "10.77.0.1:6390"})
    assert "no Ray answers at 10.77.0.1:6390 (Connection refused)" in text
    for env in ({}, {"PYTHONPATH": ""}):  # the package here, and where it is installed
        path = b.run("python", "-c", "import podium; print(podium.__path__[0])", env=env).stdout.strip()
        b.run("mount", "-t", "tmpfs", "none", path)
    assert re.search(r"host host1: .*No module named '?podium", told(60.0))
