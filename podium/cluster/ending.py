"""An orderly end when the launcher is told to terminate: processes, sockets and namespaces go before it does.

SIGTERM's default ends Python on the spot, past every `finally`. Ranks die with their launcher whatever happens, but a
socket folder or a network namespace would stay. Against SIGKILL nothing helps: what it leaves, all named `podium-…`,
the next launcher removes (`podium.cluster.rendezvous`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit(143). Does nothing where the signal is taken, or outside the main thread."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _unwind(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not cut the cleaning up short
    raise SystemExit(128 + number)
