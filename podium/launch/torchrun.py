"""Ranks started by torchrun, or by anything that sets its environment variables.

    torchrun --nproc-per-node 4 -m podium.node --task digits-mlp --strategy all-reduce
    torchrun --nproc-per-node 4 -m podium.node --strategy all-reduce --script my_loop.py --its-own-option

Nodes may have unequal numbers of processes. The last ranks become servers where the strategy wants some. The process
of rank 0 also holds the coordinator, so here a lost rank ends this start of the ranks, as torchrun has it anyway: its
agent stops all others. Where torchrun then starts them again, in whatever number, the run resumes from its newest
checkpoint (`podium.launch.attempts`).

Ranks meet over torch's store, which asks nobody for a secret. So it carries nothing that is believed: on one host the
name of a private folder, which is checked, and where the coordinator's socket lies; between hosts the coordinator's
address, where the process that answers has to prove that it holds the run's secret, and for each host the name of its
own private folder. All else, such as the run's folder, comes from the coordinator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, final

from podium.comm.base import Message, Meta
from podium.comm.clocks import WallClock
from podium.comm.real.channel import Channel
from podium.comm.real.frames import Refused
from podium.comm.real.process_group import look_up, named_part, publish
from podium.comm.real.sockets import Address
from podium.comm.real.tls import tls_of
from podium.config import RunConfig
from podium.engine.build import Job
from podium.errors import CheckpointError, CommError, ConfigError, DeadlineExceeded, PodiumError, RecordError
from podium.launch.attempts import COPIED, Attempts, may_be_started_again, restarts_allowed
from podium.launch.base import RunPlan
from podium.launch.blobs import as_tensor
from podium.launch.checkpoint_copy import CheckpointFiles, find_or_copy
from podium.launch.coordination.before_joining import BeforeJoining
from podium.launch.coordination.coordinator import Coordinator
from podium.launch.coordination.owner import Owner
from podium.launch.coordination.rules import COORDINATOR, FIRST_ASKER, LIMITS
from podium.launch.event import Event
from podium.launch.join import run_user_script
from podium.launch.local import endpoints_of, rules_of
from podium.launch.newest_checkpoint import Ask, Held, Survey, tell
from podium.launch.notices import notices
from podium.launch.prepare import plan_script, prepare, resolve_job
from podium.launch.process import Ending, NodeSpec, run_node
from podium.launch.rendezvous import rendezvous_folder
from podium.launch.run import conclude
from podium.launch.run_folder_lock import claimed
from podium.launch.secret import find_secret, leave_secret, need_secret, removed_with_this_process
from podium.launch.torchrun_environment import Environment, open_store, own_settings, read_config
from podium.records.manifest import write_manifest
from podium.records.recorder import Recorder, merge_records, to_json

STOPPED_BY_OTHERS = 75
"""Exit code of a rank whose run another host stopped: to torchrun a failure, after which it starts the ranks again."""
_LEAVE_S = 5.0
"""How long the other ranks may take to hang up once the run is over."""
_REACH_S = 5.0
"""How long to try one address of the coordinator."""
_POLL_S = 0.2
_MEET = "podium/meet"
"""The key of torch's store under which rank 0 says where to meet."""


class _Unreachable(CommError):
    """Nobody answers at the address of rank 0."""

    def __init__(self, address: str, rank: int, why: str) -> None:
        super().__init__(f"rank {rank}: the coordinator at {address} does not answer ({why})")
        self.address = address


def run_under_torchrun(argv: list[str]) -> int:
    """One rank's run; rank 0 prints the result as one line of JSON. Returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the run begins there is nothing to save
    try:
        environment = Environment.read()
        config, script, given = read_config(argv, environment)
        return _Rank(environment, config, script, given).run()
    except PodiumError as error:
        print(f"podium: {error}", file=sys.stderr)
        return error.exit_code


class _Meeting(NamedTuple):
    """Where the ranks of a run meet, and what they prove to each other that they belong to it with."""

    secret: bytes
    coordinator: Address
    folder: Path | None
    """A private folder for sockets and the store; None where ranks are on several hosts."""
    store_part: str = ""
    """The prefix under which the groups of this start form, where ranks are on several hosts."""


class _HostFolder(NamedTuple):
    """The private folder of one of several hosts, for the sockets of its ranks."""

    folder: Path
    host_id: str


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
        self.store = named_part(open_store(environment, config.start_deadline_s), environment.store_part)
        self._attempts = Attempts.of(config)
        self._continued: str | None = None
        """The name of the folder of the first start, where this one continues it."""
        self._notices: list[str] = []
        self._ending: Ending = "stopped"

    def run(self) -> int:
        """Returns the exit code."""
        with contextlib.ExitStack() as stack:
            self._host_folder = None if self.environment.one_host else self._meet_on_host(stack)
            if self.environment.rank == 0:
                self._lead(stack)
            else:
                self._follow()
        if self._ending == "stopped elsewhere" and restarts_allowed():
            said = "the run was stopped from another host, and torchrun may start it again without that host"
            print(f"podium: rank {self.environment.rank}: {said}", file=sys.stderr, flush=True)
            return STOPPED_BY_OTHERS
        return 0

    def _meet_on_host(self, stack: contextlib.ExitStack) -> _HostFolder:
        """Make this host's private folder, or find the one that the first rank of this host made."""
        environment, first = self.environment, self.environment.rank - self.environment.local_rank
        key = f"podium/host-{first}"
        if environment.local_rank > 0:
            folder, _ = find_secret(look_up(self.store, key, self._config.start_deadline_s), environment.run)
            stack.callback(self._say_left)
        else:
            folder = stack.enter_context(rendezvous_folder())
            stack.enter_context(removed_with_this_process(folder))
            leave_secret(folder, environment.run)
            stack.callback(self._see_others_leave)
            publish(self.store, key, folder.name)
        return _HostFolder(folder, f"{first}-{folder.name}")

    def _say_left(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store ends with the first rank
            publish(self.store, f"podium/left-{self.environment.rank}", "yes")

    def _see_others_leave(self) -> None:
        """Wait for the other ranks of this host: one that is still here would make the folder again."""
        environment = self.environment
        until = time.monotonic() + _LEAVE_S
        with contextlib.suppress(DeadlineExceeded):  # or the store has ended with the first rank
            for rank in range(environment.rank + 1, environment.rank + environment.local_world_size):
                look_up(self.store, f"podium/left-{rank}", max(0.001, until - time.monotonic()))

    def _lead(self, stack: contextlib.ExitStack) -> None:
        """Rank 0: choose the run's folder, coordinate, take part, and conclude."""
        if not self._script:
            resolve_job(self._config)  # what is wrong with the request is said before other ranks are waited for
        folder = None
        if self._given is None:
            folder = stack.enter_context(rendezvous_folder())
            stack.enter_context(removed_with_this_process(folder))
        secret = leave_secret(folder, self.environment.run) if folder is not None else self._given
        assert secret is not None
        listen = f"tcp:{self._host()}:0" if folder is None else _socket_in(folder)
        channel = Channel(COORDINATOR, secret=secret, listen=listen, limits=LIMITS, tls=tls_of(self._config))
        publish(self.store, _MEET, channel.address if folder is None else folder.name)
        self._continue(channel)
        self.job = job = self._plan(None)
        self._check_size()
        assert job.run_dir is not None
        stack.enter_context(claimed(job.run_dir))  # until the process ends
        self._attempts.add(job.run_dir)
        for text in getattr(job, "warnings", ()):
            print(f"podium: warning: {text}", file=sys.stderr, flush=True)
        meeting = _Meeting(secret, channel.address, folder, f"podium-{secrets.token_hex(8)}")
        coordinator = self._start_coordinator(channel, meeting)
        self._take_part(meeting)
        self._conclude(coordinator)

    def _continue(self, channel: Channel) -> None:
        """Rank 0: where the ranks were started before, continue that run, from its newest checkpoint on any host."""
        if self._script:  # it saves and loads by itself
            if self._attempts.first is not None:
                run_dir = self._attempts.next_folder(self._attempts.first)
                self._config = dataclasses.replace(self._config, run_dir=str(run_dir))
            return
        mine, path = Held.by(self._attempts)
        survey = Survey(channel, 1 if self._given is None else self.environment.world_size, mine, self._start_s)
        best = survey.newest()
        if best.first is not None:
            run_dir = self._attempts.next_folder(best.first)
            if survey.is_elsewhere:
                path = None if best.files is None else survey.bring(best.files, run_dir / COPIED)
            resume = self._config.resume if path is None else str(path)
            self._config = dataclasses.replace(self._config, run_dir=str(run_dir), resume=resume)
            self._continued = best.first
            self._say_how_it_continues(best.first, best.step)
        survey.finish()

    def _say_how_it_continues(self, first: str, step: int) -> None:
        config = self._config
        begun = f"torchrun has started the ranks of {first} again, now {self.environment.world_size} processes; "
        if step >= 0:
            text = f"the run continues from step {step} ({config.resume}) in {config.run_dir}"
        else:
            again = "from the beginning" if config.resume is None else f"from {config.resume}, as it began"
            why = "no checkpoint was written yet" + ("" if config.checkpoint_every else " (--set checkpoint_every=N)")
            text = f"{why}, so the run begins again {again}, in {config.run_dir}"
        self._notices.append(begun + text)

    def _follow(self) -> None:
        """The other ranks: find rank 0, ask it for the run's folder, and take part."""
        held, path = Held.by(self._attempts) if self.environment.local_rank == 0 else (Held(None, -1, None), None)
        until = time.monotonic() + self._start_s
        meeting = self._find_meeting(self._start_s)
        while True:
            try:
                with self._asking(meeting) as ask:
                    meeting = self._get_settings(meeting, ask, held, path)
                break
            except _Unreachable as error:
                if meeting.folder is not None or time.monotonic() > until:
                    raise
                # torch's store may remember the rank 0 of an earlier start, until this one publishes its own address.
                meeting = self._find_meeting(until - time.monotonic(), but=error)
        self._take_part(meeting)

    def _get_settings(self, meeting: _Meeting, ask: Ask, held: Held, path: Path | None) -> _Meeting:
        """Ask rank 0 how the run goes on, and plan accordingly."""
        if meeting.folder is None and not self._script:
            tell(ask, held, path)
        settings = ask("settings", {}, b"").meta
        run_dir = Path(settings["run_dir"])
        if settings["continues"] and not self._script:
            own = self._attempts.newest()
            resume = settings["resume"] if own is None else str(own.path)
            self._config = dataclasses.replace(self._config, resume=resume)
        if settings["checkpoint"] is not None:
            self._bring_checkpoint(CheckpointFiles.from_meta(settings["checkpoint"]), run_dir, ask)
        elif settings["continues"]:
            self._config = dataclasses.replace(self._config, resume=settings["resume"])
        self.job = self._plan(run_dir)
        self._check_size()
        if self.environment.local_rank == 0:
            self._attempts.add(run_dir)
        return meeting._replace(store_part=settings["store_part"])

    def _plan(self, chosen: Path | None) -> RunPlan:
        return (plan_script if self._script else prepare)(self._config, chosen=chosen)

    def _take_part(self, meeting: _Meeting) -> None:
        spec = self._spec(meeting)
        if self._script:
            run_user_script(spec, None, script=self._script[0], args=tuple(self._script[1:]), given=self._named)
        else:
            self._ending = run_node(spec)

    # Meeting.

    @property
    def _start_s(self) -> float:
        return self._config.start_deadline_s

    def _find_meeting(self, limit_s: float, but: _Unreachable | None = None) -> _Meeting:
        """Where rank 0 says that ranks meet. `but`: it could not be reached at this address; wait for another one."""
        until = time.monotonic() + limit_s
        told = look_up(self.store, _MEET, max(_POLL_S, limit_s))
        while but is not None and told == but.address:
            if time.monotonic() > until or not may_be_started_again():
                raise but
            time.sleep(_POLL_S)
            told = look_up(self.store, _MEET, max(_POLL_S, until - time.monotonic()))
        if self._given is None:
            folder, secret = find_secret(told, self.environment.run)
            return _Meeting(secret, _socket_in(folder), folder)
        if not told.startswith("tcp:"):
            raise ConfigError(f"the coordinator's address must be tcp:host:port, got {told[:80]!r}{self._whence}")
        return _Meeting(self._given, told, None)

    @contextlib.contextmanager
    def _asking(self, meeting: _Meeting) -> Iterator[Ask]:
        """Ask the coordinator, which has proved by then that it holds the secret, before this rank joins."""
        config, number = self._config, FIRST_ASKER + self.environment.rank
        folder = meeting.folder
        listen = "tcp:127.0.0.1:0" if folder is None else f"unix:{folder}/q{self.environment.rank}"
        deadline_s = config.start_deadline_s
        channel = Channel(number, secret=meeting.secret, listen=listen, deadline_s=deadline_s, tls=tls_of(config))

        def ask(kind: str, meta: Meta, data: bytes) -> Message:
            body = [as_tensor(data)] if data else []
            return channel.wait([channel.call(COORDINATOR, kind, meta, body)], deadline_s)[0]

        try:
            try:
                channel.connect_all({COORDINATOR: meeting.coordinator}, min(_REACH_S, deadline_s))
            except Refused:
                raise
            except CommError as error:
                raise _Unreachable(meeting.coordinator, self.environment.rank, f"{error}{self._whence}") from error
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
        except _Unreachable:
            raise
        except CommError as error:
            raise type(error)(
                f"rank {self.environment.rank}: the coordinator at {meeting.coordinator} does not answer "
                f"({error}){self._whence}"
            ) from error
        finally:
            channel.close()

    def _bring_checkpoint(self, files: CheckpointFiles, run_dir: Path, ask: Ask) -> None:
        """Have the checkpoint that the run resumes from on this host, too."""

        def chunk(name: str, offset: int) -> bytes:
            answer = ask("file", {"name": name, "offset": offset}, b"")
            if "refused" in answer.meta:
                raise CheckpointError(f"the first host does not send its checkpoint: {answer.meta['refused']}")
            return b"".join(part.numpy().tobytes() for part in answer.body)

        config = self._config
        if config.resume is None:
            raise ConfigError(
                f"rank {self.environment.rank}: resume must be given on all hosts or on none, got none here"
            )
        first, limit_s = self.environment.local_rank == 0, config.start_deadline_s
        copied = find_or_copy(Path(config.resume), files, run_dir / COPIED, chunk, first=first, limit_s=limit_s)
        self._config = dataclasses.replace(config, resume=str(copied))

    @property
    def _whence(self) -> str:
        place = f"{self.environment.host}:{self.environment.port}"
        return f". The address came from torch's store at {place}, which anybody who reaches that port may write to"

    # Coordinating.

    def _start_coordinator(self, channel: Channel, meeting: _Meeting) -> Coordinator:
        job = self.job
        assert job.run_dir is not None
        facts = {} if self._continued is None else {"continues": self._continued}
        write_manifest(job.run_dir, job.config.to_dict(), strategy=repr(job.strategy), launched_by="torchrun", **facts)
        self._recorder = Recorder(-1, job.run_dir / "records" / "launcher.jsonl")
        if isinstance(job, Job):
            self._notices += [*notices(job), *self._notices_of_restarts()]
        for text in self._notices:
            print(f"podium: note: {text}", file=sys.stderr, flush=True)
        resume = job.config.resume
        told: Meta = {"run_dir": str(job.config.run_dir), "store_part": meeting.store_part}
        told |= {"continues": self._continued is not None, "resume": resume}
        coordinator = Coordinator(
            rules_of(job, survives_loss=False),
            _Agent(self._notices),
            channel,
            self._recorder,
            WallClock(),
            BeforeJoining(told, None if self.environment.one_host else resume),
        )
        self._watch = threading.Thread(target=self._coordinate, args=(coordinator,), name="coordinator", daemon=True)
        self._watch.start()
        return coordinator

    def _notices_of_restarts(self) -> list[str]:
        if self.job.config.checkpoint_every or not restarts_allowed():
            return []
        return [
            "torchrun may start the ranks again (--max-restarts), and without checkpoints the run would then begin at "
            "its beginning: --set checkpoint_every=N"
        ]

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
        own = self._host_folder
        spreads = folder is None and not self._script and restarts_allowed()
        store = f"tcp:{environment.host}:{environment.port}" if folder is None else str(folder / "store")
        return NodeSpec.of(
            job,
            endpoints_of(job)[environment.rank],
            config={**job.config.to_dict(), **own_settings(job.config, environment)},
            coordinator=meeting.coordinator,
            secret=meeting.secret.hex(),
            store=store,
            store_part=meeting.store_part,
            rendezvous=str(folder if own is None else own.folder),
            passes_signals_on=True,
            host=self._host(),
            same_host=folder is not None,
            host_id="" if own is None else own.host_id,
            clock_ns=time.monotonic_ns(),
            spreads=spreads,
            keeps_copies=spreads and environment.local_rank == 0,
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
