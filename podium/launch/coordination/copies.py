"""Copies of the newest checkpoint on other hosts' disks, so that it outlives the coordinator's host.

Used where something starts all ranks again after a loss (torchrun). The first worker continues once every host has the
checkpoint. A host that cannot store it is reported, and the run goes on.
"""

from __future__ import annotations

from pathlib import Path

from podium.comm.base import Message
from podium.engine.checkpoint import folder_for
from podium.errors import CheckpointError
from podium.launch.blobs import as_tensor
from podium.launch.checkpoint_copy import CheckpointFiles, read_chunk
from podium.launch.coordination.context import RunContext


class Copies:
    """Which processes keep copies, and which of them still fetch the present one."""

    def __init__(self, run: RunContext, run_dir: Path | None) -> None:
        self._run, self._run_dir = run, run_dir
        self._keepers: set[int] = set()
        self._fetching: set[int] = set()
        self._request: Message | None = None
        self._folder: Path | None = None

    def add(self, message: Message) -> None:
        """This process keeps copies from now on."""
        self._hear(message)
        self._keepers.add(message.source)

    def spread(self, message: Message) -> None:
        """The first worker has written a checkpoint here: have it copied, then answer."""
        self._hear(message)
        assert self._run_dir is not None
        step, keep = int(message.meta["step"]), int(message.meta["keep"])
        self._folder, self._request = folder_for(self._run_dir, step), message
        members = self._run.roster.members
        self._fetching = {rank for rank in self._keepers if rank in members and members[rank].active}
        files = CheckpointFiles.at(self._folder)._asdict() if self._fetching else {}
        for rank in sorted(self._fetching):
            self._run.post.send(members[rank], "copy", {"files": files, "step": step, "keep": keep})
        self._answer_when_done()

    def send_part(self, message: Message) -> None:
        self._hear(message)
        try:
            if self._folder is None:
                raise CheckpointError("no checkpoint is being copied")
            chunk = read_chunk(self._folder, str(message.meta["name"]), int(message.meta["offset"]))
        except (OSError, CheckpointError) as error:
            self._run.post.answer(message, {"refused": str(error)})
            return
        self._run.post.answer(message, {}, [as_tensor(chunk)] if chunk else [])

    def done(self, message: Message) -> None:
        """A process has its copy, or says why not."""
        self._hear(message)
        if why := message.meta.get("failed"):
            self._run.post.tell({"event": "warning", "text": f"rank {message.source} keeps no copy: {why}"})
        self._fetching.discard(message.source)
        self._answer_when_done()

    def _answer_when_done(self) -> None:
        if not self._fetching and self._request is not None:
            self._run.post.answer(self._request, {})
            self._request = None

    def _hear(self, message: Message) -> None:
        self._run.roster.members[message.source].heard_at = self._run.now
