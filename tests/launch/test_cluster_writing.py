"""Cluster files that Podium writes are read as the same cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.launch.clusters.description import Change, Cluster, Link, Node, read_cluster, uniform
from podium.launch.clusters.writing import to_toml, write_cluster

EXAMPLES = sorted(Path(__file__).parents[2].glob("examples/clusters/*.toml"))
CLUSTERS = {
    "equal nodes": uniform(3, mbit=100.0, jitter=0.1, sharing="fair", seconds_per_sample=1e-4),
    "one node that says nothing": Cluster(nodes=(Node(name="a"),)),
    "all that there is": Cluster(
        nodes=(Node(name="a", speed=0.25, cpus=0.5), Node(name="b.c-1", up_mbit=95.5, down_mbit=9.0, latency_us=1.5)),
        links={(0, 1): Link(mbit=3.25, latency_us=2000.0)},
        changes=(Change(node=1, at_s=2.0, speed=0.5),),
        workers=(0, 1, 1),
        servers=(1,),
    ),
    "servers by link": Cluster(nodes=(Node(name="a"), Node(name="b")), servers_by_link=True),
    "a link with a latency only": Cluster(nodes=(Node(name="a"), Node(name="b")), links={(0, 1): Link(latency_us=7.0)}),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_what_is_written_is_read_again(name: str, tmp_path: Path) -> None:
    write_cluster(tmp_path / "new" / "cluster.toml", CLUSTERS[name], ["two lines", 'with = signs and "quotes"'])
    assert read_cluster(tmp_path / "new" / "cluster.toml").to_dict() == CLUSTERS[name].to_dict()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_survive_being_written(path: Path, tmp_path: Path) -> None:
    write_cluster(tmp_path / "again.toml", read_cluster(path))
    assert read_cluster(tmp_path / "again.toml").fingerprint() == read_cluster(path).fingerprint()


def test_what_is_the_default_is_left_out() -> None:
    assert (
        to_toml(Cluster(nodes=(Node(name="a", speed=0.5),)), ["why"]) == '# why\n\n[[node]]\nname = "a"\nspeed = 0.5\n'
    )
