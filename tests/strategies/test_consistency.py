"""One gate: its settings meet where they must, and each mode keeps what its name promises."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adagrad, Optimizer

from podium.config import RunConfig
from podium.data.base import ArrayDataset, Data
from podium.engine.build import Job
from podium.errors import ConfigError
from podium.launch.clusters.description import Cluster, uniform
from podium.records.recorder import Record
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.strategies.parameter_server import ParameterServer
from podium.task import Task
from podium.testing.strategies import OneWorkerContract
from podium.testing.toys import assert_close, assert_same_bits, hashes, toy, train, train_in, train_plainly, train_rank
from podium.testing.worlds import Memory, Real, Virtual, World

MODES: dict[str, dict[str, Any]] = {
    "async": {"mode": "async"},
    "ssp": {"mode": "ssp", "staleness": 1},
    "dssp": {"mode": "dssp", "staleness": 1, "staleness_high": 4},
    "softsync": {"mode": "softsync", "groups": 2},
    "backup": {"mode": "backup", "backups": 1},
    "gba": {"mode": "gba", "drop_beyond": 2},
    "drop": {"mode": "async", "drop_beyond": 1},
    "prefetch": {"mode": "async", "prefetch": True},
    "staleness-lr": {"mode": "async", "mitigation": "staleness-lr"},
    "dc-asgd": {"mode": "ssp", "mitigation": "dc-asgd"},
    "dc-asgd-adaptive": {"mode": "async", "mitigation": "dc-asgd-adaptive"},
    "softsync, dc-asgd": {"mode": "softsync", "mitigation": "dc-asgd"},
    "replicas": {"mode": "async", "replicas": 2},
    "gathered replicas": {"mode": "gba", "replicas": 2},
}


class TestSoftsyncAlone(OneWorkerContract):
    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return ParameterServer(mode="softsync")


@pytest.mark.parametrize("world", [Memory(), Virtual(), Real()], ids=lambda w: w.name)
@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_ssp_without_slack_is_bsp_in_bits(world: World, servers: int, optimizer: str) -> None:
    """Momentum and moments included, a step of fewer samples than workers included."""
    task = toy(optimizer=optimizer, samples=38)  # 3 steps of 12 and one of 2, for 3 workers
    bsp = train(task, ParameterServer(), 3)
    ssp = train_in(world, task, ParameterServer(mode="ssp", staleness=0, servers=servers), 3)
    assert_same_bits(ssp[0].state, bsp[0].state)
    assert hashes(ssp) == hashes(bsp)


def test_ssp_without_a_bound_that_matters_is_asp_in_bits() -> None:
    asp, ssp = (_records(Virtual(_uneven()), toy(epochs=3), ParameterServer(**mode), 4) for mode in _LOOSE)
    assert ssp.state == asp.state
    assert [_plain(row) for row in ssp.servers[0]] == [_plain(row) for row in asp.servers[0]]


def test_dssp_with_one_bound_is_ssp_in_bits() -> None:
    ssp = ParameterServer(mode="ssp", staleness=2)
    dssp = ParameterServer(mode="dssp", staleness=2, staleness_high=2)
    one, other = (_records(Virtual(_uneven()), toy(epochs=3), strategy, 4) for strategy in (ssp, dssp))
    assert one.state == other.state


def test_no_backups_is_bsp_in_bits() -> None:
    task = toy(optimizer="momentum")
    assert_same_bits(
        train(task, ParameterServer(mode="backup", backups=0), 3)[0].state, train(task, ParameterServer(), 3)[0].state
    )


def test_softsync_with_as_many_groups_as_workers_is_asp() -> None:
    task = toy(epochs=3)
    asp = train_in(Virtual(_uneven()), task, ParameterServer(mode="async"), 4)
    soft = train_in(Virtual(_uneven()), task, ParameterServer(mode="softsync", groups=4), 4)
    assert_close(soft[0].state, asp[0].state)


@pytest.mark.parametrize(
    "world", [Virtual(), *(pytest.param(w, marks=pytest.mark.slow) for w in (Memory(), Real()))], ids=lambda w: w.name
)
@pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
def test_every_slice_is_applied_once_by_every_range_and_all_end_alike(world: World, options: dict[str, Any]) -> None:
    run = _records(world, toy(samples=47, epochs=3), ParameterServer(servers=2, **options), 4)
    assert len(run.hashes) == 1
    for server in run.servers:
        leases = [row["lease"] for row in server if row["kind"] == "update"]
        assert len(leases) == len(set(leases))
        assert sum(_samples(run, lease) for lease in leases) == 3 * 47
    assert {worker.position for worker in run.workers} == {3 * 47}


@pytest.mark.parametrize("servers", [1, 2])
def test_a_push_that_is_too_stale_is_dropped_counted_and_its_samples_used_later(servers: int) -> None:
    run = _records(Virtual(_uneven()), toy(epochs=4), ParameterServer(mode="async", drop_beyond=1, servers=servers), 4)
    for server in run.servers:
        assert all(row["staleness"] <= 1 for row in server if row["kind"] == "update")
        assert any(row["kind"] == "dropped" and row["staleness"] > 1 for row in server)


def test_backup_workers_are_not_waited_for() -> None:
    """With one of four workers four times slower, a step takes as long as the third fastest needs."""
    cluster, task = _uneven(), toy(epochs=4, samples=240, batch_size=24)
    waiting = train_in(Virtual(cluster), task, ParameterServer(), 4)
    backed = _records(Virtual(cluster), task, ParameterServer(mode="backup", backups=1), 4)
    assert max(backed.workers[0].step_times) < 0.6 * max(waiting[0].step_times)
    dropped = [row["worker"] for row in backed.servers[0] if row["kind"] == "dropped"]
    assert dropped and set(dropped) == {3}
    assert all(row["staleness"] == 0 for row in backed.servers[0] if row["kind"] == "update")


def test_a_prefetched_gradient_says_which_parameters_it_was_computed_on() -> None:
    """Alone, a worker that computes on is always one update behind."""
    run = _records(Virtual(), toy(), ParameterServer(mode="async", prefetch=True), 1)
    stale = [row["staleness"] for row in run.servers[0] if row["kind"] == "update"]
    assert stale == [0] + [1] * (len(stale) - 1)


def test_updates_of_part_of_a_batch_take_that_part_of_the_rate() -> None:
    """Two workers in step that lease a quarter of the batch each: two small steps of plain PyTorch at half the rate."""
    mine = train(toy(optimizer="sgd", samples=36), ParameterServer(mode="ssp", staleness=0, lease=3), 2)
    plain = train_plainly(toy(optimizer=_half_of_sgd, samples=36, batch_size=6))
    assert_close(mine[0].state, plain.state)


def test_gba_makes_updates_of_a_whole_global_batch_at_the_tasks_own_rate() -> None:
    """With one worker that leases a third of the batch, three pushes are one step of plain PyTorch, Adam included."""
    task = toy(optimizer="adamw", samples=36)
    # One worker reads between its pushes, but the parameters move only with every third.
    mine = train(task, ParameterServer(mode="gba", lease=4))
    assert_close(mine[0].state, train_plainly(task).state)


class TestUneven:
    """Virtual time, four workers, the last four times slower."""

    @pytest.mark.parametrize("bound", [1, 2, 5])
    def test_the_clock_gap_never_exceeds_the_bound(self, bound: int) -> None:
        run = _records(Virtual(_uneven(jitter=0.3)), _long(), ParameterServer(mode="ssp", staleness=bound), 4)
        leads = [row["lead"] for row in run.servers[0] if row["kind"] == "update"]
        assert max(leads) == bound  # reached, since one is far slower, and never passed
        assert _gap(run.servers[0]) <= bound + 1  # counted anew from the order of updates: one push is under way

    def test_throughput_lies_between_bsp_and_asp_as_the_formulas_say(self) -> None:
        """BSP: N / max t. ASP: the sum of 1 / t. SSP: BSP's rate in the long run, plus the slack used up once."""
        rates = {name: _rate(ParameterServer(**mode)) for name, mode in _RATES.items()}
        assert rates["bsp"] <= rates["ssp"] * (1 + 1e-9) and rates["ssp"] <= rates["asp"]
        seconds = 10e-3  # a fast worker's pass over its slice, by the cluster's own figures; messages take about 1 %
        assert rates["bsp"] == pytest.approx(4 / (4 * seconds), rel=0.05)
        assert rates["asp"] == pytest.approx(3 / seconds + 1 / (4 * seconds), rel=0.05)
        assert rates["ssp"] == pytest.approx(4 / (4 * seconds), rel=0.10)
        assert rates["dssp"] <= rates["asp"]

    def test_slack_absorbs_what_varies(self) -> None:
        """Equal workers with jitter: BSP waits for the slowest of every step, SSP much less, ASP not at all."""
        noisy = uniform(5, jitter=0.4, seconds_per_sample=1e-3)
        bsp, ssp, asp = (
            _rate(ParameterServer(**mode), noisy)
            for mode in ({"mode": "sync"}, {"mode": "ssp", "staleness": 4}, {"mode": "async"})
        )
        assert bsp * 1.1 < ssp <= asp * 1.02


class TestRows:
    """Embeddings of which only touched rows travel."""

    @pytest.mark.parametrize("world", [Memory(), Virtual(), Real()], ids=lambda w: w.name)
    @pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
    @pytest.mark.parametrize("servers", [1, 3])
    def test_rows_give_what_whole_tables_give(self, world: World, optimizer: str, servers: int) -> None:
        task = _words(optimizer)
        by_rows = train_in(world, task, ParameterServer(servers=servers), 2)
        assert_close(by_rows[0].state, train(task, AllReduce(), 2)[0].state, tolerance=2e-5)
        assert len(hashes(by_rows)) == 1

    @pytest.mark.parametrize("options", MODES.values(), ids=MODES.keys())
    def test_every_mode_ends_alike_on_all_workers(self, options: dict[str, Any]) -> None:
        assert len(_records(Memory(), _words("adagrad"), ParameterServer(servers=2, **options), 3).hashes) == 1

    def test_far_fewer_bytes_travel(self) -> None:
        sent = {}
        for rows in (True, False):
            workers = train(_words("sgd", vocabulary=20_000), ParameterServer(mode="async", rows=rows), 2)
            steps = [row for w in workers for row in w.records if row["kind"] == "step"]
            sent[rows] = sum(row["sent"] + row["received"] for row in steps)
        assert sent[False] > 20 * sent[True]

    @pytest.mark.parametrize("options", [{"momentum": 0.9}, {"weight_decay": 0.1}], ids=str)
    def test_an_optimizer_that_moves_untouched_rows_gets_whole_tables(self, options: dict[str, float]) -> None:
        task = dataclasses.replace(_words("sgd"), optimizer=partial(_sgd_with, **options))
        assert_close(train(task, ParameterServer(), 2)[0].state, train(task, AllReduce(), 2)[0].state, tolerance=2e-5)

    def test_clipping_sees_whole_gradients(self) -> None:
        task = dataclasses.replace(_words("sgd"), clip_norm=0.05)
        assert_close(train(task, ParameterServer(), 2)[0].state, train(task, AllReduce(), 2)[0].state, tolerance=2e-5)

    def test_accumulated_micro_batches_touch_the_rows_of_all(self) -> None:
        task = dataclasses.replace(_words("sgd"), accumulate=3)
        assert_close(train(task, ParameterServer(), 2)[0].state, train(task, AllReduce(), 2)[0].state, tolerance=2e-5)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"mode": "dssp", "staleness": 5, "staleness_high": 2}, "staleness_high"),
        ({"mode": "sync", "drop_beyond": 2}, "drop_beyond"),
        ({"mode": "sync", "mitigation": "dc-asgd"}, "mitigation"),
        ({"mode": "gba", "prefetch": True}, "prefetch"),
        ({"mode": "async", "prefetch": True, "mitigation": "dc-asgd"}, "prefetch"),
        ({"replicas": 2}, "replicas"),
        ({"staleness": -1}, "staleness"),
        ({"groups": 0}, "groups"),
        ({"strength": 0.0}, "strength"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ParameterServer(**options)


def test_more_backups_than_workers_are_refused() -> None:
    with pytest.raises(ConfigError, match="backups must be below the number of workers"):
        train(toy(), ParameterServer(mode="backup", backups=2), 2)


def test_momentum_and_adam_on_the_server_learn_with_eight_asynchronous_workers() -> None:
    for optimizer in ("momentum", "adamw"):
        few = train_in(Virtual(), toy(optimizer=optimizer, epochs=6, samples=240), ParameterServer(mode="async"), 8)
        first, last = few[0].losses[0], few[0].losses[-1]
        assert last < first


_LOOSE: tuple[dict[str, Any], ...] = ({"mode": "async"}, {"mode": "ssp", "staleness": 10**6})
_RATES: dict[str, dict[str, Any]] = {
    "bsp": {"mode": "sync"},
    "ssp": {"mode": "ssp", "staleness": 3},
    "dssp": {"mode": "dssp", "staleness": 1, "staleness_high": 6},
    "asp": {"mode": "async"},
}


class _Run:
    """Workers' outcomes and servers' records."""

    def __init__(self, outcomes: list[Any], workers: int) -> None:
        self.workers = outcomes[:workers]
        self.servers: list[list[Record]] = outcomes[workers:]
        self.hashes = hashes(self.workers)
        self.state = {name: value.tolist() for name, value in self.workers[0].state.items()}


def _records(world: World, task: Task, strategy: Strategy[Any], workers: int) -> _Run:
    job = Job(RunConfig(task="toy", workers=workers, eval_every=0), task, strategy, task_is_named=False)
    return _Run(world.run(partial(train_rank, job=job), workers, strategy.server_spec.count), workers)


def _samples(run: _Run, lease: int) -> int:
    rows = [row for worker in run.workers for row in worker.records if row["kind"] == "step"]
    return next(int(row["samples"]) for row in rows if row["position"] - row["samples"] == lease)


def _plain(row: Record) -> Record:
    return {k: v for k, v in row.items() if k != "lead"}


def _uneven(jitter: float = 0.0) -> Cluster:
    """Four workers' nodes, the last four times slower, and one for the server."""
    even = uniform(7, jitter=jitter, seconds_per_sample=1e-3, seconds_per_step=0.0)
    nodes = tuple(dataclasses.replace(n, speed=0.25) if i == 3 else n for i, n in enumerate(even.nodes))
    return dataclasses.replace(even, nodes=nodes)


def _long() -> Task:
    """Steps of 40 samples, 10 for each of four workers: 10 ms for a fast one."""
    return toy(samples=400, epochs=6, batch_size=40)


def _rate(strategy: ParameterServer, cluster: Cluster | None = None) -> float:
    """Slices per second, from the first to the last."""
    workers = train_in(Virtual(cluster or _uneven()), _long(), strategy, 4)
    times = sorted(row["t_ns"] for w in workers for row in w.records if row["kind"] == "step")
    most = times[: int(len(times) * 0.9)]  # at the end, fast workers have nothing left to do
    return float(len(most) / (most[-1] / 1e9))


def _gap(server: list[Record]) -> int:
    """The largest lead of one worker over another, counted from the order of updates while all still push."""
    rows = [row for row in server if row["kind"] == "update"]
    last = min(max(n for n, row in enumerate(rows) if row["worker"] == w) for w in range(4))
    pushes, widest = dict.fromkeys(range(4), 0), 0
    for row in rows[:last]:
        pushes[row["worker"]] += 1
        widest = max(widest, max(pushes.values()) - min(pushes.values()))
    return widest


class _Words(nn.Module):
    """A bag of words: an embedding with sparse gradients, and a layer on top."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.table = nn.Embedding(vocabulary, 8, sparse=True)
        self.head = nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(words).mean(dim=1))
        return out


def _words(optimizer: str, vocabulary: int = 500) -> Task:
    return Task(
        name="words",
        model=partial(_Words, vocabulary),
        data=partial(_texts, vocabulary),
        loss=cross_entropy,
        optimizer=partial(_sgd_with) if optimizer == "sgd" else _adagrad,
        metrics={},
        batch_size=12,
        epochs=2,
    )


def _texts(vocabulary: int) -> Data:
    draw = np.random.Generator(np.random.Philox(key=7))
    x = torch.from_numpy(draw.integers(vocabulary, size=(60, 5)))
    y = torch.from_numpy(draw.integers(3, size=60))
    return Data(train=ArrayDataset(x[:48], y[:48]), test=ArrayDataset(x[48:], y[48:]))


def _sgd_with(model: nn.Module, **options: float) -> Optimizer:
    return SGD(model.parameters(), lr=0.5, **options)


def _adagrad(model: nn.Module) -> Optimizer:
    return Adagrad(model.parameters(), lr=0.1, eps=1e-3)  # without it, rounding in tiny gradients becomes whole steps


def _half_of_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)
