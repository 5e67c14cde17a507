"""Folds: which training samples each trial trains on, and which it is validated on.

scikit-learn's splitters do the splitting; a fold is two arrays of indices into the task's training data, so that no
sample is stored twice. In text: `5`, `stratified:5`, `shuffle:5`, `repeated-stratified:5x3` (five folds, three times).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from podium.errors import ConfigError, UnknownName

FOLDS: dict[str, str] = {
    "kfold": "every sample is held out once, in random order",
    "stratified": "as kfold, each fold with the classes in their proportions",
    "group": "as kfold, samples of a group on the same side",
    "shuffle": "each fold holds out a fifth of the samples, drawn anew",
    "repeated-stratified": "stratified, several times over with other draws",
    "timeseries": "trains on what comes first, validates on what follows",
}
"""Each kind of splitting in one line."""

_HELD_OUT = 0.2  # by `shuffle`


class FoldSpec(NamedTuple):
    """Folds as parsed from text."""

    kind: str | None
    """None: chosen by the targets (`default_kind`)."""
    n_splits: int
    repeats: int = 1


def read_folds(text: str | int) -> FoldSpec:
    """From `5`, `KIND:5` or `KIND:5x3`."""
    name, colon, count = str(text).strip().rpartition(":")
    kind = name if colon else None
    if kind is not None and kind not in FOLDS:
        raise UnknownName("kind of folds", kind, FOLDS)
    splits, times, repeats = count.partition("x")
    if not splits.isdigit() or (times and not repeats.isdigit()):
        raise ConfigError(f"folds must be N, KIND:N or KIND:NxTIMES, got {text!r}; kinds: {', '.join(FOLDS)}")
    if times and kind != "repeated-stratified":
        raise ConfigError(f"folds: only repeated-stratified is done several times, got {text!r}")
    return FoldSpec(kind, int(splits), int(repeats) if times else (2 if kind == "repeated-stratified" else 1))


def default_kind(targets: np.ndarray, n_splits: int) -> str:
    """`stratified` if targets are class numbers and each class has a sample for every fold, else `kfold`."""
    targets = np.asarray(targets)
    if targets.ndim != 1 or targets.dtype.kind not in "iu" or not len(targets):
        return "kfold"
    return "stratified" if np.unique(targets, return_counts=True)[1].min() >= n_splits else "kfold"


def make_folds(
    kind: str | Any | None,
    targets: np.ndarray,
    n_splits: int,
    *,
    seed: int,
    groups: np.ndarray | None = None,
    repeats: int = 1,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each fold the training and the validation samples, as ascending indices into the training data.

    `kind` is a name of `FOLDS`, None (`group` where groups are given, else `default_kind`), or any object with
    scikit-learn's `split(X, y, groups)`, which has its own number of folds.
    """
    targets = np.asarray(targets)
    if kind is None:
        kind = default_kind(targets, n_splits) if groups is None else "group"
    who = f"folds {kind}:{n_splits}" if isinstance(kind, str) else f"folds {type(kind).__name__}"
    splitter = _splitter(kind, who, n_splits, repeats, seed % 2**32)
    if kind == "group" and groups is None:
        raise ConfigError(f"{who}: each sample's group must be given, got none")
    if groups is not None and isinstance(kind, str) and kind != "group":
        raise ConfigError(f"{who}: takes no groups, got some; `group:{n_splits}` keeps them on one side")
    if groups is not None and len(groups) != len(targets):
        raise ConfigError(f"{who}: there must be one group per sample ({len(targets)}), got {len(groups)}")
    try:
        pairs = [(np.asarray(a), np.asarray(b)) for a, b in splitter.split(np.zeros(len(targets)), targets, groups)]
    except ValueError as error:
        raise ConfigError(f"{who}: {len(targets)} samples cannot be split so: {error}") from error
    if not pairs:
        raise ConfigError(f"{who}: must give at least one fold, got none")
    return [_checked(f"{who}, fold {i}", train, valid, len(targets)) for i, (train, valid) in enumerate(pairs)]


def _splitter(kind: str | Any, who: str, n_splits: int, repeats: int, seed: int) -> Any:
    from sklearn import model_selection as made

    if not isinstance(kind, str):
        if not hasattr(kind, "split"):
            raise ConfigError(f"folds: must be a name, or an object with split(X, y, groups), got {kind!r}")
        return kind
    if kind not in FOLDS:
        raise UnknownName("kind of folds", kind, FOLDS)
    if n_splits < (1 if kind == "shuffle" else 2) or repeats < 1:
        raise ConfigError(f"{who}: must be split in at least 2 (shuffle: 1), at least once, got {repeats} x {n_splits}")
    if kind == "kfold":
        return made.KFold(n_splits, shuffle=True, random_state=seed)
    if kind == "stratified":
        return made.StratifiedKFold(n_splits, shuffle=True, random_state=seed)
    if kind == "group":
        return made.GroupKFold(n_splits, shuffle=True, random_state=seed)
    if kind == "shuffle":
        return made.ShuffleSplit(n_splits, test_size=_HELD_OUT, random_state=seed)
    if kind == "repeated-stratified":
        return made.RepeatedStratifiedKFold(n_splits=n_splits, n_repeats=repeats, random_state=seed)
    return made.TimeSeriesSplit(n_splits)


def _checked(who: str, train: np.ndarray, valid: np.ndarray, samples: int) -> tuple[np.ndarray, np.ndarray]:
    for part, name in ((train, "training"), (valid, "validation")):
        if part.ndim != 1 or part.dtype.kind not in "iu" or not len(part):
            raise ConfigError(f"{who}: its {name} samples must be indices, at least one, got {part!r}")
        if part.min() < 0 or part.max() >= samples:
            raise ConfigError(
                f"{who}: its {name} samples must be between 0 and {samples - 1}, got {part.min()} to {part.max()}"
            )
        if len(np.unique(part)) < len(part):
            raise ConfigError(f"{who}: each of its {name} samples must be there once, got some twice")
    both = np.intersect1d(train, valid)
    if len(both):
        raise ConfigError(f"{who}: no sample may be in training and validation, got {len(both)}, as {both[0]}")
    return np.sort(train).astype(np.int64), np.sort(valid).astype(np.int64)
