"""Fixtures for pytest. Import one into a test module or a conftest.py to use it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import TypeVar

import pytest

from podium.testing.hosts import Hosts, why_not
from podium.testing.ray_cluster import RayCluster, why_not_ray
from podium.testing.slurm_cluster import SlurmCluster, why_not_slurm
from podium.testing.ssh_servers import SshServers, why_not_ssh

T = TypeVar("T")


@pytest.fixture
def make_hosts() -> Iterator[Callable[..., Hosts]]:
    """`make_hosts(count, mbit=…)` gives `Hosts` until the test ends; skips the test, with the reason, without root."""
    yield from _until_the_test_ends(Hosts, why_not())


@pytest.fixture
def start_ssh() -> Iterator[Callable[..., SshServers]]:
    """`start_ssh(hosts)` gives `SshServers` until the test ends; skips the test, with the reason, where it cannot."""
    yield from _until_the_test_ends(SshServers, why_not_ssh())


@pytest.fixture
def start_slurm() -> Iterator[Callable[..., SlurmCluster]]:
    """`start_slurm(hosts, cpus=…)` gives a `SlurmCluster` until the test ends; skips the test where it cannot."""
    yield from _until_the_test_ends(SlurmCluster, why_not_slurm())


@pytest.fixture
def start_ray() -> Iterator[Callable[..., RayCluster]]:
    """`start_ray(hosts, cpus=…)` gives a `RayCluster` until the test ends; skips the test where it cannot."""
    yield from _until_the_test_ends(RayCluster, why_not_ray())


def _until_the_test_ends(make: Callable[..., AbstractContextManager[T]], reason: str) -> Iterator[Callable[..., T]]:
    """A function that makes things and ends them after the test, the last one first."""
    if reason:
        pytest.skip(reason)
    with ExitStack() as stack:
        yield lambda *arguments, **options: stack.enter_context(make(*arguments, **options))
