"""Lost servers that are restarted: how often, how long it took, and which workers wait for the new address."""

from __future__ import annotations

from collections.abc import Sequence

from podium.comm.base import Message
from podium.errors import Lost
from podium.launch.coordination.context import RunContext
from podium.launch.coordination.members import Member
from podium.launch.coordination.rules import MOST_REPLACEMENTS


class Replacements:
    """Servers that were lost, and their replacements."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._losses: dict[int, list[float]] = {}
        self._missed: dict[int, float] = {}  # since when each server is gone
        self._served: dict[int, float] = {}  # when each last began to serve
        self._questions: list[Message] = []
        self.latest = 0.0
        """When a replacement last began to serve."""

    @property
    def possible(self) -> bool:
        rules, roster = self._run.rules, self._run.roster
        return rules.replaces_servers and self._run.processes is not None and roster.all_joined

    def replace(self, servers: Sequence[int], cause: str) -> None:
        """Restart these servers in a new process; raises Lost where one was lost too often."""
        processes = self._run.processes
        assert processes is not None, "callers check `possible`"
        for server in servers:
            self._count_loss(server, cause)
        self._run.post.hang_up(servers[0])
        self._run.roster.begin(tuple(servers), "replacement", "server")
        processes.restart_servers(tuple(servers))

    def _count_loss(self, server: int, cause: str) -> None:
        now, window = self._run.now, self._run.rules.deadline_s
        served = self._served.get(server, 0.0)
        times = [t for t in self._losses.get(server, []) if now - t <= window or t > served]
        self._losses[server] = [*times, now]
        self._missed.setdefault(server, now)
        if len(times) >= MOST_REPLACEMENTS:
            raise Lost(
                f"server {server} was lost {len(times) + 1} times, and is not replaced more than "
                f"{MOST_REPLACEMENTS} times in {window:g} s (deadline_s); the last time: {cause}"
            )

    def begun(self, member: Member) -> None:
        """A replacement serves: record how long each of its servers was missing."""
        self.latest = self._run.now
        self._served.update(dict.fromkeys(member.endpoints, self.latest))
        for server in [e for e in member.endpoints if e in self._missed]:
            took_s = self.latest - self._missed.pop(server)
            self._run.post.record("replaced", server=server, took_ns=round(took_s * 1e9))
            self._run.post.tell({"event": "replaced", "server": server, "took_s": took_s})

    def ask(self, message: Message) -> None:
        """A worker cannot reach a server at its old address; the answer is sent once the server has a new one."""
        self._questions.append(message)
        self.answer_questions()

    def answer_questions(self) -> None:
        """Answer all questions that can be answered now."""
        asked = [message for message in self._questions if message.source in self._run.roster.members]
        self._questions = [message for message in asked if not self._answer(message)]

    def _answer(self, message: Message) -> bool:
        """Answer a question if possible; returns whether it was."""
        server, old, roster = message.meta["rank"], message.meta["not"], self._run.roster
        address = roster.present_address(server)
        if server not in roster.servers or not self._run.rules.replaces_servers:
            self._run.post.answer(message, {"lost": f"server {server} is gone, and is not replaced"})
        elif address is not None and address != old:
            self._run.post.answer(message, {"address": address})
        else:
            return False
        return True
