"""The agent of a host: `python -m podium.node --join`, started by ssh, SLURM or Ray, one per host.

It reaches the head with the secret and the keys of its invitation, tells what this host has, fetches what ranks need
(the user's code, the checkpoint, data), and then starts and kills ranks as the head says. It reports four times a
second which of them run. When the head is gone, so is the agent, and its ranks with it.

Everything it makes is in a private folder of the temporary folder, removed at the end, except copies of data sets,
which are kept in the user's cache for the next run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import secrets
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any, final

from podium.comm.base import DEPARTED, Message, Meta
from podium.comm.real.channel import Channel
from podium.comm.real.tls import Tls
from podium.engine.checkpoint import FACTS
from podium.engine.device import device_of
from podium.errors import CommError, ConfigError, DeadlineExceeded, Lost, PodiumError
from podium.launch.blobs import CHUNK_BYTES, as_bytes, as_tensor
from podium.launch.coordination.rules import FIRST_AGENT, HEAD
from podium.launch.forking import fork_server
from podium.launch.hosts import probe
from podium.launch.hosts.code import place_code
from podium.launch.hosts.facts import HostFacts, route_to, sees
from podium.launch.hosts.invitation import Invitation, read_invitation, write_keys
from podium.launch.hosts.trees import Tree, digest_of, fetch
from podium.launch.join import run_user_script
from podium.launch.process import NodeSpec, run_node
from podium.launch.rank_processes import Body, RankProcesses
from podium.launch.rendezvous import rendezvous_folder
from podium.launch.signals import leave_to_launcher

BEAT_S = 0.25
_CONNECT_S = 10.0
_CACHE = "podium"


def run_agent() -> int:
    """The agent's whole life; returns the exit code. Errors go to standard error, which the head reads."""
    leave_to_launcher()  # SLURM signals every process of a job, and the head is to save first
    try:
        invitation = read_invitation()
        with rendezvous_folder() as folder:
            tls = None if invitation.keys is None else write_keys(invitation.keys, folder)
            agent = Agent(invitation, folder, tls)
            try:
                agent.run()
            finally:
                agent.close()
    except PodiumError as error:
        print(f"podium: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    except OSError as error:  # of this host: a full disk, no temporary folder
        print(f"podium: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


@final
class Agent:
    """Starts and watches the ranks of one host."""

    def __init__(self, invitation: Invitation, folder: Path, tls: Tls | None) -> None:
        self._invitation, self._folder, self._tls = invitation, folder, tls
        self._deadline_s = invitation.start_deadline_s
        number = FIRST_AGENT + (invitation.number or 0)
        listen = f"unix:{folder}/a"  # nobody dials an agent
        self._channel = Channel(number, secret=invitation.secret, listen=listen, deadline_s=self._deadline_s, tls=tls)
        self._host_id = secrets.token_hex(8)
        self._processes: dict[int, RankProcesses] = {}
        self._starts: dict[int, int] = {}
        """By rank: the head's number of its latest start."""
        self._logs: dict[int, Path] = {}
        self._sent: dict[int, int] = {}
        self._code: tuple[dict[str, str], tuple[str, ...]] = ({}, ())
        self._own: Meta = {}
        """Settings of the run that are this host's own."""
        self._clock_ns = 0
        self._probe: probe.Probe | None = None

    def run(self) -> None:
        threading.Thread(target=self._end_with_input, name="input", daemon=True).start()
        if self._invitation.for_run:
            fork_server()  # it imports torch while this process fetches what it needs
        self._connect()
        try:
            welcome = self._hello()
            if self._invitation.for_run:
                self._prepare(welcome)
        except CommError:
            raise
        except (PodiumError, OSError) as error:
            code = error.exit_code if isinstance(error, PodiumError) else 1
            text = str(error) if isinstance(error, PodiumError) else f"{type(error).__name__}: {error}"
            self._channel.send(HEAD, "failed", {"message": text, "exit_code": code})
            raise
        self._channel.send(HEAD, "ready", {})
        self._serve()

    def close(self) -> None:
        for processes in self._processes.values():
            processes.end()
        if self._probe is not None:
            self._probe.close()
        self._channel.close()

    def _connect(self) -> None:
        head = self._invitation.head
        try:
            self._channel.connect_all({HEAD: head}, min(_CONNECT_S, self._deadline_s))
        except CommError as error:
            why = probe.cause(error, head)
            raise type(error)(f"the launcher's machine cannot be reached from here at {head}: {why}") from error

    def _hello(self) -> Meta:
        self._address = route_to(self._invitation.head)
        facts = HostFacts.here(self._address)  # which may start CUDA: before any clock is read
        asked_ns = time.monotonic_ns()
        answer = self._ask("hello", facts._replace(time=time.time())._asdict())
        now_ns = time.monotonic_ns()
        if "refused" in answer.meta:
            raise Lost(str(answer.meta["refused"]))
        welcome: Meta = json.loads(as_bytes(answer.body))
        if "elapsed_ns" in welcome:
            # When the run began, by this host's clock: question and answer were under way for equally long.
            asked_there_ns, answered_there_ns = welcome["elapsed_ns"]
            self._clock_ns = (asked_ns - asked_there_ns + now_ns - answered_there_ns) // 2
        return welcome

    # What ranks need.

    def _prepare(self, welcome: Meta) -> None:
        shared = sees(str(welcome["run_dir"]), str(welcome["probe"]))
        run_dir = Path(welcome["run_dir"]) if shared else self._folder / "run"
        run_dir.mkdir(exist_ok=True)
        self._own = {"run_dir": str(run_dir)}
        roots = {name: str(self._fetch(name, self._folder)) for name in welcome["code"]["trees"]}
        self._code = place_code(welcome["code"]["settings"], welcome["code"]["paths"], roots)
        if welcome["resume"] is not None:
            self._own["resume"] = str(self._find_checkpoint(welcome["resume"]))
        if welcome["data"] is not None:
            self._own["data_dir"] = str(self._find_data(welcome["data"]))
        if self._tls is not None:
            self._own |= {"tls_cert": self._tls.cert, "tls_key": self._tls.key, "tls_ca": self._tls.ca}

    def _find_checkpoint(self, resume: Meta) -> Path:
        """The checkpoint's folder on this host: the same path on a shared disk, or a copy of the head's."""
        facts = Path(resume["path"]) / FACTS
        with contextlib.suppress(OSError):  # it is not there, or not for this user
            if digest_of(facts) == resume["digest"]:
                return facts.parent
        return self._fetch("resume", self._folder)

    def _find_data(self, data: Meta) -> Path:
        """The data's folder on this host: the same path with the same files, or a copy of the head's."""
        folder = Path(data["path"])
        with contextlib.suppress(OSError):  # a file is not there, or not for this user
            if all((folder / name).stat().st_size == size for name, size in data["sizes"].items()):
                return folder
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        return self._fetch("data", Path(home) / _CACHE)

    def _fetch(self, name: str, into: Path) -> Path:
        answer = self._ask("tree", {"name": name})
        if "refused" in answer.meta:
            raise ConfigError(str(answer.meta["refused"]))
        return fetch(Tree.from_json(as_bytes(answer.body)), into, self._chunk)

    def _chunk(self, tree: str, path: str, offset: int) -> bytes:
        answer = self._ask("chunk", {"tree": tree, "path": path, "offset": offset})
        if "refused" in answer.meta:
            raise ConfigError(str(answer.meta["refused"]))
        return as_bytes(answer.body)

    def _ask(self, kind: str, meta: Meta) -> Message:
        return self._channel.wait([self._channel.call(HEAD, kind, meta)], self._deadline_s)[0]

    # Ranks.

    def _serve(self) -> None:
        due = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= due:
                self._report()
                due = now + BEAT_S
            try:
                message = self._channel.recv(max(0.0, due - now))
            except DeadlineExceeded:
                continue
            if message.kind == "start":
                self._start(message.meta)
            elif message.kind == "kill":
                self._kill(int(message.meta["rank"]))
            elif message.kind in probe.KINDS:
                self._measure(message)
            elif message.kind == DEPARTED or message.kind == "end":
                return

    def _start(self, meta: Meta) -> None:
        rank = int(meta["spec"]["rank"])
        self._starts[rank] = int(meta["start"])
        try:
            spec = self._spec(meta)  # raises where this host has not the device
            processes = RankProcesses(_body_of(meta["script"], self._code[0]), task_name=str(spec.config["task"]))
            processes.launch(spec)
        except (PodiumError, OSError) as error:
            self._report_end(rank, f"it could not be started: {error}")
            return
        self._processes[rank] = processes
        self._logs[spec.rank] = Path(spec.log or "")
        self._sent.setdefault(spec.rank, 0)

    def _spec(self, meta: Meta) -> NodeSpec:
        """The process's spec with what is this host's own."""
        values: dict[str, Any] = {**meta["spec"], "endpoints": tuple(meta["spec"]["endpoints"])}
        values["speed_changes"] = tuple((int(at), float(speed)) for at, speed in values["speed_changes"])
        rank, settings = int(values["rank"]), {**values["config"], **self._own, **self._code[0]}
        settings["threads"] = settings["threads"] or max(1, len(os.sched_getaffinity(0)) // int(meta["placed"]))
        if values["role"] == "worker":
            settings["device"] = str(device_of(settings["device"], rank, nth=meta["nth"], most=meta["gpus"]))
        return dataclasses.replace(
            NodeSpec(**values),
            secret=self._invitation.secret.hex(),  # the head does not send it
            config=settings,
            rendezvous=str(self._folder),
            host=self._address,
            host_id=self._host_id,
            same_host=False,
            clock_ns=self._clock_ns,
            import_paths=self._code[1],
            log=str(self._folder / "logs" / f"rank-{rank}.log"),
        )

    def _kill(self, rank: int) -> None:
        if rank in self._processes:
            self._processes[rank].kill(rank)

    def _measure(self, message: Message) -> None:
        """For `podium cluster check`; this thread goes on reporting meanwhile."""
        if self._probe is None:
            invitation = self._invitation
            self._probe = probe.Probe(invitation.number or 0, self._address, self._folder, invitation.secret, self._tls)
        self._probe.take(message, self._channel.reply)

    def _report(self) -> None:
        """Send new output of the ranks, which of them have ended, and which run."""
        for rank, processes in list(self._processes.items()):
            how = processes.how_it_ended(rank, 0.0)
            self._send_log(rank)
            if how is not None:
                del self._processes[rank]
                self._report_end(rank, how)
        running = {str(rank): processes.is_running(rank) for rank, processes in self._processes.items()}
        self._channel.send(HEAD, "beat", {"running": running})

    def _report_end(self, rank: int, how: str) -> None:
        self._channel.send(HEAD, "ended", {"rank": rank, "start": self._starts[rank], "how": how})

    def _send_log(self, rank: int) -> None:
        """What a rank has written since the last report."""
        path = self._logs[rank]
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._sent[rank])
            while chunk := file.read(CHUNK_BYTES):
                self._channel.send(HEAD, "log", {"name": path.name}, [as_tensor(chunk)])
                self._sent[rank] += len(chunk)

    def _end_with_input(self) -> None:
        """End when standard input does: whoever started this agent is gone, though the network may not say so yet."""
        select.select([sys.stdin], [], [])
        if not sys.stdin.read(1):
            time.sleep(BEAT_S)  # an orderly end sends a message first
            self._channel.close()


def _body_of(script: Meta | None, settings: dict[str, str]) -> Body:
    if script is None:
        return run_node
    return functools.partial(
        run_user_script, script=settings["task"], args=tuple(script["args"]), given=tuple(script["given"])
    )
