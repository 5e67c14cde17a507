"""The local launcher: ranks are processes of this machine, forked from a server that has torch loaded.

The first run pays for the server's imports (about 3 s); ranks of later runs start in hundredths of a second, and so do
those that replace a lost server or join later. They die with the launcher: the kernel kills them when the fork
server ends, and they end when the coordinator does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from podium.comm.clocks import WallClock
from podium.comm.real.channel import Channel
from podium.engine.build import Job
from podium.errors import ConfigError, PodiumError, RankFailed
from podium.launch.base import LaunchResult, RunPlan, hosts_of
from podium.launch.coordination.coordinator import Coordinator
from podium.launch.coordination.owner import ProcessOwner
from podium.launch.coordination.rules import COORDINATOR, MOST_RANKS, Role, Rules
from podium.launch.event import Event
from podium.launch.forking import UNKNOWN, check_fork_server, fork_server, how_it_ended, nullified_main
from podium.launch.process import NodeSpec, run_node
from podium.launch.rendezvous import rendezvous_folder
from podium.launch.scale import open_to_change
from podium.records.recorder import Recorder
from podium.task import Task

_UNGUARDED = (
    " (ranks import the script that made the task: its code must be under `if __name__ == '__main__':`, "
    "or name the task's function, 'file.py:make_task', instead)"
)
_GRACE_S = 10.0
"""How long processes may take to end once their work is done."""


def run_local(job: Job, on_event: Callable[[Event], None] | None, stop: threading.Event | None) -> LaunchResult:
    """All ranks as processes on this machine, connected by loopback and Unix sockets."""
    with rendezvous_folder() as folder:
        return Processes(job, folder, on_event, task=sendable_task(job)).run(stop)


class Processes(ProcessOwner):
    """The processes of one run, and their coordinator."""

    def __init__(
        self,
        job: RunPlan,
        folder: Path,
        on_event: Callable[[Event], None] | None,
        *,
        task: Task | None = None,
        body: Callable[[NodeSpec, Task | None], None] = run_node,
        place: Callable[[int, Role], dict[str, Any]] | None = None,
    ) -> None:
        """Each process runs `body`; `task` is sent to it where it has no name.

        `place(rank, role)` returns the NodeSpec fields of a process's host and network.
        """
        self.job, self.folder = job, folder
        self._place = place or (lambda _rank, _role: {})
        self._task, self._body, self._on_event = task, body, on_event
        self._shown: int | None = None
        self._restarts: dict[int, int] = {}
        self.secret = secrets.token_bytes(32)
        self.endpoints = endpoints_of(job)
        self.started: dict[int, ForkServerProcess] = {}
        """The latest process of each number."""
        self._all: list[ForkServerProcess] = []
        self.on_started: Callable[[NodeSpec, int], None] | None = None
        """Called with the spec and the pid of every process, once it runs."""
        self._began_ns = time.monotonic_ns()
        assert job.run_dir is not None
        self.recorder = Recorder(-1, job.run_dir / "records" / "launcher.jsonl")
        channel = Channel(COORDINATOR, secret=self.secret, listen=f"unix:{folder}/k")
        self.coordinator = Coordinator(self._rules(), self, channel, self.recorder, WallClock(self._began_ns))

    def show_output_of(self, rank: int) -> None:
        """Leave this process's output on the terminal instead of in its log."""
        self._shown = rank

    def run(self, stop: threading.Event | None) -> LaunchResult:
        assert self.job.run_dir is not None
        try:
            for endpoints in self.endpoints:
                self._launch(self._spec(endpoints))
            try:
                with open_to_change(self.job.run_dir, self.coordinator.address, self.secret):
                    reports = self.coordinator.run(stop)
            except PodiumError as error:
                advised = type(error)(self._with_advice(error))
                advised.exit_code = error.exit_code
                raise advised from error
            self._join()
            return LaunchResult(reports, [], {})
        finally:
            self._end()

    def _rules(self) -> Rules:
        job = self.job
        if self._body is not run_node:
            # No rank can be added to a script's own loop, and restarting the script would begin the loop again.
            return rules_of(job, survives_loss=job.strategy.cadence.survives_loss, fixed="the loop is the script's own")
        fixed = "" if job.config.shares is None else "shares are set, one per worker that the run began with"
        replaces = job.strategy.server_spec.replaceable
        return rules_of(job, survives_loss=job.strategy.cadence.survives_loss, replaces_servers=replaces, fixed=fixed)

    def _launch(self, spec: NodeSpec) -> None:
        task = self._task
        try:
            context = fork_server()
            process = context.Process(target=self._body, args=(spec, task), name=f"podium-{spec.rank}", daemon=True)
            with nullified_main() if task is None else contextlib.nullcontext():
                process.start()
        except (AttributeError, TypeError, _pickling_error()) as error:
            raise ConfigError(
                f"task {self.job.config.task} cannot be sent to other processes ({error}); name its function "
                "('file.py:make_task') or use launcher='threads'"
            ) from error
        except (OSError, EOFError) as error:
            why = str(error) or "the fork server ended"
            raise RankFailed(f"rank {spec.rank} could not be started: {why}") from error
        self.started[spec.rank] = process
        self._all.append(process)
        if self.on_started is not None and process.pid is not None:
            self.on_started(spec, process.pid)

    def _spec(self, endpoints: tuple[int, ...], **others: Any) -> NodeSpec:
        assert self.job.run_dir is not None
        log = str(self.job.run_dir / "logs" / f"rank-{endpoints[0]}.log")
        spec = NodeSpec.of(
            self.job,
            endpoints,
            coordinator=self.coordinator.address,
            secret=self.secret.hex(),
            store=str(self.folder / "store"),
            rendezvous=str(self.folder),
            clock_ns=self._began_ns,
            log=None if endpoints[0] == self._shown else log,
            **others,
        )
        return dataclasses.replace(spec, **self._place(spec.rank, spec.role))

    # Owner.

    def hear(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def restart_servers(self, endpoints: tuple[int, ...]) -> None:
        self._restarts[endpoints[0]] = again = self._restarts.get(endpoints[0], 0) + 1
        self._launch(self._spec(endpoints, role="server", replaces=True, again=again))

    def start(self, role: Role, rank: int) -> None:
        self._launch(self._spec((rank,), role=role, late=True))

    def kill(self, rank: int) -> None:
        process = self.started[rank]
        if process.pid is not None and process.exitcode is None:
            process.kill()

    def how_it_ended(self, rank: int, wait_s: float) -> str | None:
        process = self.started[rank]
        process.join(timeout=wait_s)
        code = process.exitcode
        if code is None:
            return None
        if code == UNKNOWN:
            check_fork_server()
        return how_it_ended(code) + (self._last_words(rank) if code > 0 else "")

    def is_running(self, rank: int) -> bool:
        """A process that sleeps, or that a debugger has stopped, counts as running."""
        process = self.started[rank]
        if process.exitcode is not None:  # its pid may be another process's by now
            return False
        try:
            status = Path(f"/proc/{process.pid}/status").read_text(errors="replace")
        except OSError:
            return False
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        return facts["State"][0] in "RSD" or facts["TracerPid"] != "0"

    # The end.

    def _last_words(self, rank: int) -> str:
        """The last line of its log, which may hold an error that it could not report."""
        assert self.job.run_dir is not None
        try:
            lines = (self.job.run_dir / "logs" / f"rank-{rank}.log").read_text(errors="replace").split("\n")
        except OSError:  # it ended before it opened one
            return _UNGUARDED if self._task is not None else ""
        said = [line for line in lines if line.strip()]
        return f" ({said[-1].strip()[:300]})" if said else ""

    def _join(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        for process in self._all:
            process.join(timeout=max(0.0, deadline - time.monotonic()))

    def _end(self) -> None:
        """Leave no process behind, whatever happened."""
        for process in self._all:
            if process.exitcode is None:
                process.kill()
        for process in self._all:
            process.join(timeout=_GRACE_S)
        self.coordinator.close()
        self.recorder.close()

    def _with_advice(self, error: PodiumError) -> str:
        """The error, then the run's folder and the command to resume: these are the last lines the user sees."""
        run_dir = self.job.run_dir
        lines = [str(error), f"  records and logs: {run_dir}"]
        if run_dir is not None and any((run_dir / "checkpoints").glob("step-????????")):
            lines.append(f"  resume from the last checkpoint: podium train --resume {run_dir}")
        return "\n".join(lines)


def endpoints_of(job: RunPlan) -> list[tuple[int, ...]]:
    """The ranks of each process: one each, and colocated servers in their worker's process."""
    workers, servers = job.config.workers, job.strategy.server_spec.count
    if not job.strategy.server_spec.colocated:
        return [(rank,) for rank in range(workers + servers)]
    hosts = hosts_of(job.strategy, workers)
    beside = [hosts[m % len(hosts)] for m in range(servers)]
    return [(rank, *(workers + m for m in range(servers) if beside[m] == rank)) for rank in range(workers)]


def rules_of(job: RunPlan, *, survives_loss: bool, replaces_servers: bool = False, fixed: str = "") -> Rules:
    """The coordinator's rules for this run; `fixed`: why its number of ranks cannot change."""
    config = job.config
    limits = [config.batch_size, job.strategy.max_workers]  # a worker without a sample would have nothing to do
    return Rules(
        workers=config.workers,
        servers=job.strategy.server_spec.count,
        ranks=tuple(endpoints[0] for endpoints in endpoints_of(job)),
        survives_loss=survives_loss,
        replaces_servers=replaces_servers,
        fixed=fixed,
        most_workers=min([MOST_RANKS, *(limit for limit in limits if limit is not None)]),
        heartbeat_s=config.heartbeat_s,
        deadline_s=config.deadline_s,
        start_deadline_s=config.start_deadline_s,
    )


def sendable_task(job: Job) -> Task | None:
    """The task, where processes cannot make it from its name; otherwise None."""
    return None if job.task_is_named else job.task


def _pickling_error() -> type[Exception]:
    import pickle

    return pickle.PicklingError
