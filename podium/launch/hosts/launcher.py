"""The head of a run across hosts: it has the coordinator, the run's folder and a connection to each host's agent.

    podium train digits-mlp --workers 4 --launcher ssh --hosts hosts.txt

The head touches no tensor and needs no slot of its own: it may be a laptop, a login node or one of the hosts.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from podium.comm.base import Meta
from podium.comm.real.certificates import run_keys
from podium.comm.real.channel import Channel
from podium.comm.real.tls import Tls, tls_of
from podium.config import RunConfig
from podium.engine.build import Job
from podium.engine.checkpoint import FACTS
from podium.errors import ConfigError
from podium.launch.base import LaunchResult, RunPlan
from podium.launch.coordination.rules import HEAD
from podium.launch.event import Event
from podium.launch.hosts.base import Starter
from podium.launch.hosts.code import UserCode, user_code
from podium.launch.hosts.entries import HostEntry
from podium.launch.hosts.failure import NotOffered
from podium.launch.hosts.invitation import Invitation, write_keys
from podium.launch.hosts.pool import HostPool
from podium.launch.hosts.ranks import HostRanks, place
from podium.launch.hosts.slurm import Slurm
from podium.launch.hosts.ssh import Ssh
from podium.launch.hosts.trees import Offer, all_files, digest_of
from podium.launch.local import Meeting, Processes, endpoints_of
from podium.launch.process import AT_COORDINATOR
from podium.launch.rendezvous import rendezvous_folder

MOST_DATA_BYTES = 2 << 30
"""The largest data set that is sent to hosts that do not have it."""


def run_job(job: Job, on_event: Callable[[Event], None] | None, stop: threading.Event | None) -> LaunchResult:
    """All ranks of a job on the hosts that its launcher reaches."""
    return run_on_hosts(job, starter_for(job, on_event, stop), on_event, stop)


def starter_for(job: RunPlan, on_event: Callable[[Event], None] | None, stop: threading.Event | None) -> Starter:
    """What starts agents for this run."""
    return starter_of(job.config, endpoints_of(job), _notifier(on_event), stop)


def starter_of(
    config: RunConfig,
    endpoints: Sequence[tuple[int, ...]],
    tell: Callable[[str], None],
    stop: threading.Event | None = None,
) -> Starter:
    """What starts agents under this configuration's launcher; without `endpoints`, on all hosts that there are."""
    if config.launcher == "ssh":
        return Ssh(config.hosts)
    if config.launcher == "slurm":
        return Slurm()
    from podium.launch.hosts.ray import Ray

    return Ray(config, endpoints, tell, stop)


def _notifier(on_event: Callable[[Event], None] | None) -> Callable[[str], None]:
    return lambda text: None if on_event is None else on_event({"event": "notice", "text": text})


def run_on_hosts(
    job: RunPlan,
    starter: Starter,
    on_event: Callable[[Event], None] | None,
    stop: threading.Event | None,
    *,
    script: Meta | None = None,
) -> LaunchResult:
    """All ranks of a run on the starter's hosts. `script`: `path`, `args` and `given`, where the loop is its own."""
    if isinstance(job, Job) and not job.task_is_named:
        raise ConfigError(
            f"task {job.config.task}: a Task object cannot be sent to other hosts; name the function that makes it "
            "('file.py:make_task')"
        )
    with contextlib.closing(starter):
        return _run_on_hosts(job, starter, on_event, stop, script)


def _run_on_hosts(
    job: RunPlan,
    starter: Starter,
    on_event: Callable[[Event], None] | None,
    stop: threading.Event | None,
    script: Meta | None,
) -> LaunchResult:
    endpoints = endpoints_of(job)
    entries = starter.entries(len(endpoints))
    placed = place(entries, endpoints, job.config.workers)
    used = entries[: max(placed.values()) + 1]
    with _Head(job, starter, used, script) as head:
        head.pool.wait_ready(head.pool.start(used), stop)
        ranks = HostRanks(head.pool, placed, script, threads=starter.threads_per_rank)
        processes = Processes(
            job, ranks, head.meeting, on_event, runs_script=script is not None, began_ns=head.began_ns
        )
        launched = processes.run(stop)
        facts = {"hosts": head.pool.describe(), "placed": ranks.describe()}
        return launched._replace(facts=facts)


class _Head:
    """The pool of agents and what it offers them, for one run."""

    def __init__(self, job: RunPlan, starter: Starter, entries: Sequence[HostEntry], script: Meta | None) -> None:
        self._job, self._starter, self._entries, self._script = job, starter, entries, script
        self.began_ns = time.monotonic_ns()
        assert job.run_dir is not None
        self._run_dir = job.run_dir.resolve()
        self._probe = f".{secrets.token_hex(8)}"

    def __enter__(self) -> _Head:
        self._context = self._opened()
        return self._context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    @contextmanager
    def _opened(self) -> Iterator[_Head]:
        config, secret = self._job.config, secrets.token_bytes(32)
        code = user_code(config.to_dict(), None if self._script is None else self._script["path"])
        address = config.head or self._starter.head_address(self._entries)
        with rendezvous_folder() as folder:
            keys = keys_for(config, address)
            tls = None if keys is None else write_keys(keys, folder)
            self.meeting = Meeting(f"tcp:{address}:0", AT_COORDINATOR, None, secret, tls)
            channel = head_channel(address, secret, tls)
            invitation = Invitation(channel.address, secret, None, keys, config.start_deadline_s)
            (self._run_dir / self._probe).touch()
            self.pool = HostPool(
                channel,
                self._starter,
                invitation,
                welcome=lambda asked_ns: self._welcome(code, asked_ns),
                offers=self._offers(code),
                logs=self._run_dir / "logs",
                shown="rank-0.log" if self._script is not None else None,
            )
            try:
                yield self
            finally:
                self.pool.close()
                (self._run_dir / self._probe).unlink(missing_ok=True)

    @cached_property
    def _data(self) -> Meta | None:
        """Where this machine has the data, and the sizes of their files."""
        if self._job.config.data_dir is None:
            return None
        folder = Path(self._job.config.data_dir).resolve()
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in all_files(folder)}
        return {"path": str(folder), "sizes": sizes}

    @cached_property
    def _resume(self) -> Meta | None:
        """The checkpoint that the run begins with: where it lies here, and what tells it from another at that path."""
        if self._job.config.resume is None:
            return None
        folder = Path(self._job.config.resume).resolve()
        return {"path": str(folder), "digest": digest_of(folder / FACTS)}

    def _welcome(self, code: UserCode, asked_ns: int) -> Meta:
        data = self._data
        return {
            "run_dir": str(self._run_dir),
            "probe": self._probe,
            "code": {
                "trees": [offer.tree.name for offer in code.offers],
                "settings": code.settings,
                "paths": code.paths,
            },
            "resume": self._resume,
            "data": data,
            # When the agent asked, and when it is answered: its clock follows from both.
            "elapsed_ns": [asked_ns - self.began_ns, time.monotonic_ns() - self.began_ns],
        }

    def _offers(self, code: UserCode) -> dict[str, Callable[[], Offer]]:
        config = self._job.config
        offers: dict[str, Callable[[], Offer]] = {}
        for offer in code.offers:
            offers[offer.tree.name] = lambda offer=offer: offer  # type: ignore[misc]  # mypy infers no default's type
        if config.resume is not None:
            resume = Path(config.resume).resolve()
            offers["resume"] = lambda: Offer.of("resume", resume, all_files(resume))
        if config.data_dir is not None:
            data = Path(config.data_dir).resolve()
            offers["data"] = lambda: _data_offer(data)
        return offers


def head_channel(address: str, secret: bytes, tls: Tls | None) -> Channel:
    """Where agents reach this machine."""
    try:
        return Channel(HEAD, secret=secret, listen=f"tcp:{address}:0", tls=tls)
    except ConfigError as error:
        raise ConfigError(f"head must be an address of this machine (ip addr), got {address}: {error}") from None


def keys_for(config: RunConfig, address: str) -> dict[str, str] | None:
    """Keys for the run, as PEM texts: the user's, where given, else new ones; None on this machine, or with TLS off."""
    given = tls_of(config)
    if given is not None:
        return {"cert": _text(given.cert), "key": _text(given.key), "ca": _text(given.ca)}
    return None if config.tls == "off" or address.startswith("127.") else run_keys()


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"tls_cert, tls_key and tls_ca must be PEM files: {path}: {error}") from None


def _data_offer(folder: Path) -> Offer:
    files = all_files(folder)
    total = sum(path.stat().st_size for path in files)
    if total > MOST_DATA_BYTES:
        raise NotOffered(
            f"the data of {folder} are not there, and {total / 1e9:.1f} GB are too much to send (at most "
            f"{MOST_DATA_BYTES / 1e9:.1f})",
            f"rsync -a {folder}/ HOST:{folder}/, or put them on a disk that all hosts have at that path",
        )
    return Offer.of("data", folder, files)
