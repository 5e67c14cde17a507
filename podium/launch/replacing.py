"""Lost servers that are started anew: how often, how long it took, and who asked where they are now."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from podium.comm.base import Message, Meta
from podium.errors import Lost
from podium.launch.roster import Member, Roster, Rules

MOST_REPLACEMENTS = 3
"""Of one server, within `deadline_s` or before a replacement came to serve."""


class Replacements:
    """What the coordinator knows of servers that were lost and of those that take their places."""

    def __init__(self, rules: Rules, roster: Roster, answer: Callable[[Message, Meta], None]) -> None:
        self._rules, self._roster, self._answer = rules, roster, answer
        self._losses: dict[int, list[float]] = {}
        self._missed: dict[int, float] = {}  # since when each server is not there
        self._served: dict[int, float] = {}  # when each last began to serve
        self._questions: list[Message] = []
        self.latest = 0.0
        """When a replacement last began to serve."""

    def lose(self, servers: Sequence[int], cause: str) -> None:
        """Note the loss; raises where it was one too many."""
        now, window = time.monotonic(), self._rules.deadline_s
        for server in servers:
            served = self._served.get(server, 0.0)
            times = [t for t in self._losses.get(server, []) if now - t <= window or t > served]
            self._losses[server] = [*times, now]
            self._missed.setdefault(server, now)
            if len(times) >= MOST_REPLACEMENTS:
                raise Lost(
                    f"server {server} was lost {len(times) + 1} times, and is not replaced more than "
                    f"{MOST_REPLACEMENTS} times in {window:g} s (deadline_s); the last time: {cause}"
                )

    def begun(self, member: Member) -> dict[int, float]:
        """A replacement serves: how many seconds each of its servers was missed."""
        self.latest = time.monotonic()
        self._served.update(dict.fromkeys(member.endpoints, self.latest))
        return {e: self.latest - self._missed.pop(e) for e in member.endpoints if e in self._missed}

    def ask(self, message: Message) -> None:
        """Somebody cannot reach a server where it was; the answer comes once it is elsewhere."""
        self._questions.append(message)
        self.tell()

    def tell(self) -> None:
        """Answer those questions that can be answered by now."""
        for message in list(self._questions):
            server, old = message.meta["rank"], message.meta["not"]
            now = self._roster.present_address(server)
            if server not in self._roster.servers or not self._rules.replaces_servers:
                self._settle(message, {"lost": f"server {server} is gone, and is not replaced"})
            elif now is not None and now != old:
                self._settle(message, {"address": now})

    def forget(self, rank: int) -> None:
        """Nobody waits for an answer there any more."""
        self._questions = [message for message in self._questions if message.source != rank]

    def _settle(self, message: Message, meta: Meta) -> None:
        self._questions.remove(message)
        self._answer(message, meta)
