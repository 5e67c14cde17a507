"""A rank's connection to the coordinator: it joins, sends heartbeats, reports, and gets requests to stop or regroup.

One thread sends heartbeats and listens; when the coordinator is gone, so is the launcher, and the rank ends at once.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

from podium.comm.base import BUSY_DEADLINES, DEPARTED, Meta
from podium.comm.real.channel import Channel
from podium.comm.real.coordinator_store import CoordinatorStore
from podium.comm.real.sockets import VANISHED_S, Address
from podium.comm.real.tls import Tls
from podium.engine.checkpoint import folder_for, publish_copy
from podium.engine.recovery import Control, Regroup
from podium.engine.report import Report
from podium.errors import CheckpointError, CommError, DeadlineExceeded, Lost
from podium.launch.blobs import CHUNK_BYTES, as_bytes, as_tensor
from podium.launch.checkpoint_copy import CheckpointFiles, fetch, partial_of
from podium.launch.coordination.rules import COORDINATOR, LIMITS, MOST_REPLACEMENTS
from podium.launch.record_stream import RecordStream

_BEATS_PER_LIMIT = 6
_SILENT_BEATS = 5
_MEET_S = 10.0
"""How long a process that was just started tries to reach the coordinator."""


class Peers(NamedTuple):
    """The ranks of the run and their addresses."""

    addresses: dict[int, Address]
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    backend: str
    """What the workers exchange tensors on GPUs with, until the next plan."""


@final
class Membership(Control):
    """One process's membership in the run."""

    def __init__(
        self,
        rank: int,
        coordinator: Address,
        *,
        secret: bytes,
        listen: Address,
        heartbeat_s: float,
        deadline_s: float,
        start_deadline_s: float,
        tls: Tls | None = None,
    ) -> None:
        vanished_s = min(VANISHED_S, _SILENT_BEATS * heartbeat_s)  # the coordinator is as patient with this rank
        self._channel = Channel(
            rank,
            secret=secret,
            listen=listen,
            limits=LIMITS,
            deadline_s=deadline_s,
            tls=tls,
            vanished_s=vanished_s,
        )
        self._channel.introduce({COORDINATOR: coordinator})
        self._beat_s, self._deadline_s = min(heartbeat_s, deadline_s) / _BEATS_PER_LIMIT, deadline_s
        self._start_deadline_s = start_deadline_s
        self.joined = False
        self._busy: str | None = None
        self._stop, self._closing = threading.Event(), threading.Event()
        self._wants_stop = False
        # Numbered, since the next change may be announced while the plan of the previous one is still under way.
        self._change_asked, self._change_done = 0, 0
        self._latest: Meta | None = None
        self._thread: threading.Thread | None = None
        self._rate: tuple[float, int] | None = None
        self._records: RecordStream | None = None
        self._copies_into: Path | None = None
        self.spreads = False
        """Whether checkpoints are copied to other hosts before training continues."""
        self._lost: set[int] = set()
        self._on_lost: Callable[[Collection[int]], None] = _ignore
        self.on_plan: Callable[[str], None] = _ignore
        """Called with the backend of each new generation, before it forms."""

    def join(self, endpoints: list[int], addresses: Mapping[int, Address], deadline_s: float, gpu: str = "") -> Peers:
        """Register this process's endpoints; returns all ranks and addresses, once every process has joined.

        `gpu`: names the worker's GPU; empty where it has none.
        """
        # A cleaner may have removed the coordinator's socket: it is made again within a second.
        self._channel.connect_all({COORDINATOR: self._channel.address_book[COORDINATOR]}, min(_MEET_S, deadline_s))
        meta = {"endpoints": endpoints, "addresses": {str(k): v for k, v in addresses.items()}, "gpu": gpu}
        answer = self._ask("join", meta, deadline_s)
        if "ended" in answer:
            raise Lost(f"rank {self._channel.rank}: the run ended before it began: {answer['ended']}")
        self.joined = True
        self._lost.update(answer["lost"])
        self._thread = threading.Thread(target=self._keep_in_touch, name="membership", daemon=True)
        self._thread.start()
        return Peers(
            _by_rank(answer["addresses"]), tuple(answer["workers"]), tuple(answer["servers"]), answer["backend"]
        )

    def report_losses(self, to: Callable[[Collection[int]], None]) -> None:
        """Call `to` with the ranks that the coordinator has given up so far, and from now on with every other one.

        Later calls come from the membership's thread. A rank may be reported twice.
        """
        self._on_lost = to
        to(tuple(self._lost))

    def send_records(self, folder: Path, ranks: Iterable[int]) -> None:
        """From now on send these ranks' records to the coordinator, unless it sees this folder on a shared disk."""
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{secrets.token_hex(8)}"
        probe.touch()
        try:
            seen = self._ask("find", {"name": probe.name}, self._start_deadline_s)["seen"]
        finally:
            probe.unlink()
        if not seen:
            self._records = RecordStream(folder, ranks, self._send_chunk)

    def keep_copies(self, run_dir: Path) -> None:
        """From now on copy every checkpoint of the run to this folder, unless it is the coordinator's own."""
        if self._records is not None:
            self._copies_into = run_dir
            self._channel.send(COORDINATOR, "keeps", {})

    def store(self) -> CoordinatorStore:
        """A store for process groups, whose values the coordinator holds."""
        return CoordinatorStore(self._ask, self._deadline_s)

    def relocate(self, rank: int, old: Address) -> Address:
        """The new address of a server that cannot be reached at `old`; blocks until it has one.

        Raises Lost where it is not replaced, or where the run is ending.
        """
        patience_s = self._start_deadline_s
        try:
            answer = self._ask("where", {"rank": rank, "not": old}, patience_s)
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"rank {self._channel.rank}: server {rank} does not answer at {old}, and for {patience_s:g} s "
                "(start_deadline_s) it was not replaced"
            ) from None
        if "lost" in answer:
            raise Lost(f"rank {self._channel.rank}: {answer['lost']}")
        return str(answer["address"])

    @property
    def asked_to_stop(self) -> bool:
        """Whether this process has asked for it."""
        return self._wants_stop

    def ask_to_stop(self) -> None:
        """Ask that all workers finish the step, save and end. May be called from any thread."""
        self._wants_stop = True  # every beat carries it from now on; the next one is sent at once
        if self.joined:
            with contextlib.suppress(CommError):  # the coordinator is gone, and this rank ends anyway
                self._channel.send(COORDINATOR, "beat", {"progress": None, "busy": self._busy, "stop": True})

    # Control.

    def stop_requested(self) -> bool:
        return self._stop.is_set()

    def change_requested(self) -> bool:
        return self._change_asked > self._change_done

    def progress(self, facts: dict[str, Any]) -> None:
        if facts["event"] == "progress":
            self._latest = facts
        else:
            self._channel.send(COORDINATOR, "event", facts)

    def regroup(self, generation: int, steps_done: int) -> Regroup:
        # Longer than the coordinator's own limits: it ends ranks that hang, and its error names them.
        patience_s = (BUSY_DEADLINES + 2) * self._deadline_s + (MOST_REPLACEMENTS + 1) * self._start_deadline_s
        answer = self._ask("regroup", {"generation": generation, "steps_done": steps_done}, patience_s)
        self._change_done = answer["change"]
        self.on_plan(answer["backend"])
        servers = None if answer["servers"] is None else tuple(answer["servers"])
        return Regroup(
            answer["generation"], tuple(answer["members"]), answer["source"], servers, _by_rank(answer["addresses"])
        )

    def busy(self, what: str | None) -> None:
        self._busy = what  # the next beat carries it

    def awaits(self, facts: Meta) -> None:
        """Report for which workers a server of this process waits, and for how long."""
        with contextlib.suppress(CommError):  # the launcher is gone, and so is this process in a moment
            self._channel.send(COORDINATOR, "awaits", facts)

    def saved(self, run_dir: Path, step: int, *, keep: int, is_last: bool) -> None:
        if self._records is None:  # the launcher sees this disk
            if self.spreads:
                self._insist("spread", {"step": step, "keep": keep})
            return
        folder = folder_for(run_dir, step)
        for path in sorted(folder.iterdir()):
            self._upload(path, f"checkpoints/{folder.name}.partial/{path.name}")
        self._insist("publish", {"step": step, "keep": keep})
        if is_last:
            self._upload(run_dir / "model.safetensors", "model.safetensors.partial")
            self._insist("publish", {"step": None, "keep": keep})

    def _copy(self, meta: Meta) -> None:
        """Copy a checkpoint from the coordinator's host to this one."""
        assert self._copies_into is not None
        answer: Meta = {}
        try:
            files, step = CheckpointFiles.from_meta(meta["files"]), int(meta["step"])
            fetch(files, partial_of(folder_for(self._copies_into, step)), self._fetch_part)
            publish_copy(self._copies_into, step, int(meta["keep"]))
        except (CheckpointError, OSError) as error:
            answer = {"failed": str(error)}
        except CommError:  # the coordinator is gone, and this process in a moment
            return
        with contextlib.suppress(CommError):
            self._channel.send(COORDINATOR, "copied", answer)

    def _fetch_part(self, name: str, offset: int) -> bytes:
        asked = self._channel.call(COORDINATOR, "copy-part", {"name": name, "offset": offset})
        (answer,) = self._channel.wait([asked], self._deadline_s)
        if "refused" in answer.meta:
            raise CheckpointError(str(answer.meta["refused"]))
        return as_bytes(answer.body)

    def _upload(self, path: Path, name: str) -> None:
        with path.open("rb") as file:
            while True:
                offset, chunk = file.tell(), file.read(CHUNK_BYTES)
                if not chunk and offset:
                    return
                self._insist("upload", {"path": name, "offset": offset}, chunk)
                if len(chunk) < CHUNK_BYTES:
                    return

    def _insist(self, kind: str, meta: Meta, data: bytes = b"") -> None:
        """Ask the coordinator to store something; raises where it cannot."""
        answer = self._ask(kind, meta, self._deadline_s, data)
        if "refused" in answer:
            raise CheckpointError(f"rank {self._channel.rank}: {answer['refused']}")

    def begun(self) -> None:
        """The user's model and data are made: from now on this process waits only for other ranks."""
        self._channel.send(COORDINATOR, "begun", {})

    def done(self, report: Report | None) -> None:
        if self._records is not None:
            self._records.send_new(None)
        self._closing.set()  # before the message: the launcher may end as soon as it has received it
        self._channel.let_name_go()  # and remove the folder
        self._ask("done", {"report": None if report is None else report._asdict()}, self._deadline_s)

    def failed(self, meta: Meta) -> None:
        with contextlib.suppress(CommError):  # the launcher is gone
            if self._records is not None:
                with contextlib.suppress(OSError):  # the disk here may be what failed
                    self._records.send_new(None)
            self._channel.send(COORDINATOR, "failed", meta)

    def close(self) -> None:
        self._closing.set()
        self._channel.close()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    # Inside.

    def _send_chunk(self, rank: int, chunk: bytes) -> None:
        self._channel.send(COORDINATOR, "records", {"rank": rank}, [as_tensor(chunk)])

    def _ask(self, kind: str, meta: Meta, deadline_s: float, data: bytes = b"") -> Meta:
        body = [as_tensor(data)] if data else []
        (answer,) = self._channel.wait([self._channel.call(COORDINATOR, kind, meta, body)], deadline_s)
        return answer.meta

    def _keep_in_touch(self) -> None:
        try:
            why = self._listen()
        except BaseException as error:  # a rank that cannot receive messages must not continue
            traceback.print_exception(error)
            why = f"{type(error).__name__}: {error}"
        if not self._closing.is_set():
            print(f"podium: {why}; this rank ends", file=sys.stderr, flush=True)
            os._exit(1)

    def _listen(self) -> str:
        """Send heartbeats and listen until the run is over; returns why it is."""
        while not self._closing.is_set():
            try:
                beat = {"progress": self._with_rate(), "busy": self._busy, "stop": self._wants_stop}
                self._channel.send(COORDINATOR, "beat", beat)
                if self._records is not None:
                    self._records.send_new()
                message = self._channel.recv(self._beat_s)
            except DeadlineExceeded:
                continue
            except CommError:
                return self._last_word()
            if message.kind == "stop":
                self._stop.set()
            elif message.kind == "change":
                self._change_asked = message.meta["number"]
            elif message.kind == "copy":
                threading.Thread(target=self._copy, args=(message.meta,), name="copy", daemon=True).start()
            elif message.kind == "lost":
                self._lost.update(message.meta["ranks"])
                self._on_lost(message.meta["ranks"])
            elif message.kind == "ended":
                return f"the run ended: {message.meta['why']}"
            elif message.kind == DEPARTED:
                break
        return "the launcher is gone"

    def _last_word(self) -> str:
        """Why the run is over: a heartbeat may fail while the coordinator's last message is still unread."""
        with contextlib.suppress(CommError):
            while (message := self._channel.recv(0.0)).kind != DEPARTED:
                if message.kind == "ended":
                    return f"the run ended: {message.meta['why']}"
        return "the launcher is gone"

    def _with_rate(self) -> Meta | None:
        """The latest progress, with samples per second since the previous beat."""
        facts = self._latest
        if facts is None:
            return None
        now, before = time.monotonic(), self._rate
        self._rate = (now, facts["position"])
        if before is None or now <= before[0]:
            return facts
        return {**facts, "samples_per_s": (facts["position"] - before[1]) / (now - before[0])}


def _ignore(_news: object) -> None:
    pass


def _by_rank(addresses: Mapping[str, Address]) -> dict[int, Address]:
    """With int keys again: JSON keys are text."""
    return {int(rank): address for rank, address in addresses.items()}
