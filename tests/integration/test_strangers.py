"""Who gets into a run under torchrun: nobody without the secret, and no word of torch's open store is believed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from podium.comm.real.channel import Channel
from podium.errors import ConfigError
from podium.launch.rendezvous import rendezvous_folder
from podium.launch.secret import find_secret, leave_secret, need_secret
from podium.testing.faults import TASK, Faults, Gate
from tests.integration import leftovers
from tests.integration.processes import ROOT, finish, free_port, settings, start
from tests.integration.runs import FIELDS

NOBODY = 65534
LONG = "correct horse battery staple"

STRANGER = """
import contextlib, json, os, socket, sys, time
from pathlib import Path
from podium.comm.real.frames import ACCEPTED, Refused, prove

os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
home, found = sys.argv[1], {{"listening": 0, "in": [], "read": []}}

def knock(family, place, secret):
    for rank in (0, 1, 2, 0xFFFF):
        with contextlib.suppress(OSError, Refused), socket.socket(family) as sock:
            sock.settimeout(0.5)
            sock.connect(place)
            if sock.recv(4, socket.MSG_PEEK) != b"PODM":  # torch's own
                return
            if prove(sock, 7, rank, secret, time.monotonic() + 5) == ACCEPTED:
                found["in"].append([str(place), rank])

ports = {{int(line.split()[1].split(":")[1], 16) for line in open("/proc/net/tcp").readlines()[1:]
         if line.split()[3] == "0A"}} & set(json.loads(sys.argv[2]))
paths = [line.split()[-1] for line in open("/proc/net/unix").readlines()[1:] if home in line]
found["listening"] = len(ports) + len(paths)
for secret in (b"", b"podium", b"secret"):
    for port in ports:
        knock(socket.AF_INET, ("127.0.0.1", port), secret)
    for path in paths:
        knock(socket.AF_UNIX, path, secret)
for folder in Path(home).glob("podium-*"):
    with contextlib.suppress(OSError):
        found["read"] += [str(path) for path in folder.iterdir()]
    for name in ("secret", "store", "lock", "k"):
        with contextlib.suppress(OSError):
            found["read"].append((folder / name).read_text())
print(json.dumps(found))
"""


def listening_ports(pids: set[int]) -> list[int]:
    """The TCP ports on which these processes listen."""
    sockets = set()
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(file).removeprefix("socket:[").removesuffix("]"))
            except OSError:  # closed in this moment
                continue
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in sockets]


@contextmanager
def at_gate(folder: Path, count: int, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A run under torchrun whose rank 0 waits in its third step; killed if the test fails meanwhile."""
    gate, asked = Gate(folder), {"task.faults": Faults().gate(0, step=3), "task.gate": folder, "out": folder / "runs"}
    agent = ("-m", "torch.distributed.run", "--nproc-per-node", str(count), "--master-port", str(free_port()))
    run = start(*agent, "-m", "podium.node", "--task", TASK, *words, *settings({**FIELDS, "deadline_s": 90.0, **asked}))
    try:
        gate.wait_until_reached(90)
        yield run
    except BaseException:
        os.killpg(run.pid, signal.SIGKILL)
        raise
    finally:
        gate.open()


@pytest.fixture
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PODIUM_SECRET", "PODIUM_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.usefixtures("no_secret")
def test_another_user_of_the_machine_reaches_nothing_of_a_run_without_a_given_secret(
    tmp_path: Path, own_temporary_folder: Path
) -> None:
    own_temporary_folder.chmod(0o755)  # as /tmp is: others may look into it
    with at_gate(tmp_path, 3, "--strategy", "parameter-server") as run:
        ports = listening_ports(leftovers.children_of(run.pid))
        words = [sys.executable, "-c", STRANGER.format(nobody=NOBODY), str(own_temporary_folder), json.dumps(ports)]
        stranger = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
        assert stranger.returncode == 0, stranger.stderr
    code, _, err = finish(run)
    assert code == 0, err
    found = json.loads(stranger.stdout)
    assert found["listening"], "the run has to listen somewhere"
    assert found["in"] == [] and found["read"] == []


@pytest.mark.slow
@pytest.mark.usefixtures("no_secret")
def test_the_private_folder_goes_also_when_rank_0_is_killed(tmp_path: Path, own_temporary_folder: Path) -> None:
    with at_gate(tmp_path, 2) as run:
        assert len(list(own_temporary_folder.glob("podium-*"))) == 1
        run.send_signal(signal.SIGTERM)
    finish(run)  # and that nothing is left is checked after every test


# Ranks on several hosts: here the test itself holds the store, as a stranger who got hold of it would.


class Ranks:
    """Two ranks that believe to be on hosts of their own, and the store over which they meet."""

    def __init__(self, out: Path, **environment: str) -> None:
        self.out, self._environment = out, environment
        self._store = TCPStore("127.0.0.1", 0, 2, True, timedelta(seconds=60), wait_for_workers=False)
        self.store = PrefixStore("podium", self._store)
        self.started: list[subprocess.Popen[str]] = []

    def start(self, rank: int, **more: str) -> subprocess.Popen[str]:
        asked = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}
        asked |= {"MASTER_PORT": self._store.port, "TORCHELASTIC_USE_AGENT_STORE": "True"}
        words = ("-m", "podium.node", "--task", TASK, *settings({**FIELDS, "out": self.out}))
        environment = {name: str(value) for name, value in asked.items()}
        self.started.append(start(*words, **environment, **self._environment, **more))
        return self.started[-1]

    def await_word_of_rank_0(self) -> None:
        """Until rank 0 has told everybody where to meet, under whichever name."""
        names = ("podium/meet", "podium/coordinator")
        for _ in range(600):
            if any(self.store.check([name]) for name in names):
                return
            assert self.started[0].poll() is None, self.started[0].communicate()
            try:
                self.store.wait(["never"], timedelta(milliseconds=100))
            except RuntimeError:  # torch's own way of saying that time is up
                continue
        raise AssertionError("rank 0 told nothing")


@pytest.fixture
def make_ranks(tmp_path: Path, no_secret: None) -> Iterator[Any]:
    made: list[Ranks] = []

    def make(**environment: str) -> Ranks:
        made.append(Ranks(tmp_path / "runs", **environment))
        return made[-1]

    yield make
    for ranks in made:
        for process in ranks.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.mark.slow
def test_on_several_hosts_no_rank_starts_without_a_secret_and_each_says_how_to_set_one(make_ranks: Any) -> None:
    ranks = make_ranks()
    for process in (ranks.start(0), ranks.start(1)):
        code, _, err = finish(process)
        assert code == 2
        assert "PODIUM_SECRET" in err and "PODIUM_SECRET_FILE" in err and "secrets.token_hex" in err
    assert not ranks.out.exists()


@pytest.mark.parametrize("secret", ["", "short", "x" * 15])
def test_a_secret_that_can_be_guessed_is_refused(monkeypatch: pytest.MonkeyPatch, no_secret: None, secret: str) -> None:
    monkeypatch.setenv("PODIUM_SECRET", secret)
    with pytest.raises(ConfigError, match=rf"PODIUM_SECRET: .* at least 16 bytes, .*; got {len(secret)}\."):
        need_secret()


def test_a_secret_may_lie_in_a_file_that_nobody_else_can_read(
    monkeypatch: pytest.MonkeyPatch, no_secret: None, tmp_path: Path
) -> None:
    monkeypatch.setenv("PODIUM_SECRET", LONG)
    same = need_secret()
    monkeypatch.setenv("PODIUM_SECRET_FILE", str(tmp_path / "secret"))
    with pytest.raises(ConfigError, match="not both"):
        need_secret()
    monkeypatch.delenv("PODIUM_SECRET")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        need_secret()
    (tmp_path / "secret").write_text(f"{LONG}\n")
    for mode in (0o644, 0o640, 0o602):
        (tmp_path / "secret").chmod(mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            need_secret()
    (tmp_path / "secret").chmod(0o600)
    assert need_secret() == same


@pytest.mark.slow
def test_where_ranks_write_is_not_taken_from_the_store(make_ranks: Any, tmp_path: Path) -> None:
    ranks, elsewhere = make_ranks(PODIUM_SECRET=LONG), tmp_path / "elsewhere"
    first = ranks.start(0)
    ranks.await_word_of_rank_0()
    for name in ("run_dir", "settings", "folder"):
        ranks.store.set(f"podium/{name}", str(elsewhere))
    second = ranks.start(1)
    for process in (first, second):
        code, _, err = finish(process)
        assert code == 0, err
    assert not elsewhere.exists()
    (run_dir,) = ranks.out.iterdir()
    assert {path.name for path in (run_dir / "records").iterdir()} >= {"rank-0.jsonl", "rank-1.jsonl"}


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["a stranger", "a path"])
def test_a_coordinator_that_a_stranger_names_is_refused_with_a_clear_error(make_ranks: Any, lie: str) -> None:
    ranks = make_ranks(PODIUM_SECRET=LONG)
    ranks.start(0)
    ranks.await_word_of_rank_0()
    stranger = Channel(0xFFFF, secret=b"another secret, and long enough", listen="tcp:127.0.0.1:0")
    try:
        told = {"a stranger": stranger.address, "a path": "unix:/tmp/of-a-stranger"}[lie]
        for name in ("meet", "coordinator"):
            ranks.store.set(f"podium/{name}", told)
        code, _, err = finish(ranks.start(1))
    finally:
        stranger.close()
    assert code != 0
    assert "torch's store" in err and "may write to" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_ranks_with_different_secrets_do_not_meet(make_ranks: Any) -> None:
    ranks = make_ranks()
    ranks.start(0, PODIUM_SECRET=LONG)
    code, _, err = finish(ranks.start(1, PODIUM_SECRET=LONG[::-1]))
    assert code != 0 and "another secret" in err


# The folder of a run on one host, whose name comes from the store.


def lies(home: Path) -> dict[str, str]:
    """Names that a stranger could put into the store."""
    outside = home / "outside"
    outside.mkdir(mode=0o700)
    (outside / "secret").write_text(json.dumps({"run": "it", "secret": "00" * 32}))
    (home / "podium-aaaaaaaa").symlink_to(outside)
    return {"up and away": "../outside", "a link": "podium-aaaaaaaa", "nothing there": "podium-bbbbbbbb", "empty": ""}


def test_a_name_from_the_store_leads_to_no_folder_but_the_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_secret: None
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for what, name in lies(tmp_path).items():
        with pytest.raises(ConfigError, match="not to be trusted"):
            find_secret(name, "it")
            pytest.fail(what)
    with rendezvous_folder() as folder:
        secret = leave_secret(folder, "it")
        assert len(secret) == 32
        assert find_secret(folder.name, "it") == (folder, secret)
        with pytest.raises(ConfigError, match="of another run"):
            find_secret(folder.name, "another")
        (folder / "secret").chmod(0o644)
        with pytest.raises(ConfigError, match="nobody else can read"):
            find_secret(folder.name, "it")
        (folder / "secret").chmod(0o600)
        folder.chmod(0o755)
        with pytest.raises(ConfigError, match="nobody else can enter"):
            find_secret(folder.name, "it")
        folder.chmod(0o700)
        if os.geteuid() == 0:
            os.chown(folder / "secret", NOBODY, NOBODY)
            with pytest.raises(ConfigError, match="nobody else can read"):
                find_secret(folder.name, "it")
            os.chown(folder, NOBODY, NOBODY)
            with pytest.raises(ConfigError, match="nobody else can enter"):
                find_secret(folder.name, "it")
            os.chown(folder, 0, 0)


# A coordinator that fails.

BROKEN = """
import sys
from podium.launch.coordination.coordinator import Coordinator

def fails(self, message):
    raise KeyError("a mistake of the coordinator's")

Coordinator._beat = fails
from podium.node import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.usefixtures("no_secret")
def test_a_coordinator_that_fails_ends_the_run_on_all_ranks_with_its_error(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    asked = settings({**FIELDS, "out": tmp_path / "runs", "epochs": 1000})
    agent = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    code, _, err = finish(start(*agent, str(script), "--task", TASK, *asked), 60)
    assert code == 1
    assert 'podium: the coordinator failed: KeyError: "a mistake of the coordinator\'s"' in err
    assert "the run ended" in err  # said by the other rank
