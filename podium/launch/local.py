"""The local launcher: ranks are processes of this machine, forked from a server that has torch loaded.

The first run pays for the server's imports (about 3 s); ranks of later runs start in hundredths of a second, and so do
those that replace a lost server or join later.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podium.comm.clocks import WallClock
from podium.comm.real.channel import Channel
from podium.comm.real.sockets import Address
from podium.comm.real.tls import Tls
from podium.engine.build import Job
from podium.errors import PodiumError
from podium.launch.base import LaunchResult, RunPlan, hosts_of
from podium.launch.coordination.coordinator import Coordinator
from podium.launch.coordination.owner import ProcessOwner
from podium.launch.coordination.rules import COORDINATOR, LIMITS, MOST_RANKS, Role, Rules
from podium.launch.event import Event
from podium.launch.process import NodeSpec
from podium.launch.rank_processes import RankProcesses, Ranks
from podium.launch.rendezvous import rendezvous_folder
from podium.launch.scale import open_to_change
from podium.records.recorder import Recorder
from podium.task import Task


def run_local(job: Job, on_event: Callable[[Event], None] | None, stop: threading.Event | None) -> LaunchResult:
    """All ranks as processes on this machine, connected by loopback and Unix sockets."""
    with rendezvous_folder() as folder:
        ranks = RankProcesses(task=sendable_task(job), task_name=job.config.task)
        return Processes(job, ranks, Meeting.in_folder(folder), on_event).run(stop)


class Meeting(NamedTuple):
    """Where the processes of a run meet, and what they prove to each other that they belong to it with."""

    coordinator: Address
    """Where the coordinator listens."""
    store: str
    """Where groups form: a path, or `tcp:host:port`."""
    rendezvous: str | None
    """A private folder for sockets; None where each host has its own."""
    secret: bytes
    tls: Tls | None = None

    @classmethod
    def in_folder(cls, folder: Path) -> Meeting:
        """All on this machine, in a private folder."""
        return cls(f"unix:{folder}/k", str(folder / "store"), str(folder), secrets.token_bytes(32))


class Processes(ProcessOwner):
    """The processes of one run, and their coordinator."""

    def __init__(
        self,
        job: RunPlan,
        ranks: Ranks,
        meeting: Meeting,
        on_event: Callable[[Event], None] | None,
        *,
        runs_script: bool = False,
        began_ns: int | None = None,
        place: Callable[[int, Role], dict[str, Any]] | None = None,
    ) -> None:
        """`runs_script`: the training loop is a script's own.

        `began_ns`: when the run began, on the monotonic clock; None: now.

        `place(rank, role)` returns the NodeSpec fields of a process's host and network.
        """
        self.job, self.ranks, self._meeting = job, ranks, meeting
        self._runs_script, self._on_event = runs_script, on_event
        self._place = place or (lambda _rank, _role: {})
        self._shown: int | None = None
        self._restarts: dict[int, int] = {}
        self.endpoints = endpoints_of(job)
        self._began_ns = time.monotonic_ns() if began_ns is None else began_ns
        assert job.run_dir is not None
        self.recorder = Recorder(-1, job.run_dir / "records" / "launcher.jsonl")
        channel = Channel(
            COORDINATOR, secret=meeting.secret, listen=meeting.coordinator, limits=LIMITS, tls=meeting.tls
        )
        self.coordinator = Coordinator(self._rules(), self, channel, self.recorder, WallClock(self._began_ns))

    def show_output_of(self, rank: int) -> None:
        """Leave this process's output on the terminal instead of in its log."""
        self._shown = rank

    def run(self, stop: threading.Event | None) -> LaunchResult:
        assert self.job.run_dir is not None
        try:
            for endpoints in self.endpoints:
                self.ranks.launch(self._spec(endpoints))
            try:
                with open_to_change(
                    self.job.run_dir, self.coordinator.address, self._meeting.secret, self._meeting.tls
                ):
                    reports = self.coordinator.run(stop)
            except PodiumError as error:
                advised = type(error)(self._with_advice(error))
                advised.exit_code = error.exit_code
                raise advised from error
            self.ranks.join()
            return LaunchResult(reports, [], {})
        finally:
            self.ranks.end()
            self.coordinator.close()
            self.recorder.close()

    def _rules(self) -> Rules:
        job = self.job
        if self._runs_script:
            # No rank can be added to a script's own loop, and restarting the script would begin the loop again.
            return rules_of(job, survives_loss=job.strategy.cadence.survives_loss, fixed="the loop is the script's own")
        fixed = "" if job.config.shares is None else "shares are set, one per worker that the run began with"
        replaces = job.strategy.server_spec.replaceable
        return rules_of(job, survives_loss=job.strategy.cadence.survives_loss, replaces_servers=replaces, fixed=fixed)

    def _spec(self, endpoints: tuple[int, ...], **others: Any) -> NodeSpec:
        assert self.job.run_dir is not None
        log = str(self.job.run_dir / "logs" / f"rank-{endpoints[0]}.log")
        spec = NodeSpec.of(
            self.job,
            endpoints,
            coordinator=self.coordinator.address,
            secret=self._meeting.secret.hex(),
            store=self._meeting.store,
            rendezvous=self._meeting.rendezvous,
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
        self.ranks.launch(self._spec(endpoints, role="server", replaces=True, again=again))

    def start(self, role: Role, rank: int) -> None:
        self.ranks.launch(self._spec((rank,), role=role, late=True))

    def add_hosts(self, lines: Sequence[str]) -> int:
        return self.ranks.add_hosts(lines)

    def kill(self, rank: int) -> None:
        self.ranks.kill(rank)

    def how_it_ended(self, rank: int, wait_s: float) -> str | None:
        return self.ranks.how_it_ended(rank, wait_s)

    def where(self, rank: int) -> str:
        return self.ranks.where(rank)

    def is_running(self, rank: int) -> bool:
        return self.ranks.is_running(rank)

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
