"""Checks that all workers have the same data and settings: each computes fingerprints, and all compare them.

A data set cannot be read whole before every run. Its fingerprint is

    length    how many samples there are
    whole     a hash of what lies in memory anyway, where that is small: arrays, targets, the indices of a subset
    samples   a hash of each of up to 64 samples that are spread over the set

Each of those samples is read twice, with torch's, numpy's and Python's generators set to a fixed state before. So
augmentation that draws from them gives the same on all workers. A sample that still differs between the two reads,
since it draws from elsewhere, is left out. All generators are restored afterwards, also those that the data set holds:
training draws the same numbers as without the comparison.

This does not detect a difference in samples that were not read.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from podium.comm.base import Communicator
from podium.comm.broadcast_bytes import share_bytes
from podium.data.base import ArrayDataset, Data, Dataset, MapDataset, read_pair
from podium.engine.generators import seed_generators, undrawn
from podium.errors import ConfigError, DataError, PodiumError

MOST_SAMPLES = 64
FEWEST_SAMPLES = 2
BUDGET_S = 0.5
"""After this time no further sample is read, except for the first `FEWEST_SAMPLES`; workers compare what all read."""
WHOLE_BYTES = 8 << 20
"""Arrays in memory up to this size are hashed whole: about 20 ms."""
_FIXED_SEED = 20_170_706
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")

REMEDY = (
    "every rank must make the same data: give splits, shuffles and synthetic data a fixed seed "
    "(train_test_split(…, random_state=0), torch.Generator().manual_seed(0)), read the same files, and hand over the "
    "whole set: Podium divides it among the workers; a script makes its data before podium.join, since each rank draws "
    "numbers of its own from there on"
)


class Digest(NamedTuple):
    """The fingerprint of a data set."""

    length: int
    whole: int
    """0 where nothing was hashed whole."""
    samples: tuple[int, ...]
    """In the order in which they were read; 0 where two reads of a sample differed."""

    @classmethod
    def of(cls, dataset: Dataset) -> Digest:
        """Reads for about `BUDGET_S`; leaves all generators unchanged."""
        began = time.monotonic()
        found: list[int] = []
        with undrawn(dataset):
            for index in spread(len(dataset), MOST_SAMPLES):
                if len(found) >= FEWEST_SAMPLES and time.monotonic() - began > BUDGET_S:
                    break
                once, again = _sample(dataset, index), _sample(dataset, index)
                found.append(once if once == again else 0)
        return cls(len(dataset), _whole(dataset), tuple(found))

    @classmethod
    def from_plain(cls, plain: Sequence[Any]) -> Digest:
        length, whole, samples = plain
        return cls(int(length), int(whole), tuple(int(each) for each in samples))

    def to_plain(self) -> list[Any]:
        return [self.length, self.whole, list(self.samples)]

    @property
    def compared(self) -> int:
        """Samples that can be compared."""
        return sum(each != 0 for each in self.samples)

    def row(self) -> list[int]:
        """As a fixed number of values, for an exchange."""
        padding = [0] * (MOST_SAMPLES - len(self.samples))
        return [self.length, self.whole, len(self.samples), *self.samples, *padding]

    @classmethod
    def from_row(cls, row: Sequence[int]) -> Digest:
        length, whole, count, *samples = row
        return cls(length, whole, tuple(samples[:count]))

    def difference(self, other: Digest) -> str | None:
        """What differs, as text; None where nothing that can be compared differs."""
        if self.length != other.length:
            return f"{self.length} samples against {other.length}"
        pairs = list(zip(spread(self.length, MOST_SAMPLES), self.samples, other.samples, strict=False))
        both = [(index, a == b) for index, a, b in pairs if a and b]
        unequal = [index for index, equal in both if not equal]
        if unequal:
            first = f"the first of them sample {min(unequal)}"
            return f"{len(unequal)} of {len(both)} samples compared are not the same, {first}"
        if self.whole and other.whole and self.whole != other.whole:
            return f"{len(both)} samples compared are the same, but not the whole arrays or indices they are taken from"
        return None


ROW = len(Digest(0, 0, ()).row())


def spread(length: int, most: int) -> list[int]:
    """Up to `most` indices, spread over a set of this length, so that any first few of them are spread too."""
    found: dict[int, None] = {}
    if length <= most:
        bits = max(1, (length - 1).bit_length())
        candidates = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(1 << bits))
        return [i for i in candidates if i < length]
    bits = (most - 1).bit_length()
    for i in range(1 << bits):
        found[int(f"{i:0{bits}b}"[::-1], 2) * (length - 1) // ((1 << bits) - 1)] = None
    return list(found)[:most]


def compare(comm: Communicator, facts: Mapping[str, Any], digests: Mapping[str, Digest]) -> None:
    """Raise on all workers where one differs in a fact or in its data. Collective; all must pass the same names."""
    if comm.size == 1:
        return
    names = sorted(facts)
    mine = [hash_of(_plain(facts[name])) for name in names] + [n for d in digests.values() for n in d.row()]
    rows = comm.gather_aside(torch.tensor(mine, dtype=torch.int64)).tolist()
    if all(row == rows[0] for row in rows):
        return
    reference = max(range(comm.size), key=lambda i: (rows.count(rows[i]), -i))  # the majority's row, else the first
    for place, row in enumerate(rows):
        unequal = [n for n, a, b in zip(names, row, rows[reference], strict=False) if a != b]
        if unequal:
            raise _unequal_facts(comm, facts, unequal, comm.workers[place], comm.workers[reference])
        for number, what in enumerate(digests):
            start = len(names) + number * ROW
            a, b = (Digest.from_row(each[start : start + ROW]) for each in (row, rows[reference]))
            if said := a.difference(b):
                raise DataError(
                    f"rank {comm.workers[place]} has other {what} than rank {comm.workers[reference]}: {said}; {REMEDY}"
                )


def digests_of(data: Data) -> dict[str, Digest]:
    """Fingerprints of a task's data, by the names that messages use."""
    return {"training data": Digest.of(data.train), "test data": Digest.of(data.test)}


def difference_of(mine: Mapping[str, Digest], saved: Mapping[str, Sequence[Any]]) -> str | None:
    """What differs from digests that were saved as plain values, as text."""
    for what, digest in mine.items():
        if what in saved and (said := digest.difference(Digest.from_plain(saved[what]))):
            return f"other {what}: {said}; {REMEDY}"
    return None


def _unequal_facts(
    comm: Communicator, facts: Mapping[str, Any], names: Sequence[str], rank: int, other: int
) -> PodiumError:
    """The error that names both values of the first few facts. Collective."""
    own = json.dumps({name: _plain(facts[name]) for name in names}).encode()
    theirs, usual = (json.loads(share_bytes(comm, source, own)) for source in (rank, other))
    said = "; ".join(
        f"{name} is {_short(theirs[name])} on rank {rank} and {_short(usual[name])} on rank {other}"
        for name in names[:4]
    )
    return ConfigError(f"all ranks must be started alike, but {said}")


def model_facts(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """What must be the same on all replicas: parameters, buffers, optimizer."""
    parameters = [(name, list(p.shape), str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    buffers = [(name, list(b.shape), str(b.dtype)) for name, b in model.named_buffers()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {
        "the model": [type(model).__name__, parameters, buffers],
        "the optimizer": [type(optimizer).__name__, groups],
    }


def hash_of(value: Any) -> int:
    """63 bits of a hash over a nest of tensors, arrays, numbers and text: types, shapes and bytes; never 0."""
    digest = hashlib.sha1(usedforsecurity=False)
    _feed(digest, value)
    return int.from_bytes(digest.digest()[:8], "big") >> 1 or 1


# Inside.


def _sample(dataset: Dataset, index: int) -> int:
    seed_generators(_FIXED_SEED, cuda=False)
    return hash_of(read_pair(dataset, np.array([index], dtype=np.int64)))


def _whole(dataset: Dataset) -> int:
    """A hash of the arrays that are in memory anyway; 0 where there are none, or they are too large."""
    held: list[Any] = []
    if isinstance(dataset, ArrayDataset):
        held = [dataset.inputs, dataset.targets]
    elif isinstance(dataset, MapDataset):
        items = dataset.items
        held = [
            *(getattr(items, "tensors", None) or ()),
            getattr(items, "indices", None),
            getattr(items, "targets", None),
        ]
    small = [array for array in map(_array, held) if array is not None and array.nbytes <= WHOLE_BYTES]
    return hash_of(small) if small else 0


def _array(held: Any) -> np.ndarray | None:
    """Tensors, arrays and lists of whole numbers as an array; None for anything else."""
    if isinstance(held, Tensor):
        plain = held.device.type == "cpu" and held.layout is torch.strided
        return held.detach().contiguous().view(torch.uint8).numpy() if plain and held.dim() and held.numel() else None
    if isinstance(held, range):
        return np.array([held.start, held.stop, held.step])
    if isinstance(held, list) and len(held) * 8 <= WHOLE_BYTES and all(type(each) is int for each in held):
        return np.array(held)
    return held if isinstance(held, np.ndarray) and held.dtype.kind in "biufc" else None


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        dense = value.detach().cpu()
        dense = (dense.to_dense() if dense.layout is not torch.strided else dense).contiguous()
        digest.update(f"tensor {dense.dtype} {tuple(dense.shape)}:".encode())
        digest.update(dense.reshape(-1).view(torch.uint8).numpy())
    elif isinstance(value, np.ndarray) and value.dtype.kind != "O":
        digest.update(f"array {value.dtype.str} {value.shape}:".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)}:".encode())
        for key in sorted(value, key=repr):
            _feed(digest, [key, value[key]])
    elif isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)}:".encode())
        for each in value:
            _feed(digest, each)
    elif isinstance(value, bytes):
        digest.update(f"bytes {len(value)}:".encode() + value)
    else:
        digest.update(f"{type(value).__name__} {_ADDRESS.sub('', repr(value))};".encode())


def _plain(value: Any) -> Any:
    """The value for JSON; of other types the `repr`, without memory addresses."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return _ADDRESS.sub("", repr(value))


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"
