"""What ranks on other hosts ask before they join: where the run writes, and the checkpoint that it resumes from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from podium.comm.base import Message, Meta
from podium.errors import CheckpointError
from podium.launch.checkpoint_copy import CheckpointFiles, read_chunk


class BeforeJoining(NamedTuple):
    """Answers to processes that hold the run's secret and are no members yet."""

    run_dir: str = ""
    resume: str | None = None
    """The checkpoint's folder on this host."""

    def answer(self, message: Message) -> tuple[Meta, list[Tensor]]:
        if message.kind == "settings":
            files = None if self.resume is None else CheckpointFiles.at(Path(self.resume))._asdict()
            return {"run_dir": self.run_dir, "checkpoint": files}, []
        try:
            assert self.resume is not None
            chunk = read_chunk(Path(self.resume), str(message.meta["name"]), int(message.meta["offset"]))
        except (OSError, CheckpointError) as error:
            return {"refused": str(error)}, []
        return {}, [torch.frombuffer(bytearray(chunk), dtype=torch.uint8)] if chunk else []
