"""A contender in another environment: a script run by the peers' interpreter, with requests and answers as JSON lines.

Systems like these start helper processes that outlive them when they are killed. All descendants of a script have a
unique mark in their environment variables, by which they are found and killed with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from podium.errors import ConfigError, RankFailed
from podium.lab.bench.peers.work import DEADLINE_S, LR, PERIOD, WORKERS, Contender, Pulled, Tally

PYTHON_VARIABLE = "PODIUM_PEERS_PYTHON"
ENVIRONMENT = ".venv-peers"

_MARK = "PODIUM_BENCH_MARK"
_END_S = 10.0
_PATIENCE_S = 5.0  # how long killed processes may take to disappear


def peers_python() -> Path:
    """The interpreter that has the peers: `PODIUM_PEERS_PYTHON`, or the one that `make peers` installs."""
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        return Path(named)
    places = [home / ENVIRONMENT / "bin" / "python" for home in (Path.cwd(), Path(__file__).resolve().parents[4])]
    return next((place for place in places if place.exists()), places[0])


def need_module(peer: str, module: str) -> Path:
    """The peers' interpreter; raises `ConfigError` if it does not have this module."""
    python = peers_python()
    look = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    try:
        done = subprocess.run([str(python), "-c", look], capture_output=True, timeout=DEADLINE_S, check=False)
        missing = f"has no {module}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        missing = f"does not run: {error}"
    if missing:
        raise ConfigError(
            f"bench ps: peer {peer} needs {module} in its own environment, and {python} {missing}: "
            f"run `make peers`, or set {PYTHON_VARIABLE} to an interpreter that has it"
        )
    return python


@final
class Script(Contender):
    """One script and all its descendants."""

    def __init__(self, peer: str, module: str, sizes: Sequence[int], folder: Path) -> None:
        """`sizes` of the model's tensors, in elements; `folder` is the script's working folder."""
        self._peer, self.mark, self._rest = peer, secrets.token_hex(8), b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the script
        python, script = need_module(peer, module), Path(__file__).with_name(f"{peer}_ps.py")
        self._process = subprocess.Popen(
            [str(python), "-u", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, _MARK: self.mark},
            cwd=folder,
            start_new_session=True,
        )
        try:
            told = self._ask("setup", sizes=list(sizes), workers=WORKERS, lr=LR, period=PERIOD, folder=str(folder))
        except BaseException:
            self.end()
            raise
        self.variants, self.unavailable = tuple(told["variants"]), told["unavailable"]

    def measure(self, variant: str, seconds: float) -> float:
        done = self._ask("round", variant=variant, seconds=seconds)
        return float(done["round_trips"] / done["seconds"])

    def tally(self, variant: str) -> Tally:
        told = self._ask("tally", variant=variant)
        low, high = told["server"]
        return Tally(told["pushed"], (low, high), tuple(Pulled(*pulled) for pulled in told["pulled"]))

    def end(self) -> None:
        with contextlib.suppress(RankFailed):
            if self._process.poll() is None:
                self._ask("end", within_s=_END_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        end_marked(self.mark)
        self._process.wait(timeout=_PATIENCE_S)
        self._errors.close()

    def _ask(self, do: str, *, within_s: float = DEADLINE_S, **details: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **details}).encode() + b"\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._line(time.monotonic() + within_s))
        except (OSError, EOFError, ValueError) as error:
            raise RankFailed(f"bench ps: peer {self._peer} failed at {do!r}: {error}{self._last_words()}") from error
        return answer

    def _line(self, deadline: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._rest:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError("it gave no answer in time")
                read = os.read(self._process.stdout.fileno(), 1 << 16)
                if not read:
                    raise EOFError("it ended")
                self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _last_words(self) -> str:
        size = os.fstat(self._errors.fileno()).st_size
        said = os.pread(self._errors.fileno(), 3000, max(0, size - 3000)).decode(errors="replace").strip()
        return f"\n{said}" if said else ""


def end_marked(mark: str) -> None:
    """Kill all processes with this mark, until none is left."""
    deadline = time.monotonic() + _PATIENCE_S
    while (found := marked(mark)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def marked(mark: str) -> list[int]:
    """Processes with this mark; a zombie has no environment any more, so it is not among them."""
    word, found = f"{_MARK}={mark}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if word in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found
