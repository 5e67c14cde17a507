"""What a run allows: who takes part, how long each may take, and what a loss means; with the numbers all ranks know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["worker", "server"]

MOST_RANKS = 4096
"""Workers of a run at the same time; servers alike."""
FIRST_RESERVED = 0xFFFE
"""Ranks lie below this number."""
OPERATOR = FIRST_RESERVED
"""Endpoint of the command that asks for more or fewer ranks (`podium scale`)."""
COORDINATOR = 0xFFFF
"""Endpoint of the coordinator."""
FIRST_ASKER = 0x10000
"""A rank that asks for the run's settings before it joins is endpoint FIRST_ASKER + rank."""

MOST_REPLACEMENTS = 3
"""Of one server, within `deadline_s` or before a replacement began to serve."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Who takes part, how long each may take, and what a loss means."""

    workers: int
    servers: int = 0
    ranks: tuple[int, ...]
    """The number of each process: its worker's, or its server's where it has none."""
    survives_loss: bool
    """Whether the workers can continue in another number."""
    replaces_servers: bool = False
    """Whether a lost server is restarted and gets its state back from others."""
    fixed: str = ""
    """Why the run cannot be scaled although its strategy could be; empty if it can."""
    most_workers: int = MOST_RANKS
    heartbeat_s: float
    deadline_s: float
    start_deadline_s: float
