"""The errors that Podium raises on purpose.

PodiumError
├── ConfigError          the request is invalid (exit code 2)
│   ├── UnknownName      a name that is not on the list
│   └── MissingExtra     an optional package is not installed
├── DataError            a data file is absent, truncated or not what it claims
├── CheckpointError      a checkpoint cannot be read, or does not fit
├── RecordError          records cannot be written or read
├── TrainingError        the run cannot continue: the loss is not finite, a rank has no samples …
├── RankFailed           a rank raised; carries its own error and place
├── Interrupted          the user stopped the run before its end
└── CommError            an exchange failed
    ├── Lost             a peer is gone, or this generation of the group is over
    └── DeadlineExceeded no answer in time

An error that the request caused, such as a missing folder, exits with code 2 whatever its class: `as_request` marks it.

`Lost` is the only error after which a synchronous step may be retried:
it promises that the parameters have not moved.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
"""Failures of the machine, not mistakes in the request."""


class PodiumError(Exception):
    """Base of everything Podium raises on purpose."""

    exit_code = 1


class ConfigError(PodiumError):
    """The request is invalid. The message says who complains, what must hold and what was given."""

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
    """Training itself cannot continue."""


class RankFailed(PodiumError):
    """A rank raised. The message ends with that rank's own error and place."""


class Interrupted(PodiumError):
    """The user stopped the run before its end."""

    exit_code = 130


class CommError(PodiumError):
    """An exchange failed."""


class Lost(CommError):
    """A peer is gone, or this generation of the group is over. Parameters have not moved."""


class DeadlineExceeded(CommError):
    """A peer did not answer in time."""


@contextmanager
def as_request() -> Iterator[None]:
    """Around code that reads what the user named: an error keeps its class but exits with code 2.

    Failures of the machine, such as a full disk, keep their own code.
    """
    try:
        yield
    except (DataError, CheckpointError, RecordError) as error:
        if not _is_failure(error.__cause__):
            error.exit_code = ConfigError.exit_code
        raise
    except OSError as error:
        if _is_failure(error):
            raise
        raise ConfigError(str(error)) from error


def _is_failure(error: BaseException | None) -> bool:
    return isinstance(error, OSError) and error.errno in _FAILURES
