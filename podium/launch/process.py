"""One process of a run, under every real launcher: it joins the coordinator, then trains or serves.

Imports the standard library, numpy and torch only.
"""

from __future__ import annotations

import contextlib
import os
import sysconfig
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from podium.comm.base import Ground
from podium.comm.clocks import Clock, SlowClock, WallClock
from podium.comm.real.arena import Arena
from podium.comm.real.channel import Channel
from podium.comm.real.communicator import RealCommunicator
from podium.comm.real.process_group import Group, backend_for, client_store, file_store, named_part
from podium.comm.real.sockets import Address, remake_folder
from podium.comm.real.tls import tls_of
from podium.config import RunConfig, build
from podium.engine.allocator import keep_freed_memory
from podium.engine.build import Job
from podium.engine.report import Report
from podium.engine.training import Training, run_server
from podium.errors import PodiumError, TrainingError
from podium.exchange.collectives import collective_of
from podium.launch.base import RunPlan
from podium.launch.coordination.rules import Role
from podium.launch.forking import let_go_of_fork_server
from podium.launch.membership import Membership
from podium.launch.record_stream import file_name
from podium.launch.secret import check_secret
from podium.launch.signals import die_with_parent, leave_to_launcher, pass_on
from podium.records.recorder import Recorder
from podium.servers.build import make_server
from podium.servers.server import Server
from podium.strategies import make_strategy
from podium.task import Task, load_task

_STANDS_FOR_USERS = str(Path(__file__).parents[1] / "testing") + os.sep
_NOT_THE_USERS = (
    str(Path(__file__).parents[1]) + os.sep,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


@dataclass(frozen=True, kw_only=True)
class NodeSpec:
    """All that a process needs to take part in a run."""

    rank: int
    """The number of this process: that of its worker, or of its server where it has no worker."""
    endpoints: tuple[int, ...]
    """The ranks of this process: one, or a worker and the servers beside it, or servers that lost their worker."""
    role: Role
    """What `rank` is; the other endpoints are servers."""
    workers: int
    """Number of workers at the beginning of the run."""
    servers: int
    config: dict[str, Any]
    coordinator: Address
    secret: str
    """Hexadecimal."""
    store: str
    """A path, or `tcp:host:port`."""
    rendezvous: str | None
    """A private folder for sockets; None where ranks share no file system."""
    store_part: str = ""
    """The prefix of this run in a store that other runs share."""
    host: str = "127.0.0.1"
    """This machine's address for the other ranks."""
    same_host: bool = True
    """Whether Unix sockets reach all other ranks."""
    clock_ns: int | None = None
    """When the run began, on this machine's monotonic clock; None: now."""
    talks: bool = False
    """Whether workers send each other messages, beside what their collective sends."""
    namespace: str | None = None
    ground: Ground | None = None
    """The machines and links, where the launcher has a description of them."""
    speed: float = 1.0
    """Below 1, passes of its worker are slowed down by sleeping, as on a slower accelerator."""
    speed_changes: tuple[tuple[int, float], ...] = ()
    """Pairs of a time, in nanoseconds since the run began, and the speed from then on; in order of time."""
    log: str | None = None
    """File for this process's own output; None leaves it on the terminal."""
    late: bool = False
    """Whether it joins a run that is under way."""
    replaces: bool = False
    """Whether its servers were lost, and are restored in it."""
    passes_signals_on: bool = False
    """Whether a signal to end this process stops the whole run, since no launcher of Podium's gets the signal."""
    again: int = 0
    """How often these endpoints were started before: the socket files of killed ones still exist."""

    @classmethod
    def of(cls, job: RunPlan, endpoints: tuple[int, ...], **others: Any) -> NodeSpec:
        """A spec with the fields that follow from the run; the launcher passes the others."""
        role = "worker" if endpoints[0] < job.config.workers else "server"
        return cls(
            **{
                "rank": endpoints[0],
                "endpoints": endpoints,
                "role": role,
                "workers": job.config.workers,
                "servers": job.strategy.server_spec.count,
                "talks": job.strategy.payload.point_to_point,
                "config": job.config.to_dict(),
                **others,
            }
        )

    def socket(self, name: str) -> Address:
        """An address in the private folder that no process of the run has used."""
        return f"unix:{self.rendezvous}/{name}" + (f"-{self.again}" if self.again else "")


def run_node(spec: NodeSpec, task: Task | None = None) -> None:
    """Take part in a run as one process of it, to the end. Exits with 1 after a failure was reported."""
    settle_in(spec)
    node = Node.from_spec(spec)
    node.run(lambda: node.work(task))


class Node:
    """The membership, the channels and the ranks of this process."""

    def __init__(self, spec: NodeSpec, config: RunConfig) -> None:
        self.spec, self.config = spec, config
        self.secret = check_secret(bytes.fromhex(spec.secret), f"rank {spec.rank}")
        self.clock = _clock_of(spec)
        if spec.rendezvous is not None:  # a cleaner may have removed it before this process was started
            remake_folder(Path(spec.rendezvous))
        self.membership = Membership(
            spec.rank,
            spec.coordinator,
            secret=self.secret,
            listen=spec.socket(f"m{spec.rank}") if spec.rendezvous else "tcp:127.0.0.1:0",
            heartbeat_s=config.heartbeat_s,
            deadline_s=config.deadline_s,
            start_deadline_s=config.start_deadline_s,
            tls=tls_of(config),
        )
        self.on_end: list[Callable[[], None]] = []
        """Functions to call when the work is done, in this order: workers leave before the servers beside them end."""
        self._recorders: list[Recorder] = []
        self._arena = Arena()

    @classmethod
    def from_spec(cls, spec: NodeSpec) -> Node:
        return cls(spec, build(RunConfig, spec.config, who="run"))

    def run(self, body: Callable[[], Report | None]) -> None:
        if self.spec.passes_signals_on:
            pass_on(self.membership.ask_to_stop)
        try:
            report = body()
            if not self.membership.joined:
                raise TrainingError(f"{self.config.task} ended without calling podium.join")
            for end in self.on_end:
                end()
            self.membership.done(report)
        except BaseException as error:
            self._report(error)
            self.membership.close()
            os._exit(1)  # exchanges under way may block threads for as long as their deadline
        finally:
            for recorder in self._recorders:
                recorder.close()
        self.membership.close()

    def work(self, task: Task | None) -> Report | None:
        config, spec = self.config, self.spec
        comms = self.connect()
        strategy = make_strategy(config.strategy, config.strategy_options, config.workers)
        found = task or load_task(config.task, config.task_options, config.data_dir)
        assert config.run_dir is not None
        job = Job(config, found, strategy, Path(config.run_dir))
        self.on_end.append(comms[spec.rank].close)
        served = spec.endpoints if spec.role == "server" else spec.endpoints[1:]
        # Built before the worker, since torch's generator is global.
        how: dict[str, Any] = {"replaces": spec.replaces, "tell_awaits": self.membership.awaits}
        servers = [make_server(job, comms[e], self.recorder(e), **how) for e in served]
        if spec.role == "server":
            self.membership.begun()
            for server in servers[1:]:
                self.serve_beside(server)
            run_server(servers[0])
            return None
        for server in servers:
            self.serve_beside(server)
        training = Training(job, comms[spec.rank], self.recorder(spec.rank), self.membership, late=spec.late)
        self.membership.begun()
        return training.run()

    def connect(self) -> dict[int, RealCommunicator]:
        """Join, get the other ranks' addresses, and make one communicator per endpoint of this process."""
        spec, config = self.spec, self.config
        channels: dict[int, Channel] = {}
        transport = collective_of(config).transport(spec.same_host)
        if spec.servers or spec.talks or transport == "schedule":
            for e in spec.endpoints:
                listen = spec.socket(f"c{e}") if spec.same_host else f"tcp:{spec.host}:0"
                channels[e] = Channel(
                    e,
                    secret=self.secret,
                    listen=listen,
                    deadline_s=config.deadline_s,
                    tls=tls_of(config),
                    sums=config.checksums,
                    arena=self._arena if spec.same_host else None,
                )
        joined = self.membership.join(
            list(spec.endpoints), {e: c.address for e, c in channels.items()}, config.start_deadline_s
        )
        if not spec.same_host:
            self.membership.send_records(self._records_folder, spec.endpoints)
        alone = spec.late and spec.role == "worker"  # until it gets its first plan
        workers = (spec.rank,) if alone else joined.workers
        comms = {}
        for e in spec.endpoints:
            group = None
            if e == spec.rank and spec.role == "worker":
                backend = backend_for(config.device, spec.workers)
                group = Group(_open_store(spec), host=spec.host, backend=backend, deadline_s=config.deadline_s)
            if e in channels:
                channels[e].introduce({k: v for k, v in joined.addresses.items() if k != e})
            comms[e] = RealCommunicator(
                e,
                workers,
                joined.servers,
                self.clock,
                group=group,
                channel=channels.get(e),
                deadline_s=config.deadline_s,
                # Only workers wait for a lost server's new address: two replacements that need each other's copies
                # would wait for each other, and a server that was replaced has no copy to give.
                relocate=self.membership.relocate if group is not None else None,
                arena=self._arena if spec.same_host and transport == "memory" else None,
            )
            comms[e].ground = spec.ground
        return comms

    def serve_beside(self, server: Server) -> None:
        """Run a server in a thread of this worker's process; it ends when all workers have gone."""
        thread = threading.Thread(target=self._serve, args=(server,), name=f"server-{server.comm.rank}", daemon=True)
        thread.start()
        self.on_end.append(lambda: thread.join(timeout=self.config.deadline_s))

    def _serve(self, server: Server) -> None:
        try:
            run_server(server)
        except BaseException as error:  # the run must not continue without this server
            self._report(error)
            self.membership.close()
            os._exit(1)

    def _report(self, error: BaseException) -> None:
        with contextlib.suppress(OSError):  # the log may be on a full disk; the launcher must get the error anyway
            traceback.print_exception(error)
        self.membership.failed(_describe(error, self.spec))

    def recorder(self, rank: int) -> Recorder:
        """The file of one rank's records; a replacement appends to the file of the rank it replaces."""
        recorder = Recorder(rank, self._records_folder / file_name(rank))
        self._recorders.append(recorder)
        return recorder

    @property
    def _records_folder(self) -> Path:
        assert self.config.run_dir is not None
        return Path(self.config.run_dir) / "records"


def _clock_of(spec: NodeSpec) -> Clock:
    wall = WallClock(spec.clock_ns)
    if spec.speed < 1 or spec.speed_changes:
        return SlowClock(wall, speed=min(1.0, spec.speed), changes=spec.speed_changes)
    return wall


def settle_in(spec: NodeSpec) -> None:
    """Set this process up: die with the parent, leave signals to the launcher, enter the namespace, redirect output."""
    die_with_parent()
    if not spec.passes_signals_on:
        let_go_of_fork_server()
        leave_to_launcher()
    if spec.namespace is not None:
        from podium.launch.clusters.namespaces import enter_namespace

        enter_namespace(spec.namespace)
    if spec.log is not None:
        Path(spec.log).parent.mkdir(parents=True, exist_ok=True)
        file = os.open(spec.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.close(file)
    threads = spec.config.get("threads") or max(1, len(os.sched_getaffinity(0)) // (spec.workers + spec.servers))
    torch.set_num_threads(threads)
    keep_freed_memory()


def _open_store(spec: NodeSpec) -> Any:
    if not spec.store.startswith("tcp:"):
        return file_store(Path(spec.store))
    _, host, port = spec.store.split(":")
    store = client_store(host, int(port), 30.0, is_host=False, world_size=spec.workers + spec.servers)
    return named_part(store, spec.store_part)


def _describe(error: BaseException, spec: NodeSpec) -> dict[str, Any]:
    """What the launcher prints of a failure: the error, and the line of the user's code that raised it."""
    known = isinstance(error, PodiumError)
    message = str(error) if known else f"{type(error).__name__}: {error}"
    return {
        "error": type(error).__name__,
        "message": message,
        "exit_code": error.exit_code if isinstance(error, PodiumError) else 1,
        "place": "" if known else _place(traceback.extract_tb(error.__traceback__)),
        "traceback": "".join(traceback.format_exception(error))[-16000:],
        "log": spec.log or "",
    }


def _place(frames: traceback.StackSummary) -> str:
    """The innermost line of the user's code; where there is none, the innermost outside torch."""
    own = [f for f in frames if _is_users(f.filename)]
    chosen = own or [f for f in frames if "/torch/" not in f.filename] or list(frames)
    return f"{chosen[-1].filename}:{chosen[-1].lineno} in {chosen[-1].name}" if chosen else ""


def _is_users(file: str) -> bool:
    """Tasks and faults of `podium.testing` count as the user's code."""
    return file.startswith(_STANDS_FOR_USERS) or not file.startswith(("<", *_NOT_THE_USERS))
