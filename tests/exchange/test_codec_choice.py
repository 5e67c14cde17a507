"""Auto: packs where that is predicted to pay, says why, and gives it up where it does not."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from podium.comm.base import Communicator
from podium.engine.checkpoint import find_checkpoint
from podium.errors import ConfigError
from podium.exchange.codec_choice import Check, Choice, Line
from podium.exchange.codecs.auto import CANDIDATES, AutoCodec
from podium.exchange.packing import make_packing
from podium.launch.clusters.description import Cluster, uniform
from podium.records.recorder import Record
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.strategies.parameter_server import ParameterServer
from podium.task import Task
from podium.testing.toys import (
    CLASSES,
    FEATURES,
    Trained,
    assert_same_bits,
    hashes,
    toy,
    train,
    train_in,
    train_plainly,
)
from podium.testing.worlds import Memory, Real, Virtual

WORKERS = 4


def wide_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, CLASSES))


def task_of(**fields: Any) -> Task:
    """Ten steps an epoch."""
    return toy(**{"model": wide_model, "samples": 120, "batch_size": 12, "epochs": 2, "optimizer": "sgd", **fields})


def slow_network(mbit: float = 10.0, nodes: int = WORKERS + 2) -> Cluster:
    return uniform(nodes, mbit=mbit, latency_us=500, seconds_per_sample=1e-3)


def records(worker: Trained, kind: str) -> list[Record]:
    return [row for row in worker.records if row["kind"] == kind]


def facts(row: Record) -> dict[str, Any]:
    return {k: v for k, v in row.items() if k not in ("rank", "t_ns")}


def step_seconds(worker: Trained) -> float:
    """The usual time between two steps."""
    gaps = sorted(b - a for a, b in zip(worker.step_times, worker.step_times[1:], strict=False))
    return gaps[len(gaps) // 2] / 1e9


# Where the network is slow.


def test_over_a_slow_network_all_workers_pack_alike_and_the_prediction_holds() -> None:
    packed = train_in(Virtual(slow_network()), task_of(), AllReduce(), WORKERS, codec="auto")
    dense = train_in(Virtual(slow_network()), task_of(), AllReduce(), WORKERS)
    assert len(hashes(packed)) == 1
    (choice,), (check,) = records(packed[0], "codec"), records(packed[0], "codec_check")
    for worker in packed[1:]:
        assert facts(records(worker, "codec")[0]) == facts(choice), "all decide alike"
        assert facts(records(worker, "codec_check")[0]) == facts(check)
    predicted = choice["predicted_ms"]
    assert set(predicted) == {"dense", *CANDIDATES}
    (chosen,) = choice["chosen"]
    assert predicted[chosen] == min(predicted.values()) < predicted["dense"] / 10
    assert choice["why"].startswith(f"{chosen}: exchanges are predicted to take")
    assert check["keeps"] and check["predicted_ms"] == pytest.approx(predicted[chosen])
    # A step also sums its tail and overlaps with backward, so this is near, and not equal.
    saved = (step_seconds(dense[0]) - step_seconds(packed[0])) * 1e3
    assert saved == pytest.approx(predicted["dense"] - predicted[chosen], rel=0.15)


def test_predictions_follow_from_the_link_the_codec_and_the_bytes() -> None:
    trained = train_in(Virtual(slow_network()), task_of(), AllReduce(), WORKERS, codec="auto", steps=1)
    (row,) = records(trained[0], "codec")
    nbytes = 4 * sum(p.numel() for p in wide_model().parameters())
    for spec, milliseconds in row["predicted_ms"].items():
        gathers = make_packing(spec).codec.reduction == "gather"
        line = Line(**row["link"]["gather" if gathers else "sum"])
        rate = row["rates"].get(spec, {"gbs": 1e9, "ratio": 1.0})
        more = line.alpha if spec.startswith("power-sgd") else 0.0
        expected = nbytes / rate["gbs"] / 1e9 + more + line.seconds(rate["ratio"] * nbytes)
        assert milliseconds == pytest.approx(expected * 1e3, rel=1e-3), spec


def test_over_a_fast_network_nothing_is_packed() -> None:
    cluster = uniform(WORKERS, mbit=100_000, latency_us=5, seconds_per_sample=1e-3)
    trained = train_in(Virtual(cluster), task_of(), AllReduce(), WORKERS, codec="auto")
    (row,) = records(trained[0], "codec")
    assert row["chosen"] == ["dense"] and row["why"].startswith("off: ")
    assert not records(trained[0], "codec_check"), "there is nothing to check"
    assert_same_bits(trained[0].state, train_in(Virtual(cluster), task_of(), AllReduce(), WORKERS)[0].state)


def test_on_loopback_it_stays_off_and_says_why() -> None:
    """With codecs that are summed as gradients are, so that only bytes can make a difference."""
    spec = "auto:candidates=fp16+power-sgd:rank=4,least_gain=2"  # beyond what a busy machine adds
    for worker in train_in(Real(shared=True), task_of(), AllReduce(), 2, codec=spec, steps=2):
        (row,) = records(worker, "codec")
        assert row["chosen"] == ["dense"]
        assert "is asked for" in row["why"] and row["why"].startswith("off: ")


def test_each_bucket_has_its_own_codec() -> None:
    """A small bucket is all latency, which packing does not make less; a large one is all bytes."""
    cluster = uniform(WORKERS, mbit=100, latency_us=2000, seconds_per_sample=1e-3)
    strategy = AllReduce(bucket_bytes=1)
    trained = train_in(Virtual(cluster), task_of(), strategy, WORKERS, codec="auto:candidates=fp16", steps=3)
    (row,) = records(trained[0], "codec")
    sizes = [p.numel() for p in wide_model().parameters()][::-1]
    assert len(row["by_bucket"]) == len(sizes)
    assert row["by_bucket"][sizes.index(256 * 256)] == "fp16"
    assert row["by_bucket"][sizes.index(CLASSES)] == "dense"
    assert row["chosen"] == ["dense", "fp16"]
    assert len(hashes(trained)) == 1


@pytest.mark.parametrize("mode", ["sync", "async", "ssp", "softsync"])
def test_under_a_parameter_server_pushes_are_packed(mode: Any) -> None:
    strategy = ParameterServer(mode=mode, servers=2)
    trained = train_in(Virtual(slow_network()), task_of(epochs=1), strategy, WORKERS, codec="auto")
    assert len(hashes(trained)) == 1
    for worker in trained:
        (row,) = records(worker, "codec")
        assert row["chosen"] != ["dense"] and len(set(row["by_bucket"])) == 1
    dense = train_in(Virtual(slow_network()), task_of(epochs=1), strategy, WORKERS)
    sent = [sum(row["sent"] for w in workers for row in records(w, "step")) for workers in (trained, dense)]
    assert sent[0] < sent[1] / 10


@pytest.mark.parametrize("strategy", [AllReduce(), ParameterServer()], ids=lambda s: s.name)
def test_one_worker_has_nothing_to_choose(strategy: Strategy[Any]) -> None:
    task = toy()
    (alone,) = train(task, strategy, codec="auto")
    assert_same_bits(alone.state, train_plainly(task).state)
    (row,) = records(alone, "codec")
    assert row["why"] == "one worker sends nothing"


@pytest.mark.parametrize("spec", ["fp16", "top-k:ratio=0.05", "power-sgd:rank=2"])
def test_with_one_candidate_it_trains_as_that_does(spec: str) -> None:
    auto = train_in(Virtual(slow_network()), task_of(), AllReduce(), WORKERS, codec=f"auto:candidates={spec}")
    mine = train_in(Virtual(slow_network()), task_of(), AllReduce(), WORKERS, codec=spec)
    assert_same_bits(auto[0].state, mine[0].state)


# The check.

GROWING = '''
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch

from podium.exchange.codecs.base import Codec


@final
@dataclass(frozen=True, kw_only=True)
class Growing(Codec):
    """Sends half of the elements; its wire is small in the first turn, which is when it is tried, and huge later."""

    name: ClassVar[str] = "growing"
    reduction: ClassVar[Literal["sum", "gather"]] = "gather"
    times: int = 4

    def encode(self, tensor, span, turn, memory):
        kept = tensor[: tensor.numel() // 2]
        return kept.clone() if turn.step == 0 else kept.repeat(2 * self.times)

    def decode_add(self, wire, out, span, turn, alpha=1.0):
        half = out.numel() // 2
        out[:half].add_(wire[:half], alpha=alpha)
'''


@pytest.fixture
def growing(tmp_path: Path) -> str:
    path = tmp_path / "growing.py"
    path.write_text(GROWING)
    return f"{path}:Growing"


def test_packing_that_takes_longer_than_predicted_without_is_given_up(growing: str) -> None:
    spec = f"auto:candidates={growing},check_after=4,least_gain=1"
    trained = train_in(Virtual(slow_network()), task_of(), AllReduce(), 2, codec=spec)
    assert len(hashes(trained)) == 1
    for worker in trained:
        (check,) = records(worker, "codec_check")
        assert not check["keeps"] and check["step"] == 4
        assert check["measured_ms"] > check["dense_ms"] > check["predicted_ms"]
        sent = [row["sent"] for row in records(worker, "step")]
        assert min(sent[1:4]) > 2 * max(sent[5:])


def test_what_was_left_out_is_sent_once_packing_is_given_up(growing: str, tmp_path: Path) -> None:
    spec = f"auto:candidates={growing},check_after=4,least_gain=1"
    trained = train_in(Virtual(slow_network()), task_of(), AllReduce(), 2, codec=spec, run_dir=tmp_path, steps=12)
    assert not records(trained[0], "codec_check")[0]["keeps"]
    found = find_checkpoint(tmp_path)
    for rank in found.members:
        own = found.own(rank)
        assert own is not None
        for parts in own["leftovers"]["of_span"].values():
            assert not any(part.any() for part in parts.values())


def test_after_zero_steps_nothing_is_checked(growing: str) -> None:
    spec = f"auto:candidates={growing},check_after=0,least_gain=1"
    trained = train_in(Virtual(slow_network()), task_of(epochs=1), AllReduce(), 2, codec=spec)
    assert not records(trained[0], "codec_check")


def test_waiting_for_a_slow_worker_is_not_held_against_packing() -> None:
    """One of four is far slower: the others wait for it in their exchanges, packed or not."""
    even = slow_network()
    nodes = tuple(dataclasses.replace(n, speed=0.01) if i == 3 else n for i, n in enumerate(even.nodes))
    uneven = dataclasses.replace(even, nodes=nodes)
    trained = train_in(Virtual(uneven), task_of(), AllReduce(), WORKERS, codec="auto")
    (check,) = records(trained[0], "codec_check")
    assert check["keeps"]


def check_often(comm: Communicator, spent_ms: list[float], dense_ms: float) -> list[Any]:
    choice = Choice([make_packing("top-k")], ["top-k"], dense_ms / 1e3, dense_ms / 2e3)
    check = Check(choice, 3)
    return [check.add(int(ms * 1e6) + comm.rank, comm) for ms in spent_ms]


@pytest.mark.parametrize(("spent", "keeps"), [([1, 9, 2, 50, 50], True), ([50, 60, 1, 1, 1], False)])
def test_the_median_decides_once_and_for_all(spent: list[float], keeps: bool) -> None:
    for found in Memory().run(partial(check_often, spent_ms=spent, dense_ms=10.0), 3):
        assert [row is None for row in found] == [True, True, False, True, True]
        assert found[2]["keeps"] is keeps
        assert found[2]["measured_ms"] == pytest.approx(sorted(spent[:3])[1])


def test_where_nothing_is_packed_nothing_is_checked() -> None:
    choice = Choice([make_packing("dense")], ["dense"], 1.0, 1.0)
    (comm,) = Memory().run(lambda comm: comm, 1)
    assert [Check(choice, 1).add(10**12, comm) for _ in range(3)] == [None] * 3


# What cannot be chosen from.


@pytest.mark.parametrize(
    ("candidates", "message"),
    [
        ("dgc", "dgc changes more than how gradients are packed"),
        ("auto", "codec auto"),
        ("dense", "codec auto"),
        ("fp16+topk", "Did you mean 'top-k'"),
        ("top-k:ration=0.1", "Did you mean 'ratio'"),
    ],
)
def test_what_is_no_candidate_is_refused(candidates: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        train(toy(), AllReduce(), 2, codec=f"auto:candidates={candidates}")


def test_a_candidate_may_say_who_feeds_back() -> None:
    spec = "auto:candidates=top-k:feedback=false"
    for strategy in (AllReduce(), ParameterServer()):
        trained = train_in(Virtual(slow_network()), task_of(epochs=1), strategy, WORKERS, codec=spec)
        assert len(hashes(trained)) == 1
        assert records(trained[0], "codec")[0]["chosen"] == ["top-k:feedback=false"]


def test_servers_take_no_candidate_of_the_users_own(growing: str) -> None:
    """What is chosen travels to them as text, and they load no code by it: that is said before the first push."""
    with pytest.raises(ConfigError):
        train_in(
            Virtual(slow_network()),
            task_of(epochs=1),
            ParameterServer(),
            2,
            codec=f"auto:candidates={growing},least_gain=1",
        )


@pytest.mark.parametrize("options", [{"candidates": ()}, {"least_gain": 0.5}, {"check_after": -1}], ids=str)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="codec auto"):
        AutoCodec(**options)


def test_candidates_are_given_with_a_plus_between_them() -> None:
    assert AutoCodec(candidates=("fp16+int8:chunk=64",)).candidates == ("fp16", "int8:chunk=64")
    codec = make_packing("auto:candidates=fp16+top-k:ratio=0.1,least_gain=2").codec
    assert isinstance(codec, AutoCodec)
    assert (codec.candidates, codec.least_gain) == (("fp16", "top-k:ratio=0.1"), 2.0)
    with pytest.raises(AssertionError):
        codec.decode_add(torch.ones(1), torch.ones(1), None, None)  # type: ignore[arg-type]  # it packs nothing
