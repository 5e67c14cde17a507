"""A host that vanishes without a word is noticed also on a connection that goes on sending; a slow reader is not."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest
import torch

from podium.comm.base import DEPARTED
from podium.comm.real.channel import Channel
from podium.comm.real.frames import Limits
from podium.comm.real.tls import Tls
from podium.errors import CommError
from podium.launch.clusters.commands import find_tool, run_command
from podium.launch.clusters.namespaces import enter_namespace
from tests.comm.real.test_tls import tls  # noqa: F401  # a fixture
from tests.integration.shaping import needs_root

T = TypeVar("T")
SECRET = b"a secret of this test"
LIMIT_S = 4.0


class Hosts:
    """Two namespaces, joined by one cable."""

    def __init__(self) -> None:
        self._ip, run = find_tool("ip"), secrets.token_hex(3)
        self.names = [f"podium-{run}-0", f"podium-{run}-1"]
        self.addresses = ["10.99.7.1", "10.99.7.2"]
        for name in self.names:
            run_command(self._ip, "netns", "add", name)
        ends = ("c0", "netns", self.names[0], "type", "veth", "peer", "name", "c1", "netns", self.names[1])
        run_command(self._ip, "link", "add", *ends)
        for n, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            run_command(self._ip, "-n", name, "address", "add", f"{address}/24", "dev", f"c{n}")
            run_command(self._ip, "-n", name, "link", "set", f"c{n}", "up")

    def cut(self) -> None:
        """Packets still leave the second host, and nothing comes back: no reset, no error, as when power fails."""
        run_command(self._ip, "-n", self.names[0], "link", "set", "c0", "nomaster")
        run_command(self._ip, "-n", self.names[0], "address", "flush", "dev", "c0")

    def on(self, host: int, work: Callable[[], T]) -> T:
        """Do this in a thread on one of the hosts."""
        done: list[T] = []

        def run() -> None:
            enter_namespace(self.names[host])
            done.append(work())

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(20)
        return done[0]

    def remove(self) -> None:
        for name in self.names:
            run_command(self._ip, "netns", "delete", name)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    yield made
    made.remove()


@pytest.mark.slow
@pytest.mark.root
@needs_root
@pytest.mark.parametrize(("guarded", "beats"), [(False, True), (True, True), (False, False)])
def test_a_vanished_host_is_noticed_on_a_connection_that_beats_or_is_idle(
    hosts: Hosts,
    guarded: bool,
    beats: bool,
    tls: Tls,  # noqa: F811  # the fixture
) -> None:
    if guarded:
        pytest.importorskip("cryptography")
    options = {"secret": SECRET, "deadline_s": LIMIT_S, "tls": tls if guarded else None}
    far = hosts.on(0, lambda: Channel(0, listen=f"tcp:{hosts.addresses[0]}:0", **options))  # type: ignore[arg-type]
    near = hosts.on(1, lambda: Channel(1, listen=f"tcp:{hosts.addresses[1]}:0", **options))  # type: ignore[arg-type]
    try:
        near.introduce({0: far.address})
        hosts.on(1, lambda: near.send(0, "beat", {}))
        assert far.recv(10).kind == "beat"
        hosts.cut()
        began, over = time.monotonic(), threading.Event()

        def beat() -> None:
            while beats and not over.wait(0.05):
                try:
                    near.send(0, "beat", {})
                except CommError:
                    return

        beating = threading.Thread(target=beat)
        beating.start()
        try:
            message = near.recv(5 * LIMIT_S)
        finally:
            over.set()
            beating.join()
        assert message.kind == DEPARTED and message.source == 0
        assert "acknowledged nothing" in message.meta["error"]
        assert time.monotonic() - began < LIMIT_S + 2.0  # beyond it, only what a busy machine needs to wake a thread
    finally:
        near.close()
        far.close()


@pytest.mark.slow
def test_a_peer_that_lives_and_reads_nothing_is_not_taken_for_vanished() -> None:
    limits = Limits(inbox_messages=1, inbox_bytes=1)
    far = Channel(0, secret=SECRET, listen="tcp:127.0.0.1:0", deadline_s=30, limits=limits)
    near = Channel(1, secret=SECRET, listen="tcp:127.0.0.1:0", deadline_s=30)
    near.vanished_s = far.vanished_s = 4.0  # below, what the kernel does not answer at first would count
    sent = threading.Event()

    def flood() -> None:
        for _ in range(12):
            near.send(0, "much", {}, [torch.zeros(8 << 20, dtype=torch.uint8)])
        sent.set()

    sender = threading.Thread(target=flood)
    try:
        near.introduce({0: far.address})
        sender.start()
        assert not sent.wait(6.0), "the kernel takes all of it: send more"
        assert [far.recv(10).kind for _ in range(12)] == ["much"] * 12
        assert sent.wait(10)
    finally:
        near.close()
        far.close()
        sender.join(10)


@pytest.mark.slow
def test_a_connection_that_was_idle_for_long_may_send_again() -> None:
    far = Channel(0, secret=SECRET, listen="tcp:127.0.0.1:0", deadline_s=30)
    near = Channel(1, secret=SECRET, listen="tcp:127.0.0.1:0", deadline_s=30)
    near.vanished_s = far.vanished_s = 1.0
    try:
        near.introduce({0: far.address})
        for _ in range(2):
            near.send(0, "now and then", {})
            assert far.recv(10).kind == "now and then"
            threading.Event().wait(1.5)
    finally:
        near.close()
        far.close()
