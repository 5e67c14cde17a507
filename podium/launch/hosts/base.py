"""The interface of what starts agents on hosts: ssh, SLURM, Ray."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import final

import podium
from podium.launch.hosts.entries import HostEntry
from podium.launch.hosts.failure import Failure
from podium.launch.hosts.invitation import Invitation

MODULE = ("-m", "podium.node", "--join")
"""What Python runs on a host; the invitation is its standard input."""
_KEPT_LINES = 20
_OTHER_PYTHON = "or name another interpreter: python=PATH in the file of hosts"
_REMEDIES = {
    r"No module named '?podium": f"on HOST: pip install podium=={podium.__version__}, {_OTHER_PYTHON}",
    r"No module named": f"on HOST: install what is missing with pip, {_OTHER_PYTHON}",
    r"No space left on device|Disk quota exceeded": "on HOST: make room (df -h), or set TMPDIR, XDG_CACHE_HOME there",
    r"cannot be reached from here at": "open that port for HOST, or give this machine's address: --set head=ADDRESS",
}
"""What helps, by what an agent said when it ended; HOST stands for the host."""
_END_S, _LOST_S = 5.0, 1.0


class StartedAgent(ABC):
    """What a starter has started on a host, seen from this machine."""

    @abstractmethod
    def ended(self) -> str | None:
        """Why it ended, in its own words; None while it runs."""

    @abstractmethod
    def end(self, *, at_once: bool = False) -> None:
        """End it, if it has not ended by itself; returns within some seconds. `at_once`: its host does not answer."""


class Starter(ABC):
    """Starts agents."""

    threads_per_rank: int | None = None
    """Of a run that sets none; None: the host's cores divided by its ranks."""
    remedies: Mapping[str, str] = {}
    """What helps, by a pattern of what the way to start agents says when it fails; HOST stands for the host."""

    def entries(self, processes: int) -> list[HostEntry]:
        """The hosts of a run with this many processes; 0: all hosts that there are."""
        raise AssertionError(f"{type(self).__name__} lists no hosts")

    def unknown(self, entry: HostEntry) -> Failure | None:
        """Why this host cannot be found, as far as that is known before an agent is started there."""
        return None

    @abstractmethod
    def head_address(self, entries: Sequence[HostEntry]) -> str:
        """This machine's address for these hosts."""

    @abstractmethod
    def start(self, entries: Mapping[int, HostEntry], invitation: Invitation) -> dict[int, StartedAgent]:
        """Start an agent on each of these hosts, by number, and hand the invitation over; does not wait for them."""

    def advice(self, entry: HostEntry) -> str:
        """The command that shows a user what is wrong with a host whose agent did not start."""
        return f"podium cluster check --hosts {entry.target}"

    def remedy(self, entry: HostEntry, why: str) -> str:
        """What a user can do where an agent ended with these words."""
        for words, fix in (*_REMEDIES.items(), *self.remedies.items()):
            if re.search(words, why):
                return fix.replace("HOST", entry.target)
        return self.advice(entry)

    def close(self) -> None:
        """Give back what the hosts were got with. May be called again."""


@final
class Command(StartedAgent):
    """An agent, or several, behind a local command, such as `ssh`. Its last lines of output are kept for messages."""

    def __init__(
        self, words: Sequence[str], line: str, env: Mapping[str, str] | None = None, *, keep: int = _KEPT_LINES
    ) -> None:
        """`line` is the command's standard input, which stays open: its end tells an agent that the head is gone.

        `keep`: how many lines of output.
        """
        self._process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the head, which tells the agents
        )
        self._said: deque[str] = deque(maxlen=keep)
        self._last_words: str | None = None
        self._reader = threading.Thread(target=self._read, name="agent-output", daemon=True)
        self._reader.start()
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; `ended` tells why
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip():
                self._said.append(line.strip())

    @property
    def said(self) -> list[str]:
        """The lines of output that are kept."""
        return list(self._said)

    def close_input(self) -> None:
        """Tell the agents that the head is gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def wait(self, limit_s: float) -> bool:
        """Wait for the command's end; returns whether it has ended."""
        try:
            self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def ended(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        if self._last_words is None:  # once: something that the command left behind may hold the pipe
            self._reader.join(_END_S)
            lines = [line for line in self.said if not line.startswith("Warning: Permanently")]
            words = "; ".join(line.removeprefix("podium: ") for line in lines[-3:])
            self._last_words = words or f"it ended with exit code {code} and said nothing"
        return self._last_words

    def end(self, *, at_once: bool = False) -> None:
        self.close_input()
        if not self.wait(0.0 if at_once else _END_S):
            self._process.terminate()
            if not self.wait(_LOST_S if at_once else _END_S):
                self._process.kill()
                self._process.wait(_END_S)
        self._reader.join(_END_S)
        assert self._process.stdout is not None
        if not self._reader.is_alive():  # or something that the command left behind holds the pipe, and this would wait
            self._process.stdout.close()
