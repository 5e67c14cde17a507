"""Agents started by SLURM's `srun`, inside an allocation: one job step, with a task on each node.

The step outlives its parts: neither a lost node nor an agent that fails ends the other agents. The invitation goes to
all tasks on their standard input, and each finds its own number there by the name of its node.

Outside an allocation, a batch script starts the run inside one (`podium.launch.hosts.sbatch`).
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import final

from podium.errors import CommError, ConfigError
from podium.launch.hosts.base import Command, StartedAgent, Starter
from podium.launch.hosts.entries import HostEntry
from podium.launch.hosts.facts import routed
from podium.launch.hosts.invitation import Invitation
from podium.launch.hosts.ssh import remote_command

_ANSWER_S = 15.0
_LEAVE_S = 2.0
_LINES_PER_NODE = 20
_STEP = (
    "--ntasks-per-node=1",
    "--overlap",  # the allocation may have other steps, such as the shell that this process runs in
    "--whole",  # an agent's ranks share all that the job has on the node
    "--mem=0",
    "--cpu-bind=none",
    "--mpi=none",
    "--label",
    "--unbuffered",
    # What happens to one agent is no matter of the others:
    "--no-kill",  # SLURM would end the step when it finds out that a node is down
    "--kill-on-bad-exit=0",
    "--wait=0",
)
_PER_TASK = (
    "SLURM_CPUS_PER_TASK",
    "SRUN_CPUS_PER_TASK",
    "SLURM_GPUS_PER_TASK",
    "SLURM_TRES_PER_TASK",
    "SLURM_NTASKS_PER_CORE",
    "SLURM_NTASKS_PER_GPU",
    "SLURM_NTASKS_PER_SOCKET",
    "SLURM_DISTRIBUTION",
    "SLURM_EXACT",
    "SLURM_HINT",
)
"""Settings of the job's tasks (its ranks) that srun would take for the step's tasks (the agents)."""
_ALWAYS_SAID = "srun: cluster configuration lacks support for cpu binding; "  # where SLURM binds nothing anyway
_EXITED = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.+)")


@final
class Slurm(Starter):
    """A job step on the nodes of this process's allocation."""

    remedies = MappingProxyType(
        {
            r"Requested node configuration is not available|Invalid node name": (
                "HOST must be a node of this allocation, which has: scontrol show hostnames $SLURM_JOB_NODELIST"
            )
        }
    )

    def __init__(self) -> None:
        need_slurm("srun", "scontrol")
        self._steps: list[_Step] = []

    def entries(self, processes: int) -> list[HostEntry]:
        names = scontrol("show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
        tasks = _tasks_per_node()
        if tasks is None:
            return [HostEntry(name) for name in names]
        if sum(tasks) < processes:
            raise ConfigError(
                f"the run needs {processes} processes, and job {os.environ['SLURM_JOB_ID']} has {sum(tasks)} tasks on "
                f"{len(names)} nodes: ask SLURM for --ntasks={processes}, or use fewer workers"
            )
        slots = spread(tasks, processes) if processes else tasks
        return [HostEntry(name, slots=count) for name, count in zip(names, slots, strict=True) if count]

    def head_address(self, entries: Sequence[HostEntry]) -> str:
        """That of the interface that routes to the first node that is not this machine."""
        shown = scontrol("show", "nodes", ",".join(entry.name for entry in entries), "--oneliner")
        found = [_resolve(name) for name in re.findall(r" NodeAddr=(\S+)", shown)]
        away = [address for address in found if not address.startswith("127.")]
        return routed((away or found)[0], 22)

    def start(self, entries: Mapping[int, HostEntry], invitation: Invitation) -> dict[int, StartedAgent]:
        numbers = {entry.name: number for number, entry in entries.items()}
        step = _Step(step_command(list(entries.values())), invitation.for_nodes(numbers), len(entries))
        self._steps.append(step)
        return {number: _Task(step, task) for task, number in enumerate(entries)}

    def advice(self, entry: HostEntry) -> str:
        one = f"srun --overlap --nodes=1 --ntasks=1 --nodelist={entry.name}"
        return f"{one} {entry.python or sys.executable} -m podium --version"

    def close(self) -> None:
        while self._steps:
            self._steps.pop().end()


def step_command(entries: Sequence[HostEntry]) -> list[str]:
    """The job step with an agent on each of these nodes."""
    count = len(entries)
    where = (f"--nodes={count}", f"--ntasks={count}", f"--nodelist={','.join(entry.name for entry in entries)}")
    return ["srun", "--job-name=podium", *where, *_STEP, "sh", "-c", remote_command(entries[0])]


class _Step:
    """A running srun."""

    def __init__(self, words: Sequence[str], line: str, nodes: int) -> None:
        env = {name: value for name, value in os.environ.items() if name not in _PER_TASK}
        self.command = Command(words, line, env, keep=nodes * _LINES_PER_NODE)
        self.waits_for_lost_node = False

    def end(self) -> None:
        """srun itself waits for a node that is gone until SLURM finds out: minutes."""
        self.command.close_input()
        self.command.end(at_once=self.waits_for_lost_node and not self.command.wait(_LEAVE_S))


class _Task(StartedAgent):
    """An agent of a step."""

    def __init__(self, step: _Step, task: int) -> None:
        self._step, self._task = step, task

    def ended(self) -> str | None:
        lines = self._step.command.said
        how = next((how for tasks, how in _exits(lines) if self._task in tasks), None)
        if how is None:
            ended = self._step.command.ended()
            return None if ended is None else ended.removeprefix(_ALWAYS_SAID)
        own = f"{self._task}: "
        words = [line.removeprefix(own).removeprefix("podium: ") for line in lines if line.startswith(own)]
        return "; ".join(words[-3:]) or how

    def end(self, *, at_once: bool = False) -> None:
        """The step ends as a whole, when the starter is closed."""
        self._step.waits_for_lost_node |= at_once


def _exits(lines: Sequence[str]) -> Iterator[tuple[set[int], str]]:
    """The tasks that srun reports the failure of, and how they ended."""
    for line in lines:
        if found := _EXITED.fullmatch(line):
            yield task_numbers(found[1]), found[2]


def task_numbers(text: str) -> set[int]:
    """`0-2,5` to its numbers."""
    ends = [part.partition("-") for part in text.split(",")]
    return {number for first, _, last in ends for number in range(int(first), int(last or first) + 1)}


def _tasks_per_node() -> list[int] | None:
    """How many ranks each node takes, where the user has asked SLURM for tasks; None: an even division."""
    if not {"SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"} & os.environ.keys():
        return None  # SLURM counts one task per node then
    return tasks_per_node(os.environ["SLURM_TASKS_PER_NODE"])


def tasks_per_node(text: str) -> list[int]:
    """`2(x3),1` to 2, 2, 2, 1, as SLURM writes the tasks of each node."""
    found = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in text.split(",")]
    if None in found:
        raise ConfigError(f"SLURM_TASKS_PER_NODE must be like 2(x3),1, got {text!r}")
    return [int(part[1]) for part in found if part is not None for _ in range(int(part[2] or 1))]


def spread(tasks: Sequence[int], processes: int) -> list[int]:
    """How many processes each node gets: as even as its tasks allow, so that none that was allocated is idle."""
    counts = [0] * len(tasks)
    while sum(counts) < processes:
        node = min((n for n, most in enumerate(tasks) if counts[n] < most), key=lambda n: (counts[n], n))
        counts[node] += 1
    return counts


# SLURM's commands.


def need_slurm(*programs: str) -> None:
    """Raise where these are not installed, or SLURM's controller does not answer."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        raise ConfigError(
            f"launcher slurm needs the command `{missing[0]}`, which is not installed on this machine: run it on a "
            "login node of the cluster (on Debian: apt install slurm-client), or use launcher ssh"
        )
    done = _run("scontrol", "ping")
    if done.returncode != 0 and "is UP" not in done.stdout:
        raise CommError(f"SLURM's controller does not answer: {complaint(done)}; to see more: scontrol ping")


def scontrol(*words: str) -> str:
    """What scontrol prints."""
    done = _run("scontrol", *words)
    if done.returncode != 0:
        raise CommError(f"scontrol {' '.join(words)}: {complaint(done)}")
    return done.stdout


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise CommError(f"{' '.join(words)}: no answer from SLURM's controller within {_ANSWER_S:g} s") from error


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The line that says what is wrong: the fatal one, else the first."""
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    fatal = [line for line in lines if "fatal:" in line]
    return (fatal or lines or [f"it ended with exit code {done.returncode}"])[0]


def _resolve(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, 22, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"node {name}: its name cannot be resolved here ({error.strerror}); add it to /etc/hosts, or tell this "
            "machine's address for the nodes: --set head=ADDRESS"
        ) from error
