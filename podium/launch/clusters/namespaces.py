"""Shaped nodes on one machine: a network namespace per node, token buckets on its link.

    node 0 ─ veth ─┐
    node 1 ─ veth ─┼─ bridge, in a separate hub namespace
    node 2 ─ veth ─┘

`tc tbf` shapes both directions of each node's link: what leaves the node (up) and what leaves the hub towards it
(down). Ranks on one node use its loopback, unshaped. The machine's own interfaces, addresses and routes do not change.
Not shaped, and recorded as warnings: latency, and the cluster file's links between single pairs.

Processes outside cannot reach the nodes by TCP or by an abstract Unix socket; a Unix socket with a path works.
"""

from __future__ import annotations

import atexit
import ctypes
import ipaddress
import math
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from podium.errors import ConfigError
from podium.launch.clusters.commands import find_tool, remove_after, run_command
from podium.launch.clusters.description import Cluster
from podium.launch.rendezvous import note_what_is_made

NETWORK = ipaddress.ip_network("10.77.0.0/16")
"""Addresses inside the namespaces; they are invisible outside, so runs at the same time may use the same ones."""
CONGESTION_CONTROL = "cubic"
"""Pinned, because some systems default to BBR, which divides a link unfairly between flows."""
QUEUE_MS = 50
"""Longest queue at a token bucket before packets are dropped."""
MAX_NODES = 1000
"""A Linux bridge takes 1,024 ports."""

_NAMESPACES = Path("/var/run/netns")
_CONNECT_S = 5.0
_THREAD_S = 20.0
_CLONE_NEWNET = 0x40000000

T = TypeVar("T")


class ShapedNetwork:
    """The cluster's nodes as namespaces, for as long as the `with` block lasts; needs root.

    Removes what it created and nothing else, also when the body raises or the interpreter ends inside it.
    """

    def __init__(self, cluster: Cluster, folder: Path | None = None) -> None:
        """`folder`: the rendezvous folder that lists the namespaces, so that the next launcher can remove them."""
        self.cluster, self._folder = cluster, folder
        self.addresses: tuple[str, ...] = ()
        """The address of each node."""
        self.namespaces: tuple[str, ...] = ()
        """Of each node, for `enter_namespace`."""
        self.interfaces: tuple[str, ...] = ()
        """Of each node, for libraries that need an interface rather than an address."""
        self.hub, self.ports = "", tuple[str, ...]()
        """The namespace of the bridge, and in it the other end of each node's link."""
        self.facts: dict[str, Any] = {}
        """What was applied and read back, and the warnings, for the manifest."""
        self._created: list[str] = []
        self._owner = os.getpid()

    def __enter__(self) -> ShapedNetwork:
        _need_root()
        if len(self.cluster.nodes) > MAX_NODES:
            raise ConfigError(f"shaped launcher: at most {MAX_NODES} nodes, got {len(self.cluster.nodes)}")
        self._ip, self._tc = find_tool("ip"), find_tool("tc")
        atexit.register(self.remove)
        try:
            self._create()
        except BaseException:  # an interrupt, too, must leave nothing behind
            self.remove()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        remove_after(self.remove, error)

    def remove(self) -> None:
        """Delete the namespaces, and with them their links. May be called twice; does nothing in a forked child."""
        if os.getpid() != self._owner:
            return
        failures = []
        while self._created:
            name = self._created.pop()
            try:
                run_command(self._ip, "netns", "delete", name)
            except ConfigError as error:
                failures.append(str(error))
        atexit.unregister(self.remove)
        if failures:
            raise ConfigError("; ".join(failures))

    def _create(self) -> None:
        run = secrets.token_hex(3)
        self.hub = hub = f"podium-{run}-hub"
        count = range(len(self.cluster.nodes))
        self.namespaces = tuple(f"podium-{run}-{i}" for i in count)
        if self._folder is not None:
            note_what_is_made(self._folder, namespaces=(*self.namespaces, hub))
        self._add_namespace(hub)
        run_command(self._ip, "-n", hub, "link", "add", "bridge", "type", "bridge")
        run_command(self._ip, "-n", hub, "link", "set", "bridge", "up")
        self.interfaces, self.ports = (tuple(f"{end}-{i}" for i in count) for end in (f"pd{run}", "port"))
        self.addresses = tuple(str(NETWORK[i + 1]) for i in count)
        nodes = [self._add_node(i, hub) for i in count]
        limit_s = _THREAD_S + _CONNECT_S * len(self.namespaces)
        seen = in_thread(lambda: _congestion_controls(self.namespaces, self.addresses), limit_s)
        if set(seen) - {CONGESTION_CONTROL}:
            raise ConfigError(f"shaped launcher: sockets must use {CONGESTION_CONTROL}, got {sorted(set(seen))}")
        self.facts = {
            "run": run,
            "nodes": nodes,
            "queue_ms": QUEUE_MS,
            "congestion_control": {"asked": CONGESTION_CONTROL, "seen": seen},
            "warnings": warnings_of(self.cluster),
        }

    def _add_namespace(self, name: str) -> None:
        self._created.append(name)  # before it is created: an interrupt right after must not lose it
        try:
            run_command(self._ip, "netns", "add", name)
        except ConfigError:
            self._created.remove(name)
            raise

    def _add_node(self, index: int, hub: str) -> dict[str, Any]:
        node, name, inner = self.cluster.nodes[index], self.namespaces[index], self.interfaces[index]
        port, address = self.ports[index], self.addresses[index]
        self._add_namespace(name)
        run_command(
            *(self._ip, "link", "add", inner, "netns", name, "type", "veth"),
            *("peer", "name", port, "netns", hub),
        )
        run_command(self._ip, "-n", hub, "link", "set", port, "master", "bridge", "up")
        inside = (self._ip, "-n", name)
        run_command(*inside, "link", "set", "lo", "up")
        # No route by the kernel for the prefix: ours, which pins the congestion control, must be the only one.
        run_command(*inside, "address", "add", f"{address}/{NETWORK.prefixlen}", "dev", inner, "noprefixroute")
        run_command(*inside, "link", "set", inner, "up")
        route = ("route", "add", str(NETWORK), "dev", inner, "src", address, "congctl", CONGESTION_CONTROL)
        run_command(*inside, *route)
        return {
            "name": node.name,
            "namespace": name,
            "interface": inner,
            "address": address,
            "up": self._shape(name, inner, node.up_mbit),
            "down": self._shape(hub, port, node.down_mbit),
        }

    def _shape(self, namespace: str, interface: str, mbit: float | None) -> dict[str, Any] | None:
        """Put a token bucket on what leaves an interface; returns what was asked and what `tc` then shows."""
        if mbit is None:
            return None
        rate, burst = round(mbit * 1e6), burst_bytes(mbit)
        bucket = ("tbf", "rate", f"{rate}bit", "burst", f"{burst}b", "latency", f"{QUEUE_MS}ms")
        run_command(self._tc, "-n", namespace, "qdisc", "add", "dev", interface, "root", *bucket)
        shown = run_command(self._tc, "-n", namespace, "qdisc", "show", "dev", interface)
        return {"mbit": mbit, "burst_bytes": burst, "applied": shown.strip()}


def burst_bytes(mbit: float) -> int:
    """The token bucket's depth for a rate.

    Too deep lets a small message through unshaped, too shallow costs goodput at high rates: 16 kB at 100 Mbit/s and
    512 kB at 1 Gbit/s measured well. Between them a power law; beyond, in proportion; never under two Ethernet frames.
    """
    low, high = 16 * 1024, 512 * 1024
    if mbit <= 100:
        return max(2 * 1514, round(low * mbit / 100))
    if mbit >= 1000:
        return round(high * mbit / 1000)
    return round(low * math.pow(mbit / 100, math.log10(high / low)))


def warnings_of(cluster: Cluster) -> list[str]:
    """Settings of the cluster file that the shaped launcher ignores."""
    found = []
    latencies = sorted({node.latency_us for node in cluster.nodes if node.latency_us > 0})
    if latencies:
        listed = ", ".join(f"{value:g}" for value in latencies)
        found.append(f"latency is not shaped: the file has {listed} us, the nodes are joined by the kernel's own delay")
    if cluster.links:
        found.append(f"links between single pairs are not shaped: the file has {len(cluster.links)}")
    return found


def enter_namespace(name: str) -> None:
    """Move the calling thread into a network namespace, with all threads it starts from then on.

    A child process must call this before it makes any socket: a socket stays in the namespace it was made in.
    """
    path = _NAMESPACES / name
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _setns(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise ConfigError(f"network namespace {name} cannot be entered: {error.strerror} ({path})") from error


def _setns(handle: int) -> None:
    if hasattr(os, "setns"):  # from Python 3.12
        os.setns(handle, _CLONE_NEWNET)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(ctypes.c_int(handle), ctypes.c_int(_CLONE_NEWNET)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def in_thread(work: Callable[[], T], limit_s: float = 20.0) -> T:
    """Run `work` in a new thread, so that the caller's thread stays in its namespace.

    Raises ConfigError when it has not ended after `limit_s`; the thread then stays until the process ends.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # raised in the caller
            errors.append(error)

    thread = threading.Thread(target=run, name="podium-netns", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise ConfigError(
            f"shaped launcher: connections between the nodes could not be tested within {limit_s:g} s: the kernel "
            "blocks entering a namespace or making a socket"
        )
    if errors:
        raise errors[0]
    return results[0]


def _congestion_controls(namespaces: Sequence[str], addresses: Sequence[str]) -> list[str]:
    """The congestion control of a connection from each node to the next; raises where a node cannot reach it."""
    if len(namespaces) < 2:
        return []
    seen = []
    for i, name in enumerate(namespaces):
        following = (i + 1) % len(namespaces)
        enter_namespace(namespaces[following])
        with socket.create_server((addresses[following], 0)) as server:
            port = server.getsockname()[1]
            enter_namespace(name)
            try:
                with socket.create_connection((addresses[following], port), timeout=_CONNECT_S) as client:
                    raw = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            except OSError as error:
                raise ConfigError(f"shaped launcher: node {i} cannot reach node {following}: {error}") from error
        seen.append(raw.rstrip(b"\0").decode())
    return seen


def _need_root() -> None:
    if os.geteuid() != 0:
        raise ConfigError(
            f"the shaped launcher needs root (network namespaces), got user id {os.geteuid()}: "
            "run it with sudo, or use the launcher 'local' or 'virtual'"
        )
