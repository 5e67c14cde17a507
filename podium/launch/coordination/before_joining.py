"""What ranks on other hosts ask before they join: where the run writes, and the checkpoint that it resumes from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from podium.comm.base import Message, Meta
from podium.errors import CheckpointError
from podium.launch.checkpoint_copy import CheckpointFiles, read_chunk


class BeforeJoining(NamedTuple):
    """Answers to processes that hold the run's secret and are no members yet."""

    settings: Mapping[str, Any] = MappingProxyType({})
    """What they are told: the run's folder, where groups form."""
    resume: str | None = None
    """The checkpoint's folder on this host."""

    def answer(self, message: Message) -> tuple[Meta, list[Tensor]]:
        if message.kind == "settings":
            files = None if self.resume is None else CheckpointFiles.at(Path(self.resume))._asdict()
            return {**self.settings, "checkpoint": files}, []
        try:
            assert self.resume is not None
            chunk = read_chunk(Path(self.resume), str(message.meta["name"]), int(message.meta["offset"]))
        except (OSError, CheckpointError) as error:
            return {"refused": str(error)}, []
        return {}, [torch.frombuffer(bytearray(chunk), dtype=torch.uint8)] if chunk else []
