"""`podium bench collectives`: the same sums from every contender, proved, and ratios that follow from the rows."""

from __future__ import annotations

import os
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from torch import Tensor

from podium.errors import ConfigError, RankFailed, UnknownName
from podium.lab.bench.collectives import bench_collectives
from podium.lab.bench.peers.summing import Summing, Sums
from podium.lab.bench.peers.team import Team, answer

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")


def _rows(document: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    return {(row["collective"], row["nbytes"]): row for row in document["rows"]}


@pytest.mark.slow
def test_on_one_host_every_collective_is_measured_beside_gloo() -> None:
    names = ("auto", "shared", "ring")
    document = bench_collectives(("gloo",), rounds=1, sizes=(1000, 40_000), collectives=names, link_gbits=0)
    rows = _rows(document)
    everyone = {*names, "shared (own memory)", "gloo", "gloo-keeping-memory"}
    assert set(rows) == {(name, nbytes) for name in everyone for nbytes in (1000, 40_000)}
    assert {(row["where"], row["workers"]) for row in document["rows"]} == {("host", 2)}
    for (name, nbytes), row in rows.items():
        assert 0 < row["ms"]["min"] <= row["ms"]["median"] <= row["ms"]["max"]
        if name in names:
            assert row["vs_gloo"] == pytest.approx(rows["gloo", nbytes]["ms"]["median"] / row["ms"]["median"])
            low, high = row["vs_gloo_interval"]
            assert low <= row["vs_gloo"] <= high
    assert document["vs_gloo"] == {str(nbytes): rows["auto", nbytes]["vs_gloo"] for nbytes in (1000, 40_000)}
    assert rows["auto", 1000]["chosen"] == "shared"
    assert "skipped" in document["link"]


def test_without_peers_only_podium_is_measured() -> None:
    document = bench_collectives((), rounds=1, sizes=(1000,), collectives=("auto",), link_gbits=0)
    (row,) = document["rows"]
    assert row["collective"] == "auto"
    assert "vs_gloo" not in row
    assert "vs_gloo" not in document


@pytest.mark.root
@needs_root
def test_over_links_the_time_is_held_against_bare_sockets() -> None:
    size = 16_000_000
    document = bench_collectives(
        ("gloo",), rounds=1, sizes=(size,), collectives=("auto", "ring"), workers=(), link_workers=(2,), link_gbits=4
    )
    rows = _rows(document)
    assert set(rows) == {(name, size) for name in ("auto", "ring", "gloo")}
    assert {row["where"] for row in document["rows"]} == {"link"}
    for row in rows.values():
        share = row["bandwidth_ms"]["median"] / row["ms"]["median"]
        assert row["share_of_bandwidth"] == pytest.approx(share)
    (table,) = document["tables"]
    assert table["share_of_bandwidth"]["ring"] == {str(size): rows["ring", size]["share_of_bandwidth"]}
    assert table["vs_gloo"] == {str(size): rows["auto", size]["vs_gloo"]}
    assert rows["auto", size]["chosen"] in ("backend", "ring", "halving-doubling")


# The proof.


def _triple(tensor: Tensor) -> None:
    """The sum over two workers, of which the other has twice as much."""
    tensor *= 3


def _triple_but_the_last(tensor: Tensor) -> None:
    tensor[:-1] *= 3


def _nothing() -> None:
    pass


def _alone(way: Any, pipe: Connection) -> None:
    answer(pipe, Sums(0, 2, _nothing, {"it": way}, torch.zeros).answers)


@pytest.mark.parametrize(("way", "wrong"), [(_triple, 0), (_triple_but_the_last, 1)])
def test_every_element_must_be_the_sum(way: Any, wrong: int) -> None:
    assert Sums(0, 2, _nothing, {"it": way}, torch.zeros).prove("it", 4000) == wrong


def test_a_collective_that_does_not_sum_ends_the_bench() -> None:
    summing = Summing("a team", Team("a team", [partial(_alone, _triple_but_the_last)]), 1)
    try:
        assert summing.measure("it", 400, 3) > 0
        with pytest.raises(RankFailed, match=r"it \(a team\) must give the sum, got 1 wrong elements of 100 on rank 0"):
            summing.prove("it", 400)
    finally:
        summing.end()


def test_unknown_names_and_impossible_sizes_are_refused() -> None:
    with pytest.raises(UnknownName, match="gloo"):
        bench_collectives(("glo",))
    with pytest.raises(UnknownName, match="Did you mean 'ring'"):
        bench_collectives((), collectives=("rign",))
    with pytest.raises(ConfigError, match="sizes must be at least 4 bytes"):
        bench_collectives((), sizes=(2,))
    with pytest.raises(ConfigError, match="workers must be at least 2"):
        bench_collectives((), workers=(1,))
