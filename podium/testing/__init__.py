"""Tests for your own strategy or communicator: the contracts that Podium's own pass, and their parts.

    import pytest
    from podium.testing import StrategyContract
    from my_strategy import LocalSteps

    class TestLocalSteps(StrategyContract):
        @pytest.fixture
        def strategy(self):
            return LocalSteps(every=4)

    contracts   StrategyContract, OneWorkerContract, SynchronousContract, RoundsContract, BetweenRoundsContract,
                ClippingContract, SynchronousClippingContract (`strategies`), CommunicatorContract (`communicators`)
    tasks       toy, UNUSUAL models, OPTIMIZERS; train, train_in and train_plainly, the plain PyTorch loop (`toys`)
    worlds      Memory, Virtual, Real: a function per rank in threads, in virtual time, on processes (`worlds`)
    faults      Faults: which rank is killed, stopped or blocked, at which step (`faults`)
    hosts       Hosts: machines that share nothing, as namespaces of this one, which can be lost or cut off (`hosts`);
                make_hosts: a pytest fixture that makes them, or skips where it cannot (`fixtures`)
    services    SshServers, SlurmCluster, RayCluster: the real ones, on hosts (`ssh_servers`, `slurm_cluster`,
                `ray_cluster`); fixtures that start them or skip: start_ssh, start_slurm, start_ray (`fixtures`)
    frames      damaged frames (`frame_mutations`) and their reader under test (`frame_fuzz`, also `podium bench fuzz`)

Contracts are classes for pytest; everything else works without a test runner.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from podium.errors import MissingExtra

_HOME = {
    "BetweenRoundsContract": "strategies",
    "ClippingContract": "strategies",
    "OneWorkerContract": "strategies",
    "RoundsContract": "strategies",
    "StrategyContract": "strategies",
    "SynchronousClippingContract": "strategies",
    "SynchronousContract": "strategies",
    "CommunicatorContract": "communicators",
    "OPTIMIZERS": "toys",
    "UNUSUAL": "toys",
    "Trained": "toys",
    "assert_alike": "toys",
    "assert_close": "toys",
    "assert_same_bits": "toys",
    "hashes": "toys",
    "samples_used": "toys",
    "toy": "toys",
    "train": "toys",
    "train_in": "toys",
    "train_plainly": "toys",
    "Memory": "worlds",
    "Real": "worlds",
    "Virtual": "worlds",
    "World": "worlds",
    "Fault": "faults",
    "Faults": "faults",
    "Host": "hosts",
    "Hosts": "hosts",
    "make_hosts": "fixtures",
    "RayCluster": "ray_cluster",
    "SlurmCluster": "slurm_cluster",
    "SshServers": "ssh_servers",
    "start_ray": "fixtures",
    "start_slurm": "fixtures",
    "start_ssh": "fixtures",
    "why_not_ray": "ray_cluster",
    "why_not_slurm": "slurm_cluster",
    "why_not_ssh": "ssh_servers",
}

__all__ = list(_HOME)  # the keys are names that __getattr__ serves

if TYPE_CHECKING:
    from podium.testing.communicators import CommunicatorContract as CommunicatorContract
    from podium.testing.faults import Fault as Fault
    from podium.testing.faults import Faults as Faults
    from podium.testing.fixtures import make_hosts as make_hosts
    from podium.testing.fixtures import start_ray as start_ray
    from podium.testing.fixtures import start_slurm as start_slurm
    from podium.testing.fixtures import start_ssh as start_ssh
    from podium.testing.hosts import Host as Host
    from podium.testing.hosts import Hosts as Hosts
    from podium.testing.ray_cluster import RayCluster as RayCluster
    from podium.testing.ray_cluster import why_not_ray as why_not_ray
    from podium.testing.slurm_cluster import SlurmCluster as SlurmCluster
    from podium.testing.slurm_cluster import why_not_slurm as why_not_slurm
    from podium.testing.ssh_servers import SshServers as SshServers
    from podium.testing.ssh_servers import why_not_ssh as why_not_ssh
    from podium.testing.strategies import BetweenRoundsContract as BetweenRoundsContract
    from podium.testing.strategies import ClippingContract as ClippingContract
    from podium.testing.strategies import OneWorkerContract as OneWorkerContract
    from podium.testing.strategies import RoundsContract as RoundsContract
    from podium.testing.strategies import StrategyContract as StrategyContract
    from podium.testing.strategies import SynchronousClippingContract as SynchronousClippingContract
    from podium.testing.strategies import SynchronousContract as SynchronousContract
    from podium.testing.toys import OPTIMIZERS as OPTIMIZERS
    from podium.testing.toys import UNUSUAL as UNUSUAL
    from podium.testing.toys import Trained as Trained
    from podium.testing.toys import assert_alike as assert_alike
    from podium.testing.toys import assert_close as assert_close
    from podium.testing.toys import assert_same_bits as assert_same_bits
    from podium.testing.toys import hashes as hashes
    from podium.testing.toys import samples_used as samples_used
    from podium.testing.toys import toy as toy
    from podium.testing.toys import train as train
    from podium.testing.toys import train_in as train_in
    from podium.testing.toys import train_plainly as train_plainly
    from podium.testing.worlds import Memory as Memory
    from podium.testing.worlds import Real as Real
    from podium.testing.worlds import Virtual as Virtual
    from podium.testing.worlds import World as World


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'podium.testing' has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"podium.testing.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "pytest":
            raise
        raise MissingExtra("pytest", "testing", f"podium.testing.{name}") from None
