"""Columns of integers that need not fit into memory: append, then sort or compute percentiles.

A day of four workers leaves tens of millions of records. These tables store a few numbers per record, in a temporary
file once there are many, so that the launcher's memory does not grow with the run.
"""

from __future__ import annotations

import heapq
import os
import tempfile
import weakref
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from podium.errors import RecordError

CHUNK_ROWS = 1 << 15
"""Rows that are kept in memory before they are sorted and written to the file."""
_BLOCK_ROWS = 1 << 10
_FEW = 1 << 20
"""Up to this many numbers are sorted in memory."""

Row = tuple[int, ...]


class Table:
    """Rows of `width` integers, which can be read repeatedly in order of their first `keys` columns."""

    def __init__(self, width: int, *, keys: int = 1, scratch: Path | None = None) -> None:
        """`scratch`: the folder for the unnamed temporary file; the system's own when not given."""
        self.width, self._keys, self._scratch = width, keys, scratch
        self._buffer = array("q")
        self._file: _Scratch | None = None
        self._runs: list[_Run] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, row: Sequence[int]) -> None:
        self._buffer.extend(row)
        self._count += 1
        if len(self._buffer) >= CHUNK_ROWS * self.width:
            self._flush()

    def sorted(self) -> Iterator[Row]:
        """Rows by their keys; rows with equal keys in the order in which they were appended."""
        if self._file is None:
            yield from map(tuple, self._sorted_buffer().tolist())
            return
        self._flush()
        waiting = sorted(self._runs, key=lambda run: (run.first, run.number), reverse=True)
        heap: list[tuple[Row, int, Row, Iterator[Row]]] = []
        while heap or waiting:  # only runs that overlap are open at the same time
            while waiting and (not heap or waiting[-1].first <= heap[0][0]):
                run = waiting.pop()
                rows = self._read(run)
                row = next(rows)
                heapq.heappush(heap, (row[: self._keys], run.number, row, rows))
            _, number, row, rows = heap[0]
            yield row
            following = next(rows, None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (following[: self._keys], number, following, rows))

    def _sorted_buffer(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        rows = np.array(self._buffer, dtype=np.int64).reshape(-1, self.width)
        return rows[np.lexsort(rows[:, : self._keys].T[::-1])]  # stable

    def _flush(self) -> None:
        if not self._buffer:
            return
        if self._file is None:
            self._file = _Scratch(self._scratch)
        rows = self._sorted_buffer()
        first = tuple(rows[0, : self._keys].tolist())
        self._runs.append(_Run(len(self._runs), self._file.size, len(rows), first))
        self._file.append(rows.tobytes())
        del self._buffer[:]

    def _read(self, run: _Run) -> Iterator[Row]:
        assert self._file is not None
        size = self.width * 8
        for start in range(0, run.rows, _BLOCK_ROWS):
            count = min(_BLOCK_ROWS, run.rows - start)
            data = self._file.read(count * size, run.offset + start * size)
            yield from map(tuple, np.frombuffer(data, np.int64).reshape(-1, self.width).tolist())


class _Scratch:
    """An unnamed temporary file, deleted with this object."""

    def __init__(self, folder: Path | None) -> None:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                self._number = os.dup(file.fileno())
        except OSError as error:
            raise RecordError(f"no temporary file can be made in {folder or 'the system folder'}: {error}") from error
        weakref.finalize(self, os.close, self._number)
        self.size = 0

    def append(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                written = os.pwrite(self._number, left, self.size)
                left, self.size = left[written:], self.size + written
        except OSError as error:
            raise RecordError(f"a temporary file for records cannot be written: {error}") from error

    def read(self, size: int, offset: int) -> bytes:
        return os.pread(self._number, size, offset)


class _Run(NamedTuple):
    """A sorted run of rows in a table's file."""

    number: int
    offset: int
    rows: int
    first: Row


class Column:
    """Integers with percentiles exactly as numpy computes them."""

    def __init__(self, scratch: Path | None = None) -> None:
        self._scratch = scratch
        self._buffer = array("q")
        self._file: _Scratch | None = None
        self._count = 0
        self.total = 0

    def __len__(self) -> int:
        return self._count

    def append(self, value: int) -> None:
        self._buffer.append(value)
        self._count += 1
        self.total += value
        if len(self._buffer) >= CHUNK_ROWS:
            if self._file is None:
                self._file = _Scratch(self._scratch)
            self._file.append(self._buffer.tobytes())
            del self._buffer[:]

    def median(self) -> float:
        """0 if there are no numbers, as `quantile`."""
        if not self._count:
            return 0.0
        return float(np.median(self._ranked((self._count - 1) // 2, self._count // 2)))

    def quantile(self, part: float) -> float:
        """By linear interpolation."""
        if not self._count:
            return 0.0
        place = part * (self._count - 1)
        below = int(place)
        return float(np.quantile(self._ranked(below, min(below + 1, self._count - 1)), place - below))

    def _ranked(self, *ranks: int) -> list[int]:
        """The numbers at these places of the sorted column."""
        return [self._at(rank) for rank in ranks]

    def _at(self, rank: int) -> int:
        if self._count <= _FEW:
            return int(np.partition(np.concatenate(list(self._parts())), rank)[rank])
        low, high = self._ends()
        while low < high:  # histogram the range, then narrow it to the bin with the wanted rank
            width = max(1, -(-(high - low + 1) // _BLOCK_ROWS))
            counts = np.zeros(_BLOCK_ROWS, dtype=np.int64)
            below = 0
            for part in self._parts():
                below += int((part < low).sum())
                some = part[(part >= low) & (part <= high)]
                counts += np.bincount((some - low) // width, minlength=_BLOCK_ROWS)
            chosen = int(np.searchsorted(below + np.cumsum(counts), rank, side="right"))
            low, high = low + chosen * width, min(high, low + (chosen + 1) * width - 1)
        return low

    def _ends(self) -> tuple[int, int]:
        return min(int(part.min()) for part in self._parts()), max(int(part.max()) for part in self._parts())

    def _parts(self) -> Iterator[np.ndarray[Any, np.dtype[np.int64]]]:
        if self._file is not None:
            size = self._count - len(self._buffer)
            for start in range(0, size, CHUNK_ROWS):
                count = min(CHUNK_ROWS, size - start)
                yield np.frombuffer(self._file.read(count * 8, start * 8), np.int64)
        if self._buffer:
            yield np.array(self._buffer, dtype=np.int64)
