"""One process of a run, under every real launcher: it joins the coordinator, then trains or serves.

Imports the standard library, numpy and torch only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from podium.comm.base import Ground
from podium.comm.clocks import Clock, SlowClock, WallClock
from podium.comm.real.arena import Arena
from podium.comm.real.channel import Channel
from podium.comm.real.communicator import RealCommunicator
from podium.comm.real.process_group import Group, client_store, file_store, named_part
from podium.comm.real.sockets import Address, BothWays, remake_folder
from podium.comm.real.tls import tls_of
from podium.config import RunConfig, build
from podium.engine.allocator import keep_freed_memory
from podium.engine.build import Job
from podium.engine.device import device_of
from podium.engine.report import Report
from podium.engine.training import Training, run_server
from podium.errors import PodiumError, TrainingError
from podium.exchange.collectives import collective_of
from podium.exchange.collectives.base import Transport
from podium.launch.backend import own_gpu, set_up_nccl
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


AT_COORDINATOR = "coordinator"
"""The store of ranks that share no disk: the coordinator holds its values."""


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
    """Where groups form: a path, `tcp:host:port` of torch's store, or `AT_COORDINATOR`: by way of it."""
    rendezvous: str | None
    """A private folder for sockets; None where ranks share no file system."""
    store_part: str = ""
    """The prefix of this run in a store that other runs share."""
    host: str = "127.0.0.1"
    """This machine's address for the other ranks."""
    same_host: bool = True
    """Whether Unix sockets reach all other ranks."""
    host_id: str = ""
    """Where ranks are on several hosts: a random word, the same for the ranks of one host. They reach each other by
    Unix sockets in `rendezvous`, their host's own folder, and share memory. Empty: on one host, or not known."""
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
    import_paths: tuple[str, ...] = ()
    """Folders with packages of the user's, where they were copied to this host."""
    late: bool = False
    """Whether it joins a run that is under way."""
    replaces: bool = False
    """Whether its servers were lost, and are restored in it."""
    passes_signals_on: bool = False
    """Whether a signal to end this process stops the whole run, since no launcher of Podium's gets the signal."""
    spreads: bool = False
    """Whether checkpoints are copied to other hosts' disks, since the ranks may be started again without this host."""
    keeps_copies: bool = False
    """Whether this process stores such copies, one of each host."""
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

    @property
    def knows_hosts(self) -> bool:
        """Whether ranks are on several hosts, and those of one host can find each other."""
        return bool(self.host_id) and self.rendezvous is not None and not self.same_host

    def listen(self, endpoint: int) -> Address:
        """Where an endpoint's channel listens."""
        far = f"tcp:{self.host}:0"
        if self.knows_hosts:
            return str(BothWays(self.host_id, self.socket(f"c{endpoint}"), far))
        return self.socket(f"c{endpoint}") if self.same_host else far

    def socket(self, name: str) -> Address:
        """An address in the private folder that no process of the run has used."""
        return f"unix:{self.rendezvous}/{name}" + (f"-{self.again}" if self.again else "")


Ending = Literal["finished", "stopped", "stopped elsewhere"]
"""How a run ended for a process of it: `stopped` by a signal that this process got, or by one that another got."""


def run_node(spec: NodeSpec, task: Task | None = None) -> Ending:
    """Take part in a run as one process of it, to the end. Exits with 1 after a failure was reported."""
    settle_in(spec)
    node = Node.from_spec(spec)
    report = node.run(lambda: node.work(task))
    if not node.membership.stop_requested() or (report is not None and not report.stopped):
        return "finished"
    return "stopped" if node.membership.asked_to_stop else "stopped elsewhere"


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

    def run(self, body: Callable[[], Report | None]) -> Report | None:
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
        return report

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

    def connect(self, device: torch.device | None = None) -> dict[int, RealCommunicator]:
        """Join, get the other ranks' addresses, and make one communicator per endpoint of this process.

        `device`: where the worker's tensors are; by default the device that the configuration gives this rank.
        """
        spec, config = self.spec, self.config
        gpu = ""
        if spec.role == "worker":
            device = device or device_of(config.device, spec.rank)
            gpu = own_gpu(device)
        if gpu:
            set_up_nccl(spec.host)
        channels: dict[int, Channel] = {}
        transport = self._transport()
        arena = self._arena if spec.same_host or spec.knows_hosts else None
        if spec.servers or spec.talks or transport not in ("memory", "backend"):
            for e in spec.endpoints:
                channels[e] = Channel(
                    e,
                    secret=self.secret,
                    listen=spec.listen(e),
                    deadline_s=config.deadline_s,
                    tls=tls_of(config),
                    sums=config.checksums,
                    arena=arena,
                )
        joined = self.membership.join(
            list(spec.endpoints), {e: c.address for e, c in channels.items()}, config.start_deadline_s, gpu=gpu
        )
        if not spec.same_host:
            self.membership.send_records(self._records_folder, spec.endpoints)
        self.membership.spreads = spec.spreads
        if spec.keeps_copies:
            self.membership.keep_copies(self._records_folder.parent)
        alone = spec.late and spec.role == "worker"  # until it gets its first plan
        workers = (spec.rank,) if alone else joined.workers
        comms = {}
        for e in spec.endpoints:
            group = None
            if e == spec.rank and spec.role == "worker":
                group = Group(self._open_store(), host=spec.host, deadline_s=config.deadline_s, device=device)
                group.use(joined.backend)
                self.membership.on_plan = group.use
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
                arena=arena if spec.same_host and transport == "memory" else None,
                over_channel=group is not None and spec.knows_hosts and transport in ("schedule", "hosts"),
            )
            comms[e].ground = spec.ground
        self.membership.report_losses(functools.partial(_lose, tuple(comms.values())))
        return comms

    def _open_store(self) -> Any:
        """Where the workers' groups form."""
        spec = self.spec
        if spec.store == AT_COORDINATOR:
            return self.membership.store()
        if not spec.store.startswith("tcp:"):
            return file_store(Path(spec.store))
        _, host, port = spec.store.split(":")
        store = client_store(host, int(port), 30.0, is_host=False, world_size=spec.workers + spec.servers)
        return named_part(store, spec.store_part)

    def _transport(self) -> Transport:
        """How the run's collective sends; `hosts` is the backend where hosts are not known."""
        transport = collective_of(self.config).transport(self.spec.same_host)
        return "backend" if transport == "hosts" and not self.spec.knows_hosts else transport

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


def _lose(comms: Iterable[RealCommunicator], ranks: Collection[int]) -> None:
    for comm in comms:
        comm.lose(ranks)


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
    sys.path[:0] = [path for path in spec.import_paths if path not in sys.path]
    threads = spec.config.get("threads") or max(1, len(os.sched_getaffinity(0)) // (spec.workers + spec.servers))
    torch.set_num_threads(threads)
    keep_freed_memory()


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
