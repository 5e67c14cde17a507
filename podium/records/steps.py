"""The cost of one step: time, waiting and bytes, on the world's own clock."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from podium.records.recorder import Recorder

if TYPE_CHECKING:
    from podium.engine.batch import Batch
    from podium.engine.worker import Worker


class StepMeter:
    """Reads clock and counters when it is made, and again when the step is recorded."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._began = self._read()

    def record(self, recorder: Recorder, batch: Batch, loss: float) -> int:
        """Write the `step` record; returns the step's nanoseconds."""
        now, waited, sent, received = self._read()
        recorder.write(
            "step",
            now,
            step=self.worker.steps_done,
            position=batch.end,
            first=batch.slice.position,
            samples=batch.samples,
            loss=loss,
            step_ns=now - self._began[0],
            pass_ns=self.worker.gradients.times.last_ns,
            wait_ns=waited - self._began[1],
            sent=sent - self._began[2],
            received=received - self._began[3],
            **({} if batch.draws is None else {"pieces": [[p.position, p.count] for p in batch.draws.slices]}),
        )
        return now - self._began[0]

    def _read(self) -> tuple[int, int, int, int]:
        comm = self.worker.comm
        return comm.clock.now_ns(), comm.waited_ns, comm.traffic.sent, comm.traffic.received


def progress_of(worker: Worker, loss: float, **more: Any) -> dict[str, Any]:
    """The `progress` event of a worker after a step."""
    return {
        "event": "progress",
        "step": worker.steps_done,
        "position": worker.position,
        "epoch": worker.progress.epoch,
        "loss": worker.votes.mean_loss if worker.votes.mean_loss is not None else loss,
        **more,
    }
