"""A contender's processes, forked from a fork server that has torch loaded; requests and answers go through pipes.

Between requests they are stopped with SIGSTOP: torch RPC's shared-memory transport polls without end, and a contender
that is not measured must not take processor time from the others.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from podium.errors import RankFailed
from podium.lab.bench.peers.work import DEADLINE_S, Contender
from podium.launch.forking import fork_server, nullified_main

Member = Callable[[Connection], None]
"""The main function of a process; it is pickled, so it is a module-level function or a `partial` of one."""

_PR_SET_PDEATHSIG = 1
_END_S = 5.0


class Team:
    """The processes of one contender, from the side of the bench."""

    def __init__(self, who: str, members: Sequence[Member]) -> None:
        """Start all processes; returns when each has reported that it is ready."""
        self.who = who
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        context = fork_server()
        try:
            for member in members:
                mine, theirs = context.Pipe()
                process = context.Process(target=_run, args=(member, theirs), daemon=True)
                with nullified_main():
                    process.start()
                theirs.close()
                self._pipes.append(mine)
                self._processes.append(process)
            self._answers(range(len(members)))
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.end()
            raise

    def ask(self, what: str, *details: Any, members: Sequence[int]) -> list[Any]:
        """One answer from each of these members, which work at the same time."""
        with self._awake():
            try:
                for n in members:
                    self._pipes[n].send((what, *details))
            except OSError as error:
                raise RankFailed(f"bench: a process of {self.who} is gone: {error}") from error
            return self._answers(members)

    def end(self) -> None:
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.close()
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            process.kill()
            process.join(timeout=_END_S)

    def _answers(self, members: Sequence[int]) -> list[Any]:
        deadline, answers = time.monotonic() + DEADLINE_S, []
        for n in members:
            try:
                if not self._pipes[n].poll(max(0.0, deadline - time.monotonic())):
                    raise RankFailed(f"bench: {self.who} gave no answer in {DEADLINE_S:g} s")
                error, answer = self._pipes[n].recv()
            except (EOFError, OSError) as gone:
                raise RankFailed(f"bench: process {n} of {self.who} ended without an answer") from gone
            if error is not None:
                raise RankFailed(f"bench: process {n} of {self.who} failed: {error}")
            answers.append(answer)
        return answers

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.exitcode is None:  # after that its pid may be reused
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)


class TeamContender(Contender):
    """A contender whose first `workers` members make round trips."""

    def __init__(self, who: str, members: Sequence[Member], workers: int) -> None:
        self.team, self.workers = Team(who, members), range(workers)

    def measure(self, variant: str, seconds: float) -> float:
        took = self.team.ask("round", variant, seconds, members=self.workers)
        return float(sum(count / elapsed for count, elapsed in took))

    def end(self) -> None:
        self.team.end()


def answer(pipe: Connection, answers: Mapping[str, Callable[..., Any]]) -> None:
    """Report that this process is ready, then answer requests until the pipe closes."""
    pipe.send((None, None))
    while True:
        try:
            what, *details = pipe.recv()
        except EOFError:
            return
        pipe.send((None, answers[what](*details)))


def _run(member: Member, pipe: Connection) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a stopped process would not see its pipe close
    torch.set_num_threads(1)
    try:
        member(pipe)
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send((f"{error}\n{traceback.format_exc()}", None))
        os._exit(1)  # exchanges under way may hold threads for as long as their deadline
