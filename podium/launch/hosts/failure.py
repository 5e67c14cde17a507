"""Why a host cannot take part in a run, and what its user can do about it."""

from __future__ import annotations

from dataclasses import dataclass

from podium.errors import ConfigError, PodiumError, RankFailed


@dataclass(frozen=True)
class Failure:
    """The cause, and the next command or step."""

    what: str
    fix: str
    of_request: bool = False
    """Whether the request was wrong (exit code 2); otherwise something has failed (1)."""

    def error(self, label: str) -> PodiumError:
        """What a launcher raises for the host of this label."""
        kind = ConfigError if self.of_request else RankFailed
        return kind(f"host {label}: {self.what}\n  fix: {self.fix}")


class NotOffered(ConfigError):
    """What a host has to have is not sent to it."""

    def __init__(self, what: str, fix: str) -> None:
        """`fix`: what to do; HOST in it stands for the host's name."""
        self._fix = fix
        super().__init__(what)

    def fix_on(self, label: str) -> str:
        return self._fix.replace("HOST", label)
