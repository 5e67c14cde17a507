"""The fork server, from which ranks and other processes are forked with torch loaded: its start and its end.

The kernel kills it when the thread that started it ends, and then every process that was forked from it, also those
that are stopped; so it is started in a thread that never ends.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import os
import queue
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import Finalize
from typing import Any

from podium.errors import Lost
from podium.launch.rendezvous import rendezvous_folder
from podium.launch.signals import blocked

UNKNOWN = 255
"""The exit code that multiprocessing reports where it cannot know the real one, since the fork server is gone."""
_NAMES = "podium-"
_START_S = 60.0
_FORK_SERVER_S = 1.0
"""How long the kernel may take to end the fork server once its processes are gone."""
_LAST, _FIRST = -200, 100
"""Priorities at exit: `_LAST` after multiprocessing has ended its processes, `_FIRST` before it waits for them."""


def keep_fork_server() -> None:
    """Start the fork server where it is not running."""
    _keeper().ensure_running()


def how_fork_server_ended() -> str | None:
    """For example `killed by SIGKILL`; None while it runs or before it was started."""
    server: Any = forkserver._forkserver  # multiprocessing has no public way to read it
    pid = server._forkserver_pid
    if pid is None:
        return None
    try:
        # WNOWAIT: multiprocessing itself must be able to wait for it later.
        found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "cause unknown, since other code in this process has waited for it"
    if found is None:
        return None
    return how_it_ended(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)


def check_fork_server() -> None:
    """Raise where the fork server is gone, which kills every process that was forked from it."""
    until = time.monotonic() + _FORK_SERVER_S
    while (cause := how_fork_server_ended()) is None:
        if time.monotonic() > until:
            return  # it runs: the process really ended with that exit code
        time.sleep(0.01)
    raise Lost(
        f"the fork server, from which all ranks were forked, was lost: {cause}; its ranks were killed with it. "
        "If nobody killed it, the machine may have run out of memory (see dmesg)"
    )


def how_it_ended(code: int) -> str:
    """An exit code of multiprocessing, as text."""
    if code >= 0:
        return f"it ended with exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-code}"


def forked_here() -> list[int]:
    """Pids of processes that were forked for this one and may still run. Safe to call in a signal handler."""
    module: Any = multiprocessing.process
    return [p.pid for p in list(module._children) if p.name.startswith(_NAMES) and p.pid is not None]


def let_go_of_fork_server() -> None:
    """Close the pipe that keeps the fork server alive: if this process were stopped, the server would never end."""
    server: Any = forkserver._forkserver  # multiprocessing opens the pipe in every process
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


class _Keeper:
    """A thread that starts the fork server, and that ends with this process only."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._asked: queue.SimpleQueue[Future[None]] = queue.SimpleQueue()
        self._ends = contextlib.ExitStack()
        threading.Thread(target=self._serve, name="fork-server", daemon=True).start()
        # Forked processes ignore SIGTERM, which multiprocessing would send at exit before it waits for them.
        Finalize(None, _kill_all, exitpriority=_FIRST)
        Finalize(None, self._ends.close, exitpriority=_LAST)

    def ensure_running(self) -> None:
        answer: Future[None] = Future()
        self._asked.put(answer)
        answer.result(_START_S)

    def _serve(self) -> None:
        while True:
            answer = self._asked.get()
            try:
                self._start()
            except BaseException as error:  # raised in the caller
                answer.set_exception(error)
            else:
                answer.set_result(None)
            del answer

    def _start(self) -> None:
        own: Any = multiprocessing.current_process()
        config = own._config
        if config.get("tempdir") is None:
            # Where multiprocessing puts the server's socket. If this process is killed, multiprocessing's own folder
            # would stay; the next launcher removes this one.
            config["tempdir"] = str(self._ends.enter_context(rendezvous_folder()))
        with blocked():  # the server must not die while it imports; it unblocks signals when it can handle them
            resource_tracker.ensure_running()  # in a separate block, since starting it unblocks some signals
        with blocked():
            forkserver.ensure_running()


_KEPT: list[_Keeper] = []
_LOCK = threading.Lock()


def _keeper() -> _Keeper:
    with _LOCK:
        if not _KEPT or _KEPT[0].owner != os.getpid():  # a forked process has none of its parent's threads
            _KEPT[:] = [_Keeper()]
        return _KEPT[0]


def _kill_all() -> None:
    for process in multiprocessing.active_children():
        if process.name.startswith(_NAMES):
            process.kill()


def fork_server() -> Any:
    """The context whose processes are forked from a server with torch loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["podium.launch.preload"])
    keep_fork_server()
    return context


@contextmanager
def nullified_main() -> Iterator[None]:
    """Hide the caller's main module, which new processes would otherwise import again without need."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
