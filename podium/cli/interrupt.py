"""Ctrl-C: once asks, twice insists; SIGTERM, the request of a batch system, is the same. Only here are they taken."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

ASKED = "finishing the step, saving… (Ctrl-C again stops at once)"


@contextmanager
def stop_on_interrupt(said: str = ASKED) -> Iterator[threading.Event]:
    """An event that the first Ctrl-C, or SIGTERM, sets; the second raises KeyboardInterrupt.

    Outside the main thread, where signals cannot be taken, the event is never set.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    owner = os.getpid()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if os.getpid() != owner:  # a process that the user's code forked off: what is meant for it ends it, as usual
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        # Straight to the descriptor: the signal may have come in the middle of a write to the buffered stream.
        os.write(2, f"\n{said}\n".encode())

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
