"""`podium bench switch`: every change of phase is measured, and no sample is lost or repeated on the way."""

from __future__ import annotations

import os

import pytest

from podium.errors import ConfigError, UnknownName
from podium.lab.bench.switch import bench_switch

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

PARTS = {"drain", "home", "hand_over", "begin", "total"}
PAIRS = [
    ("all-reduce", "parameter-server (colocated)"),
    ("parameter-server (colocated)", "all-reduce"),
    ("all-reduce", "local-sgd"),
    ("local-sgd", "all-reduce"),
]


def test_there_and_back_again_each_way_is_a_row() -> None:
    document = bench_switch((), 2, models=("1m",), workers=(2,), places=("local",), servers=("colocated",), steps=1)
    rows = document["rows"]
    assert [(row["from"], row["to"]) for row in rows] == PAIRS
    for row in rows:
        assert (row["model"], row["workers"], row["place"]) == ("1m", 2, "local")
        assert row["model_bytes"] == 4 * (4 * (256 * 256 + 256) + 256 * 10 + 10)
        assert (row["missing"], row["repeated"]) == (0, 0)
        assert set(row["cost_ms"]) == PARTS
        assert row["cost_ms"]["total"] >= row["cost_ms"]["begin"] > 0
        assert row["transfer_ms"] == row["broadcast_ms"] > 0
        low, high = row["beyond_transfer_range"]
        assert low <= row["beyond_transfer_ms"] <= high
        assert row["switches"] == 2
    assert document["worst_beyond_transfer_ms"] == max(row["beyond_transfer_ms"] for row in rows)
    assert document["within_claim"] + document["beyond_claim"] == len(rows)
    assert document["lost_or_repeated"] == 0


@pytest.mark.root
@needs_root
def test_over_shaped_links_a_transfer_is_no_longer_than_the_link_takes() -> None:
    rows = bench_switch(
        (), 1, models=("1m",), workers=(2,), places=("shaped",), servers=("dedicated",), steps=1, link_mbit=200.0
    )["rows"]
    assert [(row["from"], row["to"]) for row in rows] == [
        ("all-reduce", "parameter-server (dedicated)"),
        ("parameter-server (dedicated)", "all-reduce"),
    ]
    for row in rows:
        on_wire = row["model_bytes"] * 8 / 200e6 * 1e3
        assert row["link_mbit"] == 200.0
        assert row["transfer_ms"] <= on_wire * (1 + 1e-9)
        assert (row["missing"], row["repeated"]) == (0, 0)
    assert rows[1]["cost_ms"]["home"] > on_wire, "parameters and moments cannot come faster than the link is"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"models": ("2m",)}, "model of bench switch"),
        ({"places": ("here",)}, "place of bench switch"),
        ({"servers": ("beside",)}, "servers of bench switch"),
    ],
)
def test_unknown_names_are_refused(options: dict[str, tuple[str, ...]], said: str) -> None:
    with pytest.raises(UnknownName, match=said):
        bench_switch((), 1, **options)  # type: ignore[arg-type]  # each option has its own type


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": (1,)}, "workers must be at least 2"),
        ({"steps": 0}, "steps 1"),
        ({"link_mbit": 0.0}, "link_mbit must be above 0"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
    ],
)
def test_impossible_settings_are_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        bench_switch((), 1, **options)  # type: ignore[arg-type]  # each option has its own type


def test_it_has_no_peers() -> None:
    with pytest.raises(ConfigError, match="measures Podium alone"):
        bench_switch(("ddp",))
