"""What an agent needs to reach the head: handed over on its standard input, as one line of JSON.

Standard input reaches a command through ssh, srun and a pipe alike, and nobody else: the secret and the key never stand
in an argument, in the environment, in a log or in a record.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from podium.comm.real.sockets import Address
from podium.comm.real.tls import Tls
from podium.errors import ConfigError
from podium.launch.secret import check_secret

_LONGEST = 64 << 10
_KEY_FILES = {"cert": "node.pem", "key": "node.key", "ca": "ca.pem"}


@dataclass(frozen=True)
class Invitation:
    """The head's address, the run's secret and its keys, and the agent's number."""

    head: Address
    secret: bytes
    number: int | None
    """None: one line for all agents; each finds its number in `nodes`."""
    keys: dict[str, str] | None
    """PEM texts of a certificate, its key and the authority; None: no TLS."""
    start_deadline_s: float
    nodes: dict[str, int] | None = None
    """The agents' numbers by the names that SLURM has for their nodes (SLURMD_NODENAME)."""
    for_run: bool = True
    """Whether ranks are to be started; otherwise the host is only checked."""

    def to_line(self) -> str:
        return json.dumps({**asdict(self), "secret": self.secret.hex()}) + "\n"

    def numbered(self, number: int) -> str:
        """The line for one agent."""
        return replace(self, number=number).to_line()

    def for_nodes(self, nodes: dict[str, int]) -> str:
        """The line for the agents of a job step of SLURM's."""
        return replace(self, number=None, nodes=nodes).to_line()

    @classmethod
    def from_line(cls, line: str) -> Invitation:
        try:
            found: dict[str, Any] = json.loads(line)
            keys = found["keys"]
            number = found["number"]
            if number is None:
                number = found["nodes"][os.environ["SLURMD_NODENAME"]]
            return cls(
                str(found["head"]),
                check_secret(bytes.fromhex(found["secret"]), "the invitation"),
                int(number),
                None if keys is None else {name: str(keys[name]) for name in _KEY_FILES},
                float(found["start_deadline_s"]),
                for_run=bool(found.get("for_run", True)),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "podium.node --join takes an invitation, one line of JSON, on its standard input, as Podium's "
                f"launchers write it; got {len(line)} characters that are none ({type(error).__name__}: {error})"
            ) from None


def read_invitation() -> Invitation:
    """The line on standard input."""
    return Invitation.from_line(sys.stdin.readline(_LONGEST))


def write_keys(keys: dict[str, str], folder: Path) -> Tls:
    """Put the PEM texts into files of a private folder, as `ssl` wants them."""
    paths = {}
    for name, file in _KEY_FILES.items():
        path = folder / file
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as text:
            text.write(keys[name])
        paths[name] = str(path)
    return Tls(**paths)
