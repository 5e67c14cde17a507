"""Which checkpoint the ranks of several hosts continue from, when torchrun starts them again.

Every rank tells rank 0 what its host has of the earlier starts. The newest checkpoint wins, wherever it lies: where
rank 0's host does not have it, the host that does sends it. All answers come at the end, so no rank goes on before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, final

from podium.comm.base import DEPARTED, Message, Meta
from podium.comm.real.channel import Channel
from podium.engine.checkpoint import find_checkpoint
from podium.errors import CheckpointError, DeadlineExceeded, Lost, RankFailed
from podium.launch.attempts import Attempts
from podium.launch.blobs import CHUNK_BYTES, as_bytes
from podium.launch.checkpoint_copy import CheckpointFiles, partial_of, read_chunk
from podium.launch.coordination.members import name_ranks
from podium.launch.coordination.rules import FIRST_ASKER

Ask = Callable[[str, Meta, bytes], Message]
"""(kind, facts, data) to rank 0's answer."""


class Held(NamedTuple):
    """What a host has of the earlier starts."""

    first: str | None
    """The name of the folder of the first start; None where there was none."""
    step: int
    """Of the newest whole checkpoint; -1: there is none."""
    files: CheckpointFiles | None

    @classmethod
    def by(cls, attempts: Attempts) -> tuple[Held, Path | None]:
        """What this host has, and where the checkpoint lies."""
        newest = attempts.newest()
        if newest is None:
            return cls(attempts.first, -1, None), None
        return cls(attempts.first, newest.step, CheckpointFiles.at(newest.path)), newest.path

    def to_meta(self) -> Meta:
        return {**self._asdict(), "files": None if self.files is None else self.files._asdict()}

    @classmethod
    def from_meta(cls, meta: Meta) -> Held:
        first, files = meta["first"], meta["files"]
        if first is not None and (Path(first).name != first or first in ("", "..")):
            raise CheckpointError(f"a rank must name one folder, got {str(first)[:80]!r}")
        return cls(first, int(meta["step"]), None if files is None else CheckpointFiles.from_meta(files))


def tell(ask: Ask, held: Held, folder: Path | None) -> None:
    """Tell rank 0 what this host has, and send the checkpoint if it is wanted; returns once rank 0 has decided."""
    if not ask("held", held.to_meta(), b"").meta.get("send"):
        return
    assert held.files is not None and folder is not None
    for name, size in held.files.sizes.items():
        for offset in range(0, size, CHUNK_BYTES):
            _insist(ask("part", {"name": name, "offset": offset}, read_chunk(folder, name, offset)))
    _insist(ask("sent", {}, b""))


def _insist(answer: Message) -> None:
    if "refused" in answer.meta:
        raise CheckpointError(f"the first host does not take the checkpoint: {answer.meta['refused']}")


@final
class Survey:
    """Rank 0's side; used before its coordinator begins to read the same channel."""

    def __init__(self, channel: Channel, ranks: int, mine: Held, limit_s: float) -> None:
        """`ranks`: their number, this one included. All of it together takes `limit_s` at most."""
        self._channel, self._ranks, self._mine = channel, ranks, mine
        self._limit_s, self._until = limit_s, time.monotonic() + limit_s
        self._asked: dict[int, Message] = {}
        self._holder: int | None = None

    def newest(self) -> Held:
        """What the host with the newest checkpoint has; this host's own, if it is as new. Waits for all ranks."""
        while len(self._asked) < self._ranks - 1:
            message = self._receive("held")
            self._asked[message.source - FIRST_ASKER] = message
        found = {rank: Held.from_meta(message.meta) for rank, message in sorted(self._asked.items())}
        best = max([self._mine, *found.values()], key=lambda held: (held.step, held.first is not None))
        if best is not self._mine:
            self._holder = next(rank for rank, held in found.items() if held is best)
        return best

    def bring(self, files: CheckpointFiles, into: Path) -> Path:
        """Get the newest checkpoint from the host that has it."""
        assert self._holder is not None
        target = into / files.name
        partial = partial_of(target)
        partial.mkdir(parents=True, exist_ok=True)
        self._channel.reply(self._asked.pop(self._holder), {"send": True})
        while (message := self._receive("part", "sent")).kind == "part":
            self._take(message, files, partial)
        partial.replace(target)
        find_checkpoint(target)  # raises where it is damaged
        self._asked[self._holder] = message
        return target

    @property
    def is_elsewhere(self) -> bool:
        """Whether another host has the newest checkpoint."""
        return self._holder is not None

    def finish(self) -> None:
        """Let all ranks go on."""
        for message in self._asked.values():
            self._channel.reply(message, {})

    def _take(self, message: Message, files: CheckpointFiles, partial: Path) -> None:
        name, offset = str(message.meta["name"]), int(message.meta["offset"])
        try:
            if name not in files.sizes or not 0 <= offset < files.sizes[name]:
                raise CheckpointError(f"it has announced no file {name[:80]!r} with a part at {offset}")
            path = partial / name
            with path.open("r+b" if path.exists() else "wb") as file:
                file.seek(offset)
                file.write(as_bytes(message.body))
        except (OSError, CheckpointError) as error:
            self._channel.reply(message, {"refused": str(error)})
            return
        self._channel.reply(message, {})

    def _receive(self, *kinds: str) -> Message:
        """The next message of one of these kinds from a rank of the run."""
        while True:
            try:
                message = self._channel.recv(max(0.0, self._until - time.monotonic()))
            except DeadlineExceeded:
                missing = [rank for rank in range(1, self._ranks) if rank not in self._asked]
                raise DeadlineExceeded(
                    f"{name_ranks(missing)} did not come within {self._limit_s:g} s (start_deadline_s)"
                ) from None
            rank = message.source - FIRST_ASKER
            if not 0 < rank < self._ranks:
                continue
            if message.kind == "failed":
                raise RankFailed(str(message.meta["message"]))
            if message.kind == DEPARTED:
                raise Lost(f"rank {rank} left before the run began")
            if message.kind in kinds:
                return message
