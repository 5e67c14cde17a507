"""The coordinator's data on a process of a run: a `Start`, then, once it has joined, a `Member`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from podium.comm.base import BUSY_DEADLINES, Message, Meta
from podium.launch.coordination.rules import Role

Kind = Literal["first", "replacement", "newcomer"]
"""Why a process was started: with the run, for a lost server, or because more ranks were requested."""


@dataclass
class Start:
    """A process that was started and has not joined."""

    endpoints: tuple[int, ...]
    kind: Kind
    role: Role
    """The role of its first endpoint; the other endpoints are servers."""
    since: float

    @property
    def rank(self) -> int:
        """The number of the process: its first endpoint."""
        return self.endpoints[0]


@dataclass(eq=False)
class Member:
    """A process that has joined. Times are seconds of the coordinator's clock."""

    rank: int
    endpoints: tuple[int, ...]
    start: Start
    heard_at: float
    gpu: str = ""
    """Names the worker's own GPU; empty where it has none."""
    standing: Literal["settled", "newcomer", "retired"] = "settled"
    busy_at: float = 0.0
    """When it last reported that it was busy with something that may take long."""
    begun: bool = False
    plan_request: Message | None = None
    """The call that waits for the next plan."""
    step: int = 0
    stepped_at: float = 0.0
    """When a heartbeat first reported this step."""
    finished: bool = False
    failed: bool = False
    inherits_steps: int = 0
    """Steps of the state that it must copy. While it has fewer, it has not copied the state yet."""
    retired_at: float = 0.0

    @property
    def role(self) -> Role:
        return self.start.role

    @property
    def active(self) -> bool:
        return not self.finished and not self.failed

    @property
    def ready(self) -> bool:
        """Whether it has made its model and data, and waits only for other ranks."""
        needs_plan = self.standing == "newcomer" and self.role == "worker"
        return self.begun and (self.plan_request is not None or not needs_plan)

    def beat(self, now: float, meta: Meta) -> None:
        """Process a heartbeat."""
        self.heard_at = now
        if meta.get("busy"):
            self.busy_at = now
        facts = meta.get("progress")
        if facts and facts["step"] != self.step:
            self.step, self.stepped_at = facts["step"], now

    def settle(self, inherits_steps: int) -> None:
        """The next plan names this newcomer."""
        self.standing, self.inherits_steps = "settled", inherits_steps

    def retire(self, now: float) -> None:
        self.standing, self.retired_at = "retired", now

    def take_plan_request(self) -> Message:
        request, self.plan_request = self.plan_request, None
        assert request is not None
        return request

    def is_late(self, now: float, since: float, limit: float) -> bool:
        """Whether ranks that wait for it since `since` have waited longer than `limit`; its busy time is extra."""
        busy_until = min(self.busy_at, since + (BUSY_DEADLINES - 1) * limit)
        return now - max(since, busy_until) > limit

    def __str__(self) -> str:
        """`worker 0 with server 2`."""
        if self.role == "server":
            return name_ranks(self.endpoints, "server")
        beside = [e for e in self.endpoints if e != self.rank]
        return f"worker {self.rank}" + (f" with {name_ranks(beside, 'server')}" if beside else "")


def name_ranks(ranks: Iterable[int], what: str = "rank") -> str:
    """`rank 2`, or `ranks 2, 3`."""
    numbers = list(ranks)
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
