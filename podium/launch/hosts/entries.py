"""The hosts of a run, as a user lists them: a file with a line per host, or names separated by commas.

# address            ranks    GPUs
trainer@10.0.0.11    slots=4  gpus=2
trainer@10.0.0.12    slots=4  gpus=2  python=/opt/podium/bin/python
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from podium.config import convert
from podium.errors import ConfigError, UnknownName

_OPTIONS = ("slots", "gpus", "python")


@dataclass(frozen=True)
class HostEntry:
    """One host."""

    target: str
    """What reaches it: a host name, an address, `user@host`, or a name of the ssh configuration."""
    slots: int | None = None
    """The most ranks it takes; None: its part of the run's."""
    gpus: int | None = None
    """How many of its GPUs the run uses; None: all that PyTorch sees there."""
    python: str | None = None
    """The interpreter there; None: the path of this one, else `python3`."""

    def __post_init__(self) -> None:
        for name, least in (("slots", 1), ("gpus", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"host {self.target}: {name} must be at least {least}, got {value}")
        if not self.target or self.target.startswith("-") or any(c.isspace() for c in self.target):
            raise ConfigError(f"a host must be a name, an address or user@host, got {self.target!r}")

    @property
    def name(self) -> str:
        """Without the user."""
        return self.target.rpartition("@")[2]


def read_hosts(text: str) -> list[HostEntry]:
    """The hosts of a file of this name, or of this list of names."""
    path = Path(text)
    if path.is_file():
        lines, where = path.read_text(encoding="utf-8").splitlines(), f"{text}, line "
    elif "/" in text or text.endswith((".txt", ".hosts")):
        raise ConfigError(f"hosts: {text}: no such file")
    else:
        lines, where = text.split(","), "hosts, number "
    found = [parse_entry(line, f"{where}{n}") for n, line in enumerate(lines, 1) if line.partition("#")[0].strip()]
    if not found:
        raise ConfigError(f"hosts: {text}: must name at least one host, got none")
    twice = sorted({e.target for e in found if sum(other.target == e.target for other in found) > 1})
    if twice:
        raise ConfigError(
            f"hosts: {text}: each host must be listed once (slots=N for several ranks), got {twice[0]} again"
        )
    return found


def parse_entry(line: str, where: str = "host") -> HostEntry:
    """`user@host slots=4 gpus=2`."""
    target, *words = line.partition("#")[0].split() or [""]  # which HostEntry refuses
    hints, given = get_type_hints(HostEntry), dict[str, Any]()
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ConfigError(f"{where}: options of a host are key=value, got {word!r}")
        if key not in _OPTIONS:
            raise UnknownName(f"option of a host ({where})", key, _OPTIONS)
        given[key] = convert(value, hints[key], f"{where}: {key}")
    return HostEntry(target, **given)


def divide(entries: Sequence[HostEntry], processes: int) -> list[int]:
    """How many processes each host gets: up to its slots, in order; hosts without slots share the rest evenly."""
    fixed = sum(entry.slots or 0 for entry in entries)
    free = [n for n, entry in enumerate(entries) if entry.slots is None]
    if not free:
        if fixed < processes:
            raise ConfigError(
                f"the run needs {processes} processes, and its hosts have {fixed} slots: raise slots, add hosts, or "
                "use fewer workers"
            )
        return _fill([entry.slots or 0 for entry in entries], processes)
    rest = max(0, processes - fixed)
    share, more = divmod(rest, len(free))
    room = [entry.slots or 0 for entry in entries]
    for place, n in enumerate(free):
        room[n] = share + (place < more)
    return _fill(room, processes)


def _fill(room: Sequence[int], processes: int) -> list[int]:
    counts: list[int] = []
    for slots in room:
        counts.append(min(slots, processes - sum(counts)))
    return counts
