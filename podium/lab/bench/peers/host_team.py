"""A contender's ranks on hosts, from the side of the bench: a process per rank, requests and answers as JSON lines."""

from __future__ import annotations

import contextlib
import json
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any, final

from podium.errors import RankFailed
from podium.lab.bench.peers.host_rank import Rank
from podium.lab.bench.peers.work import DEADLINE_S
from podium.testing.hosts import Host

_END_S = 10.0
_LAST_WORDS = 3000


@final
class HostTeam:
    """The ranks of one contender. Between requests they wait for the next one, and use no processor time."""

    def __init__(self, hosts: Sequence[Host], ranks: Sequence[Rank]) -> None:
        """Start all ranks; each on the host that it names. Returns when all are ready."""
        self._who = ranks[0].contender
        self._errors: list[IO[bytes]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        by_name = {host.name: host for host in hosts}
        try:
            for rank in ranks:
                self._errors.append(tempfile.TemporaryFile())  # noqa: SIM115  # lives as long as the rank
                words = (sys.executable, "-m", "podium.lab.bench.peers.host_rank", json.dumps(rank._asdict()))
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors[-1]}
                self._processes.append(by_name[rank.host].start(*words, env={"OMP_NUM_THREADS": "1"}, **pipes))
            self.ask("ready")
        except BaseException:
            self.end()
            raise

    def ask(self, do: str, *, members: Sequence[int] | None = None, **details: Any) -> list[Any]:
        """One answer from each of these ranks, or from all; they work at the same time."""
        asked = range(len(self._processes)) if members is None else members
        request = json.dumps({"do": do, **details}).encode() + b"\n"
        until = time.monotonic() + DEADLINE_S
        for n in asked:
            pipe = self._processes[n].stdin
            assert pipe is not None
            try:
                pipe.write(request)
                pipe.flush()
            except OSError:
                raise self._failed(n, do, "it ended") from None
        return [self._answer(n, do, until) for n in asked]

    def end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        until = time.monotonic() + _END_S
        for process in self._processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        for file in self._errors:
            file.close()

    def _answer(self, n: int, do: str, until: float) -> Any:
        out = self._processes[n].stdout
        assert out is not None
        with selectors.DefaultSelector() as selector:
            selector.register(out, selectors.EVENT_READ)
            if not selector.select(max(0.0, until - time.monotonic())):
                raise self._failed(n, do, f"no answer in {DEADLINE_S:g} s")
        line = out.readline()
        if not line:
            raise self._failed(n, do, "it ended")
        return json.loads(line)

    def _failed(self, n: int, do: str, why: str) -> RankFailed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            why += f" with code {self._processes[n].wait(1.0)}"
        self._errors[n].seek(0)
        said = self._errors[n].read()[-_LAST_WORDS:].decode(errors="replace").strip()
        return RankFailed(f"bench hosts: rank {n} of {self._who} failed at {do!r}: {why}\n{said}")
