"""What the coordinator sends: messages to ranks, lines for the records, events for the launcher."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, final

from torch import Tensor

from podium.comm.base import Message, Meta
from podium.comm.clocks import Clock
from podium.comm.real.channel import Channel
from podium.comm.real.sockets import Address
from podium.errors import CommError, DeadlineExceeded, RecordError
from podium.launch.coordination.members import Member
from podium.launch.coordination.owner import Owner
from podium.launch.event import Event
from podium.records.recorder import Recorder

_POLL_S = 0.05


@final
class Post:
    """The channel to the ranks, the launcher's records and its event handler."""

    def __init__(self, channel: Channel, recorder: Recorder, owner: Owner, clock: Clock) -> None:
        self._channel, self._recorder, self._owner, self._clock = channel, recorder, owner, clock

    @property
    def address(self) -> Address:
        return self._channel.address

    def receive(self, wait_s: float = _POLL_S) -> Message | None:
        with contextlib.suppress(DeadlineExceeded):
            return self._channel.recv(wait_s)
        return None

    def send(self, member: Member, kind: str, meta: Meta | None = None) -> None:
        with contextlib.suppress(CommError):  # the rank has just left: its departure is the next message
            self._channel.send(member.rank, kind, meta or {})

    def answer(self, message: Message, meta: Meta, body: Sequence[Tensor] = ()) -> None:
        with contextlib.suppress(CommError):  # the rank has just left: its departure is the next message
            self._channel.reply(message, meta, body)

    def hang_up(self, rank: int) -> None:
        """Close the connection of a lost process: if its host vanished, it still looks alive, and keeps the process of
        the same number that replaces it from connecting."""
        self._channel.hang_up([rank])

    def record(self, kind: str, **fields: Any) -> None:
        with contextlib.suppress(RecordError):  # a full disk must not hide what went wrong
            self._recorder.write(kind, self._clock.now_ns(), **fields)

    def tell(self, event: Event) -> None:
        self._owner.hear(event)

    def wait_for_departures(self, limit_s: float) -> None:
        """Wait until all ranks have closed their connections, at most this long."""
        until = self._clock.now_s() + limit_s
        while self._channel.peers and self._clock.now_s() < until:
            self.receive()

    def close(self) -> None:
        self._channel.close()
