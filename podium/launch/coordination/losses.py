"""Lost processes: continue without one, restart it, or end the run with an error that names all that were lost."""

from __future__ import annotations

from typing import NamedTuple

import podium.errors
from podium.comm.base import Message
from podium.errors import CommError, DeadlineExceeded, Lost, PodiumError, RankFailed
from podium.launch.coordination.context import RunContext
from podium.launch.coordination.members import Member, Start
from podium.launch.coordination.regrouping import Regrouping
from podium.launch.coordination.replacements import Replacements
from podium.launch.coordination.scaling import Scaling

_GRACE_S = 2.0
"""How long, beyond a heartbeat, the coordinator looks for the lost rank that a rank's error blames."""
_TOGETHER_S = 0.5
"""How long the end of a run waits for ranks that were lost at the same moment, so that the error names them all."""


class Loss(NamedTuple):
    """A process that the run needed and that is gone."""

    at: float
    member: Member
    cause: str
    advice: str


class Losses:
    """Lost processes, and what the run does about them."""

    def __init__(self, run: RunContext, scaling: Scaling, replacements: Replacements, regrouping: Regrouping) -> None:
        self._run, self._scaling, self._replacements, self._regrouping = run, scaling, replacements, regrouping
        self._all: list[Loss] = []
        self._fatal: Loss | None = None
        self._blame: tuple[float, PodiumError] | None = None  # since when a rank blames an unknown rank, and its error
        self.workers_ended_at: float | None = None

    @property
    def ends_run(self) -> bool:
        """Whether the run is about to end with an error."""
        return self._blame is not None or self._fatal is not None

    def kill(self, member: Member, cause: str, setting: str) -> None:
        """A process took longer than `setting` allows: kill it, so that a stopped one cannot continue later."""
        self._run.owner.kill(member.rank)
        self.lose(member, f"{cause}, and killed", advice(setting))

    def lose(self, member: Member, cause: str, hint: str = "") -> None:
        """A process is gone: continue without it, restart its servers, or end the run."""
        run, roster = self._run, self._run.roster
        if self._is_spare(member.rank):
            self.give_up(member.rank, cause + hint)
            return
        self._tell(member.rank, cause + hint, member.step, role=member.role)
        servers = roster.servers_of(member)
        roster.forget(member.rank)
        for other in roster.active():  # a host that vanished says no goodbye to those that wait for its ranks
            run.post.send(other, "lost", {"ranks": list(member.endpoints)})
        workers_left = any(m.rank in roster.workers and not m.failed for m in roster.members.values())
        bearable = (member.role == "server" or run.rules.survives_loss) and (not servers or self._replacements.possible)
        loss = Loss(run.now, member, cause, hint)
        self._all.append(loss)
        if not bearable or not workers_left or self.ends_run:
            self._fatal = self._fatal or loss
            self._regrouping.close()
            return
        if servers and roster.live_workers():
            self._replacements.replace(servers, cause)
        self._regrouping.settle()

    def lose_start(self, start: Start, cause: str) -> None:
        """A process is gone that was started during the run and has not joined."""
        if self._run.roster.starting.get(start.rank) is not start:
            return  # its last message was read meanwhile
        self.give_up(start.rank, cause)
        if start.kind == "replacement" and self._run.roster.live_workers():
            self._replacements.replace(start.endpoints, cause)

    def give_up(self, rank: int, cause: str = "") -> None:
        """End a process that the run does not need; with a cause, report it as a loss."""
        self._run.owner.kill(rank)
        if cause:
            self._tell(rank, cause, 0)
        self._run.roster.forget(rank)
        self._scaling.drop(rank)
        self._regrouping.settle()

    def fail(self, message: Message) -> None:
        """A rank raised. It would raise again, so the run ends with that error.

        If the error only reports that another rank did not answer, the coordinator first waits for that loss.
        """
        meta, rank = message.meta, message.source
        self._run.post.record("failed", failed=rank, **meta)
        if self._is_spare(rank):
            self.give_up(rank, f"it failed: {meta['message']}")
            return
        error, member = _error_of(message, self._run.owner.where(rank)), self._run.roster.members.get(rank)
        if member is None or not isinstance(error, CommError):
            raise error
        member.failed = True
        if isinstance(error, DeadlineExceeded):
            error = DeadlineExceeded(f"{error}{advice('deadline_s')}")
        self._blame = self._blame or (self._run.now, error)

    def check(self) -> None:
        """End the run if it cannot survive a loss, once all processes that were lost together are known."""
        if self._fatal is not None:
            self._check_fatal(self._fatal)
        elif self._blame is not None:
            since, error = self._blame
            if not self._run.roster.active() or self._run.now - since > self._run.silence_s + _GRACE_S:
                raise error

    def _check_fatal(self, loss: Loss) -> None:
        left = self._run.roster.live_workers()
        if left and self._run.now - loss.at <= _TOGETHER_S:
            return
        step = loss.member.step or self._regrouping.furthest_step  # a server counts no steps
        others = self._others(loss, all_workers=not left)
        raise Lost(f"{loss.member} was lost: {loss.cause}{others}; last heard of at step {step}{loss.advice}")

    def _others(self, named: Loss, *, all_workers: bool) -> str:
        """The other processes that were lost, and how, as text."""
        by_cause: dict[str, list[str]] = {}
        for loss in self._all:
            if all_workers or (loss.at > named.at - _TOGETHER_S and loss is not named):
                by_cause.setdefault(loss.cause, []).append(str(loss.member))
        listed = "; ".join(f"{', '.join(names)}: {cause}" for cause, names in by_cause.items())
        if not all_workers:
            return f"; so was {listed}" if listed else ""
        return f"; all workers are lost ({listed})" if len(self._all) > 1 else ""

    def _is_spare(self, rank: int) -> bool:
        """Whether the run does not need this process: not yet, or not any more."""
        member, start = self._run.roster.members.get(rank), self._run.roster.starting.get(rank)
        if member is None:
            return start is not None and start.kind == "newcomer"
        unneeded = self.workers_ended_at is not None and member.start.kind != "first"
        return member.standing != "settled" or unneeded

    def _tell(self, rank: int, cause: str, step: int, **facts: str) -> None:
        """`facts`: the role of a rank that took part."""
        generation = self._regrouping.generation
        self._run.post.record("lost", lost=rank, cause=cause, generation=generation, step=step, **facts)
        self._run.post.tell({"event": "lost", "rank": rank, "cause": cause, "step": step})


def advice(setting: str) -> str:
    return f"; if it only needs longer, raise {setting}"


def _error_of(message: Message, host: str = "") -> PodiumError:
    """The error that a rank reports, with its rank, its host and the line of the user's code that raised it."""
    meta, who = message.meta, f"rank {message.source}"
    text, place = meta["message"].removeprefix(f"{who}: "), f"\n  at {meta['place']}" if meta.get("place") else ""
    error = _class_of(meta["error"])(f"{who}{f' on host {host}' if host else ''}: {text}{place}")
    error.exit_code = meta.get("exit_code", error.exit_code)
    return error


def _class_of(name: str) -> type[PodiumError]:
    """The Podium error class of that name, or its nearest base whose constructor takes a message alone."""
    cls = getattr(podium.errors, name, None)
    if not isinstance(cls, type) or not issubclass(cls, PodiumError):
        return RankFailed
    return next(c for c in cls.__mro__ if issubclass(c, PodiumError) and c.__init__ is Exception.__init__)
