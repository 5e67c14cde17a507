"""Collectives through `torch.distributed`: the one module that knows c10d.

A group is formed directly from a store, not by `init_process_group`: it can be dropped and formed again in the same
process, which is how survivors of a lost rank continue. gloo does not report which rank it lost, and a group that
failed or timed out is dead for good, so every failure here is a plain `Lost` and the launcher finds the lost rank.

Only this module holds work objects: a neighbour of a dead rank must drop all of them, or the other workers wait for the
whole timeout.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, FileStore, PrefixStore, TCPStore

from podium.comm.real.sockets import remake_folder
from podium.errors import CommError, ConfigError, DeadlineExceeded, Lost

FORMING_S = 5.0
"""Longest attempt to form a group: a member that died meanwhile must not cost the whole deadline."""
NCCL_FORMING_S = 60.0
"""The same for nccl, which looks for links between GPUs first; a lost member that the launcher knows of ends it."""
_POLL_S = 0.02
_SPIN_S = 0.002
"""How long to look for the end of an exchange on GPUs without a pause; torch then looks once a millisecond."""


def file_store(path: Path) -> Any:
    """A store in a file, for ranks that share a file system; it outlives any rank."""
    return FileStore(str(path), -1)


def client_store(host: str, port: int, timeout_s: float, *, is_host: bool, world_size: int) -> Any:
    """A store over TCP, as torchrun sets it up."""
    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore(host, port, world_size, is_host, timeout, wait_for_workers=False, multi_tenant=True)
    except (dist.DistError, RuntimeError) as error:
        what, why = "opened" if is_host else "reached", _first_line(error)
        hint = f"; port {port} is in use, choose another MASTER_PORT" if "EADDRINUSE" in why else ""
        raise CommError(f"the store at {host}:{port} cannot be {what}: {why}{hint}") from error


def named_part(store: Any, name: str) -> Any:
    """The part of a store under this prefix."""
    return PrefixStore(name, store)


def publish(store: Any, key: str, value: str) -> None:
    store.set(key, value)


def look_up(store: Any, key: str, timeout_s: float) -> str:
    """Wait for a published value."""
    try:
        store.wait([key], timedelta(seconds=timeout_s))
        return str(store.get(key).decode())
    except (dist.DistError, RuntimeError) as error:
        raise DeadlineExceeded(f"{key!r} was not published within {timeout_s:g} s") from error


class Group:
    """The workers' process group, generation after generation."""

    def __init__(self, store: Any, *, host: str, deadline_s: float = 60.0, device: torch.device | None = None) -> None:
        """`device`: this worker's, where tensors on a GPU may be exchanged by nccl (`use`)."""
        self.store, self._host, self._deadline_s, self._device = store, host, deadline_s, device
        self.backend = "gloo"
        path = getattr(store, "path", None)
        # Held open, so that a file that replaces it cannot get the same inode.
        self._file = None if path is None else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        # gloo tries five times to reach a member behind a cut link; end before other ranks take this one for hung.
        self._forming_s = min(FORMING_S, deadline_s / 10)
        self._group: Any = None
        self._gpus: Any = None  # the group for tensors on GPUs, where nccl is the backend
        self._interrupted = threading.Event()
        self._stuck: list[Any] = []  # groups of nccl that never came to be: to end them would wait for the missing rank
        self._works: dict[int, Any] = {}
        self._sockets: Mapping[int, int] = {}  # of gloo's connections: file descriptor to inode
        self._dropping = threading.Lock()
        self._issued = 0
        self._alone = False

    def use(self, backend: str) -> None:
        """The backend of the next generation for tensors on GPUs. All members must choose the same."""
        if backend not in ("gloo", "nccl"):
            raise CommError(f"backend must be 'gloo' or 'nccl', got {backend!r}")
        self.backend = backend

    def form(self, generation: int, index: int, size: int) -> None:
        """Become member `index` of `size`; all members call this with the same generation."""
        self.drop()
        self._interrupted.clear()
        self._alone = size == 1
        if self._alone:
            return
        self._renew_store()
        store = self._part(generation)
        try:
            self._group = self._make_gloo(store, index, size)
        except (dist.DistError, RuntimeError) as error:
            raise Lost(
                f"generation {generation} did not form within {self._forming_s:g} s: {_first_line(error)}"
            ) from error
        if self.backend == "nccl":  # for tensors on GPUs only; gloo serves the rest, and has found all members alive
            self._gpus = self._make_nccl(generation, PrefixStore("gpus", store), index, size)

    def _renew_store(self) -> None:
        """Make the store's file again where it was removed: the store opens it by name for every access.

        Its content is not needed, since every generation begins with an empty prefix.
        """
        if self._file is None:
            return
        path = Path(self.store.path)
        try:
            if path.exists() and os.path.samestat(path.stat(), os.fstat(self._file)):
                return
            remake_folder(path.parent)
            self.store = file_store(path)
            os.close(self._file)
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except (ConfigError, OSError) as error:
            raise CommError(f"{path}, where workers meet, was removed and cannot be made again: {error}") from error

    def drop(self) -> None:
        """Drop every exchange and the group; blocks until exchanges in flight have ended."""
        with self._dropping:
            self._sockets = {}
            gpus, self._gpus = self._gpus, None
        if gpus is not None:
            gpus.abort()
        self._works.clear()
        self._group = None

    def interrupt(self) -> None:
        """Fail the exchanges in flight, at once; for any thread, while another waits for them.

        A host that vanished sends no reset, and gloo would wait for its whole deadline: its `abort` does not end a wait
        (torch 2.13). Shutting its connections down does, as the end of a process does.
        """
        self._interrupted.set()
        with self._dropping:
            for file, inode in self._sockets.items():
                _shut_down(file, inode)
            if self._gpus is not None:
                self._gpus.abort()

    def all_reduce(self, tensor: Tensor) -> int:
        return self._issue("allreduce", [tensor], dist.AllreduceOptions())

    def broadcast(self, tensor: Tensor, source_index: int) -> int:
        options = dist.BroadcastOptions()
        options.rootRank = source_index
        return self._issue("broadcast", [tensor], options)

    def all_gather(self, tensor: Tensor, into: Tensor) -> int:
        if self._alone:
            into.copy_(tensor)
            return self.all_reduce(tensor)
        return self._issue("_allgather_base", into, tensor, AllgatherOptions())

    def tell_all(self, generation: int, index: int, size: int, word: str) -> list[str]:
        """Every member's word, in order of their indices; raises Lost when one does not publish it in time."""
        store = self._part(generation)
        publish(store, f"word-{index}", word)
        try:
            return [look_up(store, f"word-{other}", self._forming_s) for other in range(size)]
        except DeadlineExceeded as error:
            raise Lost(f"generation {generation}: {error}") from error

    def wait(self, key: int) -> None:
        """Wait until this exchange is done; raises Lost when it failed."""
        failure = self._try(key)
        if failure is not None:  # raised here, where no stack frame holds the work object, which keeps sockets open
            raise Lost(f"a collective failed: {failure}")

    def _try(self, key: int) -> str | None:
        try:
            work, on_gpu = self._works.pop(key, (None, False))
            if on_gpu:
                _spin(work)
            if work is not None:
                work.wait()
        except RuntimeError as error:
            return _first_line(error)
        # torch may take an exchange of nccl that was cut off for one that is done.
        return "it was cut off, since a worker was lost" if on_gpu and self._interrupted.is_set() else None

    def is_done(self, key: int) -> bool:
        work, _ = self._works.get(key, (None, False))
        return work is None or bool(work.is_completed())

    def _part(self, generation: int) -> Any:
        return PrefixStore(f"generation-{generation}", self.store)

    def _issue(self, what: str, *arguments: Any) -> int:
        self._issued += 1
        if self._alone:  # there is nothing to do
            return self._issued
        if self._group is None:
            raise Lost("a collective could not be issued: there is no group")
        (tensor,) = arguments[0] if isinstance(arguments[0], list) else arguments[:1]
        on_gpu = self._gpus is not None and tensor.is_cuda
        group = self._gpus if on_gpu else self._group
        try:
            self._works[self._issued] = getattr(group, what)(*arguments), on_gpu
        except RuntimeError as error:
            raise Lost(f"a collective could not be issued: {_first_line(error)}") from None
        return self._issued

    def _make_nccl(self, generation: int, store: Any, index: int, size: int) -> Any:
        """A group whose members are connected: nccl would otherwise wait for a missing one without a limit."""
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._deadline_s)
        group = dist.ProcessGroupNCCL(store, index, size, options)
        failure: list[str] = []
        connecting = threading.Thread(target=self._meet, args=(group, failure), name="nccl", daemon=True)
        limit_s = min(NCCL_FORMING_S, self._deadline_s)
        until = time.monotonic() + limit_s
        connecting.start()
        while connecting.is_alive() and time.monotonic() < until and not self._interrupted.is_set():
            connecting.join(_POLL_S)
        if connecting.is_alive():
            self._stuck.append(group)
            why = "a worker was lost" if self._interrupted.is_set() else f"nccl did not connect within {limit_s:g} s"
            raise Lost(f"generation {generation} did not form: {why}")
        if failure:
            raise Lost(f"generation {generation} did not form: {failure[0]}")
        return group

    def _meet(self, group: Any, failure: list[str]) -> None:
        try:
            group.allreduce([torch.zeros(1, device=self._device)], dist.AllreduceOptions()).wait()
        except RuntimeError as error:
            failure.append(_first_line(error))

    def _make_gloo(self, store: Any, index: int, size: int) -> Any:
        forming, running = timedelta(seconds=self._forming_s), timedelta(seconds=self._deadline_s)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs lack it
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        options._threads = 2
        options._timeout = forming
        before = _sockets()
        group = dist.ProcessGroupGloo(store, index, size, options)
        group.set_timeout(running)
        self._sockets = {file: inode for file, inode in _sockets().items() if before.get(file) != inode}
        return group


def _sockets() -> dict[int, int]:
    """This process's sockets: file descriptor to inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed since it was listed
            facts = os.stat(int(name))
            if stat.S_ISSOCK(facts.st_mode):
                found[int(name)] = facts.st_ino
    return found


def _shut_down(file: int, inode: int) -> None:
    """Shut a TCP connection down, unless this file descriptor is another's by now."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(file)) as sock:  # or it is closed already
        if os.fstat(sock.fileno()).st_ino == inode and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.shutdown(socket.SHUT_RDWR)


def _spin(work: Any) -> None:
    until = time.monotonic() + _SPIN_S
    while not work.is_completed() and time.monotonic() < until:
        pass


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
