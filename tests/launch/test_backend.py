"""nccl or gloo: the choice, and how nccl is set up. The GPUs here are made up; two real ones were never there."""

from __future__ import annotations

import os
import socket
import sys

import pytest
import torch

from podium.launch.backend import backend_of, interface_of, own_gpu, set_up_nccl
from podium.testing import make_hosts
from tests.launch.coordination.conftest import Make, place
from tests.launch.coordination.place import LIMIT_S, Place

__all__ = ["make_hosts", "place"]  # fixtures


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (["a 0"], "nccl"),
        (["a 0", "a 1"], "nccl"),
        (["a 0", "b 0"], "nccl"),
        (["a 0", "a 1", "b 0", "b 1"], "nccl"),
        (["a 0", "a 0"], "gloo"),
        (["a 0", "b 0", "a 0"], "gloo"),
        (["a 0", ""], "gloo"),
        (["", ""], "gloo"),
        ([""], "gloo"),
    ],
)
def test_nccl_is_chosen_where_every_worker_has_its_own_gpu_on_whatever_host(gpus: list[str], expected: str) -> None:
    assert backend_of(gpus) == expected


def test_a_worker_on_the_cpu_has_no_gpu() -> None:
    assert own_gpu(torch.device("cpu")) == ""


def test_loopback_has_its_interface_and_strange_addresses_have_none() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
    assert interface_of("a-name") is None
    if socket.has_ipv6 and os.path.exists("/proc/net/if_inet6"):
        assert interface_of("::1") in ("lo", None)


@pytest.mark.root
def test_a_host_finds_the_interface_of_its_address(make_hosts: Make) -> None:
    a, b = make_hosts(2)
    code = "import sys; from podium.launch.backend import interface_of; print([interface_of(x) for x in sys.argv[1:]])"
    found = a.run(sys.executable, "-c", code, a.address, b.address, "127.0.0.1")
    assert found.returncode == 0, found.stderr
    listed = a.run("ip", "-o", "-4", "addr", "show", "to", a.address).stdout.split()
    assert found.stdout.strip() == str([listed[1].partition("@")[0], None, "lo"])


def test_what_the_user_has_set_for_nccl_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("NCCL_SOCKET_IFNAME", "TORCH_NCCL_BLOCKING_WAIT")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)
    set_up_nccl("127.0.0.1")
    assert [os.environ[name] for name in names] == ["=lo", "1"]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "bond0")
    set_up_nccl("127.0.0.1")
    assert os.environ["NCCL_SOCKET_IFNAME"] == "bond0"
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    set_up_nccl("203.0.113.9")
    assert "NCCL_SOCKET_IFNAME" not in os.environ, "nccl then looks for itself"


# The coordinator.


def joined_with(here: Place, gpus: dict[int, str]) -> list[str]:
    """What each worker is told to exchange with, at the beginning."""
    waiting = [here.pool.submit(here.members[rank].join, [rank], {}, LIMIT_S, gpu) for rank, gpu in gpus.items()]
    told = [each.result(LIMIT_S).backend for each in waiting]
    for rank in gpus:
        here.members[rank].begun()
    return told


def planned(here: Place, *ranks: int) -> list[str]:
    """What each worker is told with the next plan."""
    told: list[str] = []
    for rank in ranks:
        here.members[rank].on_plan = told.append
    for waiting in [here.regroup(rank) for rank in ranks]:
        waiting.result(LIMIT_S)
    return told


def test_all_workers_are_told_the_same_and_the_choice_follows_the_members(place: Make) -> None:
    here = place(3)
    assert joined_with(here, {0: "a 0", 1: "b 0", 2: ""}) == ["gloo"] * 3
    here.leave(2)
    assert planned(here, 0, 1) == ["nccl"] * 2
    assert [row["backend"] for row in here.records("backend")] == ["gloo", "nccl"]


def test_workers_that_lose_one_stay_with_nccl(place: Make) -> None:
    here = place(3)
    assert joined_with(here, {0: "a 0", 1: "a 1", 2: "b 0"}) == ["nccl"] * 3
    here.leave(1)
    assert planned(here, 0, 2) == ["nccl"] * 2
    assert [row["backend"] for row in here.records("backend")] == ["nccl"]


def test_without_gpus_nothing_is_recorded(place: Make) -> None:
    here = place(2)
    assert joined_with(here, {0: "", 1: ""}) == ["gloo"] * 2
    assert here.records("backend") == []
