"""torch.distributed.rpc: a worker calls a function on the server with its gradient and gets the parameters back.

On TensorPipe with its default transports, which on one machine means shared memory. Variants:

    rpc_copy          the server clones the parameters under its lock, so that no reader sees half an update
    rpc_copy_reused   the same into a buffer per worker, which saves allocating new pages
    rpc_live          the server returns the parameters themselves: one copy less, but a reader may see half an update
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from podium.lab.bench.peers.team import TeamContender, answer
from podium.lab.bench.peers.work import DEADLINE_S, LR, WORKERS, Pulled, Tally, pattern, run_for, units

VARIANTS = ("rpc_copy", "rpc_copy_reused", "rpc_live")
_SERVER = "server"


@final
class Rpc(TeamContender):
    """Two workers and a server, which have one set of parameters per variant."""

    variants = VARIANTS

    def __init__(self, size: int, folder: Path) -> None:
        super().__init__("torch RPC", [partial(_rank, rank, size, folder) for rank in range(WORKERS + 1)], WORKERS)

    def tally(self, variant: str) -> Tally:
        pulled = self.team.ask("tally", variant, members=self.workers)
        (server,) = self.team.ask("tally", variant, members=[WORKERS])
        return Tally(sum(own for own, *_ in pulled), server, tuple(pulled))


class _Server:
    """The parameters of one variant, in the server's process."""

    def __init__(self, variant: str, size: int) -> None:
        self.params, self._lock = pattern(size), threading.Lock()
        self._out = [torch.zeros(size) for _ in range(WORKERS)] if variant == "rpc_copy_reused" else []
        self._variant = variant

    def push(self, worker: int, grad: Tensor) -> Tensor:
        with self._lock:
            self.params.add_(grad, alpha=-LR)
            if self._variant == "rpc_copy":
                return self.params.clone()
            if self._variant == "rpc_copy_reused":  # this worker has read the last answer: it pushes again
                return self._out[worker].copy_(self.params)
        return self.params


_servers: dict[str, _Server] = {}


def _push(variant: str, worker: int, grad: Tensor) -> Tensor:
    """Called by RPC, on the server."""
    return _servers[variant].push(worker, grad)


def _rank(rank: int, size: int, folder: Path, pipe: Connection) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and warns at every call
        import torch.distributed.rpc as rpc

        options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/rpc", rpc_timeout=DEADLINE_S)
        if rank == WORKERS:
            _servers.update({variant: _Server(variant, size) for variant in VARIANTS})
        name = _SERVER if rank == WORKERS else f"worker{rank}"
        rpc.init_rpc(name, rank=rank, world_size=WORKERS + 1, rpc_backend_options=options)
    if rank == WORKERS:
        return answer(pipe, {"tally": lambda variant: units(_servers[variant].params)})
    workers = {variant: _Worker(variant, rank, size, rpc.rpc_sync) for variant in VARIANTS}
    answer(
        pipe,
        {
            "round": lambda variant, seconds: run_for(seconds, workers[variant].round_trip),
            "tally": lambda variant: workers[variant].pulled(),
        },
    )


class _Worker:
    """One worker's buffers for one variant."""

    def __init__(self, variant: str, rank: int, size: int, call: Callable[..., Tensor]) -> None:
        self._variant, self._rank, self._call, self._pushed = variant, rank, call, 0.0
        self._grad, self._params = torch.full((size,), float(rank + 1)), pattern(size)

    def round_trip(self) -> None:
        self._params.copy_(self._call(_SERVER, _push, (self._variant, self._rank, self._grad)))
        self._pushed += self._rank + 1

    def pulled(self) -> Pulled:
        return Pulled(self._pushed, *units(self._params))
