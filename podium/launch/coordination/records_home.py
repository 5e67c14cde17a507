"""Records that ranks on other hosts send: appended to the run's folder here."""

from __future__ import annotations

import re
from pathlib import Path

from podium.comm.base import Message
from podium.errors import RecordError
from podium.launch.coordination.context import RunContext
from podium.launch.record_stream import file_name
from podium.records.disk import mend_last_line

_PROBE = re.compile(r"\.[0-9a-f]{16}")


class RecordsHome:
    """The folder of the run's records, on the coordinator's host."""

    def __init__(self, run: RunContext, folder: Path | None) -> None:
        self._run, self._folder = run, folder
        self._begun: set[int] = set()

    def find(self, message: Message) -> None:
        """Answer whether this host sees the file of this name, which the rank has just made in its own folder."""
        name = str(message.meta["name"])
        seen = self._folder is None or (_PROBE.fullmatch(name) is not None and (self._folder / name).exists())
        self._run.post.answer(message, {"seen": seen})

    def append(self, message: Message) -> None:
        """Append what a rank has recorded; a rank writes for its own endpoints only."""
        member, rank = self._run.roster.members[message.source], message.meta["rank"]
        member.heard_at = self._run.now
        if self._folder is None or rank not in member.endpoints:
            raise RecordError(f"{member} must send records of its own ranks, {member.endpoints}, got those of {rank!r}")
        path = self._folder / file_name(rank)
        try:
            if rank not in self._begun:  # a rank in a lost one's place appends to its file
                mend_last_line(path)
                self._begun.add(rank)
            with path.open("ab") as file:
                file.write(b"".join(part.numpy().tobytes() for part in message.body))
        except OSError as error:
            raise RecordError(
                f"records of rank {rank}, on another host, cannot be written to {path}: {error}"
            ) from error
