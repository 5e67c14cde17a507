"""How long this worker's passes take, and how long the other workers' passes take."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from podium.comm.base import Communicator


class PassTimes:
    """Forward and backward passes of one worker, on the world's clock."""

    def __init__(self) -> None:
        self.last_ns = 0
        """Duration of the last step's forward and backward passes."""
        self.last_samples = 0
        """Samples in these passes."""
        self.sent_to_servers = False
        """Whether each push carries this worker's speed, which servers pass on to the first worker."""
        self._busy_ns = self._busy_samples = 0  # since `take_s_per_sample`
        self._told: Mapping[int, float] = {}
        self._exposed: Callable[[], float] | None = None

    @property
    def exchange_s(self) -> float:
        """Seconds of an exchange on this worker's own link that its computing does not hide; 0: not known."""
        return 0.0 if self._exposed is None else self._exposed()

    def expose(self, seconds: Callable[[], float] | None) -> None:
        """`seconds` returns `exchange_s`: it is called between two steps, and may measure. None: not known."""
        self._exposed = seconds

    def record(self, ns: int, samples: int) -> None:
        self.last_ns, self.last_samples = ns, samples
        self._busy_ns += ns
        self._busy_samples += samples

    def send_to_servers(self, wanted: bool) -> None:
        self.sent_to_servers = wanted

    def take_s_per_sample(self) -> float:
        """Seconds of computing per sample since the last call; 0 where there was none."""
        pace = self._busy_ns / self._busy_samples / 1e9 if self._busy_samples else 0.0
        self._busy_ns = self._busy_samples = 0
        return pace

    def compare(self, comm: Communicator) -> dict[int, float]:
        """Seconds of computing per sample since the last comparison, by worker. Collective."""
        mine = torch.zeros(comm.size, dtype=torch.float64)
        mine[comm.index] = self.take_s_per_sample()
        comm.wait(comm.all_reduce(mine))
        return {rank: seconds for rank, seconds in zip(comm.workers, mine.tolist(), strict=True) if seconds > 0}

    def tell(self, s_per_sample: Mapping[int, float]) -> None:
        """A server sent how long each worker computes per sample."""
        self._told = s_per_sample

    def take_told(self) -> Mapping[int, float]:
        """What a server last sent, once."""
        told, self._told = self._told, {}
        return told
