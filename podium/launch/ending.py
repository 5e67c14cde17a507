"""An orderly end when the launcher gets a signal to terminate: save, then remove processes, sockets and namespaces.

By default SIGTERM and SIGHUP end Python at once, without running `finally`. Ranks die with their launcher in any case,
but the steps since the last checkpoint would be lost, and a socket folder or a network namespace would stay. SIGKILL
cannot be handled: the next launcher removes what it left, all named `podium-…` (`podium.launch.rendezvous`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from podium.launch.signals import BURST_S, end_as_usual, setter

GRACE_S = 8.0
"""How long a run may take to save when its program is terminated; Docker, for example, kills after ten seconds."""


class Stop(threading.Event):
    """Set by itself, or by the caller's own event."""

    def __init__(self, outer: threading.Event | None = None) -> None:
        super().__init__()
        self._outer = outer

    def is_set(self) -> bool:
        return super().is_set() or (self._outer is not None and self._outer.is_set())


@contextmanager
def termination_saves(stop: threading.Event | None) -> Iterator[threading.Event]:
    """Inside, SIGTERM or SIGHUP sets the event; at the end of the block, or after `GRACE_S`, SystemExit is raised.

    A second signal raises at once. Installs no handler where the signals have one, or outside the main thread.
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
            set_event()
        elif time.monotonic() - asked[0][1] >= BURST_S:
            _unwind(asked[0][0], frame)

    def insist() -> None:
        event.wait()
        if asked and not over.wait(GRACE_S):
            os.kill(owner, asked[0][0])

    watch = threading.Thread(target=insist, name="termination", daemon=True)
    watch.start()
    with setter(event) as set_event:
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

    Does nothing where the signals have a handler, or outside the main thread.
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
    """Those of the two signals that have the default handler and can be handled here. `nohup` ignores SIGHUP."""
    if threading.current_thread() is not threading.main_thread():
        return []
    return [n for n in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(n) is signal.SIG_DFL]


def _unwind(number: int, frame: FrameType | None) -> None:
    for each in (signal.SIGTERM, signal.SIGHUP):  # a second one must not interrupt the clean-up
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)
