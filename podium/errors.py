"""All that Podium raises on purpose.

PodiumError
├── ConfigError          what was asked for cannot be (exit code 2)
│   ├── UnknownName      a name that is not on the list
│   └── MissingExtra     an optional package is not installed
├── DataError            a data file is absent, truncated or not what it claims
├── CheckpointError      a checkpoint cannot be read, or does not fit
├── RecordError          records cannot be written or read
├── TrainingError        the run cannot go on: the loss is not finite, a rank has no samples …
├── RankFailed           a rank raised; carries its own error and place
├── Interrupted          the user asked to stop before the run was through
└── CommError            an exchange did not happen
    ├── Lost             a peer is gone, or this generation of the group is over
    └── DeadlineExceeded nobody answered in time

`Lost` is the one error that a synchronous step may raise and be tried again after:
it promises that the parameters have not moved.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PodiumError(Exception):
    """Base of everything Podium raises on purpose."""

    exit_code = 1


class ConfigError(PodiumError):
    """What was asked for cannot be: says who, what must hold, what came."""

    exit_code = 2


class UnknownName(ConfigError):
    """A name that is not on the list; the message holds the list and the nearest match."""

    def __init__(self, what: str, name: object, known: Iterable[str]) -> None:
        self.what, self.name, self.known = what, name, sorted(known)
        near = difflib.get_close_matches(str(name), self.known, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        listed = ", ".join(self.known) or "none"
        super().__init__(f"unknown {what} {name!r}.{hint} Known: {listed}")

    def __reduce__(self) -> tuple[type[UnknownName], tuple[str, object, list[str]]]:
        return type(self), (self.what, self.name, self.known)


class MissingExtra(ConfigError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        self.args_ = (package, extra, purpose)
        super().__init__(f"{purpose} needs {package}: pip install 'podium[{extra}]'")

    def __reduce__(self) -> tuple[type[MissingExtra], tuple[str, str, str]]:
        return type(self), self.args_


class DataError(PodiumError):
    """A data file is absent, truncated or not what it claims to be."""


class CheckpointError(PodiumError):
    """A checkpoint cannot be read, or does not fit this run."""


class RecordError(PodiumError):
    """Records cannot be written or read."""


class TrainingError(PodiumError):
    """Training itself cannot go on."""


class RankFailed(PodiumError):
    """A rank raised. The message ends with that rank's own error and place."""


class Interrupted(PodiumError):
    """The user stopped the run before it was through."""

    exit_code = 130


class CommError(PodiumError):
    """An exchange did not happen."""


class Lost(CommError):
    """A peer is gone, or this generation of the group is over. Parameters have not moved."""


class DeadlineExceeded(CommError):
    """Nobody answered in time."""
