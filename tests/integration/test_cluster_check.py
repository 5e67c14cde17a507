"""`podium cluster check` on hosts that share nothing: what it measures, what it writes, what it says of mistakes."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from podium.launch.clusters.cpu_quota import CpuQuota
from podium.launch.clusters.description import Cluster, Node, read_cluster
from podium.testing import Hosts
from tests.integration.ssh_hosts import left_clean, ssh_hosts, wrapped_python

pytestmark = [pytest.mark.root, pytest.mark.slow]

MBIT = 100
API = """
import json, sys
from podium.launch.hosts.check import check_hosts
found = check_hosts(sys.argv[1], out=sys.argv[2])
print(json.dumps(found.to_dict()))
"""


@pytest.fixture(scope="module")
def hosts(own_temporary_folder: Path) -> Iterator[Hosts]:
    """The head and three hosts, and one more without an ssh server."""
    with ssh_hosts(own_temporary_folder, 5, served=4, mbit=MBIT) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left_behind(hosts: Hosts) -> Iterator[None]:
    """Instead of the folder's fixture: the hosts stay until the module's end."""
    with left_clean(hosts):
        yield


def check(hosts: Hosts, listed: str, *more: str, code: int = 0) -> str:
    (hosts[0].folder / "hosts.txt").write_text(listed.replace(",", "\n") + "\n")
    words = ("-m", "podium", "cluster", "check", "hosts.txt", *more)
    done = hosts[0].run(sys.executable, *words, timeout_s=100)
    print(done.stdout, done.stderr)
    assert done.returncode == code, done.stderr
    return done.stdout


def told(hosts: Hosts, listed: str, *more: str, code: int = 0) -> dict[str, Any]:
    """The document of the check."""
    found: dict[str, Any] = json.loads(check(hosts, listed, "--json", *more, code=code))
    assert found["ok"] is (code == 0)
    return found


def by_host(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {host["host"]: host for host in found["hosts"]}


def ends(found: dict[str, Any]) -> set[tuple[str, str]]:
    return {(link["source"], link["target"]) for link in found["links"] if link["mbit"] is not None}


def both_ways(*names: str) -> set[tuple[str, str]]:
    return {(a, b) for a in names for b in names if a != b}


def test_rates_are_those_of_the_links_and_the_file_says_what_the_document_says(hosts: Hosts) -> None:
    found = told(hosts, "host1,host2,host3", "--out", "cluster.toml")
    assert ends(found) == both_ways("host1", "host2", "host3")
    assert found["pairs"] == found["pairs_measured"] == 3 and found["head"]["tls"] is True
    for link in found["links"]:
        assert link["mbit"] == pytest.approx(MBIT, rel=0.3)
        assert 0 < link["round_trip_us"] < 1e6
    for host in found["hosts"]:
        assert host["cpu_ms"] > 0 and host["cores"] >= 1 and abs(host["clock_skew_s"]) < 5
        assert host["python"] == found["head"]["python"] and host["gpus_ms"] == []
    written = read_cluster(hosts[0].folder / "cluster.toml")
    assert written.to_dict() == found["cluster"] and written.names == ("host1", "host2", "host3")
    assert [node.up_mbit for node in written.nodes] == pytest.approx([MBIT] * 3, rel=0.3)
    assert max(node.speed for node in written.nodes) == 1.0

    words = ("train", "digits-mlp", "--workers", "3", "--steps", "4", "--launcher", "virtual", "--json")
    done = hosts[0].run(sys.executable, "-m", "podium", *words, "--cluster", "cluster.toml")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "finished"


def test_python_finds_what_the_command_line_finds(hosts: Hosts) -> None:
    done = hosts[0].run(sys.executable, "-c", API, "host1,host2", "from_python.toml", timeout_s=100)
    assert done.returncode == 0, done.stderr
    found, asked = json.loads(done.stdout), told(hosts, "host1,host2", "--out", "from_cli.toml")
    assert found.keys() == asked.keys() and found["head"] == asked["head"]
    assert ends(found) == ends(asked) == both_ways("host1", "host2")
    steady = ("host", "ok", "error", "fix", "address", "podium", "torch", "python", "cores", "gpus", "folder")
    for ours, theirs in zip(found["hosts"], asked["hosts"], strict=True):
        assert ours.keys() == theirs.keys() and [ours[key] for key in steady] == [theirs[key] for key in steady]
    for document in (found, asked):
        assert read_cluster(hosts[0].folder / document["file"]).to_dict() == document["cluster"]


def test_hosts_that_cannot_take_part_have_a_cross_and_a_fix_and_the_others_are_measured(hosts: Hosts) -> None:
    no_podium = 'export PYTHONPATH=; set -- -S "$@"'
    with wrapped_python(hosts[3], shell=no_podium) as without:
        shown = check(hosts, f"host1,host2,{without},host4,nohost", "--out", "some.toml", code=1)
    lines = shown.splitlines()
    crosses = {line.split()[1]: (line, below.strip()) for line, below in pairwise(lines) if line.startswith("✗")}
    assert set(crosses) == {"host3", "host4", "nohost"}
    assert all(fix.startswith("fix: ") for _, fix in crosses.values())
    assert "No module named" in crosses["host3"][0] and "on host3: pip install podium==" in crosses["host3"][1]
    assert "Connection refused" in crosses["host4"][0] and "systemctl start ssh" in crosses["host4"][1]
    assert "cannot be resolved" in crosses["nohost"][0] and "/etc/hosts" in crosses["nohost"][1]
    assert {line.split()[1] for line in lines if line.startswith("✓")} == {"host1", "host2"}
    assert re.search(r"✓ host1 – host2 .* Mbit/s there", shown)
    assert "– gloo, nccl" in shown and "not encrypted" in shown
    assert lines[-1] == "3 failed: host3, host4, nohost"
    assert read_cluster(hosts[0].folder / "some.toml").names == ("host1", "host2")


def test_hosts_that_cannot_connect_to_each_other_have_a_cross(hosts: Hosts) -> None:
    hosts[1].cut(hosts[2])
    try:
        found = told(hosts, "host1,host2,host3", code=1)
    finally:
        hosts[1].mend(hosts[2])
    cut = {(link["source"], link["target"]): link for link in found["links"] if not link["ok"]}
    assert set(cut) == {("host1", "host2"), ("host2", "host1")}
    assert "no connection to host2" in cut["host1", "host2"]["error"]
    assert "on host2: let " in cut["host1", "host2"]["fix"]
    assert ends(found) == both_ways("host1", "host3") | both_ways("host2", "host3")


def test_a_host_that_is_lost_during_the_check_does_not_stop_it(hosts: Hosts) -> None:
    dies = "import os, torch\ntorch.mm = lambda *_, **__: os._exit(9)\n"  # when it is to compute
    with wrapped_python(hosts[3], code=dies) as fragile:
        found = told(hosts, f"host1,host2,{fragile}", code=1)
    assert "its agent was lost" in by_host(found)["host3"]["error"] and by_host(found)["host3"]["fix"]
    assert ends(found) == both_ways("host1", "host2")
    for folder in hosts[3].folder.glob("podium-*"):  # of a process that was killed; the next one there removes it
        shutil.rmtree(folder)


def test_a_slow_host_is_named_and_takes_part(hosts: Hosts) -> None:
    with CpuQuota(Cluster(nodes=(Node(name="slow", cpus=0.25),))) as quota:
        join = f"echo $$ > {quota.groups[0]}/cgroup.procs"
        with wrapped_python(hosts[3], shell=join) as slow:
            found = told(hosts, f"host1,host2,{slow}", "--out", "uneven.toml")
    assert [text for text in by_host(found)["host3"]["slow"] if text.startswith("CPU: ")]
    nodes = {node.name: node for node in read_cluster(hosts[0].folder / "uneven.toml").nodes}
    assert nodes["host3"].speed < 0.8 and nodes["host3"].speed == min(node.speed for node in nodes.values())


def test_a_check_without_hosts_says_what_to_give(hosts: Hosts) -> None:
    for words, wanted in (([], "--hosts"), (["a", "--hosts", "b"], "give the hosts once")):
        done = hosts[0].run(sys.executable, "-m", "podium", "cluster", "check", *words)
        assert done.returncode == 2 and wanted in done.stderr
