"""Phases: a run led from one strategy to the next loses nothing on the way."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR

import podium
from podium.comm.base import Communicator
from podium.config import RunConfig
from podium.engine.build import Job
from podium.engine.checkpoint import find_checkpoint
from podium.engine.training import Training, run_server
from podium.errors import ConfigError
from podium.launch.clusters.description import Cluster, uniform
from podium.records.audit import audit
from podium.records.recorder import Recorder
from podium.servers.build import make_server
from podium.strategies import make_strategy
from podium.strategies.base import Strategy
from podium.strategies.phases import Phases
from podium.testing.toys import (
    SAMPLES,
    Trained,
    Uncontrolled,
    assert_close,
    assert_same_bits,
    dropout_model,
    everything_model,
    halve_every_third,
    hashes,
    toy,
    train,
    train_in,
    train_plainly,
)
from podium.testing.worlds import Memory, Real, Virtual

WORKERS = 3

SYNCHRONOUS = ["all-reduce", "all-reduce:overlap=false;bucket_bytes=64", "parameter-server:servers=2"]
RELAXED = [
    "parameter-server:servers=2;mode=async",
    "parameter-server:servers=2;mode=ssp;staleness=1",
    "parameter-server:servers=2;mode=softsync",
    "local-sgd:period=3",
    "diloco:sync_every=3",
]
OTHERS = [
    "all-reduce",
    "gossip:agree_every=2",
    "async-local-sgd:servers=2",
    "streaming-diloco:sync_every=4;fragments=2",
    "ad-psgd",
    "elastic-averaging:period=2",
    "parameter-server:servers=2;mode=gba",
    "adasum",
    "async-elastic:servers=2",
]


def phases(run: str, **options: Any) -> Strategy[Any]:
    return make_strategy("phases", {"run": run, **options}, WORKERS)


def of_kind(trained: Trained, kind: str) -> list[dict[str, Any]]:
    return [row for row in trained.records if row["kind"] == kind]


def check_audit(trained: list[Trained]) -> None:
    rows = [row for one in trained for row in one.records]
    assert audit(rows) == (0, 0)


@pytest.mark.parametrize("model", [everything_model, dropout_model])
@pytest.mark.parametrize("spec", ["all-reduce", "parameter-server:servers=2", "parameter-server:mode=ssp;staleness=0"])
def test_a_change_to_the_same_strategy_changes_nothing(spec: str, model: Any) -> None:
    task = toy(model=model, optimizer="adamw", schedule=halve_every_third, epochs=3)
    alone = make_strategy(spec.partition(":")[0], dict(o.split("=") for o in spec.partition(":")[2].split(";") if o))
    unbroken = train(task, alone, WORKERS)
    switched = train(task, phases(f"{spec} until step:at=3 | {spec} until epoch:at=2 | {spec}"), WORKERS)
    assert len(of_kind(switched[0], "switch")) == 2
    for a, b in zip(unbroken, switched, strict=True):
        assert_same_bits(b.state, a.state)
        assert b.losses == a.losses


@pytest.mark.parametrize("codec", ["top-k:ratio=0.2", "int8", "power-sgd:rank=1"])
def test_what_a_codec_left_out_goes_along(codec: str) -> None:
    task = toy(epochs=3)
    unbroken = train(task, make_strategy("all-reduce"), WORKERS, codec=codec)
    switched = train(task, phases("all-reduce until step:at=5 | all-reduce"), WORKERS, codec=codec)
    assert_same_bits(switched[0].state, unbroken[0].state)


@pytest.mark.parametrize("world", [Memory(), Virtual(), Real()], ids=lambda world: world.name)
def test_real_processes_threads_and_virtual_time_switch_alike(world: Any) -> None:
    task = toy(optimizer="adamw", epochs=3)
    run = "all-reduce until step:at=3 | parameter-server until step:at=8 | all-reduce"
    trained = train_in(world, task, phases(run), 2)
    assert len(hashes(trained)) == 1
    assert_close(trained[0].state, train_plainly(task).state)
    assert [row["step"] for row in of_kind(trained[0], "switch")] == [3, 8]


@pytest.mark.parametrize("optimizer", ["nesterov", "adam"])
@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(SYNCHRONOUS, 2)))
def test_synchronous_phases_equal_one_process(first: str, second: str, optimizer: str) -> None:
    task = toy(optimizer=optimizer, schedule=halve_every_third)
    run = f"{first} until step:at=3 | {second} until step:at=5 | {first}"
    trained = train(task, phases(run), WORKERS)
    assert len(hashes(trained)) == 1
    assert_close(trained[0].state, train_plainly(task).state)
    check_audit(trained)


def circle(names: list[str]) -> list[tuple[str, str]]:
    """Each is followed by another one, and follows one."""
    return list(itertools.pairwise([*names, names[0]]))


USUAL = [*SYNCHRONOUS[::2], *RELAXED]
# Fast: every strategy follows some other; all pairs of the usual ones are slow.
FAST = [*circle(USUAL), *circle(OTHERS)]
PAIRS = [*FAST, *(pytest.param(*p, marks=pytest.mark.slow) for p in itertools.permutations(USUAL, 2) if p not in FAST)]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_any_strategy_may_follow_any_other(first: str, second: str) -> None:
    task = toy(epochs=3, schedule=halve_every_third)
    run = f"{first} until step:at=5 | {second} until epoch:at=2 | {first}"
    trained = train_in(Virtual(), task, phases(run), WORKERS)
    assert len(hashes(trained)) == 1, "replicas must be alike in the end"
    assert {one.position for one in trained} == {3 * SAMPLES}
    check_audit(trained)
    assert [row["position"] for row in of_kind(trained[0], "switch")] == [56, 2 * SAMPLES]


@pytest.mark.parametrize("world", [Memory(), Virtual()], ids=lambda world: world.name)
@pytest.mark.parametrize("first", ["all-reduce", "parameter-server:mode=async", "local-sgd:period=2"])
def test_all_workers_end_a_phase_at_the_step_they_agree_on(world: Any, first: str) -> None:
    run = f"{first} until tests.strategies.test_phases:enough | all-reduce"
    trained = train_in(world, toy(epochs=4), phases(run), WORKERS)
    assert len(hashes(trained)) == 1
    check_audit(trained)
    (switch,) = of_kind(trained[0], "switch")
    assert {row["position"] for one in trained for row in of_kind(one, "switch")} == {switch["position"]}
    assert switch["position"] >= SAMPLES
    # Threads that nobody waits for go as far as the machine lets them; elsewhere it is known how long agreeing takes.
    free = isinstance(world, Memory) and "async" in first
    assert switch["position"] < (4 if free else 2) * SAMPLES, "it took far too long to agree"
    fired = [row for row in of_kind(trained[0], "trigger") if row["in_force"] and row["fires"]]
    assert len(fired) == 1
    assert "enough" in fired[0]["why"]


def enough(seen: Any) -> bool:
    return bool(seen.position >= SAMPLES)


def test_a_cycle_goes_round() -> None:
    run = "all-reduce until step:after=2 | parameter-server until step:after=3"
    trained = train(toy(epochs=3), phases(run, repeat=True), WORKERS)
    assert [row["step"] for row in of_kind(trained[0], "switch")] == [2, 5, 7, 10]
    assert_close(trained[0].state, train_plainly(toy(epochs=3)).state)


def test_the_schedule_goes_on_where_it_was() -> None:
    task = toy(epochs=3, schedule=halve_every_third)
    run = "all-reduce until step:at=2 | parameter-server:mode=async until step:at=9 | all-reduce"
    trained = train(task, phases(run), WORKERS)
    plain = train_plainly(task)
    assert [group["lr"] for group in trained[0].groups] == [group["lr"] for group in plain.optimizer.param_groups]


def test_dropped_moments_are_dropped_and_kept_ones_kept() -> None:
    task, run = toy(optimizer="momentum", epochs=2), "all-reduce until step:at=4 | all-reduce"
    kept, dropped = train(task, phases(run), WORKERS), train(task, phases(run, keep_moments=False), WORKERS)
    assert_close(kept[0].state, train_plainly(task).state)
    assert len(hashes(dropped)) == 1
    assert hashes(dropped) != hashes(kept)


def test_a_phase_may_pack_otherwise() -> None:
    run = "all-reduce until step:at=4 | all-reduce:codec=top-k:ratio=0.1 until step:at=8 | all-reduce:codec=dense"
    trained = train(toy(epochs=3), phases(run), WORKERS)
    sent = [row["sent"] for row in of_kind(trained[0], "step")]
    assert sent[5] < sent[1]
    assert sent[10] == sent[1]
    assert len(hashes(trained)) == 1


@pytest.mark.parametrize("at", [3, 6, 9])
@pytest.mark.parametrize("middle", ["parameter-server:servers=1", "local-sgd:period=2", "diloco:sync_every=2"])
def test_a_resumed_run_goes_on_in_its_phase(tmp_path: Path, at: int, middle: str) -> None:
    task = toy(model=everything_model, epochs=3, schedule=halve_every_third)
    strategy = phases(f"all-reduce until step:at=4 | {middle} until step:at=8 | all-reduce")
    options = {"checkpoint_every": 3, "keep_checkpoints": 9}
    unbroken = train_in(Memory(), task, strategy, 2, run_dir=tmp_path / "whole", **options)
    found = find_checkpoint(tmp_path / "whole" / "checkpoints" / f"step-{at:08d}")
    resumed = train_in(Memory(), task, strategy, 2, run_dir=tmp_path / "again", resume=str(found.path), **options)
    for a, b in zip(unbroken, resumed, strict=True):
        assert_same_bits(b.state, a.state)


def test_presets_are_phases() -> None:
    for name in ("strategy-switch", "sync-switch", "post-local-sgd"):
        strategy = make_strategy(name, {}, 4)
        assert len(strategy.phases) == 2
        trained = train_in(Virtual(colocated=strategy.server_spec.colocated), toy(epochs=4), strategy, 4)
        (switch,) = of_kind(trained[0], "switch")
        assert switch["position"] < 4 * SAMPLES
        check_audit(trained)


def test_strategy_switch_fires_by_its_rule_once_the_loss_has_settled() -> None:
    task = toy(epochs=30, optimizer="sgd")
    strategy = make_strategy("strategy-switch", {"latest": 1.0}, 2)
    trained = train_in(Virtual(colocated=True), task, strategy, 2)
    (switch,) = of_kind(trained[0], "switch")
    assert switch["value"] <= strategy.threshold
    readings = [row for row in of_kind(trained[0], "trigger") if row["in_force"]]
    assert len(readings) == round(switch["epoch"]), "one reading per epoch, also where it does not fire"
    assert [row["fires"] for row in readings] == [False] * (len(readings) - 1) + [True]


@pytest.mark.parametrize(
    ("run", "options", "said"),
    [
        ("all-reduce until step:at=2 | gossip", {"codec": "fp16"}, "cannot be packed"),
        ("all-reduce until step:at=2 | all-reduce:codec=dcg", {}, "dgc"),
        ("local-sgd until noise | all-reduce", {}, "noise works under all-reduce"),
        ("ad-psgd until straggler | all-reduce", {}, "speeds"),
        ("all-reduce until step:at=2 | parameter-server:mode=backup;backups=2", {}, "backups"),
        ("all-reduce until plateau:on=validation | all-reduce", {"eval_every": 0}, "eval_every"),
        ("all-reduce until step:at=2 | diloco:sync_every=50", {"checkpoint_every": 10}, "checkpoint_every"),
        ("all-reduce until step:at=2 | local-sgd:steps=speed", {"shares": (1.0, 2.0)}, "shares"),
    ],
)
def test_what_would_fail_in_a_later_phase_is_refused_before_the_first(
    run: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        podium.train(toy(), strategy=run, workers=2, launcher="threads", **options)


def raises(_seen: Any) -> bool:
    raise KeyError("my rule is broken")


def test_a_rule_that_raises_is_named() -> None:
    with pytest.raises(ConfigError, match=r"raises.*KeyError at step 1"):
        train(toy(), phases("all-reduce until tests.strategies.test_phases:raises | all-reduce"), 2)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ("all-reduce | parameter-server", "needs a trigger"),
        ("all-reduce until step:at=3", "every phase but the last"),
        ("all-reduce until | all-reduce", "a phase is"),
        ("all-reduce until plateu | all-reduce", "plateau"),
        ("all-reduce until step | all-reduce", "at and after"),
        ("all-reduce until share:at=1.5 | all-reduce", "below 1"),
        ("parameter-server:servers=1 until step:at=2 | parameter-server:servers=2", "servers"),
        ("strategy-switch until step:at=2 | all-reduce", "phases"),
        ("all-reduce:collective=ring until step:at=2 | all-reduce", "collective"),
    ],
)
def test_bad_phases_are_refused_with_a_reason(run: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Phases(run=run)


def uneven(speeds: tuple[float, ...]) -> Cluster:
    even = uniform(len(speeds), seconds_per_sample=1e-3)
    nodes = tuple(dataclasses.replace(node, speed=speed) for node, speed in zip(even.nodes, speeds, strict=True))
    return dataclasses.replace(even, nodes=nodes)


@pytest.mark.parametrize("first", ["all-reduce", "local-sgd:period=5"])
def test_a_straggler_that_is_seen_ends_a_phase(first: str) -> None:
    run = f"{first} until straggler | parameter-server:mode=async;servers=3;placement=colocated"
    task = toy(epochs=20)
    slow = train_in(Virtual(uneven((1.0, 1.0, 0.25)), colocated=True), task, phases(run), WORKERS)
    (switch,) = of_kind(slow[0], "switch")
    assert switch["value"] == pytest.approx(4.0, rel=0.05)
    assert "worker 2" in switch["why"]
    even = train_in(Virtual(uneven((1.0, 1.0, 0.9)), colocated=True), task, phases(run), WORKERS)
    assert of_kind(even[0], "switch") == []
    assert of_kind(even[0], "trigger"), "it was looked for all the same"


def test_asynchronous_workers_see_when_a_straggler_is_gone() -> None:
    run = "parameter-server:mode=async;servers=3;placement=colocated until straggler:gone=true | all-reduce"
    even = train_in(Virtual(uneven((1.0, 1.0, 0.9)), colocated=True), toy(epochs=10), phases(run), WORKERS)
    (switch,) = of_kind(even[0], "switch")
    assert switch["value"] == pytest.approx(1 / 0.9, rel=0.05)
    slow = train_in(Virtual(uneven((1.0, 1.0, 0.25)), colocated=True), toy(epochs=10), phases(run), WORKERS)
    assert of_kind(slow[0], "switch") == []


def test_advice_is_followed_where_it_pays() -> None:
    run = "all-reduce until advice | parameter-server:mode=async;servers=3;placement=colocated"
    slow = train_in(Virtual(uneven((1.0, 1.0, 0.25)), colocated=True), toy(epochs=20), phases(run), WORKERS)
    (switch,) = of_kind(slow[0], "switch")
    assert switch["value"] > 1.3
    assert switch["epoch"] >= 2, "a tenth of the budget comes first"


def test_the_noise_scale_is_measured_where_a_rule_asks_for_it() -> None:
    trained = train(toy(epochs=10), phases("all-reduce until noise:every=5;factor=1e9 | all-reduce"), WORKERS)
    readings = [row for row in of_kind(trained[0], "trigger") if row["rule"].startswith("noise") and row["in_force"]]
    assert len(readings) == 4, "every fifth step of the half of the budget that it was in force"
    assert all(row["value"] is not None for row in readings)


# What once went wrong.


class StopAt(Uncontrolled):
    """Asks to stop once a worker has been fed so many batches."""

    def __init__(self, batches: int) -> None:
        self.left = batches

    def stop_requested(self) -> bool:
        self.left -= 1
        return self.left < 0


def stop_rank(comm: Communicator, job: Job, batches: int) -> int:
    if comm.rank in comm.servers:
        run_server(make_server(job, comm, Recorder(comm.rank)))
        return 0
    training = Training(job, comm, Recorder(comm.rank), StopAt(batches))
    training.run()
    return training.worker.position


@pytest.mark.parametrize("batches", [0, 2, 3, 4, 5])
@pytest.mark.parametrize("first", ["all-reduce", "local-sgd:period=2", "parameter-server:mode=async"])
def test_a_run_that_is_stopped_around_a_change_of_phase_ends(first: str, batches: int) -> None:
    strategy = phases(f"{first} until step:at=4 | all-reduce until step:at=5 | all-reduce")
    job = Job(RunConfig(workers=2, epochs=3), toy(epochs=3), strategy)
    ended = Memory().run(partial(stop_rank, job=job, batches=batches), 2, strategy.server_spec.count)
    assert len(set(ended[:2])) == 1
    assert ended[0] < 3 * SAMPLES


@pytest.mark.parametrize("rule", ["plateau:window=2", "rate-decay", "epoch:after=0.001", "share:after=0.0001"])
def test_phases_that_repeat_go_on_training(rule: str) -> None:
    run = f"all-reduce until {rule} | all-reduce:overlap=false until {rule}"
    trained = train(toy(epochs=4), phases(run, repeat=True), WORKERS)
    assert trained[0].position == 4 * SAMPLES
    assert len(of_kind(trained[0], "switch")) <= 2 + 16, "there are no more steps than that, and the first time"


def one_cycle(optimizer: Any, total_steps: int) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps)


def test_replicas_agree_after_an_asynchronous_phase_with_a_scheduled_momentum() -> None:
    task = toy(epochs=6, schedule=one_cycle, samples=96)
    run = "parameter-server:mode=async;servers=2 until epoch:at=3 | all-reduce"
    trained = train_in(Virtual(uneven((1.0, 1.0, 0.3, 1.0, 1.0))), task, phases(run), WORKERS)
    assert len(hashes(trained)) == 1
    for other in trained[1:]:
        for name, state in trained[0].optimizer.items():
            assert_same_bits(other.optimizer[name], state)


def test_a_velocity_does_not_outlive_a_codec_that_took_the_momentum_over() -> None:
    run = "all-reduce until step:at=4 | all-reduce:codec=dgc until step:at=8 | all-reduce:codec=dense until step:at=9"
    trained = train(toy(epochs=3), phases(f"{run} | all-reduce"), WORKERS)
    assert len(hashes(trained)) == 1
    within = train(toy(epochs=3), phases(f"{run.rpartition(' until ')[0]}"), WORKERS, steps=8)
    assert all("momentum_buffer" not in state for state in within[0].optimizer.values())


def test_an_epoch_is_an_epoch_where_workers_do_unequal_numbers_of_steps() -> None:
    run = "local-sgd:steps=4/2/2;period=4 until plateau:window=3;threshold=9;fallen=1 | all-reduce"
    trained = train(toy(epochs=9), phases(run), WORKERS)
    readings = [row for row in of_kind(trained[0], "trigger") if row["in_force"]]
    assert len(readings) == 3
    assert [round(row["epoch"]) for row in readings] == [1, 2, 3]


def test_what_a_strategy_kept_does_not_go_to_another(tmp_path: Path) -> None:
    options = {"checkpoint_every": 4, "keep_checkpoints": 9}
    task = toy(epochs=3)
    train_in(Memory(), task, make_strategy("diloco", {"sync_every": 2}, 2), 2, run_dir=tmp_path, **options)
    found = str(find_checkpoint(tmp_path / "checkpoints" / "step-00000004").path)
    for name in ("async-local-sgd", "local-sgd", "all-reduce", "streaming-diloco"):
        trained = train_in(Memory(), task, make_strategy(name, {}, 2), 2, resume=found)
        assert len(hashes(trained)) == 1


def test_steps_stay_in_line_where_an_asynchronous_segment_ended_in_mid_step(tmp_path: Path) -> None:
    """Otherwise an epoch would have one step too many, and a schedule of steps would run out."""
    task, strategy = (
        toy(epochs=4, schedule=one_cycle),
        phases("parameter-server:mode=async until epoch:at=3 | all-reduce"),
    )
    ended = []
    for batches in range(1, 8):
        job = Job(RunConfig(workers=3, epochs=4), task, strategy, tmp_path / str(batches))
        Virtual(uneven((1.0, 0.7, 0.4, 1.0))).run(partial(stop_rank, job=job, batches=batches), 3, 1)
        ended.append(find_checkpoint(tmp_path / str(batches)))
    found = next(one for one in ended if one.position % SAMPLES % 12)
    resumed = train_in(Virtual(), task, strategy, 3, resume=str(found.path))
    assert resumed[0].position == 4 * SAMPLES
    assert {row["position"] % SAMPLES % 12 for row in of_kind(resumed[0], "switch")} == {0}


def moved_by_next_exchange(first: str, second: str, codec: str) -> tuple[float, str]:
    """How far the parameters move in the first few steps of the second phase, and what became of the leftovers."""
    task = toy(epochs=4, optimizer=slow_sgd, samples=96)
    run = f"{first} until step:at=10 | {second}"
    before = train_in(Virtual(), task, phases(run), WORKERS, codec=codec, steps=10)
    after = train_in(Virtual(), task, phases(run), WORKERS, codec=codec, steps=13)
    far = max(float((after[0].state[k] - before[0].state[k]).abs().max()) for k in after[0].state)
    return far, of_kind(after[0], "switch")[0]["leftovers"]


def slow_sgd(model: Any) -> SGD:
    return SGD(model.parameters(), lr=1e-3, momentum=0.5)


KINDS = ["all-reduce", "parameter-server:mode=async", "local-sgd:period=1", "diloco:sync_every=1;outer_momentum=0"]


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(KINDS, 2)))
def test_what_was_left_out_moves_parameters_as_far_as_it_was_meant_to(first: str, second: str) -> None:
    far, became = moved_by_next_exchange(first, second, "top-k:ratio=0.05")
    dense, _ = moved_by_next_exchange(first, second, "dense")
    assert became in ("converted", "kept")
    assert far < 8 * dense, "what was left out in ten steps goes out in a few, and no more than that"


def test_what_nobody_can_convert_is_dropped_and_said_so() -> None:
    run = phases("all-reduce until step:at=4 | local-sgd:period=2")
    trained = train(toy(optimizer="adam"), run, WORKERS, codec="top-k:ratio=0.1")
    assert of_kind(trained[0], "switch")[0]["leftovers"] == "dropped"
    trained = train(toy(), phases("all-reduce until step:at=4 | elastic-averaging"), WORKERS, codec="top-k:ratio=0.1")
    assert of_kind(trained[0], "switch")[0]["leftovers"] == "dropped"
