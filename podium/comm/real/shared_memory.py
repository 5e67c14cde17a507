"""Collectives among the processes of one host, in memory that they share: nothing is sent.

Every worker has a status page: numbers that all other workers can read. To sum a tensor, each worker writes on its page
where its tensor lies (`arrived`), waits for all, sums *its* part of the elements over all workers in rank order, and
writes the sum into every worker's tensor; then it writes `done`, and waits for all again. A part is processed in blocks
that stay in the cache, so memory is read once and written once: 2 n bytes per worker, whatever their number.

Sums run in rank order and one worker sums each element, so all hold the same bits, those of the memory and virtual
worlds.

Exchanges run in order, on the thread that waits for them, or on their own thread where the host has cores to spare. A
worker that is gone is noticed by its process's end; one that gave up writes so on its page.

Tensors of a GPU that all workers share are summed there, each worker its part, through the driver's own sharing of
memory; where that is not available they are copied to shared memory and back.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from podium.comm.base import Handle
from podium.comm.real import futex
from podium.comm.real.arena import Arena, Neighbour, Place
from podium.comm.real.cuda_ipc import OpenedHandles, SharedHandles, identity
from podium.errors import CommError, Lost

_ARRIVED, _DONE, _ABANDONED, _FILE, _INODE, _OFFSET, _NUMEL, _DTYPE, _KIND, _TEXT = range(10)
_WORDS = 512  # a page; from `_TEXT` on, the length of a text and its bytes
_WORD_BYTES = 8
_KINDS = ("sum", "gather", "copy")
_BLOCK_BYTES = 256 << 10
_ALIGN = 64  # elements: parts begin at cache lines
_SPINS = 400
_SLICE_S = 0.05  # how long to sleep before checking whether a peer is gone
_STAGE_BYTES = 1 << 20
_SMALL_BYTES = 64 << 10  # too small to wake the thread for
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
)


class Address(NamedTuple):
    """Where a worker's status page is, for the other workers."""

    pid: int
    place: Place

    def to_json(self) -> list[int]:
        return [self.pid, *self.place]

    @classmethod
    def from_json(cls, numbers: Sequence[int]) -> Address:
        return cls(numbers[0], Place(*numbers[1:]))


@final
class SharedMemoryHandle(Handle):
    """An exchange that was issued."""

    def __init__(
        self, kind: Literal["sum", "gather", "copy"], tensor: Tensor, into: Tensor | None = None, source: int = 0
    ) -> None:
        self.kind, self.tensor, self.into, self.source = kind, tensor.detach(), into, source
        self.finished = False
        self.error: CommError | None = None

    @property
    def done(self) -> bool:
        return self.finished or self.error is not None


class _Page:
    """One worker's status page, mapped into this process."""

    def __init__(self, tensor: Tensor) -> None:
        self._bytes: memoryview = tensor.numpy().data.cast("B")
        self.words = self._bytes.cast("q")
        self.address = tensor.data_ptr()

    def sleep(self, word: int, seen: int, seconds: float) -> None:
        futex.sleep_on(self.address + word * _WORD_BYTES, seen, seconds)

    @property
    def text(self) -> str:
        start = (_TEXT + 1) * _WORD_BYTES
        return bytes(self._bytes[start : start + self.words[_TEXT]]).decode()

    @text.setter
    def text(self, text: str) -> None:
        data, start = text.encode(), (_TEXT + 1) * _WORD_BYTES
        if start + len(data) > len(self._bytes):
            raise ValueError(f"a status page has room for {len(self._bytes) - start} bytes of text, got {len(data)}")
        self._bytes[start : start + len(data)] = data
        self.words[_TEXT] = len(data)

    def write(self, word: int, value: int) -> None:
        """Write, and wake the processes that wait for it."""
        self.words[word] = value
        futex.wake(self.address + word * _WORD_BYTES)


class _Peer:
    """Another worker of this host."""

    def __init__(self, rank: int, address: Address) -> None:
        self.rank = rank
        self.arena = Neighbour(address.pid)
        self.page = _Page(self.arena.attach(address.place, torch.int64, (_WORDS,)))
        self.opened: OpenedHandles | None = None
        self._process = os.pidfd_open(address.pid)

    @property
    def is_gone(self) -> bool:
        return bool(select.select([self._process], [], [], 0)[0])

    def close(self) -> None:
        os.close(self._process)

    def tensor(self, mine: Tensor, kind: int) -> Tensor:
        """The tensor that it contributes to the present collective."""
        words, dtype, numel = self.page.words, mine.dtype, mine.numel()
        if (words[_NUMEL], words[_DTYPE], words[_KIND]) != (numel, DTYPES.index(dtype), kind):
            theirs = f"{_KINDS[words[_KIND]]} of {words[_NUMEL]} elements of {DTYPES[words[_DTYPE]]}"
            ours = f"{_KINDS[kind]} of {numel} elements of {dtype}"
            raise CommError(f"rank {self.rank} does a {theirs} where we do a {ours}")
        if numel == 0:
            return torch.empty_like(mine)
        if mine.is_cuda:
            self.opened = self.opened or OpenedHandles(mine.device)
            return self.opened.tensor(self.page.text, words[_OFFSET], dtype, numel)
        place = Place(words[_FILE], words[_INODE], words[_OFFSET])
        try:
            return self.arena.attach(place, dtype, (numel,))
        except OSError as error:  # its files are closed before the process counts as ended
            raise Lost(f"rank {self.rank} is gone, or its memory is: {error}") from None


class SharedMemoryGroup:
    """One worker's part in its host's collectives, for one generation."""

    def __init__(self, arena: Arena, deadline_s: float, lasting: Collection[int] = ()) -> None:
        """`lasting`: addresses of allocations on a GPU that last as long as the run."""
        self._arena, self._deadline_s, self.lasting = arena, deadline_s, lasting
        self._gpu_stage: Tensor | None = None
        page = arena.allocate(_WORDS, torch.int64)
        place = arena.locate(page)
        assert place is not None
        self._page = _Page(page)
        self.address = Address(os.getpid(), place)
        self._stage = torch.empty(0, dtype=torch.uint8)
        self._described = SharedHandles()
        self._one_gpu: bool | None = None  # whether all workers' tensors lie on one GPU and can be shared there
        self._peers: list[_Peer] = []
        self._index = self._spins = 0
        self._turn = threading.Lock()  # held by the thread that runs exchanges
        self._queue: deque[SharedMemoryHandle] = deque()
        self._number = 0
        self._error: str | None = None
        self._work = threading.Semaphore(0)
        self._engine: threading.Thread | None = None

    def meet(self, rank: int, others: dict[int, Address]) -> None:
        """Map the other workers' status pages; raises OSError or ValueError where one cannot be reached."""
        for other in sorted(others):
            self._peers.append(_Peer(other, others[other]))
        self._index = sum(other < rank for other in others)
        cores = len(os.sched_getaffinity(0))
        self._spins = _SPINS if cores > len(others) else 0
        if cores > len(others) + 1:
            self._engine = threading.Thread(target=self._run, name=f"podium-shared-{rank}", daemon=True)
            self._engine.start()

    # Issuing and waiting.

    def all_reduce(self, tensor: Tensor) -> SharedMemoryHandle:
        return self._issue(SharedMemoryHandle("sum", tensor))

    def broadcast(self, tensor: Tensor, source: int) -> SharedMemoryHandle:
        """`source`: index among the members."""
        return self._issue(SharedMemoryHandle("copy", tensor, source=source))

    def all_gather(self, tensor: Tensor, into: Tensor) -> SharedMemoryHandle:
        return self._issue(SharedMemoryHandle("gather", tensor, into))

    def _issue(self, handle: SharedMemoryHandle) -> SharedMemoryHandle:
        self._queue.append(handle)
        if self._engine is not None and handle.tensor.nbytes > _SMALL_BYTES:
            self._work.release()
        return handle

    def wait(self, handle: SharedMemoryHandle, deadline_s: float) -> None:
        """Run exchanges until this one is done; raises `Lost` when it failed."""
        until = time.monotonic() + deadline_s
        while not handle.done:
            left = until - time.monotonic()
            if left <= 0 or not self._turn.acquire(timeout=left):
                self._fail(f"a collective did not end in {deadline_s:g} s")
                handle.error = Lost(self._error or "")
                break
            try:
                self._next(until)
            finally:
                self._turn.release()
        if handle.error is not None:
            raise handle.error

    def _run(self) -> None:
        """The group's own thread."""
        while self._error is None:
            self._work.acquire()
            with self._turn:
                if self._queue:
                    self._next(time.monotonic() + self._deadline_s)

    def _next(self, until: float) -> None:
        """Run the oldest exchange; called by the thread that holds the turn."""
        if not self._queue:
            return
        handle = self._queue.popleft()
        if self._error is None:
            try:
                self._carry_out(handle, until)
                handle.finished = True
                return
            except Lost as error:
                self._fail(f"a collective failed: {error}")
            except (CommError, OSError, ValueError, RuntimeError) as error:  # not a loss: it would fail again
                self._fail(f"a collective failed: {error}")
                handle.error = CommError(f"a collective cannot be carried out: {error}")
                return
            except BaseException as error:  # a thread that waits for it must not wait for ever
                self._fail(f"a collective was broken off: {type(error).__name__}")
                handle.error = CommError(self._error or "")
                raise
        handle.error = Lost(self._error or "")

    def _fail(self, why: str) -> None:
        self._error = self._error or why
        self._page.write(_ABANDONED, 1)
        futex.wake(self._page.address + _ARRIVED * _WORD_BYTES)
        futex.wake(self._page.address + _DONE * _WORD_BYTES)

    def close(self) -> None:
        """Fail what is under way, and notify the other workers."""
        self._fail("the group was dropped")
        self._work.release()
        with contextlib.suppress(IndexError):
            while True:
                self._queue.popleft().error = Lost(self._error or "")
        with self._turn:  # no thread may still use a peer that is closed
            for peer in self._peers:
                peer.close()
            self._peers = []

    # Carrying out.

    def _carry_out(self, handle: SharedMemoryHandle, until: float) -> None:
        if handle.tensor.is_cuda and self._one_gpu is None:
            self._agree_on_gpu(handle.tensor, until)
        self._number += 1
        self._page.words[_KIND] = _KINDS.index(handle.kind)
        mine = self._put_up(handle.tensor)
        self._page.write(_ARRIVED, self._number)
        self._await(_ARRIVED, until)
        tensors = [peer.tensor(mine, _KINDS.index(handle.kind)) for peer in self._peers]
        tensors.insert(self._index, mine)
        if handle.kind == "sum":
            _add_up(tensors, self._index)
        elif handle.kind == "copy":
            if self._index != handle.source:
                mine.copy_(tensors[handle.source])
        else:
            assert handle.into is not None
            for row, theirs in zip(handle.into.view(len(tensors), mine.numel()), tensors, strict=True):
                row.copy_(theirs)
        if handle.tensor.is_cuda:
            torch.cuda.synchronize(handle.tensor.device)
        self._page.write(_DONE, self._number)
        self._await(_DONE, until)
        if handle.into is None and mine.data_ptr() != handle.tensor.data_ptr():
            handle.tensor.copy_(mine.view(handle.tensor.shape))

    def _agree_on_gpu(self, tensor: Tensor, until: float) -> None:
        """Find out whether all workers are on one GPU whose memory can be shared. Collective."""
        try:
            self._described.describe(tensor)
            self._page.text = identity(tensor.device)
        except RuntimeError:
            self._page.text = f"none of rank {self._index}"
        self._number += 1
        self._page.write(_ARRIVED, self._number)
        self._await(_ARRIVED, until)
        self._one_gpu = all(peer.page.text == self._page.text for peer in self._peers)
        self._page.write(_DONE, self._number)
        self._await(_DONE, until)

    def _put_up(self, tensor: Tensor) -> Tensor:
        """Publish where the other workers find the tensor; copy it to shared memory where it is not there."""
        words, mine = self._page.words, tensor.reshape(-1)
        words[_NUMEL], words[_DTYPE] = mine.numel(), _dtype_code(mine.dtype)
        if mine.is_cuda and self._one_gpu:
            if mine.untyped_storage().data_ptr() not in self.lasting:
                mine = self._staged_on_gpu(mine)
            torch.cuda.synchronize(mine.device)
            self._page.text = self._described.describe(mine)
            words[_OFFSET] = int(mine.storage_offset())
            return mine
        place = self._arena.locate(mine)
        if place is None:
            mine = self._staged(mine)
            place = self._arena.locate(mine)
            assert place is not None or tensor.numel() == 0
        words[_FILE], words[_INODE], words[_OFFSET] = place or (0, 0, 0)
        return mine

    def _staged(self, flat: Tensor) -> Tensor:
        if flat.nbytes > self._stage.numel():
            self._stage = self._arena.allocate(max(_STAGE_BYTES, 1 << flat.nbytes.bit_length()), torch.uint8)
        staged = self._stage[: flat.nbytes].view(flat.dtype)
        return staged.copy_(flat)

    def _staged_on_gpu(self, flat: Tensor) -> Tensor:
        """A copy in memory that stays allocated: peers open an allocation once and keep it open."""
        if self._gpu_stage is None or flat.nbytes > self._gpu_stage.numel():
            nbytes = max(_STAGE_BYTES, 1 << flat.nbytes.bit_length())
            self._gpu_stage = torch.empty(nbytes, dtype=torch.uint8, device=flat.device)
        return self._gpu_stage[: flat.nbytes].view(flat.dtype).copy_(flat)

    def _await(self, word: int, until: float) -> None:
        """Wait until this word of all other workers has reached our number."""
        number = self._number
        for peer in self._peers:
            words = peer.page.words
            for _ in range(self._spins):
                if words[word] >= number:
                    break
            while (seen := words[word]) < number:
                if self._error is not None:
                    raise Lost(self._error)
                if words[_ABANDONED]:
                    raise Lost(f"rank {peer.rank} gave up")
                left = until - time.monotonic()
                if left <= 0:
                    raise Lost(f"rank {peer.rank} did not come in time")
                peer.page.sleep(word, seen, min(_SLICE_S, left))
                if peer.is_gone and words[word] < number:
                    raise Lost(f"rank {peer.rank} is gone")


def _add_up(tensors: Sequence[Tensor], index: int) -> None:
    """Sum our part of the elements, and write the sum into every tensor."""
    first, size = tensors[0], len(tensors)
    numel = first.numel()
    block = max(1, numel) if first.is_cuda else _BLOCK_BYTES // first.element_size()
    units = -(-numel // _ALIGN)
    start, stop = units * index // size * _ALIGN, min(numel, units * (index + 1) // size * _ALIGN)
    for a in range(start, stop, block):
        b = min(a + block, stop)
        parts = [tensor[a:b] for tensor in tensors]
        total = torch.add(parts[0], parts[1], out=parts[0])
        for part in parts[2:]:
            total.add_(part)
        for part in parts[1:]:
            part.copy_(total)


def _dtype_code(dtype: torch.dtype) -> int:
    if dtype not in DTYPES:
        raise CommError(f"dtype must be one of {', '.join(map(str, DTYPES))}, got {dtype}")
    return DTYPES.index(dtype)


def can_share() -> bool:
    """Whether this machine supports it."""
    return futex.AVAILABLE and hasattr(os, "memfd_create") and hasattr(os, "pidfd_open")
