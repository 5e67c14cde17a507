"""Rollback: undoes a step or round in which a worker was lost.

A step moves parameters only after the whole sum, so only generators and buffers must be undone, which a pass changes. A
round moves parameters step by step, so it is undone by restoring the worker's whole state from when the round began.
Numpy's and Python's generators are not undone: their states take 0.1 ms to read, too long for every step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from podium.engine.buffers import Snapshot
from podium.engine.generators import State
from podium.engine.worker import Worker


class _Before(NamedTuple):
    generators: State
    buffers: Snapshot
    samples_since: int  # samples since the workers' buffers were last synced
    state: dict[str, Any]  # of the worker; empty where only a step is to be undone


class Rollback:
    """One worker's states before the step and the round under way."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._step: _Before | None = None
        self._round: _Before | None = None

    def before_step(self) -> None:
        """Save what a step changes besides parameters."""
        self._step = self._take({})

    def undo_step(self) -> None:
        """Restore generators and buffers to the beginning of the step under way."""
        assert self._step is not None
        self._put_back(self._step)
        self._worker.gradients.forget_step()

    def before_round(self) -> None:
        """Save the worker's state; all workers have the same parameters here."""
        self._round = self._take(self._worker.state())

    def undo_round(self) -> None:
        """Restore the worker to the beginning of the round under way."""
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
