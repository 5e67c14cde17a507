"""Ctrl-C: once stops after the step, twice at once. SIGTERM (batch systems) and SIGHUP (a closed terminal) do the same.

Only this module handles these signals. Signals within a second count as one: `timeout` signals its program and then its
whole group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from podium.launch.signals import ASKING, BURST_S, end_as_usual, setter

ASKED = "finishing the step, saving… (Ctrl-C again stops at once)"


@contextmanager
def stop_on_interrupt(said: str = ASKED) -> Iterator[threading.Event]:
    """An event that the first Ctrl-C, SIGTERM or SIGHUP sets; another one, at least a second later, raises
    KeyboardInterrupt.

    SIGHUP stays ignored under `nohup`. Outside the main thread, where signals cannot be handled, the event is never
    set.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    owner = os.getpid()
    asked_at: float | None = None
    insisted = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at, insisted
        if os.getpid() != owner:  # a process that the user's code forked off
            end_as_usual(number)
            return
        now = time.monotonic()
        if asked_at is None:
            asked_at = now
            set_stop()
            with contextlib.suppress(OSError):  # the terminal may be gone
                # Straight to the descriptor: the signal may have interrupted a write to the buffered stream.
                os.write(2, f"\n{said}\n".encode())
        elif now - asked_at >= BURST_S and not insisted:  # a third signal must not interrupt the cleanup
            insisted = True
            raise KeyboardInterrupt

    def on_suspend(number: int, frame: FrameType | None) -> None:
        """Ctrl-Z: stop forked processes, too. They have their own session, which the terminal does not signal."""
        from podium.launch.forking import forked_here

        pids = forked_here() if os.getpid() == owner else []
        _send(pids, signal.SIGSTOP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # returns when the shell continues this process
        signal.signal(signal.SIGTSTP, on_suspend)
        _send(pids, signal.SIGCONT)

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in ASKING if not (ignored and number == signal.SIGHUP)]
    with setter(stop) as set_stop:
        before = {number: signal.signal(number, on_signal) for number in numbers}
        if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
            before[signal.SIGTSTP] = signal.signal(signal.SIGTSTP, on_suspend)
        try:
            yield stop
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # the process has ended meanwhile
            os.kill(pid, number)
