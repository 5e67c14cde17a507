"""Folds: every kind splits as it says, and what would mix training and validation is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from podium.errors import ConfigError
from podium.sweeps.search.folds import FOLDS, FoldSpec, default_kind, make_folds, read_folds

CLASSES = np.repeat(np.arange(4), (40, 30, 20, 10))
GROUPS = np.arange(100) // 4


def groups_for(kind: str) -> np.ndarray | None:
    return GROUPS if kind == "group" else None


@pytest.mark.parametrize("kind", FOLDS)
def test_every_kind_gives_folds_that_do_not_overlap(kind: str) -> None:
    folds = make_folds(kind, CLASSES, 5, seed=0, groups=groups_for(kind))
    assert len(folds) == 5
    for train, valid in folds:
        assert not np.intersect1d(train, valid).size and train.dtype == valid.dtype == np.int64
        assert (np.diff(train) > 0).all() and (np.diff(valid) > 0).all()


@pytest.mark.parametrize("kind", ["kfold", "stratified", "group"])
def test_each_sample_is_held_out_once(kind: str) -> None:
    folds = make_folds(kind, CLASSES, 5, seed=0, groups=groups_for(kind))
    assert sorted(np.concatenate([valid for _, valid in folds])) == list(range(100))
    assert all(len(train) + len(valid) == 100 for train, valid in folds)


@pytest.mark.parametrize("kind", ["kfold", "stratified", "group", "shuffle", "repeated-stratified"])
def test_the_seed_decides(kind: str) -> None:
    def held_out(seed: int) -> list[Any]:
        return [valid.tolist() for _, valid in make_folds(kind, CLASSES, 3, seed=seed, groups=groups_for(kind))]

    assert held_out(0) == held_out(0) != held_out(2**40 + 1)


def test_stratified_folds_have_the_classes_in_proportion() -> None:
    for _, valid in make_folds("stratified", CLASSES, 5, seed=0):
        assert np.bincount(CLASSES[valid]).tolist() == [8, 6, 4, 2]


@pytest.mark.parametrize("kind", ["group", None])
def test_a_group_is_on_one_side(kind: str | None) -> None:
    for train, valid in make_folds(kind, CLASSES, 5, seed=0, groups=GROUPS):
        assert not np.intersect1d(GROUPS[train], GROUPS[valid]).size


def test_time_series_validate_on_what_follows() -> None:
    assert all(train.max() < valid.min() for train, valid in make_folds("timeseries", CLASSES, 4, seed=0))


def test_repeats_multiply_the_folds() -> None:
    assert len(make_folds("repeated-stratified", CLASSES, 5, seed=0, repeats=3)) == 15


def test_one_shuffle_holds_out_a_fifth() -> None:
    ((train, valid),) = make_folds("shuffle", CLASSES, 1, seed=0)
    assert (len(train), len(valid)) == (80, 20)


def test_class_numbers_are_stratified_and_all_else_is_not() -> None:
    assert default_kind(CLASSES, 5) == "stratified"
    assert default_kind(CLASSES, 11) == "kfold"  # the smallest class has ten
    assert default_kind(CLASSES.astype(np.float32), 5) == "kfold"
    assert default_kind(np.zeros((100, 2), dtype=np.int64), 5) == "kfold"
    counts = [np.bincount(CLASSES[valid]).tolist() for _, valid in make_folds(None, CLASSES, 5, seed=0)]
    assert counts == [[8, 6, 4, 2]] * 5


def test_any_object_that_splits_will_do() -> None:
    from sklearn.model_selection import LeaveOneGroupOut

    assert len(make_folds(LeaveOneGroupOut(), CLASSES, 0, seed=0, groups=GROUPS)) == 25


class Splits:
    def __init__(self, *pairs: Any) -> None:
        self.pairs = pairs

    def split(self, x: Any, y: Any = None, groups: Any = None) -> Any:
        return iter(self.pairs)


@pytest.mark.parametrize(
    ("pairs", "told"),
    [
        ([([0, 1], [1, 2])], "no sample may be in training and validation, got 1, as 1"),
        ([([0, 1], [100])], "between 0 and 99, got 100"),
        ([([-1, 1], [2])], "between 0 and 99, got -1"),
        ([([0, 1], np.array([], dtype=int))], "at least one"),
        ([([0, 0], [1])], "some twice"),
        ([([0.0], [1])], "must be indices"),
        ([], "at least one fold"),
    ],
)
def test_a_splitter_that_gets_it_wrong_is_refused(pairs: Any, told: str) -> None:
    with pytest.raises(ConfigError, match="folds Splits") as error:
        make_folds(Splits(*pairs), CLASSES, 0, seed=0)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("kind", "splits", "told"),
    [
        ("stratifed", 5, "Did you mean 'stratified'"),
        ("kfold", 1, "at least 2"),
        ("kfold", 101, "cannot be split so"),
        ("group", 5, "group must be given"),
        (3, 5, "an object with split"),
    ],
)
def test_what_cannot_be_split_is_refused(kind: Any, splits: int, told: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_folds(kind, CLASSES, splits, seed=0)
    assert told in str(error.value)


def test_groups_are_not_left_out_of_account() -> None:
    with pytest.raises(ConfigError, match="takes no groups, got some; `group:5`"):
        make_folds("kfold", CLASSES, 5, seed=0, groups=GROUPS)
    with pytest.raises(ConfigError, match="one group per sample"):
        make_folds("group", CLASSES, 5, seed=0, groups=GROUPS[1:])


def test_texts_name_a_kind_and_a_number() -> None:
    assert read_folds("5") == read_folds(5) == FoldSpec(None, 5)
    assert read_folds("shuffle:3") == FoldSpec("shuffle", 3)
    assert read_folds("repeated-stratified:5x3") == FoldSpec("repeated-stratified", 5, 3)
    for text in ("", "x", "shuffle:", "kfold:5x2", "shufle:3", "5x2"):
        with pytest.raises(ConfigError, match="folds"):
            read_folds(text)
