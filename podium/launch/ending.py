"""An orderly end when the launcher is told to terminate: work is saved, and processes, sockets and namespaces go first.

SIGTERM's default, and that of SIGHUP, ends Python on the spot, past every `finally`. Ranks die with their launcher
whatever happens, but the steps since the last checkpoint would be lost, and a socket folder or a network namespace
would stay. Against SIGKILL nothing helps: what it leaves, all named `podium-…`, the next launcher removes
(`podium.launch.rendezvous`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from podium.launch.signals import BURST_S, end_as_usual

GRACE_S = 8.0
"""How long a run may take to save when its program is terminated; Docker, for one, kills after ten seconds."""


class Stop(threading.Event):
    """Set by itself, or by the caller's own event."""

    def __init__(self, outer: threading.Event | None = None) -> None:
        super().__init__()
        self._outer = outer

    def is_set(self) -> bool:
        return super().is_set() or (self._outer is not None and self._outer.is_set())


@contextmanager
def termination_saves(stop: threading.Event | None) -> Iterator[threading.Event]:
    """Inside, SIGTERM or SIGHUP sets the event; then, or when a run does not end for `GRACE_S`, SystemExit is raised.

    A second signal raises at once. Gives `stop` back where signals are taken already, or outside the main thread.
    """
    numbers = _untaken()
    event = Stop(stop)
    if not numbers:
        yield event
        return
    owner, asked, over = os.getpid(), list[tuple[int, float]](), threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:
            end_as_usual(number)
        if not asked:
            asked.append((number, time.monotonic()))
            event.set()
        elif time.monotonic() - asked[0][1] >= BURST_S:
            _unwind(asked[0][0], frame)

    def insist() -> None:
        event.wait()
        if asked and not over.wait(GRACE_S):
            os.kill(owner, asked[0][0])

    # Started here, since a handler may have interrupted anything and must not start a thread.
    watch = threading.Thread(target=insist, name="termination", daemon=True)
    watch.start()
    for number in numbers:
        signal.signal(number, on_signal)
    try:
        yield event
    finally:
        over.set()
        event.set()
        watch.join()
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
    if asked:
        raise SystemExit(128 + asked[0][0])


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Inside, SIGTERM or SIGHUP raises SystemExit(128 + number).

    Does nothing where the signals are taken, or outside the main thread.
    """
    numbers = _untaken()
    for number in numbers:
        signal.signal(number, _unwind)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _untaken() -> list[signal.Signals]:
    """Those of the two signals that would end this program, and may be taken here. `nohup` has one ignored."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]


def _unwind(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGTERM, signal.SIGHUP):  # a second one must not cut the cleaning up short
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)
