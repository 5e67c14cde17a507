"""Who answers a signal that asks a run to end: the launcher alone.

`timeout`, a closing terminal and Ctrl-C signal a whole process group; systemd and batch systems signal every process
of a job, one by one. The fork server and the ranks live in a session of their own, which no signal to the launcher's
group reaches. They ignore one that comes all the same: the launcher tells them when to stop. They die with the
launcher: the kernel kills them, also those that are stopped.

Under torchrun there is no launcher of Podium's. There every rank passes a signal on to the coordinator.

Imports the standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a program to end."""
BURST_S = 1.0
"""Signals within this time of the first are the same request: `timeout` signals its program, then its group."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Be killed when the thread that started this process ends, however that comes about; also while stopped.

    The kernel says nothing of a parent that had ended before: where nothing else would tell, give its number.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def blocked() -> Iterator[None]:
    """Inside, requests to end wait. A program that is started in here inherits that, and has to unblock them itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_to_launcher() -> None:
    """Continue when a signal asks this process to end: its launcher has got the same one. For the main thread.

    Neither ignored nor blocked, which programs that the user's code starts would inherit; nobody could terminate those.
    """
    _take(lambda _number: None)


def pass_on(tell: Callable[[], None]) -> None:
    """The first request to end calls `tell`, in a thread of its own; a later one ends this process at once.

    Works at any moment, also while the main thread waits in an exchange, where no Python handler could run.
    """
    ready, wake = os.pipe()
    os.set_blocking(wake, False)
    _take(lambda _number: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a child's signals are not this process's
    threading.Thread(target=_relay, args=(ready, tell), name="signals", daemon=True).start()


def _relay(ready: int, tell: Callable[[], None]) -> None:
    first: float | None = None
    while numbers := os.read(ready, 64):
        for number in numbers:
            if number not in ASKING:
                continue
            now = time.monotonic()
            if first is None:
                first = now
                tell()
            elif now - first >= BURST_S:
                os._exit(128 + number)


def _take(answer: Callable[[int], None]) -> None:
    owner = os.getpid()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            end_as_usual(number)
        answer(number)

    for number in ASKING:
        signal.signal(number, on_signal)
        signal.siginterrupt(number, False)  # libraries in C need not expect to be interrupted
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


def end_as_usual(number: int) -> None:
    """In a process that the user's code forked off, which inherits handlers: what is meant for it ends it."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
