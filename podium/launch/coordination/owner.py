"""What the coordinator asks of the launcher that owns the processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from podium.errors import ConfigError
from podium.launch.coordination.rules import Role
from podium.launch.event import Event


class Owner(ABC):
    """The launcher, as its coordinator sees it."""

    @abstractmethod
    def hear(self, event: Event) -> None:
        """The coordinator tells what happened."""

    @abstractmethod
    def kill(self, rank: int) -> None:
        """End a rank's process for good."""

    @abstractmethod
    def how_it_ended(self, rank: int, wait_s: float) -> str | None:
        """How a rank's process ended, given this long to end; None if it has not, or if the launcher cannot see it."""

    def where(self, rank: int) -> str:
        """The name of a rank's host, for messages; empty where all ranks are on this machine, or it is not known."""
        return ""


class ProcessOwner(Owner):
    """A launcher whose own children the ranks are: it sees them run, and can start more."""

    @abstractmethod
    def is_running(self, rank: int) -> bool:
        """Whether a rank's process exists and is not stopped."""

    @abstractmethod
    def restart_servers(self, endpoints: tuple[int, ...]) -> None:
        """Start a process in which these lost servers live again; its number is the first of them."""

    @abstractmethod
    def start(self, role: Role, rank: int) -> None:
        """Start one more rank."""

    def add_hosts(self, lines: Sequence[str]) -> int:
        """Use these hosts, too (`user@host slots=4`), for ranks that are started from now on; returns their slots.

        Does not wait for them. Raises ConfigError where a line is wrong, or where the launcher has no hosts.
        """
        raise ConfigError("scale: hosts can be added to a run of the launcher ssh, and this is none")
