"""An MPS daemon is there inside its `with`, and nowhere afterwards, whatever happened inside.

On a GPU the real daemon is started. Elsewhere a stand-in program takes its place: a real process with the same
commands, which can also be told to misbehave, as the real one cannot.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from podium.errors import ConfigError
from podium.sweeps.executors import mps_daemon
from podium.sweeps.executors.mps_daemon import Client, MpsDaemon, why_unavailable

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STAND_IN = """#!{python} -SE
import os, signal, sys, time
pipe = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
pid_file = pipe + "/nvidia-cuda-mps-control.pid"
manner = open("{home}/manner").read().split()
if sys.argv[1:] == ["-d"]:
    if "broken" in manner:
        sys.exit("stand-in: no device")
    if os.fork():
        os._exit(0)
    os.setsid()
    if "deaf" in manner:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(pid_file + "~", "w") as file:
        file.write(str(os.getpid()))
    os.rename(pid_file + "~", pid_file)
    time.sleep(30)  # nobody needs it longer, whatever a test forgets
else:
    if not os.path.exists(pid_file):
        sys.exit("Cannot find MPS control daemon process")
    command = sys.stdin.read().strip()
    with open("{home}/heard", "a") as file:
        file.write(command + "\\n")
    word = command.split()[0]
    clients = "{home}/clients"
    if "forgetful" in manner and os.path.exists(clients):
        open("{home}/manner", "w").close()
        sys.exit("stand-in: what was the question?")
    if word == "get_server_list":
        print(7 if os.path.exists(clients) else "")
    elif word == "get_client_list":
        print(open(clients).read())
    elif word == "terminate_client":
        os.remove(clients)
    elif word == "quit":
        os.kill(int(open(pid_file).read()), signal.SIGTERM)
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone_soon(pid: int) -> bool:
    deadline = time.monotonic() + 5
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not lives(pid)


class StandIn:
    """The stand-in program, how it behaves, and what it was told."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.program = str(home / "nvidia-cuda-mps-control")
        Path(self.program).write_text(STAND_IN.format(python=sys.executable, home=home))
        Path(self.program).chmod(0o755)
        self.behave("")

    def behave(self, manner: str) -> None:
        (self.home / "manner").write_text(manner)

    def has_client(self, pid: int) -> None:
        (self.home / "clients").write_text(f"{pid}\n")

    def heard(self) -> list[str]:
        lines = (self.home / "heard").read_text().splitlines()
        return [line for line in lines if not line.startswith("get_")]

    def daemon(self, patience_s: float = 0.2) -> MpsDaemon:
        return MpsDaemon(control=self.program, patience_s=patience_s)

    def folders(self) -> list[Path]:
        return list(self.home.glob("mps-podium-*/*"))


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    home = Path(tempfile.mkdtemp(prefix="m", dir="/tmp"))  # short, as socket paths must be
    monkeypatch.setattr(tempfile, "tempdir", str(home))
    monkeypatch.setattr(mps_daemon, "why_absent", lambda: "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield StandIn(home)
    shutil.rmtree(home)


# Anywhere.


def test_without_a_gpu_it_says_so_and_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "GPU" in (why_unavailable() or "")
    with pytest.raises(ConfigError, match=r"MpsDaemon: MPS needs an NVIDIA GPU: .+"), MpsDaemon():
        pytest.fail("it started")


def test_without_the_control_program_it_names_it_and_refuses(stand_in: StandIn) -> None:
    with pytest.raises(ConfigError, match="no-such-control"), MpsDaemon(control="no-such-control"):
        pytest.fail("it started")


def test_it_runs_inside_the_with_and_neither_process_nor_folder_stays(stand_in: StandIn) -> None:
    with stand_in.daemon() as daemon:
        pid, folder = daemon.pid, Path(daemon.env()["CUDA_MPS_PIPE_DIRECTORY"])
        assert lives(pid) and folder.is_dir() and daemon.clients() == ()
    assert not lives(pid) and not stand_in.folders()
    assert stand_in.heard() == ["quit -t 2"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_body_leaves_no_daemon(stand_in: StandIn, error: type[BaseException]) -> None:
    pids = []
    with pytest.raises(error), stand_in.daemon(patience_s=60) as daemon:
        pids.append(daemon.pid)
        stand_in.has_client(8)
        raise error
    assert not lives(pids[0]) and not stand_in.folders()
    assert stand_in.heard() == ["terminate_client 7 8", "quit -t 2"]


@pytest.fixture
def ctrl_c_interrupts() -> Iterator[None]:
    """As it does in a terminal: what a shell starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
def test_ctrl_c_while_it_waits_for_clients_leaves_no_daemon(stand_in: StandIn) -> None:
    pids = []
    interrupt = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.warns(RuntimeWarning, match="were killed"), pytest.raises(KeyboardInterrupt):
        with stand_in.daemon(patience_s=30) as daemon:
            pids.append(daemon.pid)
            stand_in.has_client(8)
            interrupt.start()
        pytest.fail("it did not wait")
    interrupt.join(5)
    assert gone_soon(pids[0]) and not stand_in.folders()


def test_a_daemon_that_misses_a_question_is_asked_again(stand_in: StandIn) -> None:
    with stand_in.daemon(patience_s=10):
        stand_in.has_client(8)
        stand_in.behave("forgetful")
        leaves = threading.Timer(0.5, (stand_in.home / "clients").unlink)
        leaves.start()
    leaves.join(5)
    assert stand_in.heard() == ["quit -t 2"], "the client left by itself, and was waited for"


def test_clients_that_stay_are_taken_off_before_the_daemon_quits(stand_in: StandIn) -> None:
    with stand_in.daemon() as daemon:
        stand_in.has_client(8)
        assert daemon.clients() == (Client(8, 7),)
        assert not daemon.terminate(9)
    assert stand_in.heard() == ["terminate_client 7 8", "quit -t 2"]


def test_a_client_is_taken_off_on_request(stand_in: StandIn) -> None:
    with stand_in.daemon() as daemon:
        stand_in.has_client(8)
        assert daemon.terminate(8) and daemon.clients() == ()
    assert stand_in.heard() == ["terminate_client 7 8", "quit -t 2"]


def test_a_daemon_that_does_not_quit_is_killed_with_a_warning(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mps_daemon, "_LEAVE_S", 0.3)
    stand_in.behave("deaf")
    with pytest.warns(RuntimeWarning, match="would not quit and were killed$"), stand_in.daemon() as daemon:
        pid = daemon.pid
    assert gone_soon(pid) and not stand_in.folders()


def test_a_daemon_that_does_not_start_tells_its_last_words(stand_in: StandIn) -> None:
    stand_in.behave("broken")
    with pytest.raises(ConfigError, match="stand-in: no device"), stand_in.daemon():
        pytest.fail("it started")
    assert not stand_in.folders()


OWNER = """
import os, signal, sys
from podium.sweeps.executors import mps_daemon
mps_daemon.why_absent = lambda: ""
with mps_daemon.MpsDaemon(control=sys.argv[1]) as daemon:
    print(daemon.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_daemon_of_an_owner_that_was_killed_is_stopped_by_the_next(stand_in: StandIn) -> None:
    environment = os.environ | {"TMPDIR": str(stand_in.home)}
    command = [sys.executable, "-c", OWNER, stand_in.program]
    owner = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=20, check=False)
    assert owner.returncode == -signal.SIGKILL
    orphan = int(owner.stdout)
    assert lives(orphan) and len(stand_in.folders()) == 1
    with stand_in.daemon() as daemon:
        assert not lives(orphan) and daemon.pid != orphan
        assert len(stand_in.folders()) == 1


def test_a_daemon_that_is_held_is_left_alone_by_the_next(stand_in: StandIn) -> None:
    with stand_in.daemon() as first, stand_in.daemon() as second:
        assert first.pid != second.pid and lives(first.pid)


def test_clients_are_told_addresses_and_limits(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    with stand_in.daemon() as daemon:
        assert set(daemon.env()) == {"CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"}
        limited = daemon.env(active_thread_percentage=12.5, memory_limit="4G")
        assert limited["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "12.5"
        assert limited["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=4G"
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-8932f937")
        assert daemon.env()["CUDA_VISIBLE_DEVICES"] == "0,1"  # as the daemon counts those that it sees
        for wrong in (0, 101, -1):
            with pytest.raises(ConfigError, match="active_thread_percentage"):
                daemon.env(active_thread_percentage=wrong)
        for spelt in ("4 GB", "lots", "=4G"):
            with pytest.raises(ConfigError, match="memory_limit"):
                daemon.env(memory_limit=spelt)


def test_it_gives_no_addresses_when_it_does_not_run(stand_in: StandIn) -> None:
    daemon = stand_in.daemon()
    with pytest.raises(ConfigError, match="must be entered"):
        daemon.env()


# On a GPU: the real daemon.

CLIENT = """
import sys, torch
x = torch.arange(1000.0, device="cuda")
print(float((x * 2).sum()), flush=True)
sys.stdin.readline()
torch.empty(int(sys.argv[1]) << 30, dtype=torch.uint8, device="cuda")
"""


def client_of(daemon: MpsDaemon, gib: int = 0, memory_limit: str | None = None) -> subprocess.Popen[str]:
    """A process that computes, says what came out, and takes so much memory once it is told to go on."""
    environment = os.environ | daemon.env(memory_limit=memory_limit)
    command = [sys.executable, "-c", CLIENT, str(gib)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def answer_of(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    return client.stdout.readline().strip()


def finish(client: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        _, complaint = client.communicate("\n", timeout=30)
    finally:
        client.kill()
    return client.returncode, complaint


@pytest.mark.gpu
@on_a_gpu
def test_a_client_process_computes_through_the_real_daemon_and_nothing_stays() -> None:
    with MpsDaemon() as daemon:
        client = client_of(daemon)
        try:
            assert answer_of(client) == "999000.0"
            (found,) = daemon.clients()
            assert found.pid == client.pid
            processes = (daemon.pid, found.server)
            assert all(map(lives, processes))
        finally:
            code, complaint = finish(client)
        assert code == 0, complaint
    assert not any(map(lives, processes))


@pytest.mark.gpu
@on_a_gpu
def test_a_client_that_wants_more_than_its_memory_limit_runs_out_of_memory() -> None:
    with MpsDaemon() as daemon:
        modest, greedy = (client_of(daemon, gib, "4G") for gib in (1, 6))
        try:
            assert answer_of(modest) == answer_of(greedy) == "999000.0"
        finally:
            ends = finish(modest), finish(greedy)
    assert ends[0][0] == 0, ends[0][1]
    assert ends[1][0] != 0 and "out of memory" in ends[1][1]


@pytest.mark.gpu
@on_a_gpu
def test_an_error_beside_a_client_that_stays_leaves_no_real_daemon() -> None:
    clients: list[subprocess.Popen[str]] = []
    found: list[int] = []
    with pytest.raises(ValueError, match="in the body"), MpsDaemon() as daemon:
        clients.append(client_of(daemon))
        assert answer_of(clients[0]) == "999000.0"
        found += [daemon.pid, *(client.server for client in daemon.clients())]
        raise ValueError("in the body")
    finish(clients[0])
    assert len(found) == 2 and not any(map(lives, found))
