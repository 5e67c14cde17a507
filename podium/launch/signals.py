"""Signals that ask a run to end: only the launcher handles them.

`timeout`, a closing terminal and Ctrl-C signal a whole process group; systemd and batch systems signal every process
of a job, one by one. The fork server and the ranks run in their own session, which no signal to the launcher's group
reaches. They ignore a signal that still arrives: the launcher tells them when to stop. They die with the launcher: the
kernel kills them, also those that are stopped.

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
from queue import SimpleQueue
from types import FrameType

ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""The signals that ask a program to end."""
BURST_S = 1.0
"""Signals within this time of the first are the same request: `timeout` signals its program, then its group."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when the thread that started it ends, for any reason; also while stopped.

    The kernel does not act where the parent had ended before this call: pass `parent`, its pid, to check that too.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def blocked() -> Iterator[None]:
    """Inside, `ASKING` signals wait. A program started in here inherits the mask, and must unblock them itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def setter(event: threading.Event) -> Iterator[Callable[[], None]]:
    """A function that sets the event, a moment later, and that a signal handler may call.

    A handler must not call `Event.set`: `set` takes the event's lock, and the code that the signal interrupted may hold
    that lock (`Event.wait` does for some microseconds). The main thread would then wait for itself for ever.
    """
    asked: SimpleQueue[bool] = SimpleQueue()  # `put` is reentrant

    def relay() -> None:
        if asked.get():
            event.set()

    # Started here, since a signal handler, which may interrupt any code, must not start a thread.
    thread = threading.Thread(target=relay, name="signals", daemon=True)
    thread.start()
    try:
        yield lambda: asked.put(True)
    finally:
        asked.put(False)
        thread.join()


def leave_to_launcher() -> None:
    """Continue when a signal asks this process to end: its launcher got the same signal. For the main thread.

    Signals are neither ignored nor blocked: programs that the user's code starts would inherit that, and could not be
    terminated.
    """
    _take(lambda _number: None)


def pass_on(tell: Callable[[], None]) -> None:
    """The first request to end calls `tell`, in a separate thread; a later one ends this process at once.

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
        signal.siginterrupt(number, False)  # libraries in C may not handle interrupted system calls
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKING)


def end_as_usual(number: int) -> None:
    """In a process that the user's code forked, which inherits the handlers: end it by the signal's default."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
