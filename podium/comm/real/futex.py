"""Sleeping on a word of shared memory until another process changes it: Linux's futex, through the C library.

On x86-64 only: there, other cores see stores in their order, so a process that sees the flag also sees the data that
was written before it. Elsewhere this would need a memory fence, which Python does not have.
"""

from __future__ import annotations

import ctypes
import platform
import sys

AVAILABLE = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")
_FUTEX, _WAIT, _WAKE, _ALL = 202, 0, 1, 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None).syscall
_syscall.restype = ctypes.c_long
_NOTHING = ctypes.c_void_p(None)


def sleep_on(address: int, seen: int, seconds: float) -> None:
    """Sleep until the 32-bit word at `address` is no longer `seen`, `wake` is called, or the time is over."""
    time = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    word = ctypes.c_uint32(seen & 0xFFFFFFFF)
    _syscall(_FUTEX, ctypes.c_void_p(address), _WAIT, word, ctypes.byref(time), _NOTHING, 0)


def wake(address: int) -> None:
    """Wake all that sleep on this word."""
    _syscall(_FUTEX, ctypes.c_void_p(address), _WAKE, _ALL, _NOTHING, _NOTHING, 0)
