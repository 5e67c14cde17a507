"""Pushes that wait for a decision: their units here and, on the first server, which servers have all units."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING

from podium.servers.applied import Span, span_of_lease

if TYPE_CHECKING:
    from podium.servers.pushes.answers import PushRequest
    from podium.servers.wire.messages import Key, Push


class PushInbox:
    """Units of pushes, by push."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._parts: dict[Key, dict[int, PushRequest]] = defaultdict(dict)
        self._have: dict[Key, set[int]] = defaultdict(set)

    def __contains__(self, key: Key) -> bool:
        return key in self._parts

    def add(self, request: PushRequest) -> bool:
        """A unit has arrived; returns whether its push is complete."""
        key = (request.message.source, request.push.lease)
        self._parts[key][request.push.unit] = request
        return self.is_complete(key)

    def is_complete(self, key: Key) -> bool:
        return len(self._parts.get(key, ())) == self._units

    def complete(self) -> list[Key]:
        """Pushes of which all units have arrived."""
        return [key for key in self._parts if self.is_complete(key)]

    def units(self, key: Key) -> list[PushRequest]:
        """The units of a push, in order."""
        return [request for _, request in sorted(self._parts[key].items())]

    def last(self, key: Key) -> Push:
        """The last unit of a push, which carries the step's loss, votes and weight."""
        return next(request.push for request in self._parts[key].values() if request.push.last)

    def span(self, key: Key) -> Span:
        return span_of_lease(key[1], self.last(key).size)

    def take(self, key: Key) -> list[PushRequest]:
        """Remove a push and return its units; none where it is not here."""
        found = self.units(key) if key in self._parts else []
        self._parts.pop(key, None)
        self._have.pop(key, None)
        return found

    def take_all(self) -> list[PushRequest]:
        found = [request for parts in self._parts.values() for request in parts.values()]
        self._parts.clear()
        return found

    def forget(self, worker: int, keep: Container[int]) -> None:
        """Drop a worker's pushes, except those over these leases."""
        for key in [key for key in self._parts if key[0] == worker and key[1] not in keep]:
            del self._parts[key]

    # On the first server.

    def has(self, key: Key, server: int) -> set[int]:
        """A server has the whole push; returns all servers that have."""
        self._have[key].add(server)
        return self._have[key]

    def all_on(self, server: int, keys: Iterable[Key]) -> bool:
        """Whether a server has all units of all these pushes."""
        return all(server in self._have[key] for key in keys)

    def lost_server(self, server: int) -> None:
        """A server has lost its pushes, until the workers push them again."""
        for have in self._have.values():
            have.discard(server)

    def forget_servers(self, worker: int, keep: Container[int]) -> None:
        """Forget which servers have a worker's pushes, except those over these leases."""
        for key in [key for key in self._have if key[0] == worker and key[1] not in keep]:
            del self._have[key]

    @property
    def sources(self) -> set[int]:
        """Workers with a push that waits here."""
        return {source for source, _ in self._parts}
