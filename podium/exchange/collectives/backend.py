"""The backend's own all-reduce: gloo or nccl between processes, the modelled ring in virtual time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from torch import Tensor

from podium.exchange.collectives.base import Collective

if TYPE_CHECKING:
    from podium.comm.base import Communicator, Handle


@final
@dataclass(frozen=True, kw_only=True)
class Backend(Collective):
    """What the world itself offers: gloo or nccl."""

    name: ClassVar[str] = "backend"
    needs_channel: ClassVar[bool] = False

    def all_reduce(self, comm: Communicator, tensor: Tensor) -> Handle:
        return comm.all_reduce(tensor)
