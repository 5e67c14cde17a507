"""Memory that the processes of one host share, so that a tensor in it is sent as its place and not as its bytes.

A segment is an anonymous file in memory (`memfd`): it has no name to clean up, and is freed when the last process that
uses it ends, killed or not. Other processes open it through `/proc`, which the kernel allows to the same user only. A
segment can neither shrink nor grow, so a process that has mapped it cannot be made to read past its end.
"""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import socket
import struct
import weakref
from bisect import bisect_right
from typing import NamedTuple

import torch
from torch import Tensor

_NAME = "podium-arena"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_PEER_CREDENTIALS = struct.Struct("3i")


class Place(NamedTuple):
    """Where a tensor lies: the owner's file descriptor, the file's inode, and the offset in bytes."""

    file: int
    inode: int
    offset: int


class _Segment(NamedTuple):
    address: int
    nbytes: int
    file: int
    inode: int


class Arena:
    """Segments of this process that other processes of the host can map. Each lives as long as tensors lie in it."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros in a new segment."""
        if numel == 0:  # it needs no memory
            return torch.empty(0, dtype=dtype)
        nbytes = max(numel * dtype.itemsize, mmap.PAGESIZE)
        file = os.memfd_create(_NAME, os.MFD_ALLOW_SEALING | os.MFD_CLOEXEC)
        os.ftruncate(file, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, _SEALS)
        memory = mmap.mmap(file, nbytes)
        tensor = torch.frombuffer(memory, dtype=dtype, count=numel)
        segment = _Segment(tensor.data_ptr(), nbytes, file, os.fstat(file).st_ino)
        # Once its tensors are freed, another segment may get its address, so `locate` must not find the old one.
        weakref.finalize(memory, self._drop, segment).atexit = False
        self._segments = sorted([*self._segments, segment])  # a new list: other threads may be reading the old one
        return tensor

    def _drop(self, segment: _Segment) -> None:
        self._segments = [other for other in self._segments if other is not segment]
        os.close(segment.file)

    def locate(self, tensor: Tensor) -> Place | None:
        """Where other processes find this tensor; None if it is not in the arena."""
        if not tensor.is_cpu or not tensor.is_contiguous() or not self._segments:
            return None
        address, segments = tensor.data_ptr(), self._segments
        at = bisect_right(segments, address, key=lambda segment: segment.address) - 1
        if at < 0 or address + tensor.nbytes > segments[at].address + segments[at].nbytes:
            return None
        return Place(segments[at].file, segments[at].inode, address - segments[at].address)


class Neighbour:
    """The arena of another process of this host, seen from here."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._mapped: dict[tuple[int, int], Tensor] = {}

    def attach(self, place: Place, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor at this place; raises OSError or ValueError where the place is invalid."""
        whole = self._mapped.get((place.file, place.inode))
        if whole is None:
            whole = self._mapped[place.file, place.inode] = self._map(place)
        nbytes = math.prod(shape) * dtype.itemsize
        if place.offset < 0 or place.offset % dtype.itemsize or place.offset + nbytes > whole.numel():
            raise ValueError(f"{nbytes} bytes at {place.offset} are not inside a segment of {whole.numel()}")
        return whole[place.offset : place.offset + nbytes].view(dtype).view(shape)

    def _map(self, place: Place) -> Tensor:
        path = f"/proc/{self._pid}/fd/{place.file}"
        if not os.readlink(path).startswith(f"/memfd:{_NAME}"):
            raise ValueError(f"{path} is no segment")
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            about = os.fstat(file)
            if about.st_ino != place.inode or fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError(f"{path} is another file, or not sealed")
            return torch.frombuffer(mmap.mmap(file, about.st_size), dtype=torch.uint8)
        finally:
            os.close(file)


def neighbour_of(sock: socket.socket) -> Neighbour | None:
    """The process at the other end of a Unix socket, if its memory can be mapped here."""
    if sock.family != socket.AF_UNIX or not hasattr(os, "memfd_create"):
        return None
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
    pid, user, _ = _PEER_CREDENTIALS.unpack(credentials)
    if pid <= 0 or user != os.getuid() or not os.access(f"/proc/{pid}/fd", os.R_OK | os.X_OK):
        return None
    return Neighbour(pid)
