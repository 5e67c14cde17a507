"""Codecs under strategies: every one trains, replicas agree, and what was left out survives whatever happens."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

import podium
from podium.comm.base import Communicator
from podium.config import RunConfig, parse_spec, resolve
from podium.engine.build import Job
from podium.engine.checkpoint import find_checkpoint
from podium.engine.files import load_tree, save_tree
from podium.engine.recovery import Control, Regroup
from podium.engine.training import Training, run_server
from podium.engine.worker import Worker
from podium.errors import ConfigError, UnknownName
from podium.exchange.codecs import CODECS
from podium.exchange.packing import make_packing
from podium.records.recorder import Recorder
from podium.servers.build import make_server
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.strategies.parameter_server import ParameterServer
from podium.task import Task
from podium.tasks.digits import digits_mlp
from podium.testing.toys import (
    CLASSES,
    FEATURES,
    UNUSUAL,
    Half,
    Uncontrolled,
    assert_close,
    assert_same_bits,
    everything_model,
    halve_every_third,
    hashes,
    toy,
    train,
    train_in,
    train_plainly,
)
from podium.testing.worlds import Memory, Real, Virtual, World

DEADLINE_S = 2.0
"""Of a wait; servers and those who wait for them put up with some of these."""
SPARSE = "ratio=0.1"
SPECS = {
    name: f"{name}:{SPARSE}" if name in ("top-k", "random-k") else name
    for name in CODECS
    if name not in ("auto", "dgc")
} | {
    "dgc": f"dgc:{SPARSE},warmup_epochs=1",
    "power-sgd 4": "power-sgd:rank=4,min_rate=1",
}
RESIDUAL = {"top-k": SPECS["top-k"], "dgc": SPECS["dgc"], "power-sgd": "power-sgd:min_rate=1", "one-bit": "one-bit"}
SYNCHRONOUS: dict[str, Strategy[Any]] = {
    "all-reduce": AllReduce(bucket_bytes=300),
    "parameter-server": ParameterServer(bucket_bytes=300),
    "parameter-server 2": ParameterServer(servers=2, unit_bytes=200),
}
ASYNCHRONOUS: dict[str, Strategy[Any]] = {
    "async": ParameterServer(mode="async"),
    "async 2": ParameterServer(mode="async", servers=2, unit_bytes=200),
    "ssp": ParameterServer(mode="ssp", staleness=1),
    "softsync": ParameterServer(mode="softsync", groups=2),
    "backup": ParameterServer(mode="backup", backups=1),
    "gba": ParameterServer(mode="gba"),
    "dropping": ParameterServer(mode="async", drop_beyond=0),
    "prefetching": ParameterServer(mode="async", prefetch=True),
    "dc-asgd": ParameterServer(mode="async", mitigation="dc-asgd"),
}
WAYS = {"plain": {}, "accumulating": {"accumulate": 2}, "clipping": {"clip_norm": 0.05}}


def wide_model() -> nn.Module:
    """Large enough that matrices are compressed and a sample of elements misses some."""
    return nn.Sequential(nn.Linear(FEATURES, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, CLASSES))


def task_of(**fields: Any) -> Task:
    return toy(**{"model": wide_model, "samples": 60, "epochs": 3, **fields})


def learns(losses: list[float]) -> bool:
    return sum(losses[-4:]) < sum(losses[:4])


# Every codec with every strategy.


@settings(max_examples=2)
@given(st.sampled_from(list(WAYS.values())), st.sampled_from(["all-reduce", "parameter-server 2"]))
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_replicas_agree_after_synchronous_training(spec: str, way: dict[str, Any], strategy: str) -> None:
    trained = train(task_of(samples=36, epochs=1), SYNCHRONOUS[strategy], 3, codec=spec, **way)
    assert len(hashes(trained)) == 1
    assert all(value.isfinite().all() for value in trained[0].state.values())


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_every_codec_learns(spec: str) -> None:
    task = task_of(epochs=6, optimizer="sgd") if spec != SPECS["dgc"] else task_of(epochs=6)
    assert learns(train_in(Virtual(), task, AllReduce(), 2, codec=spec)[0].losses)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_asynchronous_workers_end_alike_with_every_codec(spec: str) -> None:
    assert len(hashes(train(task_of(epochs=1), ParameterServer(mode="async", servers=2), 3, codec=spec))) == 1


@pytest.mark.parametrize("strategy", ASYNCHRONOUS.values(), ids=ASYNCHRONOUS.keys())
def test_asynchronous_workers_end_alike_in_every_mode(strategy: Strategy[Any]) -> None:
    for spec in RESIDUAL.values():
        assert len(hashes(train(task_of(epochs=1), strategy, 3, codec=spec))) == 1, spec


@pytest.mark.parametrize("pull", ["fp16", "int8", "one-bit", f"top-k:{SPARSE}", "random-k:ratio=0.5", "power-sgd"])
def test_answers_may_be_packed_too_in_every_mode(pull: str) -> None:
    for options in ({"servers": 2}, {"mode": "async"}, {"mode": "ssp"}, {"mode": "backup"}):
        strategy = ParameterServer(pull=pull, **options)
        assert len(hashes(train(task_of(epochs=1), strategy, 3, codec="top-k:ratio=0.3"))) == 1, options


@pytest.mark.parametrize("codec", CODECS)
def test_one_worker_under_all_reduce_is_plain_pytorch_whatever_the_codec(codec: str) -> None:
    """Nobody is there to send to. A codec that takes the momentum over changes more than that."""
    task = toy(optimizer="adamw", model=everything_model, schedule=halve_every_third)
    if codec == "dgc":
        with pytest.raises(ConfigError, match="dgc applies the optimizer's momentum"):
            train(task, AllReduce(), codec=codec)
    else:
        assert_same_bits(train(task, AllReduce(), codec=codec)[0].state, train_plainly(task).state)


@pytest.mark.parametrize("strategy", SYNCHRONOUS.values(), ids=SYNCHRONOUS.keys())
def test_dense_is_what_it_was(strategy: Strategy[Any]) -> None:
    task = toy(optimizer="adamw")
    assert_same_bits(train(task, strategy, codec="dense")[0].state, train_plainly(task).state)
    assert_same_bits(train(task, strategy, 3, codec="dense")[0].state, train(task, strategy, 3)[0].state)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "nesterov"])
def test_dgc_that_sends_everything_is_the_optimizers_own_momentum(optimizer: str) -> None:
    """To the precision of its wire; what that rounds off comes later."""
    task = task_of(optimizer=optimizer)
    for workers in (1, 2):
        mine = train(task, AllReduce(), workers, codec="dgc:ratio=1,warmup_epochs=0,select=exact")
        if optimizer == "sgd":
            assert_close(mine[0].state, train_plainly(task).state, tolerance=2e-3)
        assert learns(mine[0].losses)


MODELS = [*UNUSUAL, "half"]
# Fast: every codec with some model and every model with some codec; all pairs are slow.
PAIRS = [
    pytest.param(spec, model, id=f"{name}-{model}", marks=[] if (i - k) % len(MODELS) == 0 else pytest.mark.slow)
    for i, (name, spec) in enumerate(SPECS.items())
    for k, model in enumerate(MODELS)
]


@pytest.mark.parametrize(("spec", "model"), PAIRS)
def test_any_model_travels_in_any_codec(spec: str, model: str) -> None:
    task = toy(model=UNUSUAL.get(model, Half), epochs=1, samples=24)
    strategy = AllReduce() if len(spec + model) % 2 else ParameterServer(servers=2)  # each with half of them
    assert len(hashes(train(task, strategy, 2, codec=spec))) == 1


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_threads_and_virtual_time_give_the_same_bits(spec: str) -> None:
    for strategy in (SYNCHRONOUS["all-reduce"], SYNCHRONOUS["parameter-server 2"]):
        threads = train(task_of(samples=36, epochs=1), strategy, 3, codec=spec)
        assert hashes(threads) == hashes(train_in(Virtual(), task_of(samples=36, epochs=1), strategy, 3, codec=spec))


@pytest.mark.slow
@pytest.mark.parametrize("world", [Real(), Real(shared=True)], ids=["sockets", "shared memory"])
def test_real_processes_give_the_bits_of_threads(world: World) -> None:
    task = toy(model=everything_model, optimizer="adamw", schedule=halve_every_third)
    for codec, strategy in (
        ("top-k:ratio=0.1", AllReduce()),
        ("power-sgd:min_rate=1", AllReduce()),
        ("power-sgd:min_rate=1", ParameterServer(pull="int8")),
    ):
        threads, processes = train(task, strategy, 2, codec=codec), train_in(world, task, strategy, 2, codec=codec)
        for one, other in zip(threads, processes, strict=True):
            assert_same_bits(other.state, one.state)


@pytest.mark.parametrize("options", ["mode=async", "mode=ssp,staleness=1,servers=2", "mode=async,pull=int8"])
def test_a_recorded_run_with_a_codec_replays_to_the_same_bits(tmp_path: Path, options: str) -> None:
    fields: dict[str, Any] = {"strategy": f"parameter-server:{options},lease=3", "codec": "top-k:ratio=0.2"}
    fields |= {"workers": 3, "epochs": 2}
    raced = podium.train("podium.testing.toys:toy", launcher="threads", run_dir=str(tmp_path / "raced"), **fields)
    again = podium.train(
        "podium.testing.toys:toy", launcher="virtual", run_dir=str(tmp_path / "again"), replay=raced.run_dir, **fields
    )
    assert again.param_hash == raced.param_hash


# What codecs do to others.


def one_cycle(optimizer: Optimizer, total_steps: int, cycle_momentum: bool = True) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps + 1, cycle_momentum=cycle_momentum)


def test_momentum_that_a_codec_took_over_is_not_done_again() -> None:
    """Schedules that cycle momentum write it into the optimizer's groups at every step."""
    with pytest.raises(ConfigError, match="cycle_momentum=False"):
        Memory().run(partial(_momenta, cycles=True), 2)
    assert Memory().run(partial(_momenta, cycles=False), 2) == [[0.0]] * 2


def _momenta(comm: Communicator, cycles: bool) -> list[float]:
    """What is left of the optimizer's own momentum after a run."""
    task = toy(schedule=partial(one_cycle, cycle_momentum=cycles))
    job = Job(RunConfig(task="toy", workers=2, codec="dgc:ratio=0.5"), task, AllReduce(), task_is_named=False)
    training = Training(job, comm, Recorder(comm.rank), Uncontrolled())
    training.run()
    return [group["momentum"] for group in training.worker.optimizer.param_groups]


def test_a_checkpoint_of_momentum_taken_over_says_what_the_user_chose(tmp_path: Path) -> None:
    train(toy(), AllReduce(), 2, codec="dgc:ratio=0.5", run_dir=tmp_path)
    assert find_checkpoint(tmp_path).shared()["groups"][0]["momentum"] == 0.9


# Accuracy.

ACCURATE = {
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "ef-sign": "ef-sign",
    "one-bit": "one-bit",
    "top-k": "top-k:ratio=0.01",
    "dgc": "dgc:ratio=0.05,warmup_epochs=3",
    "power-sgd": "power-sgd:rank=4",
}


@pytest.fixture(scope="module")
def dense_accuracy() -> float:
    return _accuracy("dense")


@pytest.mark.parametrize("spec", ACCURATE.values(), ids=ACCURATE.keys())
def test_digits_are_learnt_within_a_point_of_dense(spec: str, dense_accuracy: float) -> None:
    assert _accuracy(spec) >= dense_accuracy - 0.01


def _accuracy(spec: str) -> float:
    trained = train_in(Virtual(), digits_mlp(epochs=8), AllReduce(), 2, codec=spec)
    return float(trained[0].report.metrics["accuracy"])


# What was left out, in checkpoints.


def left_in(run_dir: Path, step: int | None = None) -> dict[str, Tensor]:
    """What all workers together had not sent, by kind, from a checkpoint."""
    found = find_checkpoint(run_dir if step is None else run_dir / "checkpoints" / f"step-{step:08d}")
    owns = [found.own(rank) for rank in found.members]
    return total_of([own["leftovers"] for own in owns if own is not None])


def total_of(leftovers: list[dict[str, Any]]) -> dict[str, Tensor]:
    kinds = {kind for one in leftovers for kind in one["of_span"]}
    return {
        kind: torch.stack(
            [
                torch.cat([part.reshape(-1).double() for _, part in sorted(one["of_span"][kind].items())])
                for one in leftovers
                if kind in one["of_span"]
            ]
        ).sum(0)
        for kind in kinds
    }


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer(servers=2, pull="int8")], ids=lambda s: s.name)
@pytest.mark.parametrize("spec", RESIDUAL.values(), ids=RESIDUAL.keys())
def test_a_resumed_run_equals_the_unbroken_one(tmp_path: Path, spec: str, strategy: Strategy[Any]) -> None:
    fields: dict[str, Any] = {"codec": spec, "checkpoint_every": 4}
    whole = train(task_of(), strategy, 3, run_dir=tmp_path / "whole", **fields)
    train(task_of(), strategy, 3, run_dir=tmp_path / "cut", steps=8, **fields)
    rest = train(task_of(), strategy, 3, run_dir=tmp_path / "rest", resume=str(tmp_path / "cut"), **fields)
    for one, other in zip(whole, rest, strict=True):
        assert_same_bits(other.state, one.state)


@pytest.mark.parametrize("spec", RESIDUAL.values(), ids=RESIDUAL.keys())
def test_leftovers_do_not_depend_on_how_gradients_are_cut(tmp_path: Path, spec: str) -> None:
    """They are kept by name. With the same cut afterwards, how they were cut before does not matter."""
    first, second = AllReduce(bucket_bytes=1), AllReduce(bucket_bytes=1 << 20)
    train(task_of(), first, 2, run_dir=tmp_path / "cut", steps=4, codec=spec)
    before = left_in(tmp_path / "cut")
    for strategy in (first, second):
        name = f"rest-{strategy.bucket_bytes}"
        train(task_of(), strategy, 2, run_dir=tmp_path / name, steps=4, resume=str(tmp_path / "cut"), codec=spec)
        after = left_in(tmp_path / name)
        assert before.keys() == after.keys() != set()
        assert all(torch.equal(before[kind], after[kind]) for kind in before)
    resumed = train(task_of(), second, 2, run_dir=tmp_path / "on", resume=str(tmp_path / "cut"), codec=spec)
    assert len(hashes(resumed)) == 1


def test_another_bucket_size_goes_on_to_nearly_the_same_result(tmp_path: Path) -> None:
    """With a codec that does not look at how the gradients are cut, but for its residual."""
    fields: dict[str, Any] = {"codec": "fp16:feedback=true"}
    whole = train(task_of(), AllReduce(), 2, **fields)
    train(task_of(), AllReduce(), 2, run_dir=tmp_path / "cut", steps=5, **fields)
    cut = AllReduce(bucket_bytes=1)
    rest = train(task_of(), cut, 2, run_dir=tmp_path / "rest", resume=str(tmp_path / "cut"), **fields)
    assert_close(rest[0].state, whole[0].state, tolerance=1e-5)


@pytest.mark.parametrize("workers", [1, 5])
@pytest.mark.parametrize("spec", RESIDUAL.values(), ids=RESIDUAL.keys())
def test_with_fewer_or_more_workers_nothing_is_lost(tmp_path: Path, spec: str, workers: int) -> None:
    train(task_of(), AllReduce(), 4, run_dir=tmp_path / "cut", steps=4, codec=spec)
    again = AllReduce(bucket_bytes=1)
    train(task_of(), again, workers, run_dir=tmp_path / "rest", steps=4, resume=str(tmp_path / "cut"), codec=spec)
    before, after = left_in(tmp_path / "cut"), left_in(tmp_path / "rest")
    assert before.keys() == after.keys() != set()
    for kind in before:
        torch.testing.assert_close(after[kind], before[kind], rtol=1e-5, atol=1e-6)
    on = train(task_of(), again, workers, run_dir=tmp_path / "on", resume=str(tmp_path / "cut"), codec=spec)
    assert len(hashes(on)) == 1


@pytest.mark.parametrize("spec", ["dense", *RESIDUAL.values()], ids=["dense", *RESIDUAL])
def test_a_checkpoint_without_leftovers_is_gone_on_from(tmp_path: Path, spec: str) -> None:
    """As older ones are."""
    train(task_of(), AllReduce(), 2, run_dir=tmp_path / "cut", steps=4, codec=spec)
    saved = find_checkpoint(tmp_path / "cut")
    for path in saved.path.glob("rank-*.safetensors"):
        own = load_tree(path)
        del own["leftovers"]
        save_tree(path, own)
    facts = {"step": saved.step, "position": saved.position, "members": saved.members}
    (saved.path / "checkpoint.json").write_text(json.dumps(facts))
    rest = train(task_of(), AllReduce(), 2, run_dir=tmp_path / "rest", resume=str(tmp_path / "cut"), codec=spec)
    assert len(hashes(rest)) == 1


@pytest.mark.slow
def test_a_run_may_go_on_with_another_codec(tmp_path: Path) -> None:
    train(task_of(), AllReduce(), 2, run_dir=tmp_path / "cut", steps=4, codec=RESIDUAL["top-k"])
    for spec in ("dense", *RESIDUAL.values()):
        rest = train(task_of(), AllReduce(), 2, codec=spec, resume=str(tmp_path / "cut"))
        assert len(hashes(rest)) == 1 and learns(rest[0].losses)


# Workers that are lost, leave and join, as threads.


class Seen(NamedTuple):
    """What one worker kept: after its last step before each change, and when it goes on after it, if it does."""

    before: list[dict[str, Any]]
    after: list[dict[str, Any]]
    param_hash: str


class Meeting:
    """Where workers hear who goes on: once all who are left have come."""

    def __init__(self, plans: list[tuple[int, ...]], left: list[tuple[int, ...]]) -> None:
        """`plans`: members after each change; `left`: who comes to hear of it."""
        self.plans, self.left = plans, left
        self._changed = threading.Condition()
        self._come: list[dict[int, int]] = [{} for _ in plans]

    def regroup(self, rank: int, generation: int, steps: int) -> Regroup:
        with self._changed:
            n = generation if generation >= 0 else next(i for i, p in enumerate(self.left) if rank in p)
            self._come[n][rank] = steps
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._come[n].keys() >= set(self.left[n]), 4 * DEADLINE_S), (
                "somebody is late"
            )
            stay = [r for r in self.plans[n] if r in self._come[n]]
            source = max(stay, key=lambda r: self._come[n][r])
            return Regroup(n + 1, self.plans[n], source)


class Watching(Control):
    """Asks for changes at some steps, and looks at what the worker remembers."""

    def __init__(self, rank: int, meeting: Meeting, asks: tuple[tuple[int, int], ...]) -> None:
        self.rank, self.meeting, self._asks = rank, meeting, asks
        self.training: Training | None = None
        self.latest: dict[str, Any] = {"of_span": {}, "named": {}}
        self.before: list[dict[str, Any]] = []
        self.after: list[dict[str, Any]] = []
        self._batches = 0

    @property
    def worker(self) -> Worker:
        assert self.training is not None
        return self.training.worker

    def stop_requested(self) -> bool:
        if len(self.after) < len(self.before):
            self.latest = self.worker.sender.residuals.state()
            self.after.append(self.latest)
        return False

    def progress(self, facts: dict[str, Any]) -> None:
        if facts["event"] == "progress":
            self.latest = self.worker.sender.residuals.state()

    def change_requested(self) -> bool:
        self._batches += 1
        return (self.rank, self._batches) in self._asks

    def regroup(self, generation: int, steps_done: int) -> Regroup:
        self.before.append(self.latest)
        return self.meeting.regroup(self.rank, generation, steps_done)


class Fate(NamedTuple):
    """What happens in a run of threads."""

    first: tuple[int, ...]  # who begins
    plans: list[tuple[int, ...]]  # who goes on after each change
    left: list[tuple[int, ...]]  # who comes to each change
    asks: tuple[tuple[int, int], ...] = ()  # which rank asks for a change, before its how-manieth batch
    dies: tuple[int, int] = (-1, 0)  # which rank, at its how-manieth loss


class _Death(Exception):
    """A rank is gone, without a word."""


def live(comm: Communicator, job: Job, fate: Fate, meeting: Meeting) -> Seen | None:
    """One rank's part."""
    late = comm.rank in comm.workers and comm.rank not in fate.first
    comm.workers = fate.first if not late else comm.workers
    recorder = Recorder(comm.rank)
    if comm.rank in comm.servers:
        run_server(make_server(job, comm, recorder))
        return None
    control = Watching(comm.rank, meeting, fate.asks)
    control.training = Training(job, comm, recorder, control, late=late)
    if comm.rank == fate.dies[0]:
        gradients = control.worker.gradients
        gradients.use_loss(_dying(gradients.loss, fate.dies[1]))
    report = control.training.run()
    return Seen(control.before, control.after, report.param_hash)


def _dying(loss: Callable[[Any, Any], Tensor], at: int) -> Callable[[Any, Any], Tensor]:
    visits: Iterator[int] = iter(range(1, at))

    def dying(outputs: Any, targets: Any) -> Tensor:
        if next(visits, None) is None:
            raise _Death
        return loss(outputs, targets)

    return dying


def run_fate(fate: Fate, strategy: Strategy[Any], spec: str, **config: Any) -> list[Seen]:
    """What each worker that lived saw at the changes."""
    ranks = max(max(p) for p in [fate.first, *fate.plans]) + 1
    settings = RunConfig(task="toy", workers=len(fate.first), eval_every=0, codec=spec, **config)
    job = Job(settings, task_of(epochs=4), strategy, task_is_named=False)
    meeting = Meeting(fate.plans, fate.left)
    main = partial(live, job=job, fate=fate, meeting=meeting)
    outcomes = Memory().attempt(main, ranks, strategy.server_spec.count, deadline_s=DEADLINE_S)
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, BaseException) and not isinstance(outcome, _Death):
            raise outcome
        assert isinstance(outcome, _Death) == (rank == fate.dies[0])
    return [outcome for outcome in outcomes[:ranks] if isinstance(outcome, Seen)]


def check_kept(seen: list[Seen], change: int = 0) -> None:
    """All that workers had not sent before a change is still there after it."""
    before = total_of([one.before[change] for one in seen if len(one.before) > change])
    after = total_of([one.after[change] for one in seen if len(one.after) > change])
    assert before.keys() == after.keys() != set()
    for kind in before:
        torch.testing.assert_close(after[kind], before[kind], rtol=1e-4, atol=1e-6)


DEATH = Fate((0, 1, 2), [(0, 2)], [(0, 2)], dies=(1, 5))
LEAVE = Fate((0, 1, 2), [(0, 1)], [(0, 1, 2)], asks=((0, 4),))
JOIN = Fate((0, 1), [(0, 1, 2)], [(0, 1, 2)], asks=((1, 4),))
SWAP = Fate((0, 1, 2), [(0, 1, 3)], [(0, 1, 2, 3)], asks=((2, 4),))
JOIN_AND_LEAVE_AT_ONCE = Fate((0, 1), [(0, 1, 2), (0, 1)], [(0, 1, 2), (0, 1, 2)], asks=((1, 4), (2, 1)))


@pytest.mark.parametrize("spec", RESIDUAL.values(), ids=RESIDUAL.keys())
@pytest.mark.parametrize(
    "strategy",
    [AllReduce(bucket_bytes=300), ParameterServer(), ParameterServer(mode="async")],
    ids=["all-reduce", "sync", "async"],
)
def test_a_lost_worker_changes_nothing_in_what_the_others_keep(strategy: Strategy[Any], spec: str) -> None:
    """Their last step did not happen, or had happened: either way its memory is the one they go on with, in bits."""
    seen = run_fate(DEATH, strategy, spec, checkpoint_every=8)
    assert len({one.param_hash for one in seen}) == 1
    for one in seen:
        (before,), (after,) = one.before, one.after
        assert before["of_span"].keys() == after["of_span"].keys() != set()
        for kind, parts in before["of_span"].items():
            assert_same_bits(after["of_span"][kind], parts)
        assert_same_bits(after["named"], before["named"])


FATES = {"leave": LEAVE, "join": JOIN, "swap": SWAP}
CHANGING = {"ar": AllReduce(), "sync": ParameterServer(), "ssp": ParameterServer(mode="ssp", staleness=1)}
# Fast: any two of strategy, fate and codec meet; all three are slow.
CHANGES = [
    pytest.param(strategy, fate, spec, id=f"{who}-{how}-{name}", marks=[] if (i + j + k) % 3 == 0 else pytest.mark.slow)
    for i, (who, strategy) in enumerate(CHANGING.items())
    for j, (how, fate) in enumerate(FATES.items())
    for k, (name, spec) in enumerate(RESIDUAL.items())
]


@pytest.mark.parametrize(("strategy", "fate", "spec"), CHANGES)
def test_nothing_is_lost_when_workers_join_and_leave(strategy: Strategy[Any], fate: Fate, spec: str) -> None:
    seen = run_fate(fate, strategy, spec)
    check_kept(seen)
    stayed = [one for rank, one in enumerate(seen) if rank in fate.plans[-1]]
    assert len({one.param_hash for one in stayed}) == 1


def test_a_newcomer_that_has_sent_nothing_shares_too() -> None:
    seen = run_fate(JOIN_AND_LEAVE_AT_ONCE, ParameterServer(mode="ssp", staleness=1), RESIDUAL["top-k"])
    check_kept(seen, 1)


# Names.

OWN_CODEC = '''
from dataclasses import dataclass
from typing import ClassVar, final

from podium.exchange.codecs.base import Codec


@final
@dataclass(frozen=True, kw_only=True)
class Twice(Codec):
    """Sends floats as they are, twice."""

    name: ClassVar[str] = "twice"
    reduction: ClassVar[str] = "sum"
    times: int = 2

    def encode(self, tensor, span, turn, memory):
        return tensor.repeat(self.times)

    def decode_add(self, wire, out, span, turn, alpha=1.0):
        out.add_(wire[: out.numel()], alpha=alpha)
'''


@pytest.fixture
def own_codec(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(OWN_CODEC)
    return f"{path}:Twice"


class TestNames:
    """How a codec is asked for."""

    @pytest.mark.parametrize(
        ("given", "overrides", "expected"),
        [
            ({"codec": "top-k:ratio=0.05,select=exact"}, [], ("top-k", {"ratio": "0.05", "select": "exact"})),
            ({"codec": "top-k:ratio=0.05;select=exact"}, [], ("top-k", {"ratio": "0.05", "select": "exact"})),
            ({"codec": "top-k:ratio=0.05"}, ["codec.ratio=0.1"], ("top-k", {"ratio": "0.1"})),
            ({}, ["codec=top-k", "codec.ratio=0.1"], ("top-k", {"ratio": "0.1"})),
            ({}, ["codec=int8", "codec.feedback=true"], ("int8", {"feedback": "true"})),
            ({"codec": "power-sgd"}, ["codec.min-rate=3"], ("power-sgd", {"min_rate": "3"})),
            (
                {"strategy": "all-reduce:codec=top-k:ratio=0.01;select=exact,overlap=false"},
                [],
                ("top-k", {"ratio": "0.01", "select": "exact"}),
            ),
            ({"codec": "mine.py:Mine"}, [], ("mine.py:Mine", {})),
            ({"codec": "mine.py:Mine:every=4"}, ["codec.by=2"], ("mine.py:Mine", {"every": "4", "by": "2"})),
        ],
    )
    def test_options_come_from_the_name_and_from_set(
        self, given: dict[str, str], overrides: list[str], expected: tuple[str, dict[str, str]]
    ) -> None:
        assert parse_spec(resolve(None, overrides, given).codec) == expected

    def test_a_strategy_keeps_its_own_options_beside_a_codec(self) -> None:
        config = resolve(None, [], {"strategy": "all-reduce:codec=int8,overlap=false,collective=ring"})
        assert (config.codec, config.collective, config.strategy_options) == ("int8", "ring", {"overlap": "false"})

    def test_set_reaches_a_codec_that_the_strategy_names(self) -> None:
        config = resolve(None, ["codec.ratio=0.1"], {"strategy": "all-reduce:codec=top-k"})
        assert parse_spec(config.codec) == ("top-k", {"ratio": "0.1"})

    def test_set_reaches_a_codec_of_the_users_own(self) -> None:
        config = resolve(None, ["codec.by=2"], {"codec": "mine.py:Mine"})
        assert parse_spec(config.codec) == ("mine.py:Mine", {"by": "2"})

    def test_options_that_are_set_before_the_codec_count_too(self) -> None:
        config = resolve(None, ["codec.ratio=0.1", "codec=top-k"])
        assert parse_spec(config.codec) == ("top-k", {"ratio": "0.1"})

    def test_a_codec_of_the_users_own_trains(self, own_codec: str) -> None:
        for strategy in (AllReduce(), ParameterServer()):
            mine = train(toy(), strategy, 2, codec=f"{own_codec}:times=3,feedback=false")
            assert_close(mine[0].state, train(toy(), strategy, 2)[0].state)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"codec": "topk"}, "unknown codec 'topk'. Did you mean 'top-k'"),
            ({"codec": "top-k:ration=0.1"}, "unknown option of codec top-k 'ration'. Did you mean 'ratio'"),
            ({"codec": "top-k:select=exakt"}, "Did you mean 'exact'"),
            ({"codec": "top-k:ratio=2"}, "top-k: ratio must be above 0 and at most 1, got 2"),
            ({"codec": "top-k:feedback=maybe"}, "codec top-k: feedback must be true or false, got 'maybe'"),
            ({"codec": "top-k:0.1"}, "codec top-k: options are key=value, got '0.1'"),
            ({"collective": "rign"}, "unknown collective 'rign'. Did you mean 'ring'"),
            ({"collective": "ring:segment=3"}, "unknown option of collective ring 'segment'"),
            ({"strategy": "parameter-server:pull=int9"}, "unknown codec 'int9'. Did you mean 'int8'"),
            ({"strategy": "parameter-server:pull=dgc"}, "pull=dgc packs gradients"),
        ],
        ids=str,
    )
    def test_what_does_not_exist_is_refused_before_anything_starts(
        self, tmp_path: Path, fields: dict[str, str], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            podium.train("podium.testing.toys:toy", workers=2, out=str(tmp_path), **fields)  # type: ignore[arg-type]  # text all
        assert not list(tmp_path.iterdir())

    def test_servers_cannot_choose_how_they_answer(self) -> None:
        with pytest.raises(ConfigError, match="auto"):
            ParameterServer(pull="auto")

    def test_an_unknown_codec_names_all_that_exist(self) -> None:
        with pytest.raises(UnknownName) as caught:
            make_packing("none")
        assert set(caught.value.known) == set(CODECS)

    @pytest.mark.parametrize(
        ("spec", "feedback", "keeps"),
        [
            ("top-k", True, True),
            ("top-k:feedback=false", False, False),
            ("fp16", False, False),
            ("fp16:feedback=true", True, True),
            ("dgc", False, False),
            ("dgc:feedback=true", True, False),
            ("dense", False, False),
        ],
    )
    def test_feedback_is_the_senders_choice(self, spec: str, feedback: bool, keeps: bool) -> None:
        packing = make_packing(spec)
        assert (packing.feedback, packing.keeps_residual) == (feedback, keeps)

    def test_without_feedback_nothing_is_kept(self, tmp_path: Path) -> None:
        train(task_of(), AllReduce(), 2, codec="top-k:ratio=0.1,feedback=false", run_dir=tmp_path)
        assert left_in(tmp_path) == {}
