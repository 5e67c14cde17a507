"""From measurements to slow hosts and to a cluster file."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from podium.launch.clusters.description import Link
from podium.launch.hosts.failure import Failure
from podium.launch.hosts.measured import HostReport, LinkReport, node_names, slow_devices, to_cluster

BROKEN = Failure("gone", "come back")


def hosts(*cpu_ms: float, **fields: Any) -> list[HostReport]:
    return [HostReport(host=f"h{n}", cpu_ms=ms, **fields) for n, ms in enumerate(cpu_ms)]


def links(count: int, mbit: float = 100.0, trip: float = 200.0, **others: dict[str, float]) -> list[LinkReport]:
    """All pairs both ways; `others`: fields of one direction, such as `h0_h1={"mbit": 5.0}`."""
    found = []
    for a, b in permutations((f"h{n}" for n in range(count)), 2):
        fields = {"mbit": mbit, "round_trip_us": trip, **others.get(f"{a}_{b}", {})}
        found.append(LinkReport(source=a, target=b, **fields))
    return found


def test_a_host_is_slow_where_it_takes_a_quarter_longer_than_the_median() -> None:
    assert slow_devices({"a": 10.0, "b": 10.4, "c": 12.4}, {}) == {}
    assert slow_devices({"a": 10.0, "b": 10.0, "c": 21.0}, {}) == {"c": ("CPU: 2.1 times the median",)}


def test_of_two_hosts_the_slower_one_is_named() -> None:
    assert set(slow_devices({"a": 10.0, "b": 30.0}, {})) == {"b"}


def test_gpus_are_compared_with_gpus() -> None:
    slow = slow_devices({"a": 10.0, "b": 10.0}, {"a": [1.0, 1.0], "b": [1.0, 4.0]})
    assert slow == {"b": ("GPU 1: 4.0 times the median",)}


def test_nodes_have_the_rates_latencies_and_speeds_that_were_measured() -> None:
    cluster = to_cluster(hosts(10.0, 20.0, 10.0), links(3))
    assert cluster is not None and not cluster.links
    assert [node.speed for node in cluster.nodes] == [1.0, 0.5, 1.0]
    assert {(node.up_mbit, node.down_mbit, node.latency_us) for node in cluster.nodes} == {(100.0, 100.0, 100.0)}


def test_a_host_that_only_sends_slowly_is_a_slow_node_and_not_many_slow_links() -> None:
    found = links(3, h1_h0={"mbit": 10.0}, h1_h2={"mbit": 10.0})
    cluster = to_cluster(hosts(1.0, 1.0, 1.0), found)
    assert cluster is not None and not cluster.links
    assert (cluster.nodes[1].up_mbit, cluster.nodes[1].down_mbit) == (10.0, 100.0)


def test_a_pair_that_differs_has_a_link_of_its_own() -> None:
    found = links(
        4, h0_h1={"mbit": 30.0}, h1_h0={"mbit": 25.0}, h2_h3={"round_trip_us": 4000.0}, h3_h2={"round_trip_us": 4100.0}
    )
    cluster = to_cluster(hosts(1.0, 1.0, 1.0, 1.0), found)
    assert cluster is not None
    assert cluster.links == {(0, 1): Link(mbit=25.0), (2, 3): Link(latency_us=2000.0)}
    for link in found:
        a, b = int(link.source[1]), int(link.target[1])
        path = cluster.path(a, b)
        assert link.mbit is not None and link.round_trip_us is not None
        assert path.bytes_per_s_up * 8 / 1e6 == pytest.approx(link.mbit, rel=0.25)
        assert path.latency_ns / 1e3 == pytest.approx(link.round_trip_us / 2, rel=0.25)


def test_hosts_that_failed_and_pairs_that_were_not_measured_are_left_out() -> None:
    some = [*hosts(10.0, 10.0), HostReport(host="h2", failure=BROKEN)]
    apart = [LinkReport(source="h0", target="h1", failure=BROKEN), LinkReport(source="h1", target="h0")]
    cluster = to_cluster(some, apart)
    assert cluster is not None and cluster.names == ("h0", "h1") and not cluster.links
    assert cluster.nodes[0].up_mbit is None and cluster.nodes[0].latency_us == 50.0
    assert to_cluster([HostReport(host="h0", failure=BROKEN)], []) is None


def test_speed_is_that_of_the_gpus_where_every_host_has_one() -> None:
    both = [HostReport(host="a", cpu_ms=1.0, gpus_ms=(4.0, 4.0)), HostReport(host="b", cpu_ms=8.0, gpus_ms=(2.0,))]
    one = [both[0], HostReport(host="b", cpu_ms=8.0)]
    assert [node.speed for node in (to_cluster(both, []) or pytest.fail()).nodes] == [0.5, 1.0]
    assert [node.speed for node in (to_cluster(one, []) or pytest.fail()).nodes] == [1.0, 0.12]


def test_names_are_what_a_cluster_file_takes() -> None:
    assert node_names(["me@a.b", "you@a.b", "fe80::1", "_x"]) == ["a.b", "a.b-2", "fe80--1", "x"]
