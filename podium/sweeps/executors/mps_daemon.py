"""A private CUDA MPS daemon: processes that share a GPU run their kernels side by side, not in turns.

The daemon has its own folder (pipe, log, and a lock that its owner holds), so it does not disturb other daemons, and
only processes started with `MpsDaemon.env()` use it. It is always stopped: at the end of the `with`, also after an
error or Ctrl-C; if its owner was killed, by the next `MpsDaemon` that starts and finds a folder without a held lock.

Under MPS, a busy client that is killed leaves the server in an undefined state, and a fault in one client ends them
all: take a client off with `terminate` before you kill it.

NVIDIA, Multi-Process Service, https://docs.nvidia.com/deploy/mps/
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Final, NamedTuple, final

from podium.errors import ConfigError, DeadlineExceeded
from podium.records.nvml import why_absent

CONTROL: Final = "nvidia-cuda-mps-control"

_START_S: Final = 20.0
_ANSWER_S: Final = 10.0
_GRACE_S: Final = 2.0  # for terminated clients: one that makes no further CUDA call stays connected
_LEAVE_S: Final = 5.0  # for processes that were told to end
_POLL_S: Final = 0.05
_SOCKET_PATH_BYTES: Final = 107
_LONGEST_NAME: Final = "nvidia-cuda-mps-control.pid"
_COMM: Final = "nvidia-cuda-mps"  # the kernel keeps 15 characters of a name: control and server begin alike
_LIMIT: Final = re.compile(r"(?:\d+=)?\d+[KMG]?")
_UNANSWERED: Final = contextlib.suppress(OSError, ValueError, DeadlineExceeded)


class Client(NamedTuple):
    """A process that computes through MPS, and the process id of the MPS server that serves it."""

    pid: int
    server: int


def why_unavailable(control: str = CONTROL) -> str | None:
    """Why MPS is not available here; None where it is."""
    if not sys.platform.startswith("linux"):
        return f"MPS exists on Linux only, this is {sys.platform}"
    missing = why_absent()
    if missing:
        return f"MPS needs an NVIDIA GPU: {missing}"
    if shutil.which(control) is None:
        return f"MPS needs the program {control}, which comes with NVIDIA's driver and is not on the PATH"
    return None


@final
class MpsDaemon:
    """An MPS daemon for as long as its `with` lasts. Client processes are started with `env()` in their environment.

    At the end it waits up to `patience_s` for clients to exit, terminates the remaining ones, and stops the daemon; it
    warns if that needed SIGKILL. Raises ConfigError where MPS is not available. Serves the GPUs that
    CUDA_VISIBLE_DEVICES names, and this user only.
    """

    limit_of_clients: ClassVar[int] = 48
    """How many clients one GPU takes up to CUDA 13.0; the next one fails when it starts CUDA."""

    def __init__(self, *, patience_s: float = 10.0, control: str = CONTROL) -> None:
        if patience_s < 0:
            raise ConfigError(f"MpsDaemon: patience_s must be at least 0, got {patience_s}")
        self._patience_s, self._control = patience_s, control
        self._daemon: _DaemonFolder | None = None

    def __enter__(self) -> MpsDaemon:
        if self._daemon is not None:
            raise ConfigError("MpsDaemon: it runs already; make another one")
        why = why_unavailable(self._control)
        if why is not None:
            raise ConfigError(f"MpsDaemon: {why}")
        root = _root()
        _stop_abandoned(root, self._control)
        self._daemon = _DaemonFolder.make(root, self._control)
        try:
            self._daemon.start()
        except BaseException:
            self._close(patience_s=0.0)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # After an error there is no reason to wait: remaining clients have lost their parent.
        self._close(self._patience_s if error is None else 0.0)

    def env(self, *, active_thread_percentage: float | None = None, memory_limit: str | None = None) -> dict[str, str]:
        """Variables that a client's environment must have in addition, before it starts CUDA.

        `active_thread_percentage` caps the multiprocessors that a client may use, and reserves none. `memory_limit`,
        such as "4G" (of device 0) or "1=512M", is enforced: a client that wants more runs out of memory.
        """
        found = dict(self._running.addresses)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:  # the daemon numbers the devices that it sees from 0
            found["CUDA_VISIBLE_DEVICES"] = ",".join(str(i) for i in range(len(visible.split(","))))
        if active_thread_percentage is not None:
            if not 0 < active_thread_percentage <= 100:
                must = "active_thread_percentage must be above 0 and at most 100"
                raise ConfigError(f"MpsDaemon: {must}, got {active_thread_percentage}")
            found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{active_thread_percentage:g}"
        if memory_limit is not None:
            if not _LIMIT.fullmatch(memory_limit):
                raise ConfigError(f"MpsDaemon: memory_limit must be like '4G' or '0=512M', got {memory_limit!r}")
            found["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = memory_limit if "=" in memory_limit else f"0={memory_limit}"
        return found

    @property
    def pid(self) -> int:
        """The daemon's process id."""
        return self._running.read_pid()

    def clients(self) -> tuple[Client, ...]:
        """The connected clients. Asks the daemon, which takes some milliseconds."""
        return self._running.clients()

    def terminate(self, pid: int) -> bool:
        """Take a client's work off the GPU, so that its process may be killed; False if `pid` is not a client.

        The client's next use of CUDA fails. It is listed among the clients until its process ends.
        """
        return self._running.terminate(pid)

    @property
    def _running(self) -> _DaemonFolder:
        if self._daemon is None:
            raise ConfigError("MpsDaemon: it must be entered (with …) before it is used")
        return self._daemon

    def _close(self, patience_s: float) -> None:
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            daemon.stop(patience_s)


@final
class _DaemonFolder:
    """A daemon's locked folder, and the daemon in it."""

    def __init__(self, folder: Path, lock: int, control: str) -> None:
        self.folder, self._lock, self._control = folder, lock, control
        self._pipe, self._log = folder / "pipe", folder / "log"
        self.addresses = {"CUDA_MPS_PIPE_DIRECTORY": str(self._pipe), "CUDA_MPS_LOG_DIRECTORY": str(self._log)}

    @classmethod
    def make(cls, root: Path, control: str) -> _DaemonFolder:
        """A new folder, which gets its visible name only once it is locked."""
        hidden = Path(tempfile.mkdtemp(prefix=".", dir=root))
        try:
            (hidden / "pipe").mkdir()
            (hidden / "log").mkdir()
            lock = _hold(hidden)
            assert lock is not None, "no other process knows of this folder"
            return cls(hidden.rename(root / hidden.name.removeprefix(".")), lock, control)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise

    def start(self) -> None:
        longest = self._pipe / _LONGEST_NAME
        if len(os.fsencode(longest)) > _SOCKET_PATH_BYTES:
            raise ConfigError(f"MpsDaemon: the path {longest} is too long for a socket: set TMPDIR to a shorter one")
        try:
            with (self._log / "start").open("wb") as words:  # no pipe: the daemon would keep it open
                started = subprocess.run(
                    [self._control, "-d"],
                    env=os.environ | self.addresses,
                    stdin=subprocess.DEVNULL,
                    stdout=words,
                    stderr=words,
                    start_new_session=True,  # Ctrl-C must reach only this process
                    timeout=_START_S,
                    check=False,
                )
            answers = started.returncode == 0 and _wait_for(self._answers, _START_S)
        except subprocess.TimeoutExpired:
            answers = False
        if not answers:
            raise ConfigError(f"MpsDaemon: the daemon must start and answer, it did not: {self._last_words()}")

    def read_pid(self) -> int:
        return int((self._pipe / _LONGEST_NAME).read_text())

    def clients(self) -> tuple[Client, ...]:
        servers = _numbers(self._ask("get_server_list"))
        return tuple(
            Client(pid, server) for server in servers for pid in _numbers(self._ask(f"get_client_list {server}"))
        )

    def terminate(self, pid: int) -> bool:
        found = [client for client in self.clients() if client.pid == pid]
        for client in found:
            self._ask(f"terminate_client {client.server} {client.pid}")
        return bool(found)

    def stop(self, patience_s: float) -> None:
        """End clients, daemon and folder, in this order. Also when interrupted, no process stays."""
        try:
            if self._processes():
                with _UNANSWERED:  # a daemon that does not answer is killed below
                    self._see_clients_off(patience_s)
                with _UNANSWERED:
                    self._ask(f"quit -t {_GRACE_S:.0f}")
                    _wait_for(lambda: not self._processes(), _LEAVE_S)
        finally:
            self._kill()
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)

    def _see_clients_off(self, patience_s: float) -> None:
        if not _wait_for(self._is_left, patience_s):
            for client in self.clients():
                with _UNANSWERED:  # the client has exited meanwhile
                    self._ask(f"terminate_client {client.server} {client.pid}")
            _wait_for(self._is_left, _GRACE_S)

    def _is_left(self) -> bool:
        """Whether all clients are gone; a daemon that does not answer once may answer the next time."""
        with _UNANSWERED:
            return not self.clients()
        return not self._processes()

    def _kill(self) -> None:
        left = self._processes()
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        gone = _wait_for(lambda: not self._processes(), _LEAVE_S)
        became = "were killed" if gone else "were killed and are not gone"
        warnings.warn(f"MPS: processes {left} would not quit and {became}", RuntimeWarning, stacklevel=2)

    def _processes(self) -> list[int]:
        """The daemon and its servers: processes of that name that were started with this folder's address."""
        address = f"CUDA_MPS_PIPE_DIRECTORY={self._pipe}".encode()
        return [pid for pid in _mps_processes() if address in _environment(pid)]

    def _answers(self) -> bool:
        with _UNANSWERED:
            self.read_pid()
            self._ask("get_server_list")
            return True
        return False

    def _ask(self, command: str) -> str:
        """The daemon's answer. Raises OSError if the command fails, DeadlineExceeded if it takes too long."""
        try:
            answer = subprocess.run(
                [self._control],
                input=f"{command}\n",
                env=os.environ | self.addresses,
                capture_output=True,
                text=True,
                errors="replace",
                start_new_session=True,
                timeout=_ANSWER_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded(f"MPS: the daemon did not answer {command!r} within {_ANSWER_S:.0f} s") from None
        if answer.returncode != 0:
            raise OSError(f"MPS: {command!r} failed: {(answer.stderr or answer.stdout).strip()}")
        return answer.stdout

    def _last_words(self) -> str:
        said = [file.read_text(errors="replace").strip() for file in sorted(self._log.iterdir()) if file.is_file()]
        return " | ".join(words[-500:] for words in said if words) or "it said nothing"


def _root() -> Path:
    """The folder of this user's daemons. Its prefix is not that of a run's folder, which other runs clear away."""
    root = Path(tempfile.gettempdir()) / f"mps-podium-{os.geteuid()}"
    root.mkdir(mode=0o700, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(f"MpsDaemon: {root} must be a folder that is yours alone; move it away")
    return root


def _stop_abandoned(root: Path, control: str) -> None:
    """Stop the daemons whose owners were killed."""
    for folder in root.iterdir():
        if not folder.name.startswith("."):
            with contextlib.suppress(OSError):  # deleted meanwhile, or damaged
                lock = _hold(folder)
                if lock is not None:
                    _DaemonFolder(folder, lock, control).stop(patience_s=0.0)


def _hold(folder: Path) -> int | None:
    """The file descriptor of the folder's lock; None where another process holds the lock."""
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _mps_processes() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if (entry / "comm").read_text().startswith(_COMM) and not _is_zombie(entry):
                    yield int(entry.name)


def _is_zombie(process: Path) -> bool:
    return (process / "stat").read_text().rpartition(")")[2].split()[0] in "ZX"


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # the process has ended, or is another user's
        return []


def _numbers(words: str) -> list[int]:
    return [int(word) for word in words.split() if word.isdecimal()]


def _wait_for(holds: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True
