"""`podium bench codecs`: costs, bytes and step times in one document, and ratios that follow from the rows."""

from __future__ import annotations

import os
from typing import Any

import pytest

from podium.errors import ConfigError, UnknownName
from podium.lab.bench.codecs import _keeps, bench_codecs
from podium.lab.bench.peers.stepping import sent_bytes

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
QUICK: dict[str, Any] = {"rounds": 1, "side": 64, "epochs": 1, "seeds": 1}
SMALL: dict[str, Any] = {"features": 100, "width": 64, "depth": 2}


@pytest.mark.slow
def test_each_codec_has_its_costs_and_its_accuracy_beside_that_of_dense() -> None:
    codecs = ("dense", "fp16", "power-sgd:rank=1")
    document = bench_codecs((), codecs=codecs, link_mbit=0, **QUICK)
    rows = {row["codec"]: row for row in document["rows"]}
    assert tuple(rows) == codecs
    assert rows["dense"]["ratio"] == 1
    assert rows["fp16"]["ratio"] == pytest.approx(0.5, rel=0.01)
    assert rows["power-sgd:rank=1"]["ratio"] == pytest.approx(2 / 64)
    for row in rows.values():
        assert min(row["encode_gbs"], row["decode_gbs"], row["step_gbs"]) > 0
        assert 0 < row["accuracy"] <= 1
        assert row["dense_accuracy"] == rows["dense"]["accuracy"]
    assert "link" not in document
    assert document["link_skipped"]


@pytest.mark.slow
@pytest.mark.root
@needs_root
def test_over_a_link_codecs_are_measured_beside_ddp_and_their_bytes_are_counted() -> None:
    document = bench_codecs(
        ("ddp",), codecs=("dense", "int8"), link_codecs=("dense", "fp16", "auto"), link_mbit=100, **QUICK, **SMALL
    )
    link = {(row["system"], row["codec"]): row for row in document["link"]}
    podium = {("podium", codec) for codec in ("dense", "fp16", "auto")}
    assert set(link) == podium | {("ddp", hook) for hook in ("none", "fp16", "power-sgd")}
    for (system, _), row in link.items():
        dense = link[system, "none" if system == "ddp" else "dense"]
        assert row["speedup_over_dense"] == pytest.approx(dense["ms"] / row["ms"])
        assert row["bytes_on_wire"] > 0
    best, other = document["best_podium"], document["best_ddp"]
    assert document["fastest_podium"]["ms"] == min(link["podium", codec]["ms"] for codec in ("dense", "fp16"))
    assert best["ms"] == link["podium", best["codec"]]["ms"]
    same = document["like_for_like"]
    assert set(same) == {"dense", "fp16"}
    assert same["fp16"]["ddp_over_podium"] == pytest.approx(link["ddp", "fp16"]["ms"] / link["podium", "fp16"]["ms"])
    assert other["ms"] == min(link["ddp", hook]["ms"] for hook in ("none", "fp16", "power-sgd"))
    assert document["podium_over_ddp"] == pytest.approx(other["ms"] / best["ms"])
    assert document["auto_regret"] == pytest.approx(link["podium", "auto"]["ms"] / best["ms"])
    for chose in (document["auto_chose"], document["loopback"]["auto_chose"]):
        assert [bool(once["codec"]) for once in chose] == [True]  # one round
    # 11,274 parameters, half of which go each way twice between two workers.
    dense = link["podium", "dense"]
    assert dense["counted_bytes"] == pytest.approx(4 * 11_274, rel=0.01)
    assert dense["counted_bytes"] < dense["bytes_on_wire"] < 1.5 * dense["counted_bytes"]
    rows = {row["codec"]: row for row in document["rows"]}
    assert rows["dense"]["bytes_on_wire"] == dense["bytes_on_wire"]
    assert rows["int8"]["bytes_on_wire"] < dense["bytes_on_wire"] / 2  # counted although it is not in the table


def test_a_codec_that_costs_accuracy_is_not_the_best() -> None:
    assert _keeps(0.97, 0.98)
    assert not _keeps(0.95, 0.98)
    assert not _keeps(None, 0.98)  # it diverged
    assert _keeps(0.5, None)  # dense is not among them: nothing is known


def test_bytes_are_read_from_the_interface_of_that_name() -> None:
    assert sent_bytes("") == 0
    assert sent_bytes("lo") >= 0
    with pytest.raises(FileNotFoundError, match="no interface pd-none"):
        sent_bytes("pd-none")


def test_unknown_names_and_impossible_sizes_are_refused() -> None:
    with pytest.raises(UnknownName, match="ddp"):
        bench_codecs(("dpp",))
    with pytest.raises(UnknownName, match="codec"):
        bench_codecs((), codecs=("fp61",))
    with pytest.raises(ConfigError, match="auto chooses among codecs"):
        bench_codecs((), codecs=("auto",))
    with pytest.raises(ConfigError, match="side, epochs and seeds must be at least 1"):
        bench_codecs((), seeds=0)
