"""Shaped nodes: real namespaces, real token buckets, real quotas; without root only the refusals are tried."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import ConfigError
from podium.launch.clusters.commands import find_tool, run_command
from podium.launch.clusters.cpu_quota import CpuQuota
from podium.launch.clusters.description import Cluster, Link, Node, uniform
from podium.launch.clusters.namespaces import ShapedNetwork, burst_bytes, in_thread, warnings_of
from podium.launch.rendezvous import rendezvous_folder

ROOT_FOLDER = Path(__file__).parents[2]

RECEIVER = """
import socket, sys
from podium.launch.clusters.namespaces import enter_namespace
name, address, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
enter_namespace(name)
with socket.create_server((address, 0)) as server:
    server.settimeout(20)
    print(server.getsockname()[1], flush=True)
    peer, (source, _) = server.accept()
    with peer:
        peer.settimeout(20)
        left = nbytes
        while left:
            left -= len(peer.recv(min(left, 65536)))
        peer.sendall(b"!")
print(source, flush=True)
"""
SENDER = """
import socket, sys, time
from podium.launch.clusters.namespaces import enter_namespace
name, address, port, nbytes = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
enter_namespace(name)
begun = time.monotonic()
with socket.create_connection((address, port), timeout=20) as peer:
    peer.sendall(bytes(nbytes))
    assert peer.recv(1) == b"!"
print(time.monotonic() - begun, flush=True)
"""


def _missing() -> str:
    if os.geteuid() != 0:
        return "needs root (network namespaces)"
    absent = [tool for tool in ("ip", "tc") if not shutil.which(tool, path="/usr/sbin:/sbin:/usr/bin:/bin")]
    return f"needs {' and '.join(absent)} (iproute2)" if absent else ""


needs_root = pytest.mark.skipif(bool(_missing()), reason=_missing() or "can run here")


def _python(script: str, *arguments: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.Popen(words, cwd=ROOT_FOLDER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _transfer(network: ShapedNetwork, source: int, target: int, nbytes: int) -> tuple[float, str]:
    """Seconds from before the connection to the receipt of the last byte, and the address the receiver saw."""
    with _python(RECEIVER, network.namespaces[target], network.addresses[target], nbytes) as receiver:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        with _python(SENDER, network.namespaces[source], network.addresses[target], port, nbytes) as sender:
            took, _ = sender.communicate(timeout=40)
        seen, _ = receiver.communicate(timeout=40)
    return float(took), seen.strip()


def _namespaces() -> set[str]:
    folder = Path("/var/run/netns")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


@pytest.mark.root
@needs_root
def test_nodes_reach_one_another_no_faster_than_they_are_shaped() -> None:
    with ShapedNetwork(uniform(2, mbit=50)) as network:
        seconds, seen = _transfer(network, source=0, target=1, nbytes=2_000_000)
    assert seen == network.addresses[0]
    # Counted until the receiver's receipt, so a busy machine can only lower it.
    assert 2_000_000 * 8 / seconds / 1e6 < 50 * 1.15


@pytest.mark.root
@needs_root
def test_the_receivers_rate_binds_when_it_is_the_lower_one() -> None:
    nodes = (Node(name="a", up_mbit=400, down_mbit=400), Node(name="b", up_mbit=400, down_mbit=10))
    with ShapedNetwork(Cluster(nodes=nodes)) as network:
        seconds, _ = _transfer(network, source=0, target=1, nbytes=300_000)
    assert 300_000 * 8 / seconds / 1e6 < 10 * 1.15


@pytest.mark.root
@needs_root
def test_what_was_applied_is_recorded_and_read_back() -> None:
    nodes = (Node(name="a", up_mbit=100, down_mbit=1000), Node(name="b"))
    with ShapedNetwork(Cluster(nodes=nodes)) as network:
        facts = network.facts
        route = run_command(find_tool("ip"), "-n", network.namespaces[0], "route")
    assert facts["congestion_control"] == {"asked": "cubic", "seen": ["cubic", "cubic"]}
    assert "congctl cubic" in route
    a, b = facts["nodes"]
    assert "100Mbit burst 16Kb" in a["up"]["applied"]
    assert "rate 1Gbit" in a["down"]["applied"] and a["down"]["burst_bytes"] == 512 * 1024
    assert b["up"] is None and b["down"] is None
    assert any("latency is not shaped" in warning for warning in facts["warnings"])


@pytest.mark.root
@needs_root
def test_nothing_is_left_when_the_body_raises_and_nothing_is_added_outside() -> None:
    ip = find_tool("ip")

    def outside() -> str:
        return run_command(ip, "-o", "link") + run_command(ip, "route") + run_command(ip, "-o", "-4", "address")

    before = outside()
    with pytest.raises(ZeroDivisionError), ShapedNetwork(uniform(2, mbit=100)) as network:
        assert set(network.namespaces) < _namespaces()
        assert all(len(name) <= 15 for name in network.interfaces)
        assert outside() == before
        raise ZeroDivisionError
    assert not {n for n in _namespaces() if n.startswith(network.namespaces[0][:-1])}
    network.remove()  # once more does nothing


@pytest.mark.root
@needs_root
def test_two_networks_stand_beside_one_another() -> None:
    with ShapedNetwork(uniform(2)) as one, ShapedNetwork(uniform(2)) as two:
        assert not set(one.namespaces) & set(two.namespaces)
        one.remove()
        assert _transfer(two, source=1, target=0, nbytes=1000)[1] == two.addresses[1]


@pytest.mark.root
@needs_root
def test_the_end_of_the_interpreter_removes_what_nobody_removed() -> None:
    script = (
        "from podium.launch.clusters.description import uniform\n"
        "from podium.launch.clusters.namespaces import ShapedNetwork\n"
        "network = ShapedNetwork(uniform(1))\nnetwork.__enter__()\nprint(network.namespaces[0])"
    )
    with _python(script) as child:
        name, _ = child.communicate(timeout=40)
    assert name.startswith("podium-") and child.returncode == 0
    assert name.strip() not in _namespaces()


@pytest.mark.root
@needs_root
def test_what_a_launcher_that_is_killed_while_it_makes_its_network_left_the_next_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f"""
        import os, signal, tempfile
        from podium.launch.clusters import namespaces as netns
        from podium.launch.clusters.description import uniform
        from podium.launch.rendezvous import rendezvous_folder
        tempfile.tempdir = {str(tmp_path)!r}
        run = netns.run_command

        def killed_after_the_first_node(*words):
            if any(word.endswith("-1") for word in words):
                os.kill(os.getpid(), signal.SIGKILL)
            print(*words, flush=True)
            return run(*words)

        netns.run_command = killed_after_the_first_node
        with rendezvous_folder() as folder, netns.ShapedNetwork(uniform(2), folder):
            pass
    """
    with _python(textwrap.dedent(script)) as child:
        said, _ = child.communicate(timeout=40)
    made = {line.split()[-1] for line in said.splitlines() if " netns add " in line}
    assert len(made) == 2 and made <= _namespaces()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with rendezvous_folder():
        assert not made & _namespaces()


@pytest.mark.root
@needs_root
def test_a_command_that_fails_shows_itself_and_its_own_words() -> None:
    with pytest.raises(ConfigError, match=r"netns delete podium-absent` failed \(1\): .*No such file"):
        run_command(find_tool("ip"), "netns", "delete", "podium-absent")


def test_without_root_the_error_says_so() -> None:
    script = (
        "import os\nfrom podium.launch.clusters.description import uniform\n"
        "from podium.launch.clusters.namespaces import ShapedNetwork\n"
        "from podium.errors import ConfigError\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        "try: ShapedNetwork(uniform(2)).__enter__()\n"
        "except ConfigError as error: print(error)"
    )
    with _python(script) as child:
        said, _ = child.communicate(timeout=40)
    assert "the shaped launcher needs root (network namespaces)" in said


def test_a_missing_tool_names_the_package_that_has_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'tc'.*iproute2"):
        find_tool("tc", path=str(tmp_path))


def test_what_cannot_be_shaped_is_a_warning_and_what_was_not_asked_is_none() -> None:
    pair = uniform(2, latency_us=70)
    linked = Cluster(nodes=pair.nodes, links={(0, 1): Link(mbit=10)})
    assert [w.split(":")[0] for w in warnings_of(linked)] == [
        "latency is not shaped",
        "links between single pairs are not shaped",
    ]
    assert "70 us" in warnings_of(pair)[0]
    assert warnings_of(uniform(2, latency_us=0)) == []


@given(st.floats(0.1, 1e5), st.floats(1.0, 10.0))
def test_a_faster_link_never_has_a_smaller_burst(mbit: float, factor: float) -> None:
    assert burst_bytes(mbit * factor) >= burst_bytes(mbit) >= 3028


def test_bursts_are_the_measured_ones_at_the_usual_rates() -> None:
    assert (burst_bytes(100), burst_bytes(1000)) == (16 * 1024, 512 * 1024)


BUSY = """
import sys, time
sys.stdin.read()
wall, cpu = time.monotonic(), time.process_time()
while time.process_time() - cpu < 0.1 and time.monotonic() - wall < 20: pass
print((time.process_time() - cpu) / (time.monotonic() - wall))
"""


def _cpu_share(cluster: Cluster) -> tuple[float, dict[str, dict[str, int]], list[Path]]:
    with CpuQuota(cluster) as quota, _python(BUSY) as child:
        quota.add(0, child.pid)
        share, _ = child.communicate(timeout=40)
        return float(share), quota.facts(), list(quota.groups.values())


@pytest.mark.root
@needs_root
def test_a_quota_holds_a_busy_process_back_and_is_gone_afterwards() -> None:
    try:
        share, facts, groups = _cpu_share(Cluster(nodes=(Node(name="slow", cpus=0.2),)))
    except ConfigError as error:
        pytest.skip(f"no CPU quota here: {error}")
    assert share < 0.4, "0.2 of a CPU was allowed"
    assert facts["slow"]["nr_throttled"] > 0
    assert groups and not any(group.exists() for group in groups)


@pytest.mark.root
@needs_root
def test_a_process_that_outlives_its_quota_goes_on_without_it() -> None:
    with _python("input()") as child:
        try:
            with CpuQuota(Cluster(nodes=(Node(name="slow", cpus=0.5),))) as quota:
                quota.add(0, child.pid)
                (group,) = quota.groups.values()
                assert str(child.pid) in (group / "cgroup.procs").read_text().split()
        except ConfigError as error:
            child.kill()
            pytest.skip(f"no CPU quota here: {error}")
        assert child.poll() is None and not group.exists()
        child.communicate("\n", timeout=20)


def test_nodes_without_cpus_need_no_control_group() -> None:
    with CpuQuota(uniform(2)) as quota:
        quota.add(0, os.getpid())
        assert quota.groups == {} and quota.facts() == {}


def test_a_quota_that_cannot_be_set_is_refused_and_says_what_to_do() -> None:
    script = (
        "import os\nfrom podium.launch.clusters.description import Cluster, Node\n"
        "from podium.launch.clusters.cpu_quota import CpuQuota\n"
        "from podium.errors import ConfigError\n"
        "if os.geteuid() == 0: os.seteuid(65534)\n"
        "try: CpuQuota(Cluster(nodes=(Node(name='a', cpus=1.0),))).__enter__()\n"
        "except ConfigError as error: print(error)"
    )
    with _python(script) as child:
        said, _ = child.communicate(timeout=40)
    assert "no CPU quota can be set here" in said and "leave cpus out" in said


def test_work_in_a_thread_that_never_ends_is_given_up() -> None:
    over = threading.Event()
    try:
        with pytest.raises(ConfigError, match=r"within 0\.2 s"):
            in_thread(lambda: over.wait(30), 0.2)
    finally:
        over.set()
