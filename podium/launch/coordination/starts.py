"""Processes that start: each has `start_deadline_s` to join and to make its model and data."""

from __future__ import annotations

from podium.errors import DeadlineExceeded, RankFailed
from podium.launch.coordination.context import RunContext
from podium.launch.coordination.losses import Losses
from podium.launch.coordination.members import Start, name_ranks

_TOGETHER_S = 0.5
"""How long the end of a run waits for processes that end at the same moment, so that the error names them all."""


class Starts:
    """Watches processes until they are ready."""

    def __init__(self, run: RunContext, losses: Losses) -> None:
        self._run, self._losses = run, losses

    def ended(self, wait_s: float = 0.0) -> list[tuple[Start, str]]:
        """Processes that ended before they joined, and how."""
        starting = list(self._run.roster.starting.values())
        found = [(start, self._run.owner.how_it_ended(start.rank, wait_s)) for start in starting]
        return [(start, cause) for start, cause in found if cause is not None]

    def lose(self, ended: list[tuple[Start, str]]) -> None:
        """These ended without a message. The run ends if it was to begin with one of them."""
        starting = self._run.roster.starting
        if any(start.kind == "first" and starting.get(start.rank) is start for start, _ in ended):
            self._fail_first()
        for start, cause in ended:
            self._losses.lose_start(start, cause)

    def _fail_first(self) -> None:
        wait_s = _TOGETHER_S / max(1, len(self._run.roster.starting))
        causes = {start.rank: cause for start, cause in self.ended(wait_s) if start.kind == "first"}
        if len(causes) == 1:
            ((rank, cause),) = causes.items()
            raise RankFailed(f"rank {rank} ended before it joined: {cause}")
        listed = "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())
        raise RankFailed(f"{name_ranks(causes)} ended before they joined: {listed}")

    def check(self) -> None:
        self._check_joined()
        self._check_begun()

    def _check_joined(self) -> None:
        limit, now = self._run.rules.start_deadline_s, self._run.now
        late = [start for start in self._run.roster.starting.values() if now - start.since > limit]
        if first := [start.rank for start in late if start.kind == "first"]:
            raise DeadlineExceeded(f"{name_ranks(first)} did not join within {limit:g} s (start_deadline_s)")
        for start in late:
            self._losses.lose_start(start, f"did not join within {limit:g} s (start_deadline_s), and killed")

    def _check_begun(self) -> None:
        limit, now = self._run.rules.start_deadline_s, self._run.now
        late = [m for m in self._run.roster.active() if now - m.start.since > limit and not m.ready]
        if first := [m.rank for m in late if m.start.kind == "first"]:
            raise DeadlineExceeded(
                f"{name_ranks(first)} did not begin within {limit:g} s: still making the model or opening the data; "
                "if that needs longer, raise start_deadline_s"
            )
        for member in late:
            self._losses.kill(member, f"did not begin within {limit:g} s", "start_deadline_s")
