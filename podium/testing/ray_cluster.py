"""A real Ray on test hosts: the head on the first, a raylet on each of the others.

    with Hosts(3) as hosts, RayCluster(hosts) as ray:
        hosts[0].run("python", "my_driver.py", env=ray.env)     # ray.init() joins the cluster

Its files are in `/tmp/ray` and its objects in `/dev/shm` of each host. Only who has the token may connect. Starting
takes about 7 s.
"""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import final

from podium.errors import ConfigError
from podium.testing.daemons import Service
from podium.testing.hosts import Host, why_not

_PORT = 6379
_START_S = 90.0
_STOP_S = 30.0
_OBJECT_STORE_BYTES = 80 << 20  # the least that Ray takes
_RAY = (sys.executable, "-m", "ray.scripts.scripts")


def why_not_ray() -> str:
    """Why Ray cannot run on hosts here, as a reason to skip a test; empty where it can."""
    if reason := why_not():
        return reason
    if importlib.util.find_spec("ray") is None:
        return "Ray on hosts needs Ray: pip install 'podium[ray]'"
    return ""


@final
class RayCluster(Service):
    """A Ray cluster of all hosts, while the `with` block lasts; every host has joined when it begins."""

    def __init__(self, hosts: Iterable[Host], *, cpus: int = 4, gpus: int = 0) -> None:
        """`cpus`, `gpus`: how many each host offers, whatever the machine has."""
        if reason := why_not_ray():
            raise ConfigError(reason)
        self._hosts, self._cpus, self._gpus = tuple(hosts), cpus, gpus
        self._starting: list[tuple[Host, subprocess.Popen[str]]] = []
        self.address = f"{self._hosts[0].address}:{_PORT}"
        self.env = {
            "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent to anyone
            "RAY_worker_niceness": "0",  # by default every other process of the machine comes first
        }
        """What a driver needs in its environment, on any of the hosts."""

    def _begin(self) -> None:
        head, *others = self._hosts
        self._start([head], "--head", "--port", str(_PORT), "--include-dashboard", "false")
        self._start(others, "--address", self.address)

    def _start(self, hosts: Iterable[Host], *role: str) -> None:
        """Start Ray on hosts, at the same time."""
        size = ["--num-cpus", str(self._cpus), "--object-store-memory", str(_OBJECT_STORE_BYTES)]
        size += ["--num-gpus", str(self._gpus)] if self._gpus else []
        # A head may not be told where the head is.
        env = {name: value for name, value in self.env.items() if name != "RAY_ADDRESS"}
        for host in hosts:
            words = ("start", *role, "--node-ip-address", host.address, *size)
            self._starting.append((host, _begin(host, *words, env=env)))
        for host, process in self._starting:
            printed = process.communicate(timeout=_START_S)[0]
            if process.returncode != 0:
                raise ConfigError(f"Ray did not start on {host.name}:\n{printed.strip()}")
        self._starting.clear()

    def _end(self) -> None:
        for host, process in self._starting:
            host.send_signal(process, signal.SIGKILL)
        stopping = [_begin(host, "stop", "--force", env=self.env) for host in self._hosts if host.alive]
        for process in stopping:
            process.communicate(timeout=_STOP_S)
        for host in self._hosts:
            shutil.rmtree(host.folder / "ray", ignore_errors=True)


def _begin(host: Host, *words: str, env: dict[str, str]) -> subprocess.Popen[str]:
    return host.start(*_RAY, *words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
