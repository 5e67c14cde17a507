"""Hosts for tests: they share nothing, their links can be cut, and losing one says no goodbye."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from podium.errors import ConfigError
from podium.testing import Host, Hosts, hosts, make_hosts

Make = Callable[..., Hosts]
pytestmark = pytest.mark.root
__all__ = ["make_hosts"]  # the fixture

LISTEN = """
import socket, sys
server = socket.create_server(("", 7000))
print("listening", flush=True)
connection, _ = server.accept()
while data := connection.recv(1 << 20):
    connection.sendall(data[:1])
"""
HEAR = """
import socket
heard = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
heard.bind(("", 7001))
print("listening", flush=True)
heard.settimeout(30)
print(heard.recv(100).decode())
"""


def python(host: Host, text: str, *arguments: str) -> str:
    done = host.run(sys.executable, "-c", text, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def listening(host: Host, text: str) -> subprocess.Popen[str]:
    process = host.start(sys.executable, "-c", text, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "listening\n"
    return process


def hears(receiver: Host, sender: Host) -> bool:
    """Whether a datagram from the sender arrives before one that the receiver sends to itself afterwards."""
    process = listening(receiver, HEAR)
    for host, text in ((sender, "hello"), (receiver, "silence")):
        send = f"import socket; socket.socket(type=socket.SOCK_DGRAM).sendto(b'{text}', ('{receiver.address}', 7001))"
        python(host, send)
    return process.communicate(timeout=40)[0].strip() == "hello"


def test_hosts_share_no_folder_no_memory_no_name_and_no_process(make_hosts: Make) -> None:
    a, b = make_hosts(2)
    for host in (a, b):
        assert host.run("hostname").stdout.strip() == host.name
        for shared in ("/tmp", "/dev/shm"):
            with tempfile.NamedTemporaryFile(dir=shared) as file:
                assert host.run("ls", file.name).returncode != 0
        host.run("sh", "-c", "echo mine > /tmp/file; echo mine > /dev/shm/file")
    assert (a.folder / "file").read_text() == "mine\n"
    a.run("rm", "/tmp/file", "/dev/shm/file")
    assert b.run("cat", "/tmp/file", "/dev/shm/file").stdout == "mine\nmine\n"
    process = a.start("sh", "-c", "echo begun; sleep 60; : somebody", stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "begun\n"
    seen = [host.run("sh", "-c", "cat /proc/[0-9]*/cmdline").stdout.count("somebody") for host in (a, b)]
    assert seen == [1, 0]


def test_podium_is_installed_on_every_host(make_hosts: Make) -> None:
    (host,) = make_hosts(1)
    assert python(host, "import podium, os; print(podium.__version__, os.getcwd())").endswith(" /tmp")


def test_a_command_starts_in_the_hosts_own_folder(make_hosts: Make) -> None:
    (host,) = make_hosts(1)
    host.run("touch", "relative")
    assert (host.folder / "relative").exists()


def test_hosts_reach_each_other_by_name(make_hosts: Make) -> None:
    a, b = make_hosts(2)
    listening(b, LISTEN)
    ask = f"import socket; c = socket.create_connection(('{b.name}', 7000), 5); c.sendall(b'x'); print(c.recv(1))"
    assert python(a, ask) == "b'x'"


def test_a_link_has_the_rate_that_was_asked_for(make_hosts: Make) -> None:
    a, b = make_hosts(2, mbit=80)
    listening(b, LISTEN)
    send = (
        f"import socket, time; c = socket.create_connection(('{b.name}', 7000), 5); began = time.monotonic();"
        "c.sendall(bytes(4_000_000)); c.shutdown(socket.SHUT_WR);"
        "[None for _ in iter(lambda: c.recv(1 << 16), b'')]; print(time.monotonic() - began)"
    )
    assert float(python(a, send)) > 0.3  # 0.4 s at 80 Mbit/s, less what the token bucket lets through at once


def test_a_link_is_cut_in_one_direction_or_in_both_and_mended(make_hosts: Make) -> None:
    a, b, c = make_hosts(3)
    a.cut(b, one_way=True)
    assert not hears(b, a) and hears(a, b)
    a.cut(b)
    assert not hears(b, a) and not hears(a, b)
    assert hears(c, a) and hears(c, b)
    b.mend(a)
    assert hears(b, a) and hears(a, b)


def test_a_lost_host_says_no_goodbye_and_runs_nothing_any_more(make_hosts: Make) -> None:
    a, b = make_hosts(2)
    server = listening(b, LISTEN)
    wait = (
        f"import socket; c = socket.create_connection(('{b.name}', 7000), 5); c.sendall(b'x'); c.recv(1);"
        "print('connected', flush=True); c.settimeout(1.5); print(c.recv(1))"
    )
    client = a.start(sys.executable, "-c", wait, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert client.stdout is not None and client.stdout.readline() == "connected\n"
    b.lose()
    assert "TimeoutError" in client.communicate(timeout=20)[1], "neither a FIN nor a reset arrives"
    assert server.wait(20) != 0
    with pytest.raises(ConfigError, match="host1 is lost: it runs no command"):
        b.run("true")
    assert a.run("true").returncode == 0


def traces(host: Host) -> list[Path]:
    """What exists on this machine while the host does."""
    spaces = (Path("/var/run/netns") / name for name in (*host._network.namespaces, host._network.hub))
    return [Path(f"/proc/{host.pid}"), host.folder.parent, *spaces]


def test_nothing_is_left_of_them() -> None:
    if reason := hosts.why_not():
        pytest.skip(reason)
    with Hosts(2) as (a, b):
        processes = [host.start("sleep", "60") for host in (a, b)]
        there = {*traces(a), *traces(b)}
        assert all(path.exists() for path in there)
        b.lose()
    assert not [path for path in there if path.exists()]
    assert all(process.poll() is not None for process in processes)


def test_hosts_end_with_the_process_that_made_them() -> None:
    if reason := hosts.why_not():
        pytest.skip(reason)
    text = (
        "import time\nfrom podium.testing import Hosts\nfrom tests.testing.test_hosts import traces\n"
        "with Hosts(1) as (host,):\n    print(*traces(host), flush=True)\n    time.sleep(60)"
    )
    maker = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    process, *rest = (Path(word) for word in maker.stdout.readline().split())
    assert process.exists() and rest
    os.kill(maker.pid, signal.SIGKILL)
    maker.communicate(timeout=20)
    until = time.monotonic() + 10
    while process.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not process.exists()
    with Hosts(1):
        pass  # removes what the killed one left, as the next run does
    assert not [path for path in rest if path.exists()]


def test_without_root_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need root" in hosts.why_not()
    with pytest.raises(ConfigError, match="need root"):
        Hosts(2)
