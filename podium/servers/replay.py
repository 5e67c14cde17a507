"""The order in which a server processes its messages: as they arrive, or as in a recorded run.

The order in which servers process draws and pushes decides an asynchronous run; everything else follows from the seed.
Records hold that order, so a run that raced on real machines can be repeated bit by bit in virtual time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, final

from podium.comm.base import DEPARTED, Communicator, Message
from podium.errors import RecordError
from podium.servers.wire.messages import arrival_of

if TYPE_CHECKING:
    from podium.records.recorder import Record

ORDERED = ("draw", "push", "pull", "have")


class Arrivals(ABC):
    """Chooses the next message."""

    @abstractmethod
    def next(self, comm: Communicator, deadline_s: float | None = None) -> Message:
        """Raises `DeadlineExceeded` where none arrives within the deadline; None: the communicator's own."""


@final
class AsTheyCome(Arrivals):
    """First come, first served."""

    def next(self, comm: Communicator, deadline_s: float | None = None) -> Message:
        return comm.recv(deadline_s)


@final
class AsRecorded(Arrivals):
    """Draws and pushes in the order of a recorded run; early messages wait."""

    def __init__(self, records: Iterable[Record], rank: int) -> None:
        self._script = deque(filter(None, (_arrival(r) for r in records if r["rank"] == rank)))
        self._held: list[Message] = []

    def next(self, comm: Communicator, deadline_s: float | None = None) -> Message:
        while True:
            message = self._take_held()
            if message is not None:
                return message
            message = comm.recv(deadline_s)
            if message.kind in ORDERED:
                self._held.append(message)
            elif message.kind == DEPARTED and self._script:  # in the recorded run, workers left only at the end
                source, what, lease, _ = self._script[0]
                raise RecordError(
                    f"replay: the record continues with {what} of rank {source} (lease {lease}), this run does not"
                )
            else:
                return message

    def _take_held(self) -> Message | None:
        if not self._held:
            return None
        if not self._script:
            raise RecordError(f"replay: the record ends before {self._held[0].kind} of rank {self._held[0].source}")
        source, what, lease, part = self._script[0]
        for message in self._held:
            got, unit = arrival_of(message)
            if (message.source, message.kind, unit) == (source, what, part):
                if got != lease:
                    raise RecordError(f"replay: expected lease {lease} of rank {source}, got {got}")
                self._held.remove(message)
                self._script.popleft()
                return message
        return None


def _arrival(row: Record) -> tuple[int, str, int, int] | None:
    """The message that a record stands for: a push that was applied on arrival has only its update's record."""
    if row["kind"] == "arrival":
        return row["source"], row["what"], row["lease"], row["range"]
    if row["kind"] == "update" and "pushes" not in row:
        return row["worker"], "push", row["lease"], row["range"]
    return None
