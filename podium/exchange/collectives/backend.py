"""The backend's own all-reduce: gloo or nccl between processes, the modelled ring in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from podium.exchange.collectives.base import Native, Transport


@final
@dataclass(frozen=True, kw_only=True)
class Backend(Native):
    """The backend's own all-reduce: gloo or nccl."""

    name: ClassVar[str] = "backend"

    def transport(self, same_host: bool) -> Transport:
        return "backend"
