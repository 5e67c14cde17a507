"""What a data set may hand over: pairs. Anything else is refused, never taken apart."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from podium.data.base import ArrayDataset, Dataset, MapDataset, as_dataset, read_pair
from podium.errors import DataError

X, Y = torch.arange(12.0).view(6, 2), torch.arange(6)
Pair, Triple = namedtuple("Pair", "x y"), namedtuple("Triple", "x y z")
TWO = np.array([0, 1])

REFUSED: dict[str, Any] = {
    "dicts of two": [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)],
    "dicts of three": [{"x": x, "y": y, "z": y} for x, y in zip(X, Y, strict=True)],
    "single tensors, two of which look like a pair": X,
    "single arrays": X.numpy(),
    "single numbers": list(range(6)),
    "texts of two letters": ["ab", "cd", "ef"],
    "tuples of one": TensorDataset(X),
    "tuples of three": TensorDataset(X, Y, Y),
    "named tuples of three": [Triple(x, y, y) for x, y in zip(X, Y, strict=True)],
    "sets": [{1, 2}, {3, 4}],
}


@pytest.mark.parametrize("what", REFUSED)
def test_samples_that_are_no_pairs_are_refused(what: str) -> None:
    with pytest.raises(DataError, match=r"sample 0 must be a pair \(inputs, target\), got a"):
        read_pair(as_dataset(REFUSED[what]), TWO)


NO_DATA: dict[str, Any] = {
    "a mapping of columns": {"x": X, "y": Y},
    "a tuple of samples": ((X[0], Y[0]), (X[1], Y[1])),
    "a pair of lists": (X.tolist(), Y.tolist()),
    "three arrays": (X, Y, Y),
    "text": "ab",
    "an iterator": iter([(X[0], Y[0])]),
}


@pytest.mark.parametrize("what", NO_DATA)
def test_what_holds_no_samples_by_index_is_refused(what: str) -> None:
    with pytest.raises(DataError, match="data must be a Dataset, a pair of arrays"):
        as_dataset(NO_DATA[what])


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return zip(X, Y, strict=True)


class StreamOfKnownLength(Stream):
    def __len__(self) -> int:
        return len(X)


@pytest.mark.parametrize("stream", [Stream, StreamOfKnownLength])
def test_a_stream_is_refused_and_told_why(stream: type[Stream]) -> None:
    with pytest.raises(DataError, match="which an IterableDataset does not support"):
        as_dataset(stream())


def test_a_loader_is_refused_with_the_remedy() -> None:
    with pytest.raises(DataError, match="pass the DataLoader's data set instead"):
        as_dataset(DataLoader(TensorDataset(X, Y), batch_size=2))


def test_a_data_set_of_ones_own_must_gather_two_things() -> None:
    class Odd(Dataset):
        def __len__(self) -> int:
            return 6

        def gather(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Any, Any]:
            return {"x": X[indices], "y": Y[indices]}  # type: ignore[return-value]

    with pytest.raises(DataError, match=r"Odd.gather must return \(inputs, targets\), got a dict with keys 'x', 'y'"):
        read_pair(Odd(), TWO)


@pytest.mark.parametrize("make", [tuple, list, Pair._make])
def test_pairs_of_any_kind_are_carried(make: Any) -> None:
    samples = [make([x, y]) for x, y in zip(X, Y, strict=True)]
    inputs, targets = read_pair(MapDataset(samples), TWO)
    assert torch.equal(inputs, X[:2]) and torch.equal(targets, Y[:2])


def test_inputs_and_targets_may_be_nests() -> None:
    samples = [({"x": x, "twice": (x, x)}, [y, y]) for x, y in zip(X, Y, strict=True)]
    inputs, targets = read_pair(MapDataset(samples), TWO)
    assert torch.equal(inputs["twice"][1], X[:2]) and torch.equal(targets[0], Y[:2])


def test_arrays_are_carried_as_before() -> None:
    assert isinstance(as_dataset((X, Y.numpy())), ArrayDataset)
