"""When a run is saved, what its checkpoints hold, and how a run resumes from one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.engine import checkpoint
from podium.engine.buffers import load_buffers
from podium.engine.checkpoint_parts import agree_on_checkpoint, gather_parts
from podium.engine.files import Checksum, save_tensors
from podium.engine.fingerprints import Digest, difference_of
from podium.engine.validation import busy
from podium.errors import CheckpointError
from podium.exchange.residuals import ResidualScale, convert_residuals, scale_of

if TYPE_CHECKING:
    from podium.engine.build import Job
    from podium.engine.segment import SegmentLoop


class RunCheckpoints:
    """One worker's part in a run's checkpoints."""

    def __init__(self, job: Job, total_steps: int, digests: Mapping[str, Digest]) -> None:
        self._job, self._total_steps, self._digests = job, total_steps, digests
        self.saved_at = -1
        """The position of the last checkpoint."""
        self.began_at = 0
        """The position at which this run began or resumed."""

    def begin(self, position: int) -> None:
        self.began_at = position

    def regrouped(self, saved_at: int, began_at: int) -> None:
        """The workers regrouped: take over these positions of the most advanced worker."""
        self.saved_at, self.began_at = saved_at, began_at

    def next_horizon(self, loop: SegmentLoop) -> int:
        """The position at which the next checkpoint is due, or the run ends."""
        every, course = self._job.config.checkpoint_every, loop.phases.course
        if every == 0:
            return course.end
        return min(course.end, course.position_of((loop.worker.progress.global_step // every + 1) * every))

    def was_missed(self, loop: SegmentLoop) -> bool:
        """Whether a checkpoint was due here and a lost worker prevented it."""
        every, here = self._job.config.checkpoint_every, loop.worker.position
        due = every > 0 and loop.phases.course.step_at(here) % every == 0 and here != self.began_at
        return due and self.saved_at != here

    # Save.

    def save(self, loop: SegmentLoop, *, is_last: bool) -> None:
        """All workers write their own files; then the first writes the shared file and publishes. Collective."""
        worker, comm, run_dir, began = loop.worker, loop.comm, self._job.run_dir, loop.comm.clock.now_ns()
        if run_dir is not None:
            step = loop.phases.course.step_at(worker.position)
            own = {
                "rng": worker.generators.state(),
                "other_rng": worker.generators.others_state(),
                "buffers": {k: v.detach().clone() for k, v in worker.model.named_buffers()},
                "leftovers": worker.sender.residuals.state(),
            }
            mine = checkpoint.save_own(run_dir, step, comm.rank, own)
            parts = gather_parts(comm, run_dir, step, mine)
            if comm.index == 0:
                with busy(loop.control, "checkpoint"):
                    if is_last:
                        save_tensors(run_dir / "model.safetensors", worker.model.state_dict())
                    self._save_shared(loop, run_dir, step, began, parts.by_rank)
                    keep = self._job.config.keep_checkpoints
                    loop.control.saved(run_dir, step, keep=keep, is_last=is_last)
            if comm.size > 1:
                comm.barrier()  # no worker leaves or continues before it is published: the first may be lost meanwhile
            if comm.rank in parts.sent:
                checkpoint.drop_own(run_dir, step, comm.rank)
        self.saved_at = worker.position

    def _save_shared(
        self, loop: SegmentLoop, run_dir: Path, step: int, began: int, parts: Mapping[int, Checksum] | None
    ) -> None:
        worker, strategy = loop.worker, loop.strategy
        shared = {**worker.state(), **self._must_match(loop), "phasing": loop.phases.state()}
        shared["data"] = {what: digest.to_plain() for what, digest in self._digests.items()}
        shared["strategy"], shared["unit"] = type(strategy).__name__, list(scale_of(strategy, worker))
        keep = self._job.config.keep_checkpoints
        path = checkpoint.save_shared(run_dir, step, shared, loop.comm.workers, keep, parts)
        self.saved_at = worker.position  # now: if the other workers time out, it is not written again
        now = loop.comm.clock.now_ns()
        loop.recorder.write("checkpoint", now, step=step, position=worker.position, path=path.name, took_ns=now - began)

    def _must_match(self, loop: SegmentLoop) -> dict[str, int | None]:
        """What must be the same in a checkpoint and in the run that resumes from it."""
        scheduled = self._job.task.schedule is not None
        return {
            "seed": self._job.config.seed,
            "samples": loop.phases.course.samples,
            "scheduled_steps": self._total_steps if scheduled else None,  # a schedule is made for a number of steps
        }

    # Resume.

    def resume(self, loop: SegmentLoop, path: Path) -> None:
        """Resume from the newest checkpoint at this path. Collective."""
        found = checkpoint.find_checkpoint(path, verified=False)  # loading a file verifies it
        agree_on_checkpoint(loop.comm, found)
        shared = found.shared()
        self._check(loop, found, shared)
        worker = loop.worker
        try:
            worker.load_state(shared)
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{found.path} does not fit task {self._job.task.name}: {error}") from error
        if "phasing" in shared:  # older checkpoints have none
            if loop.comm.index == 0 and (said := loop.phases.starts_over(shared["phasing"])):
                loop.control.progress({"event": "warning", "text": f"{found.path}: {said}"})
            loop.phases.load_state(shared["phasing"])
        if shared.get("strategy") != type(loop.strategy).__name__:
            worker.strategy_state.clear()  # it is another strategy's
        self._take_own(loop, found)
        if "unit" in shared:
            convert_residuals(worker, ResidualScale(*shared["unit"]), scale_of(loop.strategy, worker))

    def _check(self, loop: SegmentLoop, found: checkpoint.Checkpoint, shared: Mapping[str, Any]) -> None:
        for name, mine in self._must_match(loop).items():
            if shared[name] != mine:
                raise CheckpointError(f"{found.path}: was made with {name}={shared[name]}, this run has {name}={mine}")
        if said := difference_of(self._digests, shared.get("data", {})):  # older checkpoints have none
            raise CheckpointError(f"{found.path}: was made with {said}")

    def _take_own(self, loop: SegmentLoop, found: checkpoint.Checkpoint) -> None:
        """Load this worker's own file; the first worker also takes the residuals of workers that are now missing."""
        comm, worker = loop.comm, loop.worker
        own = found.own(comm.rank)
        if own is not None:
            worker.generators.set_state(own["rng"])
            if "other_rng" in own:  # older checkpoints have none
                worker.generators.set_others_state(own["other_rng"])
            load_buffers(worker.model, own["buffers"])
        missing = [rank for rank in found.members if rank not in comm.workers] if comm.index == 0 else []
        for kept in (own, *(found.own(rank) for rank in missing)):
            if kept is not None and "leftovers" in kept:  # older checkpoints have none
                worker.sender.residuals.add(kept["leftovers"])
