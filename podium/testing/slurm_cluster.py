"""A real SLURM on test hosts: slurmctld on the first, slurmd on every one.

    with Hosts(3) as hosts, SlurmCluster(hosts) as slurm:
        hosts[0].run("srun", "--nodes", "3", "hostname", env=slurm.env)

Configuration, keys, sockets, spool and logs are in `/tmp/slurm` and `/run/munge` of each host: a SLURM of the machine
itself is neither used nor changed. No folder is shared: a batch script's output is on the first host of its allocation.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import final

from podium.errors import ConfigError
from podium.testing.daemons import Daemons, Service, kill, need_new_folder
from podium.testing.hosts import Host, find_program, why_not, why_without

_FOLDER = "/tmp/slurm"
_READY_S = 60.0
_KEY_BYTES = 128
_PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "srun": "slurm-client",
    "munged": "munge",
}
_SETTINGS = f"""\
ClusterName=podium
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0
ReturnToService=2
SlurmdParameters=config_overrides
MailProg=/bin/true
StateSaveLocation={_FOLDER}/state
SlurmdSpoolDir={_FOLDER}/spool
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
"""
"""`config_overrides`: nodes have as many cores as are asked for. `batch_sched_delay`: no batch job waits for 3 s."""


def why_not_slurm() -> str:
    """Why SLURM cannot run on hosts here, as a reason to skip a test; empty where it can."""
    return why_not() or why_without("SLURM on hosts needs", _PROGRAMS)


@final
class SlurmCluster(Service):
    """One partition of all hosts, while the `with` block lasts; every host is idle when it begins.

    Its end kills the jobs that still run, and commands of SLURM's that still wait.
    """

    def __init__(self, hosts: Iterable[Host], *, cpus: int = 4) -> None:
        """`cpus`: how many each host offers, whatever the machine has."""
        if reason := why_not_slurm():
            raise ConfigError(reason)
        self.env = {"SLURM_CONF": f"{_FOLDER}/slurm.conf"}
        """What srun, sbatch, scontrol and their like need in their environment, on any of the hosts."""
        self._hosts, self._cpus, self._daemons = tuple(hosts), cpus, Daemons()

    def _check(self) -> None:
        need_new_folder(self._hosts, "slurm")

    def _begin(self) -> None:
        self._prepare()
        self._start_munge()
        self._start("slurmctld", self._hosts[:1])
        self._start("slurmd", self._hosts)
        self._daemons.wait(self._idle, "SLURM", _READY_S)

    def _prepare(self) -> None:
        key = secrets.token_bytes(_KEY_BYTES)
        for host in self._hosts:
            folder = host.folder / "slurm"
            folder.mkdir(mode=0o755)
            for name in ("state", "spool"):
                (folder / name).mkdir(mode=0o755)
            (folder / "slurm.conf").write_text(self._configuration())
            with open(folder / "munge.key", "xb", opener=_for_owner_only) as file:
                file.write(key)

    def _configuration(self) -> str:
        first = self._hosts[0]
        lines = [
            f"SlurmctldHost={first.name}({first.address})",
            *(f"NodeName={host.name} NodeAddr={host.address} CPUs={self._cpus}" for host in self._hosts),
            "PartitionName=all Nodes=ALL Default=YES State=UP",
        ]
        return _SETTINGS + "\n".join(lines) + "\n"

    def _start_munge(self) -> None:
        """The authentication service of each host; all have the same key."""
        files = {"key-file": f"{_FOLDER}/munge.key", "seed-file": "/run/munge/seed", "log-file": f"{_FOLDER}/munge.log"}
        options = [f"--{name}={path}" for name, path in files.items()]
        for host in self._hosts:
            host.run("mkdir", "-p", "/run/munge")
            self._daemons.start(host, _path("munged"), "--foreground", *options, log=f"{_FOLDER}/munged.log")

    def _start(self, program: str, hosts: Iterable[Host]) -> None:
        for host in hosts:
            log = f"{_FOLDER}/{program}.log"
            self._daemons.start(host, _path(program), "-D", log=log, env=self.env)

    def _idle(self) -> bool:
        done = self._hosts[0].run("sinfo", "--noheader", "--Node", "--format=%T", env=self.env, timeout_s=_READY_S)
        return done.stdout.split() == ["idle"] * len(self._hosts)

    def _is_part(self, pid: int) -> bool:
        """Whether a process is one of SLURM's own, which may change what their environment shows, or of a job."""
        process = Path(f"/proc/{pid}")
        own = process.joinpath("comm").read_text().startswith("slurm")
        return own or f"SLURM_CONF={self.env['SLURM_CONF']}".encode() in process.joinpath("environ").read_bytes()

    def _end(self) -> None:
        for host in self._hosts:
            kill(host, self._is_part)
        self._daemons.end()
        for host in self._hosts:
            shutil.rmtree(host.folder / "slurm", ignore_errors=True)


def _path(program: str) -> str:
    found = find_program(program)
    assert found is not None  # `why_not_slurm` looked for it
    return found


def _for_owner_only(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
