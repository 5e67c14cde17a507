"""Hosts that share nothing, on one Linux machine: for tests of runs across machines. Needs root.

    with Hosts(3, mbit=100) as (a, b, c):
        b.start("python", "-m", "http.server", "8000")
        a.run("curl", f"http://{b.name}:8000")
        b.lose()                                    # the power fails

A host has its own network stack, processes, host name, `/tmp` (which is also its home and where commands start), `/run`
and `/dev/shm`. Installed software is the same on all of them: the Python environment, whose programs are on the path,
and the folder of this package. Links are those of `ShapedNetwork`: a veth pair per host, a bridge, token buckets in
both directions.

A host that is lost says no goodbye: its link is down before its processes are killed, so no peer receives a FIN or a
reset. A link that is cut drops packets without an error at either end; it can be cut in one direction only.
"""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, final

import podium
from podium.errors import ConfigError
from podium.launch.clusters.commands import find_tool, run_command
from podium.launch.clusters.description import uniform
from podium.launch.clusters.namespaces import ShapedNetwork
from podium.launch.rendezvous import rendezvous_folder

START_S = 20.0
NO_HOST = "02:00:00:00:00:01"
"""A hardware address that no interface has: frames to it are dropped."""
_TMP = Path("/tmp")
_WITH_PARENT = ("setpriv", "--pdeathsig", "KILL")
"""A host ends with the process that made it, even if that is killed."""
_KEPT = ("PATH", "LANG", "LC_ALL", "OMP_NUM_THREADS")


def why_not() -> str:
    """Why hosts cannot be made here, as a reason to skip a test; empty where they can."""
    if sys.platform != "linux":
        return f"hosts need Linux namespaces, this is {sys.platform}"
    if os.geteuid() != 0:
        return f"hosts need root (namespaces), got user id {os.geteuid()}"
    wanted = {
        "ip": "iproute2",
        "tc": "iproute2",
        "nsenter": "util-linux",
        "unshare": "util-linux",
        "setpriv": "util-linux",
    }
    return why_without("hosts need", wanted)


def why_without(who_need: str, wanted: Mapping[str, str]) -> str:
    """Which Debian packages are absent, as a reason to skip a test; `wanted`: each program's package."""
    absent = sorted({package for program, package in wanted.items() if find_program(program) is None})
    return f"{who_need} {' and '.join(absent)}: apt install {' '.join(absent)}" if absent else ""


def find_program(name: str) -> str | None:
    """The path of a program; also searches /usr/sbin and /sbin, which may not be on the path."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


@final
class Hosts:
    """As many hosts as asked for, while the `with` block lasts; nothing of them is left behind."""

    def __init__(self, count: int, *, mbit: float | None = None) -> None:
        """`mbit`: rate of each host's link, up and down; None: as fast as the kernel."""
        if reason := why_not():
            raise ConfigError(reason)
        self._cluster = uniform(count, mbit=mbit)
        self._stack = ExitStack()
        self._hosts: tuple[Host, ...] = ()

    def __enter__(self) -> Hosts:
        with ExitStack() as stack:
            folder = stack.enter_context(rendezvous_folder())  # should this process be killed, the next run removes it
            network = stack.enter_context(ShapedNetwork(self._cluster, folder))
            names = folder / "hosts"
            lines = [f"{address} host{i}" for i, address in enumerate(network.addresses)]
            names.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
            users = folder / "passwd"
            users.write_text("\n".join(map(_at_home, Path("/etc/passwd").read_text().splitlines())) + "\n")
            hosts = []
            for index in range(len(lines)):
                own = folder / f"host{index}"
                own.mkdir()
                own.chmod(0o1777)
                hosts.append(stack.enter_context(Host(network, index, own, names, users)))
            self._hosts = tuple(hosts)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]


@final
class Host:
    """One machine of `Hosts`."""

    def __init__(self, network: ShapedNetwork, index: int, folder: Path, names: Path, users: Path) -> None:
        self.name, self.address = f"host{index}", network.addresses[index]
        self.folder = folder
        """The host's `/tmp`, as seen from outside."""
        self._network, self._index = network, index
        self._instead = {"/etc/hosts": names, "/etc/passwd": users}
        self._first: subprocess.Popen[str] | None = None
        self._started: list[subprocess.Popen[Any]] = []
        self.pid = 0
        """The host's first process, as seen from outside: when it ends, all others of the host do."""

    def __enter__(self) -> Host:
        namespace = f"/var/run/netns/{self._network.namespaces[self._index]}"
        separate = ("unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child")
        self._first = subprocess.Popen(
            (*_WITH_PARENT, find_tool("nsenter"), f"--net={namespace}", *separate, "sh", "-c", self._boot()),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._first.stdout is not None and self._first.stderr is not None
        if self._first.stdout.readline() != "ready\n":
            self._first.kill()
            raise ConfigError(f"{self.name} did not start: {self._first.stderr.read().strip()}")
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children").read_text()
        self.pid = int(children)
        return self

    @property
    def alive(self) -> bool:
        """Whether the host runs commands: not after `lose`, nor once its first process has ended."""
        return self._first is not None and self._first.poll() is None

    def __exit__(self, *_: object) -> None:
        self._end()
        for stream in (s for p in self._started for s in (p.stdin, p.stdout, p.stderr) if s is not None):
            stream.close()

    def run(
        self, *words: str, env: Mapping[str, str] | None = None, timeout_s: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the host to its end, as `subprocess.run` does, with text captured."""
        return subprocess.run(
            self._command(words),
            env={**login_environment(), **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def start(self, *words: str, env: Mapping[str, str] | None = None, **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the host. `options` are those of `subprocess.Popen`.

        The process is the command's representative outside: it ends as the command does, but passes no signal on.
        `send_signal` reaches the command itself.
        """
        options.setdefault("stdin", subprocess.DEVNULL)
        process = subprocess.Popen(self._command(words), env={**login_environment(), **(env or {})}, **options)
        self._started.append(process)
        return process

    def processes(self) -> list[int]:
        """The ids of all processes of the host, as seen from outside."""
        if not self.alive:
            return []
        own = _process_namespace(self.pid)
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and _process_namespace(int(name)) == own]

    @staticmethod
    def send_signal(process: subprocess.Popen[Any], number: int) -> None:
        """Send a signal to a command that a host's `start` began; nothing happens if it has ended."""
        if process.poll() is None:
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), number)

    def lose(self) -> None:
        """The power fails: the link goes down, then every process of the host is killed."""
        self._link("down")
        self._end()

    def cut(self, *others: Host, one_way: bool = False) -> None:
        """Drop all packets between this host and the others; with `one_way`, only those that this host sends."""
        for other in others:
            self._drop_to(other)
            if not one_way:
                other._drop_to(self)

    def mend(self, *others: Host) -> None:
        """Undo every `cut` between this host and the others."""
        for one, other in ((a, b) for each in others for a, b in ((self, each), (each, self))):
            subprocess.run(one._neighbour("del", other), capture_output=True, timeout=START_S, check=False)

    def _drop_to(self, other: Host) -> None:
        run_command(*self._neighbour("replace", other), "lladdr", NO_HOST, "nud", "permanent")

    def _neighbour(self, verb: str, other: Host) -> tuple[str, ...]:
        network = self._network
        where = (find_tool("ip"), "-n", network.namespaces[self._index])
        return (*where, "neighbour", verb, other.address, "dev", network.interfaces[self._index])

    def _link(self, state: str) -> None:
        network = self._network
        run_command(find_tool("ip"), "-n", network.hub, "link", "set", network.ports[self._index], state)

    def _end(self) -> None:
        if self._first is None:
            return
        if self.alive:
            self._kill_first_process()
        self._first.communicate(timeout=START_S)
        for process in self._started:
            process.kill()
            process.wait(START_S)
        self._first = None

    def _kill_first_process(self) -> None:
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:  # somebody else killed it
            return
        try:
            signal.pidfd_send_signal(handle, signal.SIGKILL)
            if not select.select([handle], [], [], START_S)[0]:
                raise ConfigError(f"{self.name}: its first process did not end within {START_S:g} s")
        finally:
            os.close(handle)

    def _command(self, words: tuple[str, ...]) -> tuple[str, ...]:
        if not self.alive:
            raise ConfigError(f"{self.name} is lost: it runs no command")
        inside = ("--target", str(self.pid), "--net", "--mount", "--uts", "--pid", "--wdns=/tmp")
        return (find_tool("nsenter"), *inside, *words)

    def _boot(self) -> str:
        """The host's first process: separates its file systems, then waits and reaps orphans."""
        software = [path for path in _software() if path.is_relative_to(_TMP)]
        q = shlex.quote
        lines = [
            "set -e",
            f"hostname {self.name}",
            "mount -t tmpfs none /dev/shm",
            *(f"mount --bind {q(str(own))} {path}" for path, own in self._instead.items()),
            "mount -t tmpfs none /mnt",
            f"mkdir /mnt/tmp && mount --bind {q(str(self.folder))} /mnt/tmp",
            *(f"mkdir /mnt/{i} && mount --bind {q(str(path))} /mnt/{i}" for i, path in enumerate(software)),
            "mount --bind /mnt/tmp /tmp",
            *(f"mkdir -p {q(str(p))} && mount --bind /mnt/{i} {q(str(p))}" for i, p in enumerate(software)),
            "mount -t tmpfs -o mode=755 none /run",
            "cd /tmp",
            "echo ready",
            "while :; do sleep 1; done",
        ]
        return "\n".join(lines)


def login_environment() -> dict[str, str]:
    """A login's environment on a host, where the package is installed; not the caller's, which may name its paths."""
    kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
    path = f"{Path(sys.executable).parent}:{kept.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, "PYTHONPATH": str(Path(podium.__file__).parents[1]), "HOME": "/tmp", "TMPDIR": "/tmp"}


def _process_namespace(pid: int) -> str:
    with contextlib.suppress(OSError):  # ended in this moment, or one of the machine that nobody may look into
        return os.readlink(f"/proc/{pid}/ns/pid")
    return ""


def _at_home(line: str) -> str:
    """A line of /etc/passwd; root's home is the host's own, which ssh and sshd look up here."""
    name, *rest = line.split(":")
    return ":".join((name, *rest[:4], "/tmp", *rest[5:])) if name == "root" else line


def _software() -> list[Path]:
    """Folders that every host has because Podium is installed there."""
    found = {Path(path).resolve() for path in (sys.prefix, sys.base_prefix, Path(podium.__file__).parents[1])}
    return sorted(path for path in found if not any(other in path.parents for other in found))
