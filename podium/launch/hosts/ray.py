"""Agents started by Ray: a placement group has a bundle of CPUs and GPUs per host, and an actor in it holds the agent.

Ray finds the hosts and starts the agents. Nothing else goes through it: agents and ranks have connections of their own.

This process is the driver: on a node of the cluster (RAY_ADDRESS=HOST:6379, or not set), or elsewhere by Ray's client
(RAY_ADDRESS=ray://HOST:10001). A Ray that is already initialized in this process is used and left running.

The invitation is an argument of a call: it goes to the actor's process alone, and Ray does not store it. Ray encrypts
its connections only with RAY_USE_TLS=1.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

from podium.config import RunConfig, devices_in
from podium.errors import CommError, ConfigError, DeadlineExceeded, Interrupted
from podium.launch.hosts.base import MODULE, StartedAgent, Starter
from podium.launch.hosts.entries import HostEntry
from podium.launch.hosts.facts import routed
from podium.launch.hosts.invitation import Invitation
from podium.launch.hosts.ranks import place
from podium.launch.ray_process import RAYS_OWN, import_ray, in_short, restored_process

_WHO = "launcher ray"
_CONNECT_S = 5.0
_SAY_AFTER_S = 3.0
_END_S = 5.0
_CLIENT = "ray://"
_STRATEGIES = {"spread": "STRICT_SPREAD", "pack": "PACK"}


class Request(NamedTuple):
    """What is asked of Ray: a bundle for each host."""

    bundles: list[dict[str, float]]
    ranks: list[int]
    """How many processes of the run each bundle is for."""
    strategy: str

    def __str__(self) -> str:
        kinds = {tuple(bundle.items()): 0 for bundle in self.bundles}
        for bundle in self.bundles:
            kinds[tuple(bundle.items())] += 1
        parts = [f"{count} with {_amounts(dict(kind))}" for kind, count in kinds.items()]
        return f"hosts: {', '.join(parts)} ({self.strategy})"


def request_for(config: RunConfig, endpoints: Sequence[tuple[int, ...]], nodes: int, gpus: float) -> Request:
    """The bundles for a run with these processes on so many hosts, of a cluster with so many GPUs."""
    hosts = [HostEntry(f"host-{n}") for n in range(min(nodes, len(endpoints)))]
    placed = place(hosts, endpoints, config.workers)
    bundles, ranks = list[dict[str, float]](), list[int]()
    for number in range(len(hosts)):
        here = [rank for rank, host in placed.items() if host == number]
        bundle: dict[str, float] = {"CPU": len(here) * (config.threads or 1)}
        if wanted := sum(_takes_gpu(config, rank, gpus) for rank in here):
            bundle["GPU"] = wanted
        bundles.append(bundle)
        ranks.append(len(here))
    return Request(bundles, ranks, _STRATEGIES[config.placement])


def _takes_gpu(config: RunConfig, rank: int, gpus: float) -> bool:
    """Whether this process is a worker on a GPU. `auto` means one where the cluster has enough for all workers."""
    if rank >= config.workers:
        return False
    devices = devices_in(config.device)
    return devices[rank % len(devices)].startswith("cuda") or (devices == ("auto",) and gpus >= config.workers)


class _Place(NamedTuple):
    """A bundle for one host."""

    group: Any
    bundle: int
    """Its number in the group."""
    size: dict[str, float]


@final
class Ray(Starter):
    """An actor per host."""

    threads_per_rank = 1  # what a rank books, unless the run sets more

    def __init__(
        self,
        config: RunConfig,
        endpoints: Sequence[tuple[int, ...]],
        tell: Callable[[str], None],
        stop: threading.Event | None,
    ) -> None:
        """`tell` gets a line while Ray looks for hosts; setting `stop` ends the search."""
        self._config, self._endpoints = config, endpoints
        self._tell, self._stop = tell, stop or threading.Event()
        self._ray = import_ray(_WHO)
        self._stack = contextlib.ExitStack()
        self._request = Request([], [], "")
        self._places: dict[int, _Place] = {}
        """By the host's number."""
        self._addresses: list[str] = []

    def entries(self, processes: int) -> list[HostEntry]:
        if not self._ray.is_initialized():
            self._connect()
        alive = self._alive()
        usable = sum(node["Resources"].get("CPU", 0) > 0 for node in alive)
        nodes = self._config.nodes or max(1, min(processes or usable, usable))
        gpus = sum(node["Resources"].get("GPU", 0) for node in alive)
        if processes:
            self._request = request_for(self._config, self._endpoints, nodes, gpus)
        else:  # one process on each node
            self._request = request_for(
                dataclasses.replace(self._config, workers=nodes), [(n,) for n in range(nodes)], nodes, gpus
            )
        group = self._group(self._request.bundles, self._request.strategy)
        self._wait_for(group)
        self._places = {n: _Place(group, n, bundle) for n, bundle in enumerate(self._request.bundles)}
        chosen = self._nodes_of(group)
        self._addresses = [str(node["NodeManagerAddress"]) for node in chosen]
        return [
            HostEntry(str(node["NodeManagerHostname"]), slots=ranks)
            for node, ranks in zip(chosen, self._request.ranks, strict=True)
        ]

    def head_address(self, entries: Sequence[HostEntry]) -> str:
        """That of the interface that routes to the first node that is not this machine."""
        away = [address for address in self._addresses if not _is_here(address)]
        return routed((away or self._addresses)[0], 1)

    def start(self, entries: Mapping[int, HostEntry], invitation: Invitation) -> dict[int, StartedAgent]:
        for number, entry in entries.items():
            if number not in self._places:
                self._places[number] = self._place_for(entry)
        return {number: self._start(self._places[number], invitation.numbered(number)) for number in entries}

    def _place_for(self, entry: HostEntry) -> _Place:
        """A bundle for a host that joins a run under way; its actor waits for it."""
        alive = self._alive()
        node = next((n for n in alive if entry.name in (n["NodeManagerHostname"], n["NodeManagerAddress"])), None)
        if node is None:
            raise ConfigError(f"{_WHO}: {entry.name} must be a node of the cluster, which has {_listed(alive)}")
        ranks = entry.slots or 1
        bundle = {"CPU": ranks * (self._config.threads or 1), f"node:{node['NodeManagerAddress']}": 0.001}
        if any("GPU" in place.size for place in self._places.values()):  # as the hosts that are there have it
            bundle["GPU"] = ranks
        return _Place(self._group([bundle], "PACK"), 0, bundle)

    def _start(self, place: _Place, line: str) -> StartedAgent:
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        actor = self._ray.remote(_agent_class()).options(
            num_cpus=place.size["CPU"],
            num_gpus=place.size.get("GPU", 0),
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=scheduling.PlacementGroupSchedulingStrategy(
                place.group, placement_group_bundle_index=place.bundle
            ),
        )
        started = actor.remote()
        return _RayAgent(self._ray, started, started.run.remote(list(MODULE), line))

    def advice(self, entry: HostEntry) -> str:
        return f"on {entry.name}: {os.path.basename(sys.executable)} -m podium --version; here: ray status"

    def close(self) -> None:
        self._stack.close()

    def _connect(self) -> None:
        address = find_address()
        check_address(self._ray, address)
        self._stack.enter_context(restored_process())
        on_sigterm = signal.getsignal(signal.SIGTERM)
        try:
            self._ray.init(address=address, log_to_driver=False, configure_logging=False)
        except (OSError, ValueError, RuntimeError, self._ray.exceptions.RayError) as error:
            self._ray.shutdown()
            raise CommError(f"{_WHO}: Ray at {address} did not let this process join: {in_short(error)}") from error
        self._stack.callback(self._ray.shutdown)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)  # Ray would end this process before it has saved

    def _group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        """A placement group, which is given back at the end."""
        groups = importlib.import_module("ray.util.placement_group")
        group = groups.placement_group(bundles, strategy=strategy)

        def give_back() -> None:
            with contextlib.suppress(self._ray.exceptions.RayError, ConnectionError):  # Ray itself is gone
                groups.remove_placement_group(group)

        self._stack.callback(give_back)
        return group

    def _wait_for(self, group: Any) -> None:
        began, said = time.monotonic(), False
        while not group.wait(timeout_seconds=1):
            waited = time.monotonic() - began
            if self._stop.is_set():
                raise Interrupted(f"{_WHO}: stopped while Ray was looking for {self._request}")
            if waited > self._config.start_deadline_s:
                raise DeadlineExceeded(self._describe_failure())
            if waited > _SAY_AFTER_S and not said:
                said = True
                self._tell(f"Ray looks for {self._request}; if it has an autoscaler, that may be adding nodes")

    def _describe_failure(self) -> str:
        has, free = _listed(self._alive()), _amounts(self._ray.available_resources())
        return (
            f"{_WHO}: Ray has not found {self._request} within {self._config.start_deadline_s:g} s "
            f"(start_deadline_s); the cluster has {has}; free: {free}. Use fewer workers, other --nodes, "
            "--set placement=pack, or more nodes (ray start --address …); to see what is booked: ray status"
        )

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _nodes_of(self, group: Any) -> list[dict[str, Any]]:
        """The node of each bundle."""
        groups = importlib.import_module("ray.util.placement_group")
        where = groups.placement_group_table(group)["bundles_to_node_id"]
        nodes = {node["NodeID"]: node for node in self._ray.nodes()}
        return [nodes[where[number]] for number in sorted(where)]


def _agent_class() -> type:
    """The actor's class. Ray sends it by value, so that a node without Podium can say so itself."""

    class PodiumAgent:
        """The agent's process; it ends with this one, since its standard input does."""

        def run(self, words: list[str], line: str) -> tuple[int, list[str]]:
            """Run the agent to its end; returns its exit code and its last words."""
            import collections
            import contextlib
            import os
            import subprocess
            import sys

            env = {name: value for name, value in os.environ.items() if not name.startswith(rays_own)}
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            process = subprocess.Popen([sys.executable, *words], env=env, text=True, errors="replace", **pipes)
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
            said = collections.deque(process.stdout, maxlen=20)
            return process.wait(), [text.strip() for text in said if text.strip()]

    rays_own = RAYS_OWN
    return PodiumAgent


class _RayAgent(StartedAgent):
    """An actor, and its call that lasts as long as the agent."""

    def __init__(self, ray: Any, actor: Any, call: Any) -> None:
        self._ray, self._actor, self._call = ray, actor, call

    def ended(self) -> str | None:
        try:
            if not self._ray.wait([self._call], timeout=0)[0]:
                return None
            code, said = self._ray.get(self._call, timeout=_END_S)
        except self._ray.exceptions.RayError as error:
            return f"its Ray actor is gone: {in_short(error)}"
        words = [line.removeprefix("podium: ") for line in said]
        return "; ".join(words[-3:]) or f"it ended with exit code {code} and said nothing"

    def end(self, *, at_once: bool = False) -> None:
        with contextlib.suppress(self._ray.exceptions.RayError):  # it is gone already, with its node
            if not at_once:
                self._ray.wait([self._call], timeout=_END_S)
            self._ray.kill(self._actor)


# Reaching the cluster.


def find_address() -> str:
    """What RAY_ADDRESS says, or the cluster that was started on this machine."""
    address = os.environ.get("RAY_ADDRESS", "auto")
    if address == "auto":
        address = importlib.import_module("ray._private.utils").read_ray_address() or ""
    if address in ("", "local"):
        raise ConfigError(
            f"{_WHO} needs a Ray cluster, and RAY_ADDRESS names none: set it to HOST:6379 on a node of the cluster, or "
            "to ray://HOST:10001 elsewhere; to start a cluster here: ray start --head"
        )
    return address


def check_address(ray: Any, address: str) -> None:
    """Raise at once where Ray itself would try for minutes: nobody listens, another token, no node of the cluster."""
    host, _, port = address.removeprefix(_CLIENT).rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"RAY_ADDRESS must be HOST:PORT or ray://HOST:PORT, got {address!r}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        raise CommError(
            f"{_WHO}: no Ray answers at {address} ({error.strerror or error}); on its head: ray status; to name "
            "another one: RAY_ADDRESS=HOST:6379"
        ) from error
    if not address.startswith(_CLIENT):
        _check_node(ray, address)


def _check_node(ray: Any, address: str) -> None:
    try:
        client = importlib.import_module("ray._raylet").GcsClient(address=address)
        nodes = client.get_all_node_info(timeout=_CONNECT_S)
    except ray.exceptions.AuthenticationError as error:
        raise ConfigError(
            f"{_WHO}: Ray at {address} does not accept this process's token: set RAY_AUTH_MODE=token and the cluster's "
            "RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH)"
        ) from error
    except ray.exceptions.RayError as error:
        raise CommError(f"{_WHO}: Ray at {address} does not answer: {in_short(error)}") from error
    if not any(_is_here(info.node_manager_address) for info in nodes.values()):
        raise ConfigError(
            f"{_WHO}: this machine is no node of the Ray cluster at {address}: use Ray's client, "
            f"RAY_ADDRESS={_CLIENT}{address.rpartition(':')[0]}:10001, or make it a node: ray start --address {address}"
        )


def _is_here(address: str) -> bool:
    """Whether an address is one of this machine's."""
    try:
        return routed(address, 1) == address
    except ConfigError:  # no route to it
        return False


def _listed(nodes: Sequence[Mapping[str, Any]]) -> str:
    """`host0: 4 CPU; host1: 4 CPU`."""
    texts = [f"{node['NodeManagerHostname']}: {_amounts(node['Resources'])}" for node in nodes]
    return "; ".join(sorted(texts)) or "no node"


def _amounts(resources: Mapping[str, float]) -> str:
    """`4 CPU, 2 GPU`."""
    return ", ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if resources.get(name)) or "no CPU"
