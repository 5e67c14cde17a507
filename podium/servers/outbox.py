"""What one server sends: answers to workers, and messages to other servers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from podium.errors import Lost
from podium.servers.wire.long_settings import fold
from podium.servers.wire.messages import KINDS, Mirror, Seed, encode

if TYPE_CHECKING:
    from podium.comm.base import Communicator, Message


class Outbox:
    """Sends for one server; knows the servers of the present segment."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank = comm, comm.rank
        self.servers: tuple[int, ...] = comm.servers
        self.segment: list[int] | None = None
        """The present segment's name; later segments have larger names. None where the seed has no name."""

    def begin(self, seed: Seed) -> None:
        """A segment begins."""
        self.servers = tuple(seed.servers)
        self.segment = None if seed.segment is None else list(seed.segment)

    @property
    def is_first(self) -> bool:
        """Whether this server holds the cursor and decides for all servers."""
        return self.rank == self.servers[0]

    @property
    def others(self) -> list[int]:
        return [server for server in self.servers if server != self.rank]

    def answer(self, message: Message, facts: Any, body: Sequence[Tensor] = (), more: bool = False) -> None:
        """Reply to a worker or a server; does nothing where it is gone."""
        with contextlib.suppress(Lost):
            self.comm.reply(message, encode(facts), body, more)

    def tell(self, server: int, word: Any) -> None:
        """Send one way; a server that is being replaced misses it, and sends `Hello` when it is restored."""
        with contextlib.suppress(Lost):
            self.send(server, word)

    def send(self, server: int, word: Any, body: Sequence[Tensor] = ()) -> None:
        """Send one way, marked with the present segment; raises `Lost` where the server is being replaced."""
        meta = encode(word._replace(segment=self.segment))
        if isinstance(word, Mirror):
            meta, body = fold(meta, body)
        self.comm.send(server, KINDS[type(word)], meta, body)
