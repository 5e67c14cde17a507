"""Real ssh, SLURM and Ray on test hosts: each serves, survives the loss of a host, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

import pytest

from podium.errors import ConfigError
from podium.testing import (
    Host,
    Hosts,
    RayCluster,
    SlurmCluster,
    SshServers,
    hosts,
    make_hosts,
    start_ray,
    start_slurm,
    start_ssh,
    why_not_ray,
    why_not_slurm,
    why_not_ssh,
)

Make = Callable[..., Hosts]
pytestmark = pytest.mark.root
__all__ = ["make_hosts", "start_ray", "start_slurm", "start_ssh"]  # the fixtures

INSTALLED = "import podium, socket; print(socket.gethostname(), podium.__version__)"
TASK_PER_NODE = """
import socket
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

@ray.remote(num_cpus=1)
def where():
    import podium
    return socket.gethostname()

ray.init(log_to_driver=False, logging_level="ERROR")
group = placement_group([{"CPU": 2}] * 3, strategy="STRICT_SPREAD")
places = [PlacementGroupSchedulingStrategy(group, i) for i in range(3)]
print(*sorted(ray.get([where.options(scheduling_strategy=place).remote() for place in places], timeout=60)))
"""
COUNT_NODES = """
import sys
from ray._raylet import GcsClient
print(len(GcsClient(address=sys.argv[1]).get_all_node_info(timeout=5)))
"""


def printed(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def names(some: Sequence[Host] | Hosts) -> list[str]:
    return [host.name for host in some]


def names_on(host: Host) -> list[str]:
    """What is in a host's `/tmp`, except where Podium itself lies, if that is there."""
    software = {path.relative_to("/tmp").parts[0] for path in hosts._software() if path.is_relative_to("/tmp")}
    return sorted({path.name for path in host.folder.iterdir()} - software)


def runs(host: Host, what: str) -> bool:
    """Whether a process of the host has this in its command line."""
    return what in host.run("sh", "-c", "cat /proc/[0-9]*/cmdline").stdout


class TestSsh:
    def test_every_host_reaches_every_host_and_itself_without_a_question(
        self, make_hosts: Make, start_ssh: Callable[..., SshServers]
    ) -> None:
        machines = make_hosts(3)
        servers = start_ssh(machines)
        for host in machines:
            assert printed(host.run("ssh", "host1", "hostname")) == ["host1"]
        for host in machines:
            assert printed(machines[0].run("ssh", *servers.options, host.name, "hostname")) == [host.name]
        assert printed(machines[0].run("ssh", machines[2].address, "ssh", "host0", "hostname")) == ["host0"]

    def test_a_command_finds_the_home_the_software_and_not_the_clients_environment(
        self, make_hosts: Make, start_ssh: Callable[..., SshServers]
    ) -> None:
        a, _ = machines = make_hosts(2)
        start_ssh(machines)
        words = f'echo "$PWD $HOME $MINE"; python -c "{INSTALLED}"; command -v podium >/dev/null && echo podium'
        there = printed(a.run("ssh", "host1", words, env={"MINE": "mine"}))
        assert (there[:3], there[4:]) == (["/tmp", "/tmp", "host1"], ["podium"])

    def test_a_stranger_is_refused_and_an_unknown_host_is_not_trusted(
        self, make_hosts: Make, start_ssh: Callable[..., SshServers]
    ) -> None:
        a, b = machines = make_hosts(2)
        start_ssh(machines)
        (a.folder / ".ssh" / "id_ed25519").unlink()
        assert "Permission denied" in a.run("ssh", "host1", "true").stderr
        (b.folder / ".ssh" / "known_hosts").write_text("")
        assert "Host key verification failed" in b.run("ssh", "host0", "true").stderr

    def test_a_lost_host_answers_no_more_and_the_others_do(
        self, make_hosts: Make, start_ssh: Callable[..., SshServers]
    ) -> None:
        a, b, c = machines = make_hosts(3)
        start_ssh(machines)
        process = a.start("ssh", "host1", "echo begun; sleep 60", stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        b.lose()
        assert a.run("ssh", "-o", "ConnectTimeout=1", "host1", "true").returncode == 255
        assert printed(a.run("ssh", c.name, "hostname")) == [c.name]

    def test_nothing_is_left_of_it(self, make_hosts: Make) -> None:
        if reason := why_not_ssh():
            pytest.skip(reason)
        a, b, c = machines = make_hosts(3)
        with SshServers(machines):
            assert runs(a, "sshd")
            b.lose()
            os.kill(c.pid, signal.SIGKILL)
        assert not runs(a, "sshd") and not names_on(a)
        with SshServers([a]):
            assert printed(a.run("ssh", "host0", "hostname")) == ["host0"]


class TestSlurm:
    def test_srun_answers_from_every_host(self, make_hosts: Make, start_slurm: Callable[..., SlurmCluster]) -> None:
        machines = make_hosts(3)
        slurm = start_slurm(machines)
        for host in (machines[0], machines[2]):
            assert sorted(printed(host.run("srun", "--nodes=3", "hostname", env=slurm.env))) == names(machines)

    def test_hosts_offer_the_cpus_that_were_asked_for_and_tasks_find_the_software(
        self, make_hosts: Make, start_slurm: Callable[..., SlurmCluster]
    ) -> None:
        machines = make_hosts(2)
        slurm = start_slurm(machines, cpus=3)
        words = ("srun", "--nodes=2", "--ntasks=6", "python", "-c", INSTALLED)
        found = printed(machines[0].run(*words, env=slurm.env))
        assert sorted(found[::2]) == sorted(names(machines) * 3)
        assert machines[0].run("srun", "--immediate=1", "--ntasks=7", "true", env=slurm.env).returncode != 0

    def test_a_batch_script_runs_and_what_still_runs_at_the_end_is_killed(self, make_hosts: Make) -> None:
        if reason := why_not_slurm():
            pytest.skip(reason)
        a, b = machines = make_hosts(2)
        with SlurmCluster(machines) as slurm:
            (a.folder / "job.sh").write_text("#!/bin/sh\nsrun hostname\nsleep 77\n")
            printed(a.run("sbatch", "--nodes=2", "--output=/tmp/job.out", "job.sh", env=slurm.env))
            until = time.monotonic() + 20
            while not runs(a, "sleep\00077") and time.monotonic() < until:
                time.sleep(0.02)
            assert sorted((a.folder / "job.out").read_text().split()) == names(machines)
        assert not runs(a, "slurm") and not runs(a, "munged") and not runs(b, "slurm") and not runs(b, "munged")
        assert not runs(a, "sleep\00077")
        assert names_on(a) == ["job.out", "job.sh"]

    def test_one_cluster_follows_another_on_the_same_hosts_also_after_a_loss(self, make_hosts: Make) -> None:
        if reason := why_not_slurm():
            pytest.skip(reason)
        a, b, c = machines = make_hosts(3)
        with SlurmCluster(machines):
            b.lose()
        with SlurmCluster([c, a]) as slurm:
            assert sorted(printed(a.run("srun", "--nodes=2", "hostname", env=slurm.env))) == ["host0", "host2"]
            c.lose()
        assert not runs(a, "slurmd")

    def test_a_daemon_that_does_not_start_is_an_error_with_its_log(self, make_hosts: Make) -> None:
        if reason := why_not_slurm():
            pytest.skip(reason)
        (a,) = machines = make_hosts(1)
        a.start("python", "-m", "http.server", "6817", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        until = time.monotonic() + 20  # until the port of slurmctld is taken
        while a.run("bash", "-c", "exec 3<>/dev/tcp/localhost/6817").returncode and time.monotonic() < until:
            time.sleep(0.02)
        with pytest.raises(ConfigError, match=r"slurmctld.log: .*Address already in use"), SlurmCluster(machines):
            pass
        assert not runs(a, "slurm") and not names_on(a)

    def test_a_second_one_on_the_same_host_is_refused_and_the_first_goes_on(
        self, make_hosts: Make, start_slurm: Callable[..., SlurmCluster]
    ) -> None:
        (a,) = machines = make_hosts(1)
        slurm = start_slurm(machines)
        with pytest.raises(ConfigError, match="host0 must have no /tmp/slurm"), SlurmCluster(machines):
            pass
        assert printed(a.run("srun", "hostname", env=slurm.env)) == ["host0"]


class TestRay:
    @pytest.mark.slow
    def test_a_task_runs_on_every_host_with_a_token_and_not_without(
        self, make_hosts: Make, start_ray: Callable[..., RayCluster]
    ) -> None:
        machines = make_hosts(3)
        ray = start_ray(machines)
        for host in (machines[0], machines[2]):
            assert printed(host.run("python", "-c", TASK_PER_NODE, env=ray.env)) == names(machines)
        stranger = {**ray.env, "RAY_AUTH_TOKEN": "0" * 64}
        assert "InvalidAuthToken" in machines[1].run("python", "-c", COUNT_NODES, ray.address, env=stranger).stderr
        assert printed(machines[1].run("python", "-c", COUNT_NODES, ray.address, env=ray.env)) == ["3"]

    @pytest.mark.slow
    def test_nothing_is_left_of_it_also_after_the_loss_of_a_host(self, make_hosts: Make) -> None:
        if reason := why_not_ray():
            pytest.skip(reason)
        a, b = machines = make_hosts(2)
        with RayCluster(machines):
            assert runs(a, "raylet") and runs(b, "raylet")
            b.lose()
        assert not runs(a, "ray") and not names_on(a)

    @pytest.mark.slow
    def test_a_host_that_cannot_join_is_named_and_nothing_stays(self, make_hosts: Make) -> None:
        if reason := why_not_ray():
            pytest.skip(reason)
        a, b = machines = make_hosts(2)
        (b.folder / "ray").write_text("where Ray's folder should be")
        with pytest.raises(ConfigError, match="Ray did not start on host1"), RayCluster(machines):
            pass
        assert not runs(a, "ray") and not runs(b, "ray")


REASONS = {"ssh": (why_not_ssh, SshServers), "slurm": (why_not_slurm, SlurmCluster), "ray": (why_not_ray, RayCluster)}


@pytest.mark.parametrize("service", REASONS)
def test_without_root_the_reason_is_given(monkeypatch: pytest.MonkeyPatch, service: str) -> None:
    why_not, start = REASONS[service]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need root" in why_not()
    with pytest.raises(ConfigError, match="need root"):
        start([])


@pytest.mark.parametrize(
    ("service", "expected"),
    [("ssh", "openssh-server: apt install openssh-server"), ("slurm", "munge and slurmd: apt install munge slurmd")],
)
def test_without_its_package_the_line_that_installs_it_is_given(
    monkeypatch: pytest.MonkeyPatch, service: str, expected: str
) -> None:
    if reason := hosts.why_not():
        pytest.skip(reason)
    found, absent = hosts.find_program, ("sshd", "munged", "slurmd")
    monkeypatch.setattr(hosts, "find_program", lambda name: None if name in absent else found(name))
    assert REASONS[service][0]().endswith(expected)


def test_without_ray_the_extra_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := hosts.why_not():
        pytest.skip(reason)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert why_not_ray() == "Ray on hosts needs Ray: pip install 'podium[ray]'"
