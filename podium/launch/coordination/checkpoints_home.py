"""Checkpoints and models that a worker on another host has written: copied to the run's folder here, then published."""

from __future__ import annotations

import re
from pathlib import Path

from podium.comm.base import Message
from podium.engine.checkpoint import publish_copy
from podium.errors import CheckpointError
from podium.launch.coordination.context import RunContext
from podium.records.disk import make_folder, sync_file

_FILE = re.compile(r"checkpoints/step-\d{8}\.partial/[\w.-]+|model\.safetensors\.partial")
"""What a worker may write: a path can lead nowhere else."""


class CheckpointsHome:
    """The run's folder, on the coordinator's host. Nothing has its final name before all its bytes are verified."""

    def __init__(self, run: RunContext, run_dir: Path | None) -> None:
        self._run, self._run_dir = run, run_dir

    def upload(self, message: Message) -> None:
        """Write a part of a file."""
        path, offset = str(message.meta["path"]), int(message.meta["offset"])
        try:
            target = self._path(path)
            make_folder(target.parent)
            with target.open("r+b" if offset else "wb") as file:
                file.seek(offset)
                for part in message.body:
                    file.write(part.numpy().tobytes())
        except (OSError, CheckpointError) as error:
            self._refuse(message, f"{path} cannot be written on the launcher's host: {error}")
            return
        self._hear(message)
        self._run.post.answer(message, {})

    def publish(self, message: Message) -> None:
        """All files are here: verify them and give them their final names."""
        step, keep = message.meta["step"], int(message.meta["keep"])
        try:
            if step is None:
                model = self._path("model.safetensors.partial")
                sync_file(model)
                model.replace(model.with_suffix(""))
            else:
                assert self._run_dir is not None
                publish_copy(self._run_dir, int(step), keep)
        except (OSError, CheckpointError) as error:
            self._refuse(message, f"the copy on the launcher's host is not whole: {error}")
            return
        self._hear(message)
        self._run.post.answer(message, {})

    def _path(self, name: str) -> Path:
        if self._run_dir is None or _FILE.fullmatch(name) is None:
            raise CheckpointError(f"a worker must send files of a checkpoint or its model, got {name[:80]!r}")
        return self._run_dir / name

    def _hear(self, message: Message) -> None:
        self._run.roster.members[message.source].heard_at = self._run.now

    def _refuse(self, message: Message, why: str) -> None:
        self._run.post.answer(message, {"refused": why})
