"""Machines that vanish and links that break in mid-run: the survivors go on, and no sample is lost or used twice."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

from podium.testing import Host, Hosts, SshServers, make_hosts, start_ssh
from tests.integration.on_hosts import result_of, rows_at_home, steps_at_home, train, wait_for

pytestmark = [pytest.mark.root, pytest.mark.slow]
__all__ = ["make_hosts", "start_ssh"]  # the fixtures
Make = Callable[..., Hosts]
Start = Callable[[Hosts], SshServers]

SERVERS = "parameter-server:mode=async,servers=2,replicas=2"
GOES_ON_S = 5.0
"""With default settings, on an idle machine. Here other tests run before, so the bound is twice that."""


@pytest.mark.parametrize(
    ("strategy", "lost"), [("all-reduce", 2), ("local-sgd:period=4", 2), (SERVERS, 2), (SERVERS, 1)]
)
def test_training_goes_on_without_a_lost_host(strategy: str, lost: int, make_hosts: Make, start_ssh: Start) -> None:
    """With two servers, host 1 holds one of them and a worker; host 2 a worker only."""
    hosts = make_hosts(3)
    start_ssh(hosts)
    process = train(list(hosts), "--strategy", strategy, workers=3, epochs=20)
    wait_for(lambda: steps_at_home(hosts[0]) >= 20, process)
    hosts[lost].lose()
    result = result_of(process)
    survivors = {"0", "1", "2"} - {str(lost)}
    assert set(result["param_hash"]) == survivors and len(set(result["param_hash"].values())) == 1
    assert result["audit"] == {"missing": 0, "repeated": 0}
    assert result["metrics"]["accuracy"] > 0.95  # the unbroken run: 0.978
    assert longest_pause_s(hosts[0]) < 2 * GOES_ON_S


@pytest.mark.parametrize("heals", [True, False], ids=["for 3 s", "for good"])
@pytest.mark.parametrize("strategy", ["all-reduce", SERVERS])
def test_a_link_is_cut(strategy: str, heals: bool, make_hosts: Make, start_ssh: Start) -> None:
    hosts = make_hosts(3)
    start_ssh(hosts)
    process = train(list(hosts), "--strategy", strategy, workers=3, epochs=20)
    wait_for(lambda: steps_at_home(hosts[0]) >= 20, process)
    hosts[2].cut(hosts[0], hosts[1])
    if heals:
        time.sleep(3.0)  # the cut itself
        hosts[2].mend(hosts[0], hosts[1])
    result = result_of(process)
    assert len(set(result["param_hash"].values())) == 1
    assert result["audit"] == {"missing": 0, "repeated": 0}
    assert result["metrics"]["accuracy"] > 0.95


def longest_pause_s(head: Host) -> float:
    """Between two steps of the first worker."""
    times = [row["t_ns"] for row in rows_at_home(head, 0) if row["kind"] == "step"]
    return max(later - earlier for earlier, later in itertools.pairwise(times)) / 1e9
