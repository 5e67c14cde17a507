"""Generations: once all live workers wait for a plan, the coordinator sends the members and whose state to copy."""

from __future__ import annotations

from collections.abc import Iterable

from podium.comm.base import Message, Meta
from podium.errors import Lost
from podium.launch.backend import backend_of
from podium.launch.coordination.context import RunContext
from podium.launch.coordination.members import Member, name_ranks
from podium.launch.coordination.replacements import Replacements
from podium.launch.coordination.scaling import Change, Scaling

_FRUITLESS = 3
"""Regroups of the same members without a step in between, after which the run ends."""


class Regrouping:
    """The present generation, and the plan of the next."""

    def __init__(self, run: RunContext, scaling: Scaling, replacements: Replacements) -> None:
        self._run, self._scaling, self._replacements = run, scaling, replacements
        self.generation = 0
        self.furthest_step = 0
        self.waiting_since: float | None = None
        """When the first worker of the present generation requested a plan."""
        self._fruitless = 0
        self._members: list[int] = []  # of the present generation, once there was a plan
        self._backend = ""
        self._called_for = -1  # the generation whose workers were last called to a plan
        self._closed = False

    def note_step(self, step: int) -> None:
        if step > self.furthest_step:
            self.furthest_step, self._fruitless = step, 0

    def close(self) -> None:
        """Make no more plans: the run ends."""
        self._closed = True

    def ask(self, message: Message) -> None:
        """A worker that lost a peer, or was called to a plan, waits for the plan."""
        member, roster = self._run.roster.members[message.source], self._run.roster
        member.heard_at, member.plan_request = self._run.now, message
        if self.waiting_since is None and member.rank in roster.workers:
            self.waiting_since = member.heard_at
        self._scaling.advance()
        self.settle()
        waits_still = member.plan_request is not None and member.rank in roster.workers
        if waits_still and roster.servers and self._called_for != self.generation:
            # Workers that exchange through servers may train for long before they notice a lost worker.
            self._called_for = self.generation
            self._scaling.call_workers()

    def settle(self) -> None:
        """Send the plan once every live worker waits for it; a change that is due adds the newcomers."""
        live = self._run.roster.live_workers()
        if self._closed or not live or any(member.plan_request is None for member in live):
            return
        change = self._scaling.due
        requests = [member.take_plan_request() for member in live]
        steps = {message.source: int(message.meta["steps_done"]) for message in requests}
        source = self._source(live if change is None else live[: change.workers], steps)
        if change is not None:
            requests += self._make_change(steps[source])
        members = sorted(self._run.roster.workers & {message.source for message in requests})
        self._count_fruitless(members, change)
        self.generation += 1
        plan = {"generation": self.generation, "members": members, "source": source, **self._new_addresses()}
        also = {"change": self._scaling.announced, "backend": self.choose_backend(members)}
        for message in requests:
            self._run.post.answer(message, {**plan, **also})
        took_s = 0.0 if self.waiting_since is None else self._run.now - self.waiting_since
        self.waiting_since = None
        self._run.post.tell({"event": "regroup", **plan, "step": steps[source], "took_s": took_s})
        self._replacements.answer_questions()  # workers may wait for a server that is retired now

    def choose_backend(self, workers: Iterable[int]) -> str:
        """What the workers of this generation exchange tensors on GPUs with; recorded where one has a GPU."""
        gpus = self._run.roster.gpus(workers)
        chosen = backend_of(gpus)
        if any(gpus) and chosen != self._backend:
            self._backend = chosen
            self._run.post.record("backend", backend=chosen, generation=self.generation, gpus=len(set(gpus) - {""}))
        return chosen

    def _source(self, staying: list[Member], steps: dict[int, int]) -> int:
        """The rank whose state all copy: the one with most steps, the lowest among equals."""
        holders = [member.rank for member in staying if steps[member.rank] >= member.inherits_steps]
        if not holders:
            names = name_ranks([member.rank for member in staying], "worker")
            raise Lost(f"all workers that held the state were lost; {names} had not copied it")
        return max(holders, key=lambda rank: (steps[rank], -rank))

    def _make_change(self, steps: int) -> list[Message]:
        """Carry out the change that is due; returns the requests of the newcomers."""
        new = [member for member in self._run.roster.newcomers() if member.role == "worker"]
        self._scaling.carry_out(steps)
        return [member.take_plan_request() for member in new]

    def _new_addresses(self) -> Meta:
        """Servers and addresses that differ from those at the beginning of the run."""
        roster, rules = self._run.roster, self._run.rules
        before = set(range(rules.workers, rules.workers + rules.servers))
        new = sorted(roster.since_start & (roster.workers | roster.servers))
        return {
            "servers": None if roster.servers == before else sorted(roster.servers),
            "addresses": {str(e): roster.addresses[e] for e in new if e in roster.addresses},
        }

    def _count_fruitless(self, members: list[int], change: Change | None) -> None:
        self._fruitless = self._fruitless + 1 if members == self._members and change is None else 0
        self._members = members
        if self._fruitless >= _FRUITLESS:
            raise Lost(f"the workers could not form a group {_FRUITLESS} times in a row; is a link between them cut?")
