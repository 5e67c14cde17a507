"""Streaming DiLoCo: against DiLoCo, against replicas by hand, and in virtual time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from podium.engine.flat import Flat
from podium.errors import ConfigError
from podium.launch.clusters.description import uniform
from podium.strategies.base import Strategy
from podium.strategies.diloco import DiLoCo
from podium.strategies.streaming_diloco import StreamingDiLoCo, layers_of
from podium.task import Task
from podium.testing.strategies import RoundsContract
from podium.testing.toys import CLASSES, FEATURES, assert_same_bits, plain_model, toy, train, train_in
from podium.testing.worlds import Virtual
from tests.strategies.test_local_sgd import Replicas, exchanges, flat_of


class TestStreamingDiLoCo(RoundsContract):
    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return StreamingDiLoCo(sync_every=4, fragments=2, overlap=1)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("codec", ["dense", "bf16"])
@pytest.mark.parametrize("sync_every", [2, 3])
def test_one_fragment_without_overlap_and_mixing_is_diloco(workers: int, codec: str, sync_every: int) -> None:
    task = toy(optimizer="adamw")
    streamed = train(
        task, StreamingDiLoCo(sync_every=sync_every, fragments=1, overlap=0, mix=0.0), workers, codec=codec
    )
    whole = train(task, DiLoCo(sync_every=sync_every), workers, codec=codec)
    assert_same_bits(streamed[0].state, whole[0].state)


def streamed_by_hand(task: Task, workers: int, sync_every: int, fragments: int, overlap: int, mix: float) -> Tensor:
    """The paper's box with plain replicas, torch's SGD as the outer optimizer and equal weights."""
    replicas, every, steps = Replicas(task, workers), sync_every // fragments, 0
    layers = [[0, 1], [2, 3]]  # weight and bias of each
    part = [[i for layer in layers[f::fragments] for i in layer] for f in range(fragments)]
    anchors = [nn.Parameter(p.detach().clone()) for p in replicas.models[0].parameters()]
    outers = [torch.optim.SGD([anchors[i] for i in p], lr=0.7, momentum=0.9, nesterov=True) for p in part]
    due: tuple[int, int, list[Tensor]] | None = None

    def params(w: int) -> list[nn.Parameter]:
        return list(replicas.models[w].parameters())

    def merge(f: int, drifts: list[Tensor]) -> None:
        for i, drift in zip(part[f], drifts, strict=True):
            anchors[i].grad = -drift
        outers[f].step()
        for w in range(workers):
            for i in part[f]:
                params(w)[i].data.mul_(mix).add_(anchors[i].data, alpha=1 - mix)

    while not replicas.is_over:
        replicas.step()
        steps += 1
        if due is not None and due[0] == steps:
            merge(*due[1:])
            due = None
        if steps % every == 0:
            f = (steps // every - 1) % fragments
            drifts = [sum(params(w)[i].data - anchors[i].data for w in range(workers)) / workers for i in part[f]]
            due = (steps + overlap, f, drifts)  # type: ignore[assignment]  # sums of tensors
            if overlap == 0:
                merge(f, drifts)  # type: ignore[arg-type]  # sums of tensors
                due = None
    if due is not None:
        merge(*due[1:])
    replicas.put_all(replicas.mean())
    return replicas.flats()[0]


@pytest.mark.parametrize(
    ("sync_every", "fragments", "overlap", "mix"),
    [(4, 2, 0, 0.0), (4, 2, 1, 0.0), (6, 2, 2, 0.5), (4, 1, 3, 0.25), (4, 2, 0, 0.5)],
)
def test_it_is_the_papers_box(sync_every: int, fragments: int, overlap: int, mix: float) -> None:
    task = toy(optimizer="adamw", samples=48, epochs=3)  # equal weights
    strategy = StreamingDiLoCo(sync_every=sync_every, fragments=fragments, overlap=overlap, mix=mix)
    expected = streamed_by_hand(task, 3, sync_every, fragments, overlap, mix)
    torch.testing.assert_close(flat_of(train(task, strategy, 3)[0]), expected, rtol=1e-5, atol=5e-6)


def test_a_fragment_at_a_time_is_sent_and_less_than_the_whole() -> None:
    task = toy(samples=48, epochs=4)  # 16 steps
    sent = {}
    for fragments in (1, 2):
        trained = train(task, StreamingDiLoCo(sync_every=8, fragments=fragments, overlap=2), 2)[0]
        rows = [row for row in trained.records if row["kind"] == "step"]
        sent[fragments] = [row["sent"] for row in rows if row["sent"]]
        assert exchanges(trained) == ([8, 16] if fragments == 1 else [4, 8, 12, 16])
    assert max(sent[2]) < max(sent[1])
    assert sum(sent[2]) == pytest.approx(sum(sent[1]), rel=0.2)


def test_exchanges_hide_behind_training() -> None:
    """A slow network: with overlap, virtual time passes as if there were (almost) none."""
    task, cluster = toy(samples=120, epochs=4, model=wide), uniform(2, mbit=2.0, seconds_per_sample=1e-3)
    waits = {}
    for overlap in (0, 2):
        trained = train_in(Virtual(cluster), task, StreamingDiLoCo(sync_every=8, overlap=overlap), 2)
        waits[overlap] = sum(row["wait_ns"] for row in trained[0].records if row["kind"] == "step")
    assert waits[2] < 0.1 * waits[0]


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, CLASSES))


def test_layers_are_modules_in_the_order_of_the_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False))
    flat = Flat(model, torch.optim.SGD(model.parameters(), lr=1.0), 1 << 20)
    names = [[flat.pieces[i].name for i in layer] for layer in layers_of(flat)]
    assert names == [["0.weight", "0.bias"], ["1.weight", "1.bias"], ["2.weight"]]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sync_every": 0}, "sync_every must be at least 1, got 0"),
    ({"sync_every": 10, "fragments": 3}, r"fragments must divide sync_every \(10\), got 3"),
    ({"sync_every": 10, "fragments": 5, "overlap": 2}, r"overlap must be from 0 to below sync_every / fragments \(2\)"),
    ({"mix": 1.0}, "mix must be from 0 to below 1, got 1"),
    ({"outer_lr": -1.0}, "outer_lr must be above 0, got -1"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StreamingDiLoCo(**options)


def test_more_fragments_than_layers_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most the layers of the model \(2\), got 4"):
        train(toy(model=plain_model), StreamingDiLoCo(sync_every=8, fragments=4), 2)
