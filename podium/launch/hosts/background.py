"""A thread for what may take long: reading and sending files, writing to a terminal."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import final

_WAITING = 100


@final
class Background:
    """Runs tasks one by one, in order, on a thread of its own."""

    def __init__(self, name: str, on_error: Callable[[Exception], None]) -> None:
        """`on_error` is called, on that thread, with what a task raised; later tasks are run all the same."""
        self._on_error = on_error
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(_WAITING)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        """Returns at once, unless very many tasks wait."""
        self._tasks.put(task)

    def offer(self, task: Callable[[], None]) -> bool:
        """Returns at once: whether the task will be run, or too many wait."""
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            return False
        return True

    def close(self, limit_s: float) -> None:
        """Wait until all tasks are done, at most this long."""
        try:
            self._tasks.put(None, timeout=limit_s)
        except queue.Full:
            return
        self._thread.join(limit_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:
                self._on_error(error)
