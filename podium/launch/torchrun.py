"""Ranks started by torchrun, or by anything that sets its environment variables.

    torchrun --nproc-per-node 4 -m podium.node --task digits-mlp --strategy all-reduce
    torchrun --nproc-per-node 4 -m podium.node --strategy all-reduce --script my_loop.py --its-own-option

Nodes may have unequal numbers of processes. The last ranks become servers where the strategy wants some. The process
of rank 0 also holds the coordinator, so here a lost rank ends the run, as torchrun has it anyway: its agent stops all
others.

Ranks meet over torch's store, which asks nobody for a secret. So it carries nothing that is believed: on one host the
name of a private folder, which is checked, and where the coordinator's socket lies; between hosts the coordinator's
address, where the process that answers has to prove that it holds the run's secret. All else, such as the run's
folder, comes from the coordinator.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, final

from podium.comm.base import Message, Meta
from podium.comm.clocks import WallClock
from podium.comm.real.channel import Channel
from podium.comm.real.frames import Refused
from podium.comm.real.process_group import client_store, look_up, named_part, publish
from podium.comm.real.sockets import Address
from podium.comm.real.tls import tls_of
from podium.config import RunConfig, check_script, named_in, resolve
from podium.engine.build import Job
from podium.engine.device import device_of
from podium.errors import CheckpointError, CommError, ConfigError, PodiumError, RecordError
from podium.launch.base import RunPlan
from podium.launch.checkpoint_copy import CheckpointFiles, find_or_copy
from podium.launch.coordination.before_joining import BeforeJoining
from podium.launch.coordination.coordinator import Coordinator
from podium.launch.coordination.owner import Owner
from podium.launch.coordination.rules import COORDINATOR, FIRST_ASKER
from podium.launch.event import Event
from podium.launch.join import run_user_script
from podium.launch.local import endpoints_of, rules_of
from podium.launch.notices import notices
from podium.launch.prepare import plan_script, prepare
from podium.launch.process import NodeSpec, run_node
from podium.launch.rendezvous import rendezvous_folder
from podium.launch.run import conclude
from podium.launch.run_folder_lock import claimed
from podium.launch.secret import find_secret, leave_secret, need_secret, removed_with_this_process
from podium.records.manifest import write_manifest
from podium.records.recorder import Recorder, merge_records, to_json
from podium.strategies import make_strategy

_LEAVE_S = 5.0
"""How long the other ranks may take to hang up once the run is over."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """What torchrun tells a process."""

    rank: int
    world_size: int
    local_rank: int
    """Its place among the processes of its node, whose ranks follow one another."""
    local_world_size: int
    host: str
    port: int
    agent_store: bool  # whether torchrun's agent holds the store, rather than rank 0
    attempt: str  # names this start of the ranks: the agent may start them again, and its store remembers

    @classmethod
    def read(cls) -> Environment:
        """From the environment; refuses, with the missing names, when it is not torchrun's."""
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in names if name not in os.environ]
        if missing:
            raise ConfigError(f"podium.node needs torchrun's environment variables; missing: {', '.join(missing)}")
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return cls(
            rank,
            world,
            int(os.environ.get("LOCAL_RANK", rank)),
            int(os.environ.get("LOCAL_WORLD_SIZE", world)),
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            f"podium-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
        )

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on this host."""
        return self.local_world_size == self.world_size

    @property
    def run(self) -> str:
        """What tells this start of these ranks from all others on this host at the same time."""
        name = os.environ.get("TORCHELASTIC_RUN_ID", "")
        return f"{name} {self.attempt} on port {self.port} with {self.world_size} ranks"


def run_under_torchrun(argv: list[str]) -> int:
    """One rank's run; rank 0 prints the result as one line of JSON. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the run begins there is nothing to save
    try:
        environment = Environment.read()
        config, script, given = _config(argv, environment)
        _Rank(environment, config, script, given).run()
    except PodiumError as error:
        print(f"podium: {error}", file=sys.stderr)
        return error.exit_code
    return 0


class _Meeting(NamedTuple):
    """Where the ranks of a run meet, and what they prove to each other that they belong to it with."""

    secret: bytes
    coordinator: Address
    folder: Path | None
    """A private folder for sockets and the store; None where ranks are on several hosts."""


@final
class _Agent(Owner):
    """torchrun's agent owns the processes: the coordinator can neither see, start nor end them."""

    def __init__(self, notices: list[str]) -> None:
        self._notices = notices

    def hear(self, event: Event) -> None:
        """A rank's warning goes to the terminal and into the result; no other event is shown here."""
        if event["event"] == "warning":
            self._notices.append(event["text"])
            print(f"podium: warning: {event['text']}", file=sys.stderr, flush=True)

    def kill(self, rank: int) -> None: ...

    def how_it_ended(self, rank: int, wait_s: float) -> str | None:
        return None


class _Rank:
    """One process of torchrun's."""

    def __init__(
        self, environment: Environment, config: RunConfig, script: list[str], named: frozenset[str] = frozenset()
    ) -> None:
        """`script` is the user's own and its arguments, or empty where a task is trained.

        `named`: settings that were given, if only their default.
        """
        self.environment, self._config, self._script, self._named = environment, config, script, named
        # Before anybody is waited for: what the user has to set is said at once, by every rank.
        self._given = None if environment.one_host else need_secret()
        store = client_store(
            environment.host,
            environment.port,
            config.start_deadline_s,
            is_host=environment.rank == 0 and not environment.agent_store,
            world_size=environment.world_size,
        )
        self.store = named_part(store, environment.attempt)

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            if self.environment.rank == 0:
                self._lead(stack)
            else:
                self._follow()

    def _lead(self, stack: contextlib.ExitStack) -> None:
        """Rank 0: choose the run's folder, coordinate, take part, and conclude."""
        self.job = job = self._plan(None)
        self._check_size()
        assert job.run_dir is not None
        stack.enter_context(claimed(job.run_dir))  # until the process ends
        for text in getattr(job, "warnings", ()):
            print(f"podium: warning: {text}", file=sys.stderr, flush=True)
        folder = None
        if self._given is None:
            folder = stack.enter_context(rendezvous_folder())
            stack.enter_context(removed_with_this_process(folder))
        secret = leave_secret(folder, self.environment.run) if folder is not None else self._given
        assert secret is not None
        coordinator = self._start_coordinator(secret, folder)
        publish(self.store, "podium/meet", coordinator.address if folder is None else folder.name)
        self._take_part(_Meeting(secret, coordinator.address, folder))
        self._conclude(coordinator)

    def _follow(self) -> None:
        """The other ranks: find rank 0, ask it for the run's folder, and take part."""
        meeting = self._find_meeting()
        with self._asking(meeting) as ask:
            settings = ask("settings", {}).meta
            run_dir = Path(settings["run_dir"])
            if settings["checkpoint"] is not None:
                self._bring_checkpoint(CheckpointFiles.from_meta(settings["checkpoint"]), run_dir, ask)
            self.job = self._plan(run_dir)
            self._check_size()
        self._take_part(meeting)

    def _plan(self, chosen: Path | None) -> RunPlan:
        return (plan_script if self._script else prepare)(self._config, chosen=chosen)

    def _take_part(self, meeting: _Meeting) -> None:
        spec = self._spec(meeting)
        if self._script:
            run_user_script(spec, None, script=self._script[0], args=tuple(self._script[1:]), given=self._named)
        else:
            run_node(spec)

    # Meeting.

    def _find_meeting(self) -> _Meeting:
        told = look_up(self.store, "podium/meet", self._config.start_deadline_s)
        if self._given is None:
            folder, secret = find_secret(told, self.environment.run)
            return _Meeting(secret, _socket_in(folder), folder)
        if not told.startswith("tcp:"):
            raise ConfigError(f"the coordinator's address must be tcp:host:port, got {told[:80]!r}{self._whence}")
        return _Meeting(self._given, told, None)

    @contextlib.contextmanager
    def _asking(self, meeting: _Meeting) -> Iterator[Callable[[str, Meta], Message]]:
        """Ask the coordinator, which has proved by then that it holds the secret, before this rank joins."""
        config, number = self._config, FIRST_ASKER + self.environment.rank
        folder = meeting.folder
        listen = "tcp:127.0.0.1:0" if folder is None else f"unix:{folder}/q{self.environment.rank}"
        deadline_s = config.start_deadline_s
        channel = Channel(number, secret=meeting.secret, listen=listen, deadline_s=deadline_s, tls=tls_of(config))

        def ask(kind: str, meta: Meta) -> Message:
            return channel.wait([channel.call(COORDINATOR, kind, meta)], deadline_s)[0]

        try:
            channel.introduce({COORDINATOR: meeting.coordinator})
            try:
                yield ask
            except CommError:
                raise
            except PodiumError as error:  # or the first host would wait for this rank until the start deadline
                where = f"rank {self.environment.rank}: on host {socket.gethostname()}: {error}"
                facts = {"error": type(error).__name__, "message": where, "exit_code": error.exit_code}
                channel.send(COORDINATOR, "failed", facts)
                raise
        except Refused as error:
            raise Refused(
                f"rank {self.environment.rank}: {meeting.coordinator} is not this run's coordinator, or was given "
                f"another secret ({error}){self._whence}"
            ) from error
        except CommError as error:
            raise type(error)(
                f"rank {self.environment.rank}: the coordinator at {meeting.coordinator} does not answer "
                f"({error}){self._whence}"
            ) from error
        finally:
            channel.close()

    def _bring_checkpoint(self, files: CheckpointFiles, run_dir: Path, ask: Callable[[str, Meta], Message]) -> None:
        """Have the checkpoint that the run resumes from on this host, too."""

        def chunk(name: str, offset: int) -> bytes:
            answer = ask("file", {"name": name, "offset": offset})
            if "refused" in answer.meta:
                raise CheckpointError(f"the first host does not send its checkpoint: {answer.meta['refused']}")
            return b"".join(part.numpy().tobytes() for part in answer.body)

        config = self._config
        if config.resume is None:
            raise ConfigError(
                f"rank {self.environment.rank}: resume must be given on all hosts or on none, got none here"
            )
        first, limit_s = self.environment.local_rank == 0, config.start_deadline_s
        copied = find_or_copy(Path(config.resume), files, run_dir / "resumed", chunk, first=first, limit_s=limit_s)
        self._config = dataclasses.replace(config, resume=str(copied))

    @property
    def _whence(self) -> str:
        place = f"{self.environment.host}:{self.environment.port}"
        return f". The address came from torch's store at {place}, which anybody who reaches that port may write to"

    # Coordinating.

    def _start_coordinator(self, secret: bytes, folder: Path | None) -> Coordinator:
        job = self.job
        assert job.run_dir is not None
        write_manifest(job.run_dir, job.config.to_dict(), strategy=repr(job.strategy), launched_by="torchrun")
        self._recorder = Recorder(-1, job.run_dir / "records" / "launcher.jsonl")
        self._notices = notices(job) if isinstance(job, Job) else []
        for text in self._notices:
            print(f"podium: note: {text}", file=sys.stderr, flush=True)
        listen = f"tcp:{self._host()}:0" if folder is None else _socket_in(folder)
        coordinator = Coordinator(
            rules_of(job, survives_loss=False),
            _Agent(self._notices),
            Channel(COORDINATOR, secret=secret, listen=listen, tls=tls_of(job.config)),
            self._recorder,
            WallClock(),
            BeforeJoining(str(job.config.run_dir), None if self.environment.one_host else job.config.resume),
        )
        self._watch = threading.Thread(target=self._coordinate, args=(coordinator,), name="coordinator", daemon=True)
        self._watch.start()
        return coordinator

    def _coordinate(self, coordinator: Coordinator) -> None:
        try:
            coordinator.run()
        except BaseException as error:  # a thread has nobody above it, and no rank must wait for a run that is over
            self._end_run(coordinator, error)

    def _end_run(self, coordinator: Coordinator, error: BaseException) -> None:
        """Say what ended the run, here and on all ranks, and end this process: it waits in an exchange for ever."""
        known = isinstance(error, PodiumError)
        why = str(error) if known else f"the coordinator failed: {type(error).__name__}: {error}"
        try:
            if not known:
                traceback.print_exception(error)
            assert self.job.run_dir is not None
            with contextlib.suppress(RecordError):
                merge_records(self.job.run_dir)
            print(f"podium: {why}\n  records: {self.job.run_dir}", file=sys.stderr, flush=True)
            coordinator.announce_end(why, but=self.environment.rank)
        finally:
            os._exit(error.exit_code if isinstance(error, PodiumError) else 1)

    def _conclude(self, coordinator: Coordinator) -> None:
        self._watch.join(timeout=self.job.config.deadline_s)
        coordinator.wait_for_departures(_LEAVE_S)  # or ranks that are still here would make the private folder again
        coordinator.close()
        self._recorder.close()
        assert self.job.run_dir is not None
        merge_records(self.job.run_dir)
        if not self._script:  # a script says for itself what it came to
            result = conclude(self.job, coordinator.reports, launcher="torchrun", notices=self._notices)
            print(to_json(result.to_dict()), flush=True)

    # Taking part.

    def _check_size(self) -> None:
        job, world_size = self.job, self.environment.world_size
        processes = len(endpoints_of(job))
        if world_size != processes:
            raise ConfigError(
                f"{job.config.strategy} with {job.config.workers} workers needs {processes} processes, "
                f"got WORLD_SIZE={world_size}"
            )

    def _spec(self, meeting: _Meeting) -> NodeSpec:
        environment, job, folder = self.environment, self.job, meeting.folder
        store = f"tcp:{environment.host}:{environment.port}" if folder is None else str(folder / "store")
        return NodeSpec.of(
            job,
            endpoints_of(job)[environment.rank],
            config={**job.config.to_dict(), **own_settings(job.config, environment)},
            coordinator=meeting.coordinator,
            secret=meeting.secret.hex(),
            store=store,
            store_part=environment.attempt,
            rendezvous=None if folder is None else str(folder),
            passes_signals_on=True,
            host=self._host(),
            same_host=folder is not None,
            clock_ns=time.monotonic_ns(),
        )

    def _host(self) -> str:
        """The address under which others reach this process: loopback when all are here."""
        if self.environment.one_host:
            return "127.0.0.1"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((self.environment.host, self.environment.port))  # sends nothing; picks the interface
            return str(probe.getsockname()[0])


def _socket_in(folder: Path) -> Address:
    """Where the coordinator listens, in the private folder of a run on one host."""
    return f"unix:{folder}/k"


def own_settings(config: RunConfig, environment: Environment) -> dict[str, Any]:
    """What of a run's settings is this process's own, where there are several nodes: its device and its threads.

    GPUs and cores are shared with the others of this node, however many other nodes have. Named by its number, a GPU is
    never taken for one of nccl's: nodes could not tell that they have chosen alike.
    """
    if environment.one_host:
        return {}
    threads = config.threads or max(1, len(os.sched_getaffinity(0)) // environment.local_world_size)
    if environment.rank >= config.workers:  # a server, which has no device
        return {"threads": threads}
    device = device_of(config.device, environment.rank, first=environment.rank - environment.local_rank)
    return {"threads": threads, "device": str(device)}


def _config(argv: list[str], environment: Environment) -> tuple[RunConfig, list[str], frozenset[str]]:
    """The configuration, the user's script with its arguments, if one was named, and which settings were."""
    parser = argparse.ArgumentParser(prog="podium.node", description="One rank of a run, under torchrun.")
    parser.add_argument("--config", help="a run file (TOML)")
    parser.add_argument("--task")
    parser.add_argument("--strategy")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--script", nargs=argparse.REMAINDER, default=[], help="the user's own loop; the rest is its")
    given = vars(parser.parse_args(argv))
    file, overrides, script = given.pop("config"), given.pop("overrides"), given.pop("script")
    named = named_in(overrides, given)
    if script:
        check_script(resolve(file, overrides, given))
        given["task"] = script[0]
    config = resolve(file, overrides, given)
    strategy = make_strategy(config.strategy, config.strategy_options, environment.world_size)
    servers = strategy.server_spec.processes
    if environment.world_size <= servers:
        raise ConfigError(f"{config.strategy} needs more than {servers} processes, got {environment.world_size}")
    return dataclasses.replace(config, workers=environment.world_size - servers), script, named
