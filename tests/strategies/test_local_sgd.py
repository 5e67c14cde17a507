"""Local SGD: against all-reduce, against replicas stepped by hand, and with unequal numbers of steps.

What holds for every strategy with rounds is in `RoundsContract`, which the tests of the others use too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from podium.comm.base import Communicator
from podium.config import RunConfig
from podium.data.order import GlobalOrder, share_of
from podium.engine.build import Job
from podium.engine.checkpoint import folder_for
from podium.engine.feed import make_feed, parts_from, plan_round
from podium.engine.recovery import share_from_first
from podium.engine.training import Training
from podium.errors import ConfigError
from podium.launch.clusters.description import Cluster, Node
from podium.records.recorder import Record, Recorder
from podium.strategies import STRATEGIES, find_strategy
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.strategies.local_sgd import LOSSES, LocalSGD
from podium.strategies.pace import Pace
from podium.task import Task
from podium.testing.faults import EPOCHS, SAMPLES, Faults
from podium.testing.strategies import BetweenRoundsContract, OneWorkerContract, RoundsContract
from podium.testing.toys import (
    BATCH,
    Trained,
    Uncontrolled,
    assert_close,
    assert_same_bits,
    halve_every_third,
    samples_used,
    toy,
    train,
    train_in,
    train_plainly,
)
from podium.testing.worlds import Memory, Virtual
from tests.integration.runs import records_of
from tests.integration.runs import train as train_faulty

UNEVEN = Cluster(
    nodes=tuple(Node(name=f"n{i}", speed=speed, up_mbit=1000, down_mbit=1000) for i, speed in enumerate((4, 1, 1))),
    seconds_per_sample=1e-2,
)


class Replicas:
    """Plain PyTorch replicas, each trained on its share of every global step."""

    def __init__(self, task: Task, workers: int, shares: Sequence[float] | None = None) -> None:
        self.task, self.shares = task, shares or [1.0] * workers
        self.data = task.data().train
        self.order, self.position = GlobalOrder(len(self.data), 0), 0
        self.models, self.optimizers, self.samples = [], [], [0] * workers
        for _ in range(workers):
            torch.manual_seed(0)
            self.models.append(task.model())
            self.optimizers.append(task.optimizer(self.models[-1]))

    @property
    def is_over(self) -> bool:
        return self.position >= self.task.epochs * len(self.data)

    def step(self) -> None:
        whole = self.order.slice_at(self.position, self.task.batch_size)
        for i, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            mine = share_of(whole, self.shares, i)
            if mine.count:
                x, y = self.data.gather(self.order.indices(mine), self.order.keys(mine))
                optimizer.zero_grad()
                self.task.loss(model(x), y).backward()
                optimizer.step()
                self.samples[i] += mine.count
        self.position += whole.count

    def take_weights(self) -> list[float]:
        """Each one's part of the samples since this was last asked."""
        counts, self.samples = self.samples, [0] * len(self.samples)
        return [count / sum(counts) for count in counts]

    def flats(self) -> list[Tensor]:
        return [parameters_to_vector(model.parameters()).detach().clone() for model in self.models]

    def put(self, i: int, flat: Tensor) -> None:
        vector_to_parameters(flat.clone(), self.models[i].parameters())

    def mean(self) -> Tensor:
        return sum((w * flat for w, flat in zip(self.take_weights(), self.flats(), strict=True)), torch.zeros(()))

    def put_all(self, flat: Tensor) -> None:
        for i in range(len(self.models)):
            self.put(i, flat)


def flat_of(trained: Trained) -> Tensor:
    return torch.cat([value.reshape(-1) for value in trained.state.values()])


class TestLocalSGD(RoundsContract, BetweenRoundsContract, OneWorkerContract):
    period = 4

    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return LocalSGD(period=4)


class TestWithAllAveraged(RoundsContract):
    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return LocalSGD(period=2, average="parameters,moments,buffers", adapt="loss")


class TestWithUnequalSteps(RoundsContract, OneWorkerContract):
    @pytest.fixture
    def for_two_workers(self) -> Strategy[Any]:
        return LocalSGD(period=2, steps="2,1")

    @pytest.fixture
    def strategy(self, request: pytest.FixtureRequest) -> Strategy[Any]:
        alone = request.function.__name__ in vars(OneWorkerContract) and "nobody_uses" not in request.function.__name__
        return LocalSGD(period=2, steps="2" if alone else "2,1,1")


class TestAgainstAllReduce:
    @pytest.mark.parametrize(("workers", "steps"), [(2, "equal"), (3, "equal"), (2, "1,1"), (3, "1,1,1")])
    def test_a_period_of_one_with_plain_sgd_is_all_reduce(self, workers: int, steps: str) -> None:
        task = toy(optimizer="sgd", schedule=halve_every_third)
        local = train(task, LocalSGD(period=1, steps=steps), workers)
        assert_close(local[0].state, train(task, AllReduce(), workers)[0].state)
        assert_close(local[0].state, train_plainly(task).state)

    @pytest.mark.parametrize("optimizer", ["momentum", "nesterov"])
    def test_with_momentum_it_is_where_moments_are_averaged(self, optimizer: str) -> None:
        task = toy(optimizer=optimizer)
        reduced = train(task, AllReduce(), 3)[0]
        local = train(task, LocalSGD(period=1, average="parameters+moments"), 3)[0]
        assert_close(local.state, reduced.state)
        for name, state in reduced.optimizer.items():
            assert_close(local.optimizer[name], state)
        apart = train(task, LocalSGD(period=1), 3)[0]
        assert (flat_of(apart) - flat_of(reduced)).abs().max() > 1e-4, "it would not matter, and this shows nothing"

    @pytest.mark.parametrize("shares", [(5, 1, 1, 3), (1, 0, 1), (0, 1)])
    def test_uneven_shares_too(self, shares: tuple[float, ...]) -> None:
        task = toy(optimizer="sgd")
        assert_close(train(task, LocalSGD(period=1), len(shares), shares=shares)[0].state, train_plainly(task).state)

    def test_an_epoch_whose_last_step_leaves_some_without_samples_too(self) -> None:
        task = toy(optimizer="sgd", samples=25)
        assert_close(train(task, LocalSGD(period=1), 3)[0].state, train_plainly(task).state)


@pytest.mark.parametrize(("period", "shares"), [(3, None), (4, (2.0, 1.0, 1.0)), (5, (1.0, 0.0, 3.0))])
def test_it_is_the_mean_of_replicas_by_their_samples(period: int, shares: tuple[float, ...] | None) -> None:
    task = toy(optimizer="momentum", samples=37)
    by_hand, steps = Replicas(task, 3, shares), 0
    while not by_hand.is_over:
        by_hand.step()
        steps += 1
        if steps % period == 0 or by_hand.is_over:
            by_hand.put_all(by_hand.mean())
    trained = train(task, LocalSGD(period=period), 3, shares=shares)
    torch.testing.assert_close(flat_of(trained[0]), by_hand.flats()[0], rtol=1e-5, atol=2e-6)


def exchanges(trained: Trained) -> list[int]:
    """At which of its steps a worker has sent something."""
    steps = [row for row in trained.records if row["kind"] == "step"]
    return [i + 1 for i, row in enumerate(steps) if row["sent"] > 0]


def falling(optimizer: Optimizer, _total: int) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1.0 if step < 6 else 0.25)


class TestPeriod:
    def test_it_doubles_over_the_warm_up(self) -> None:
        trained = train(toy(epochs=8), LocalSGD(period=4, warm_up=8), 2)
        assert exchanges(trained[0]) == [1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32]

    def test_by_rate_it_is_the_square_of_alpha_over_the_rate_and_never_below_the_period(self) -> None:
        task = toy(optimizer="sgd", schedule=falling, epochs=5)  # rates 0.2, then 0.05
        trained = train(task, LocalSGD(period=2, adapt="rate", alpha=0.15), 2)
        assert exchanges(trained[0]) == [2, 4, 6, 15]
        assert math.floor((0.15 / 0.05) ** 2 + 1e-9) == 9

    def test_a_rate_of_zero_ends_no_round(self) -> None:
        def ends(optimizer: Optimizer, _total: int) -> LRScheduler:
            return LambdaLR(optimizer, lambda step: float(step < 4))

        assert exchanges(train(toy(schedule=ends), LocalSGD(period=2, adapt="rate"), 2)[0]) == [2, 4]

    def test_by_loss_it_shrinks_with_the_square_root(self) -> None:
        trained = train(toy(epochs=12, optimizer="adamw"), LocalSGD(period=6, adapt="loss"), 2)
        met = [0, *exchanges(trained[0])]
        lengths = [b - a for a, b in pairwise(met)]
        rows = [[row for row in worker.records if row["kind"] == "step"] for worker in trained]
        means = []
        for a, b in pairwise(met):
            part = [(row["samples"], row["loss"]) for worker in rows for row in worker[a:b]]
            means.append(sum(n * loss for n, loss in part) / sum(n for n, _ in part))
        expected = [6] + [max(1, min(6, math.ceil(6 * math.sqrt(mean / means[0])))) for mean in means[:-1]]
        assert lengths == expected
        assert lengths[-1] < 6

    def test_the_first_loss_survives_a_checkpoint(self, tmp_path: Path) -> None:
        strategy, task = LocalSGD(period=4, adapt="loss"), toy(epochs=6, optimizer="adamw")
        train(task, strategy, 2, run_dir=tmp_path, checkpoint_every=8, keep_checkpoints=10)
        kept: list[Tensor] = []
        for step in (8, 16, 24):
            resumed = partial(losses_of_resumed, task=task, strategy=strategy, resume=str(folder_for(tmp_path, step)))
            kept.append(Memory().run(resumed, 2)[0])
        assert len({float(first) for first, _ in kept}) == 1
        assert len({float(last) for _, last in kept}) == 3


def losses_of_resumed(comm: Communicator, task: Task, strategy: LocalSGD, resume: str) -> Tensor:
    config = RunConfig(task=task.name, workers=2, eval_every=0, resume=resume, steps=24)
    training = Training(
        Job(config, task, strategy, None, task_is_named=False), comm, Recorder(comm.rank), Uncontrolled()
    )
    training._begin_alike()
    found = training.worker.sender.memory.get_named(LOSSES)
    assert found is not None
    assert strategy.init(training.worker).first_loss == found[0]
    return found


class TestRoundsOfUnequalSteps:
    @given(
        samples=st.integers(1, 120),
        batch_size=st.integers(1, 40),
        paces=st.lists(st.integers(1, 6), min_size=1, max_size=5),
        start=st.integers(0, 300),
        length=st.integers(1, 300),
    )
    @settings(max_examples=200, deadline=None)
    def test_rounds_use_every_sample_once(
        self, samples: int, batch_size: int, paces: list[int], start: int, length: int
    ) -> None:
        order, position, horizon, seen = GlobalOrder(samples, 3), start, start + length, []
        while position < horizon:
            plans = [plan_round(order, position, horizon, batch_size, paces, i) for i in range(len(paces))]
            assert len({(plan.begin, plan.end, plan.steps) for plan in plans}) == 1
            assert plans[0].end > position
            for plan, pace in zip(plans, paces, strict=True):
                assert 1 <= len(plan.mine) <= max(1, pace)
                seen += [piece.position + i for piece in plan.mine for i in range(piece.count)]
                assert all(piece.offset + piece.count <= samples for piece in plan.mine), "crosses the epoch's end"
            position = plans[0].end
        assert seen == list(range(start, horizon))

    @given(samples=st.integers(1, 100), batch_size=st.integers(1, 30), size=st.integers(1, 6), step=st.integers(0, 9))
    @settings(max_examples=200, deadline=None)
    def test_one_step_each_is_the_division_of_a_global_step(
        self, samples: int, batch_size: int, size: int, step: int
    ) -> None:
        order = GlobalOrder(samples, 0)
        epochs, rest = divmod(step, order.steps(batch_size, 1))
        position = epochs * samples + rest * batch_size
        whole = order.slice_at(position, batch_size)
        for index in range(size):
            plan = plan_round(order, position, 10**6, batch_size, [1] * size, index)
            expected = share_of(whole, [1.0] * size, index)
            assert (plan.end, plan.steps) == (position + whole.count, 1.0)
            assert [p for p in plan.mine if p.count] == ([expected] if expected.count else [])

    def test_parts_go_on_where_a_step_is_begun(self) -> None:
        order = GlobalOrder(20, 0)
        assert [(p.position, p.count) for p in parts_from(order, 2, 40, 8, 3)] == [
            (2, 1), (3, 3), (6, 2), (8, 3), (11, 3), (14, 2), (16, 2), (18, 1), (19, 1),
        ]  # fmt: skip

    @pytest.mark.parametrize("workers", [2, 3])
    def test_one_step_each_trains_as_equal_steps_do_in_bits(self, workers: int) -> None:
        task = toy(optimizer="adamw", schedule=halve_every_third, samples=25)
        numbers = ",".join("1" * workers)
        paced, equal = (train(task, LocalSGD(period=1, steps=steps), workers) for steps in (numbers, "equal"))
        for a, b in zip(paced, equal, strict=True):
            assert_same_bits(a.state, b.state)

    def test_each_worker_follows_the_schedule_of_the_global_steps(self) -> None:
        """A round of two global steps: one worker passes them in four steps, the others in one."""
        task = toy(samples=48, schedule=every_step, optimizer="sgd", epochs=2)
        rates = Memory().run(partial(rates_of, task=task, strategy=LocalSGD(period=4, steps="4,1,1")), 3)
        assert rates[0] == pytest.approx([1 / (1 + s) for s in (0, 0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 6, 6, 6, 7, 8)])
        assert rates[1] == rates[2] == pytest.approx([1 / (1 + s) for s in (0, 2, 4, 6)])

    @pytest.mark.parametrize("steps", ["4,1,1", "speed"])
    def test_unequal_nodes_are_through_with_a_round_together(self, steps: str) -> None:
        task = toy(samples=BATCH * 16)
        paced = train_in(Virtual(UNEVEN), task, LocalSGD(period=4, steps=steps), 3)
        equal = train_in(Virtual(UNEVEN), task, LocalSGD(period=4), 3)
        assert waiting(equal) > 0.2
        assert waiting(paced) < 0.08
        assert samples_used(paced) == samples_used(equal) == 2 * BATCH * 16
        if steps == "4,1,1":
            assert [len(worker.losses) for worker in paced] == [64, 16, 16]
        assert max(max(worker.step_times) for worker in paced) < 0.6 * max(max(w.step_times) for w in equal)

    def test_speeds_are_smoothed_and_the_slowest_does_one_step(self) -> None:
        pace = Pace("speed", 8, speeds=[1.0, 0.5, 0.01])
        Memory().run(partial(self._paces, pace=pace), 3)

    @staticmethod
    def _paces(comm: Communicator, pace: Pace) -> None:
        class Stub:
            position = 0

        worker: Any = Stub()
        worker.comm = comm
        assert pace._of_workers(worker, 8) == [8, 4, 1]
        assert Pace("speed", 8)._of_workers(worker, 8) == [1, 1, 1]
        assert Pace("6,3,3", 6)._of_workers(worker, 2) == [2, 1, 1]

    def test_shares_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="use steps"):
            train(toy(), LocalSGD(steps="2,1"), 2, shares=(1, 2))


def every_step(optimizer: Optimizer, _total: int) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 5.0 / (1 + step))  # the task's rate is 0.2


def rates_of(comm: Communicator, task: Task, strategy: LocalSGD) -> list[float]:
    """The rate of each step, in a loop of our own."""
    job = Job(RunConfig(task=task.name, workers=comm.size), task, strategy, None, task_is_named=False)
    training, rates = Training(job, comm, Recorder(comm.rank), Uncontrolled()), []
    worker = training.worker
    share_from_first(worker)
    worker.progress.run_until(training.end)
    feed = make_feed("round", training.data.train, training.order, worker, worker.replica.device)
    state = strategy.init(worker)
    while (batch := feed.next()) is not None:
        rates.append(float(worker.optimizer.param_groups[0]["lr"]))
        strategy.step(worker, state, batch)
    assert worker.replica.schedule is not None and worker.replica.schedule.last_epoch == training.total_steps
    return rates


def waiting(trained: Sequence[Trained]) -> float:
    """Share of the workers' time that they waited; the first rounds, which measure, are left out."""
    rows = [
        row for worker in trained for row in worker.records if row["kind"] == "step" and row["position"] > 5 * BATCH
    ]
    return sum(row["wait_ns"] for row in rows) / sum(row["step_ns"] for row in rows)


class TestWhatIsLeftOut:
    @pytest.mark.parametrize("codec", ["int8", "top-k:ratio=0.1"])
    def test_sent_and_residual_add_up_to_the_drift(self, codec: str) -> None:
        """Whatever was not sent lies in the residuals: with them, the parameters are the mean of the workers' own."""
        task = toy(optimizer="sgd", samples=24, epochs=1)  # two steps, one round
        outcomes = Memory().run(partial(with_residual, task=task, codec=codec), 2)
        (params, _), residual = outcomes[0], sum(left for _, left in outcomes)
        exact = train(task, LocalSGD(period=2), 2)[0].state
        assert residual.abs().max() > 1e-5, "nothing was left out, and this shows nothing"
        torch.testing.assert_close(params + residual, parameters_of(exact), rtol=1e-5, atol=2e-6)


def with_residual(comm: Communicator, task: Task, codec: str) -> tuple[Tensor, Tensor]:
    feedback = f"{codec}{';' if ':' in codec else ':'}feedback=true"
    config = RunConfig(task=task.name, workers=comm.size, codec=feedback, eval_every=0)
    job = Job(config, task, LocalSGD(period=2), None, task_is_named=False)
    training = Training(job, comm, Recorder(comm.rank), Uncontrolled())
    training.run()
    worker = training.worker
    left = worker.flat.by_name(worker.sender.memory.of_span["residual"])
    names = [name for name, _ in worker.model.named_parameters()]
    flat = torch.cat([left[name] for name in names])
    return parameters_to_vector(worker.model.parameters()).detach().clone(), flat


def parameters_of(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1) for value in state.values()])


PRESETS = ("phases", "strategy-switch", "sync-switch", "post-local-sgd")
ROUNDS = [
    name
    for name, one in ((name, find_strategy(name)()) for name in STRATEGIES if name not in PRESETS)
    if one.cadence.by_rounds and one.cadence.survives_loss
]
KILLED = [
    ("local-sgd", {"period": "4"}),
    ("local-sgd", {"period": "2", "steps": "2,2,1"}),
    ("diloco", {"sync_every": "5"}),
    ("streaming-diloco", {"sync_every": "4", "overlap": "1"}),
]


class TestLosses:
    """A worker is killed in the middle of a round: the others do the round again without it."""

    @pytest.mark.parametrize(
        ("strategy", "options"), [*KILLED, *((name, {}) for name in ROUNDS if name not in dict(KILLED))]
    )
    def test_survivors_do_the_round_again(self, strategy: str, options: dict[str, str], tmp_path: Path) -> None:
        result = train_faulty(
            tmp_path,
            Faults().kill(1, step=15),
            workers=3,
            strategy=strategy,
            strategy_options=options,
        )
        assert (result.status, result.lost) == ("finished", [1])
        assert len(set(result.param_hash.values())) == 1
        undone = records_of(result.run_dir, "undone")
        assert {row["rank"] for row in undone} == {0, 2}
        assert all(row["steps"] > 0 for row in undone)
        audit_rounds(result.run_dir)


def audit_rounds(run_dir: str) -> None:
    """What happened, by the records, used every sample of every epoch once."""
    rows = [*records_of(run_dir, "step"), *records_of(run_dir, "undone")]
    (mark,) = {row["position"] for row in records_of(run_dir, "undone")}
    lost = {row["rank"] for row in rows} - {row["rank"] for row in records_of(run_dir, "end")}
    used = 0
    for rank in {row["rank"] for row in rows}:
        mine = sorted((row for row in rows if row["rank"] == rank), key=lambda row: row["t_ns"])
        used += sum(row["samples"] for row in _happened(mine, mark if rank in lost else None))
    assert used == EPOCHS * SAMPLES


def _happened(rows: list[Record], mark: int | None) -> list[Record]:
    """Without the steps that were undone; of a lost worker, without those after the others' mark."""
    kept: list[Record] = []
    for row in rows:
        if row["kind"] == "undone":
            kept = [step for step in kept if step["step"] <= row["step"]]
        else:
            kept.append(row)
    if mark is not None:
        # Where workers do unequal numbers of steps, only the last of a round moves the position.
        reached = [row["position"] for row in kept].index(mark) if mark else -1
        kept = kept[: reached + 1]
    return kept


BAD: list[tuple[dict[str, Any], str]] = [
    ({"period": 0}, "period must be at least 1, got 0"),
    ({"warm_up": -1}, "warm_up must be at least 0, got -1"),
    ({"alpha": 0.0}, "alpha must be above 0, got 0"),
    ({"adapt": "los"}, "loss"),
    ({"average": "parameters,momentum"}, "moments"),
    ({"average": "moments"}, "average must hold parameters, got 'moments'"),
    ({"steps": "sped"}, "steps must be equal, speed or numbers of at least 1"),
    ({"steps": "4,0"}, "steps must be equal, speed or numbers of at least 1"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalSGD(**options)


def test_numbers_must_be_as_many_as_the_workers() -> None:
    LocalSGD(steps="4/1/1").check(3)
    with pytest.raises(ConfigError, match=r"one number per worker \(2\), got '4,1,1'"):
        LocalSGD(steps="4,1,1").check(2)
