"""Threads beside a server's loop that move units and write parameters into workers' memory.

The loop decides everything, in the order of arrivals; an apply thread runs its jobs in order. All jobs of one unit go
to the same thread, so the unit's updates stay in order, and two units are moved at once where there are cores. The
kernels release the interpreter's lock.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from podium.errors import DeadlineExceeded

Job = Callable[[], None]


class ApplyThreads:
    """`count` threads, started when first used; with 0, the caller runs the jobs itself."""

    def __init__(self, count: int, deadline_s: float = 60.0) -> None:
        self._queues: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in range(count)]
        self._threads: list[threading.Thread] = []
        self._deadline_s = deadline_s
        self._error: BaseException | None = None

    def __bool__(self) -> bool:
        return bool(self._queues)

    def run(self, number: int, job: Job) -> None:
        """Run this job after all earlier jobs of the same number."""
        self._check()
        if not self._queues:
            return job()
        if not self._threads:
            self._threads = [threading.Thread(target=self._work, args=(q,), daemon=True) for q in self._queues]
            for thread in self._threads:
                thread.start()
        self._queues[number % len(self._queues)].put(job)

    def settle(self) -> None:
        """Return once all jobs are done; raises the error of a failed job."""
        if self._threads:
            done = [threading.Event() for _ in self._queues]
            for queue, event in zip(self._queues, done, strict=True):
                queue.put(event.set)
            for event in done:
                if not event.wait(self._deadline_s):
                    raise DeadlineExceeded(f"an apply thread of this server did not finish in {self._deadline_s:g} s")
        self._check()

    def close(self) -> None:
        for queue in self._queues:
            queue.put(None)
        for thread in self._threads:
            thread.join(self._deadline_s)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self, queue: SimpleQueue[Job | None]) -> None:
        while (job := queue.get()) is not None:
            try:
                job()
            except BaseException as error:  # the loop raises it at its next call
                self._error = self._error or error
