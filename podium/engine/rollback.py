"""Rollback: a step or round that did not happen leaves no trace.

A step moves parameters only when all of it is summed, so what must be undone is what a pass changes besides: generators
and buffers. A round moves parameters step by step, so it is undone by going back to all that the worker was when the
round began. Numpy's and Python's generators are not undone: their states take 0.1 ms to read, too long for every step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from podium.engine.buffers import Snapshot
from podium.engine.generators import State
from podium.engine.worker import Worker


class _Before(NamedTuple):
    generators: State
    buffers: Snapshot
    samples_since: int  # that the buffers have seen since all workers' were made alike
    state: dict[str, Any]  # of the worker; empty where only a step is to be undone


class Rollback:
    """What one worker goes back to."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._step: _Before | None = None
        self._round: _Before | None = None

    def before_step(self) -> None:
        """Remember what a step changes besides parameters."""
        self._step = self._take({})

    def undo_step(self) -> None:
        """The step under way did not happen: generators and buffers go back to where it began."""
        assert self._step is not None
        self._put_back(self._step)
        self._worker.gradients.forget_step()

    def before_round(self) -> None:
        """All workers are alike here: remember where to go back to, should the next round fail."""
        self._round = self._take(self._worker.state())

    def undo_round(self) -> None:
        """The round under way did not happen."""
        assert self._round is not None
        self._put_back(self._round)
        self._worker.progress.close_round()

    def _take(self, state: dict[str, Any]) -> _Before:
        worker = self._worker
        return _Before(worker.generators.state(), Snapshot(worker.model), worker.buffers.samples_since, state)

    def _put_back(self, before: _Before) -> None:
        worker = self._worker
        before.buffers.restore()  # first: their shapes may have changed
        if before.state:
            worker.load_state(before.state)
        worker.generators.set_state(before.generators)
        worker.buffers.seen_since(before.samples_since)
        worker.sender.drop()
