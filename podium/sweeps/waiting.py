"""Trials that the source gave and no executor has taken, sorted into groups."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import final

from podium.errors import PodiumError
from podium.sweeps.trial import Trial

KeyOf = Callable[[Trial], Hashable]

MOST_WAITING = 4096
"""How many trials are taken from the source before any of them is trained …"""
LONGEST_FETCH_S = 10.0
"""… or as many as are sorted into groups in this time."""
NO_KEY = object()  # None may be a group's key


@final
class WaitingTrials:
    """A queue per group. Sorting a trial builds its model, and a source may be endless: so the queues are bounded."""

    def __init__(
        self,
        ask: Callable[[], Trial | None],
        on_failed: Callable[[Trial, PodiumError], None],
        should_stop: Callable[[], bool],
    ) -> None:
        """`ask` returns the source's next trial; `on_failed` is called with a trial whose key raised, and the error."""
        self._ask, self._on_failed, self._should_stop = ask, on_failed, should_stop
        self._key_of: KeyOf = lambda trial: None
        self._queues: dict[Hashable, deque[Trial]] = {}

    def sort_into(self, key_of: KeyOf) -> None:
        """Sort trials by this key from now on, and take trials from the source, up to `MOST_WAITING`.

        A trial for which `key_of` raises a PodiumError has failed.
        """
        waiting = [trial for queue in self._queues.values() for trial in queue]
        self._key_of, self._queues = key_of, {}
        for trial in sorted(waiting, key=lambda trial: trial.number):
            self._sort(trial)
        self._fetch()

    def groups(self) -> list[Hashable]:
        """Keys with waiting trials, in order of first appearance; takes more trials from the source first."""
        self._fetch()
        return [key for key, queue in self._queues.items() if queue]

    def of(self, key: Hashable) -> Sequence[Trial]:
        """A group's waiting trials."""
        return tuple(self._queues.get(key, ()))

    def __len__(self) -> int:
        """Waiting trials of all groups."""
        return sum(map(len, self._queues.values()))

    def first_group(self) -> Hashable:
        """A group with trials; `NO_KEY` when there are none now."""
        if not any(self._queues.values()):
            self._fetch(until=lambda key: True)
        return next((key for key, queue in self._queues.items() if queue), NO_KEY)

    def pop(self, key: Hashable) -> Trial | None:
        """The next trial of a group; None when there is none now."""
        if not self._queues.get(key):
            self._fetch(until=lambda found: found == key)
        queue = self._queues.get(key)
        return queue.popleft() if queue else None

    def _fetch(self, until: Callable[[Hashable], bool] = lambda key: False) -> None:
        """Take trials from the source and sort them, until `until(key)` holds, none are left, or enough wait."""
        waiting, began = len(self), time.monotonic()
        while not self._should_stop() and (trial := self._ask()) is not None:
            key = self._sort(trial)
            if key is NO_KEY:
                continue
            waiting += 1
            if until(key) or waiting >= MOST_WAITING or time.monotonic() - began > LONGEST_FETCH_S:
                return

    def _sort(self, trial: Trial) -> Hashable:
        try:
            key = self._key_of(trial)
        except PodiumError as error:
            self._on_failed(trial, error)
            return NO_KEY
        self._queues.setdefault(key, deque()).append(trial)
        return key
