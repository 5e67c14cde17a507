"""A run's rules: its ranks, its deadlines, and what a loss means; with reserved endpoint numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from podium.comm.real.frames import Limits

Role = Literal["worker", "server"]

MOST_RANKS = 4096
"""Limit on the workers of a run at the same time, and on its servers."""
FIRST_RESERVED = 0xFFFE
"""Ranks lie below this number."""
OPERATOR = FIRST_RESERVED
"""Endpoint of the command that requests more or fewer ranks (`podium scale`)."""
COORDINATOR = 0xFFFF
"""Endpoint of the coordinator."""
FIRST_ASKER = 0x10000
"""A rank that asks for the run's settings before it joins is endpoint FIRST_ASKER + rank."""
FIRST_AGENT = 0x20000
"""The agent of the n-th host is endpoint FIRST_AGENT + n."""
HEAD = 0x2FFFF
"""Endpoint of the head, which agents connect to."""

LIMITS = Limits(header_bytes=1 << 20)
"""Of messages between ranks and the coordinator: those with the addresses of all ranks have about 90 bytes for each."""
MOST_REPLACEMENTS = 3
"""Limit for one server, within `deadline_s` or before a replacement began to serve."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A run's ranks, its deadlines, and what a loss means."""

    workers: int
    servers: int = 0
    ranks: tuple[int, ...]
    """The number of each process: its worker's, or its server's where it has none."""
    survives_loss: bool
    """Whether the run can continue with another number of workers."""
    replaces_servers: bool = False
    """Whether a lost server is restarted and restored from a copy."""
    fixed: str = ""
    """Why the run cannot be scaled although its strategy could be; empty if it can."""
    most_workers: int = MOST_RANKS
    heartbeat_s: float
    deadline_s: float
    start_deadline_s: float
