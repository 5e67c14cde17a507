"""Runs the phases of a run: which phase it is in, and what ends it.

The first worker decides: after each step and validation it evaluates the rule that ends the phase, records its value,
and votes for the switch with its next exchange once the rule fires. Other rules are evaluated beside it, so that the
records show when each of them would have fired.

What carries over: parameters, the optimizer's moments (unless `keep_moments=false`), buffers, generators, residuals,
the position in the data, the schedule and the count of steps. A strategy's own state (an outer momentum, a centre) ends
with it, unless a strategy of the same class follows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from podium.comm.broadcast_bytes import share_bytes
from podium.engine.build import fitted
from podium.errors import ConfigError, PodiumError
from podium.exchange.packing import Packing, make_packing
from podium.exchange.residuals import convert_residuals, scale_of
from podium.records.recorder import Recorder
from podium.strategies.base import Strategy
from podium.strategies.phases import Phase, Phased, phases_of
from podium.strategies.triggers import WATCHED, format_trigger, make_trigger
from podium.strategies.triggers.base import Course, Memory, Reading, Seen, Trigger
from podium.strategies.triggers.fixed import Fixed

if TYPE_CHECKING:
    from podium.engine.worker import Worker


COMPARE_EVERY = 10
"""Steps between two comparisons of the workers' speeds, where a rule needs them."""


@dataclass
class Watched:
    """A rule that is not in force, and its memory."""

    text: str
    rule: Trigger
    memory: Memory = field(default_factory=dict)
    fired: bool = False


class Ending(NamedTuple):
    """Why a phase ended."""

    rule: str
    why: str
    value: float | None = None


class Leaving(NamedTuple):
    """A switch under way: one phase has ended, the next has not begun; and what it cost this worker so far."""

    before: str
    after: str
    ending: Ending
    drain_ns: int
    home_ns: int
    left: int  # clock time at which the worker held the whole state again
    leftovers: str  # what became of the codec's residuals


class PhaseRunner:
    """Which phase a run is in, and what ends it."""

    def __init__(
        self, strategy: Strategy[Any], worker: Worker, course: Course, recorder: Recorder, codec: str, packing: Packing
    ) -> None:
        """`codec` and `packing` are the run's own: phases may have others."""
        self._plan, self.worker, self.course, self.recorder = strategy, worker, course, recorder
        self._codec, self._packing = codec, packing
        self.turn = 0
        """How many phases have ended."""
        self._memory: Memory = {}
        self._packed_by = codec
        self.ending: Ending | None = None
        """Why the present phase ends, once the rule has fired."""
        self.leaving: Leaving | None = None
        self._watched = [Watched(text, make_trigger(text)) for text in WATCHED] if self.is_led else []
        self.times: Mapping[int, float] = {}
        """Seconds of computing per sample, by worker, where they were just compared."""
        self._step_s = 0.0
        for phase in phases_of(strategy):
            if phase.codec is not None:
                self._fitted(phase.codec)  # raise now, not in mid-run
        self._prepare()

    def follow(self, course: Course) -> None:
        """Use this course from here on; the start of the present phase stays."""
        self.course = course._replace(began=self.course.began, again=self.course.again)

    @property
    def is_led(self) -> bool:
        """Whether there is more than one phase."""
        return isinstance(self._plan, Phased)

    @property
    def watched(self) -> list[str]:
        """The rules that are evaluated besides the one in force."""
        return [watched.text for watched in self._watched]

    @property
    def phase(self) -> Phase:
        phases = phases_of(self._plan)
        return phases[self.turn % len(phases)]

    @property
    def strategy(self) -> Strategy[Any]:
        """The present phase's strategy."""
        return self.phase.strategy

    @property
    def horizon(self) -> int:
        """The sample position at which the present phase ends at the latest."""
        rule, course = self.phase.until, self.course
        if rule is None:
            return course.end
        # Where phases repeat, at least one global step each, or they would switch for ever without a step.
        least = course.position_of(course.step_at(course.began) + 1) if course.again else 0
        return min(course.end, max(least, rule.horizon(course)))

    @property
    def is_over(self) -> bool:
        """Whether the next phase is due: the same answer on all workers."""
        if self.phase.until is None or self.worker.position >= self.course.end:
            return False
        return self.worker.votes.agreed.switch or self.worker.position >= self.horizon

    @property
    def compares_times(self) -> bool:
        """Whether workers' speeds must be compared in this phase."""
        return self.phase.until is not None and self.phase.until.needs_times

    @property
    def _rule(self) -> Trigger | None:
        """The trigger that ends the present phase, with open settings fitted to the run's budget."""
        until = self.phase.until
        return None if until is None else until.fitted(self.course)

    # Judging, on the first worker.

    def saw_step(self, loss: float, step_s: float) -> None:
        """A step is done; `loss` is this worker's own."""
        worker, self._step_s = self.worker, step_s
        self.times = self._compare_times()
        meter = worker.gradients.noise
        shared = loss if worker.votes.mean_loss is None else worker.votes.mean_loss
        self._judge(Seen(self.course, worker.position, loss=shared, noise=None if meter is None else meter.scale))

    def saw_validation(self, loss: float, metrics: Mapping[str, float]) -> None:
        self._judge(Seen(self.course, self.worker.position, validated=loss, metrics=metrics))

    def _compare_times(self) -> Mapping[int, float]:
        """Seconds of computing per sample, by worker, every few steps where a rule needs it. Collective."""
        worker, strategy = self.worker, self.strategy
        if not self.compares_times:
            return {}
        if strategy.cadence.by_leases:
            return worker.gradients.times.take_told()
        due = worker.round.steps == 0 if strategy.cadence.by_rounds else worker.steps_done % COMPARE_EVERY == 0
        return worker.gradients.times.compare(worker.comm) if due else {}

    def _judge(self, seen: Seen) -> None:
        worker = self.worker
        if not self.is_led or worker.comm.index != 0:
            return
        if self.ending is not None:
            worker.votes.request(switch=True)  # also after a resume, or after the worker that voted was lost
        rate = float(worker.optimizer.param_groups[0]["lr"])
        seen = seen._replace(rate=rate, times=self.times, step_s=self._step_s)
        for watched in self._watched:
            reading = None if watched.fired else _ask(watched.rule, seen, watched.memory)
            if reading is not None and (reading.fires or seen.validated is not None):
                watched.fired = reading.fires
                self._record(watched.text, reading, seen, in_force=False)
        rule = self._rule
        if rule is None or isinstance(rule, Fixed) or self.ending is not None:
            return
        reading = _ask(rule, seen, self._memory)
        if reading is not None:
            self._record(format_trigger(rule), reading, seen, in_force=True)
            if reading.fires:
                self.ending = Ending(format_trigger(rule), reading.why, reading.value)
                worker.votes.request(switch=True)

    def _record(self, rule: str, reading: Reading, seen: Seen, in_force: bool) -> None:
        self.recorder.write(
            "trigger",
            self.worker.comm.clock.now_ns(),
            rule=rule,
            in_force=in_force,
            phase=self.turn,
            value=reading.value if math.isfinite(reading.value) else None,
            threshold=reading.threshold,
            fires=reading.fires,
            why=reading.why,
            step=self.course.step_at(seen.position),
            epoch=seen.epoch,
            position=seen.position,
        )

    # From one phase to the next.

    def advance(self, drain_ns: int = 0, home_ns: int = 0) -> None:
        """Prepare the worker for the next phase, after the strategy's `finish`, which took this long."""
        left, before, ending = self.worker.comm.clock.now_ns(), self.phase, self.ending or self._ending_at_horizon()
        scale = scale_of(self.strategy, self.worker)
        self.turn += 1
        self.course = self.course._replace(began=self.worker.position, again=self.turn >= len(phases_of(self._plan)))
        self._memory, self.ending = {}, None
        self.worker.votes.switched()
        if isinstance(self._plan, Phased) and not self._plan.keep_moments:
            self.worker.replica.load_optimizer_state({})
        leftovers = convert_residuals(self.worker, scale, scale_of(self.strategy, self.worker))
        self._settle_in(before.strategy)
        self.leaving = Leaving(before.text, self.phase.text, ending, drain_ns, home_ns, left, leftovers)

    def has_begun(self, began: int) -> None:
        """The strategy's `init`, which began at `began`, is done: after a switch, record why and at what cost."""
        if self.leaving is None:
            return
        leaving, self.leaving, worker, now = self.leaving, None, self.worker, self.worker.comm.clock.now_ns()
        self.recorder.write(
            "switch",
            now,
            before=leaving.before,
            after=leaving.after,
            rule=leaving.ending.rule,
            why=leaving.ending.why,
            value=leaving.ending.value,
            step=self.course.step_at(worker.position),
            epoch=worker.position / self.course.samples,
            position=worker.position,
            drain_ns=leaving.drain_ns,
            home_ns=leaving.home_ns,
            leftovers=leaving.leftovers,
            hand_over_ns=began - leaving.left,
            begin_ns=now - began,
        )

    def _ending_at_horizon(self) -> Ending:
        rule = self._rule
        assert rule is not None
        if isinstance(rule, Fixed):
            return Ending(format_trigger(rule), rule.reached)
        if self.worker.position < rule.horizon(self.course):
            return Ending(format_trigger(rule), "the first worker's rule fired")
        return Ending(format_trigger(rule), f"{rule.latest:.0%} of the budget is used: the rule has not fired")

    def _settle_in(self, before: Strategy[Any]) -> None:
        worker, strategy = self.worker, self.strategy
        if type(before) is not type(strategy):
            worker.strategy_state.clear()
        step = self.course.step_at(worker.position)
        if not strategy.cadence.by_leases:
            worker.progress.count_from(step)  # asynchronous workers have counted their own steps
        worker.replica.follow_schedule(step)
        worker.leases.clear()
        worker.votes.set_mean_loss(None)
        self._prepare()

    def _prepare(self) -> None:
        """Set the worker's codec and measurements for the phase."""
        worker, phase = self.worker, self.phase
        codec = phase.codec or self._codec
        if codec != self._packed_by:
            self._pack_by(codec)
            self._packed_by = codec
        worker.gradients.times.send_to_servers(self.compares_times)
        measures = phase.until is not None and phase.until.needs_noise and worker.comm.index == 0
        worker.gradients.measure_noise(measures)

    def _pack_by(self, codec: str) -> None:
        """Use this codec from here on; servers get its name, where it is not the run's own codec."""
        replica, own = self.worker.replica, codec == self._codec
        replica.reclaim_momentum()  # first: another codec reads the optimizer's own settings
        packing = self._packing if own else self._fitted(codec)
        self.worker.sender.use(packing, None if own else codec)
        replica.lend_momentum(packing.codec)

    def _fitted(self, codec: str) -> Packing:
        return fitted(make_packing(codec), self.worker.optimizer)

    # State, for checkpoints and for workers that regroup.

    def state(self) -> dict[str, Any]:
        return {
            "plan": [phase.text for phase in phases_of(self._plan)],
            "turn": self.turn,
            "began": self.course.began,
            "memory": self._as_json(),
            "ending": None if self.ending is None else list(self.ending),
            "watched": json.dumps({w.text: [w.memory, w.fired] for w in self._watched}),
        }

    def _as_json(self) -> str:
        try:
            return json.dumps(self._memory)
        except TypeError as error:
            raise ConfigError(
                f"trigger {self.phase.until}: what it remembers must be plain JSON values: {error}"
            ) from error

    def starts_over(self, state: Mapping[str, Any]) -> str:
        """A warning where a checkpoint was made with other phases; empty where it was not."""
        before, now = list(state["plan"]), [phase.text for phase in phases_of(self._plan)]
        if before == now or max(len(before), len(now)) == 1:
            return ""
        phase = min(int(state["turn"]), len(before) - 1) + 1
        return (
            f"was made in phase {phase} of '{' | '.join(before)}'; this run has the phases '{' | '.join(now)}' and "
            "begins with its first"
        )

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue in the phase of `state`; a run with other phases begins with its first."""
        if list(state["plan"]) != [phase.text for phase in phases_of(self._plan)]:
            self.course = self.course._replace(began=self.worker.position)
            return
        moved = self.turn != state["turn"]
        if state["turn"] < self.turn:
            self.leaving = None  # the source has not left that phase
        again = state["turn"] >= len(phases_of(self._plan))
        self.turn, self.course = state["turn"], self.course._replace(began=state["began"], again=again)
        self._memory = json.loads(state["memory"])
        seen = json.loads(state["watched"])
        for watched in self._watched:
            watched.memory, watched.fired = seen.get(watched.text, ({}, False))
        ending = state.get("ending")
        self.ending = None if ending is None else Ending(*ending)
        if moved:
            self.worker.votes.switched()
            self._prepare()

    def share(self) -> None:
        """Copy the first worker's state to all, so that any of them can judge in its place. Collective."""
        comm = self.worker.comm
        mine = json.dumps(self.state()).encode() if comm.index == 0 else b""
        told = share_bytes(comm, comm.workers[0], mine)
        if comm.index != 0:
            self.load_state(json.loads(told))


def _ask(rule: Trigger, seen: Seen, memory: Memory) -> Reading | None:
    """A rule's reading; a user's own rule may raise anything."""
    try:
        return rule.judge(seen, memory)
    except PodiumError:
        raise
    except Exception as error:
        step = seen.course.step_at(seen.position)
        raise ConfigError(f"trigger {rule} raised {type(error).__name__} at step {step}: {error}") from error
