"""Parameter server: workers push gradients to servers, which hold the parameters and move them.

Synchronous: a server answers once it has the gradients of all workers; the result is all-reduce's. Asynchronous: it
applies each push as it comes and answers at once; nobody waits for anybody, at the price of stale gradients.

Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014.
Dean et al., Large Scale Distributed Deep Networks, NIPS 2012 (asynchronous SGD).

A push is weighted by its samples, as everywhere. An asynchronous push is a step of its own over one lease, so its
learning rate is scaled by lease / global batch unless `lr_scale` says otherwise (the linear rule).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, final

import torch
from torch import Tensor

from podium.errors import ConfigError
from podium.servers.moments import pack, parts_of, unpack
from podium.servers.ranges import Range, divide_ranges
from podium.servers.server import options_of
from podium.strategies.base import Strategy

if TYPE_CHECKING:
    from podium.worker import Batch, Worker


class PSState(NamedTuple):
    ranges: list[list[Range]]  # by server
    versions: list[int]  # of the parameters this worker holds, by server


@final
@dataclass(frozen=True, kw_only=True)
class ParameterServer(Strategy[PSState]):
    """Gradients to servers, parameters back."""

    name: ClassVar[str] = "parameter-server"

    mode: Literal["sync", "async"] = "sync"
    """Whether a server waits for all workers before it moves the parameters."""
    servers: int = 1
    placement: Literal["dedicated", "colocated"] = "dedicated"
    """Whether servers have processes of their own or live in the workers'."""
    lease: int | None = None
    """Samples per asynchronous push; the global batch divided by the workers when not given."""
    lr_scale: float | None = None
    """What the learning rate of an asynchronous push is multiplied by; lease / global batch when not given."""

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise ConfigError(f"parameter-server: servers must be at least 1, got {self.servers}")
        if self.lease is not None and self.lease < 1:
            raise ConfigError(f"parameter-server: lease must be at least 1 sample, got {self.lease}")
        if self.lr_scale is not None and not self.lr_scale > 0:
            raise ConfigError(f"parameter-server: lr_scale must be above 0, got {self.lr_scale}")

    @property
    def server_count(self) -> int:
        return self.servers

    @property
    def colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def feed(self) -> Literal["step", "cursor"]:
        return "cursor" if self.mode == "async" else "step"

    def init(self, worker: Worker) -> PSState:
        """The first worker brings parameters and optimizer state to the servers; the others wait until it has."""
        if worker.clip_norm is not None and self.mode == "sync" and self.servers > 1:
            raise ConfigError(
                "parameter-server: clip_norm needs the norm of the whole gradient, which no one of several "
                f"synchronous servers has; use servers=1 (got {self.servers}) or all-reduce"
            )
        sizes = [p.element_size() for p in worker.params]
        state = PSState(divide_ranges(worker.flat.pieces, sizes, self.servers), [0] * self.servers)
        if worker.comm.index == 0:
            self._seed(worker, state)
        worker.comm.barrier()
        return state

    def step(self, worker: Worker, state: PSState, batch: Batch) -> Tensor:
        loss = worker.backward(batch)
        if self.mode == "async" and worker.clip_norm is not None:
            worker.clip_own()
        meta = {
            "options": options_of(worker.optimizer, self._lr_scale(worker, batch)),
            "unused": worker.unused(),
            "stop": worker.stop_requested,
            "loss": float(loss) * batch.weight,
            "lease": batch.lease,
        }
        pushes = [
            worker.comm.call(
                server,
                "push",
                {**meta, "version": state.versions[m]},
                body=[r.of(worker.flat.grads) for r in state.ranges[m]],
                into=[r.of(worker.params) for r in state.ranges[m]],
            )
            for m, server in enumerate(worker.comm.servers)
        ]
        for m, answer in enumerate(worker.comm.wait(*pushes)):
            assert answer is not None
            state.versions[m] = answer.meta["version"]
        if self.mode == "sync":
            assert answer is not None
            worker.stop_agreed, worker.step_loss = worker.stop_agreed or answer.meta["stop"], answer.meta["loss"]
        worker.advance(batch)
        return loss

    def finish(self, worker: Worker, state: PSState) -> None:
        """Wait until all workers are through, then take parameters and optimizer state home."""
        answers = worker.comm.wait(*(worker.comm.call(server, "leave", {}) for server in worker.comm.servers))
        moments: dict[str, dict[str, Tensor]] = {}
        for ranges, answer in zip(state.ranges, answers, strict=True):
            assert answer is not None
            for r, tensor in zip(ranges, answer.body, strict=False):
                r.of(worker.params).copy_(tensor)
            self._collect(worker, ranges, unpack(ranges, answer.meta, answer.body[len(ranges) :]), moments)
        worker.load_optimizer_state(moments)

    def _seed(self, worker: Worker, state: PSState) -> None:
        dtypes = [p.dtype for p in worker.params]
        seeds = []
        for server, ranges in zip(worker.comm.servers, state.ranges, strict=True):
            states = parts_of(
                ranges,
                lambda i: worker.optimizer.state.get(worker.flat.parameters[i], {}),
                lambda i, tensor: _in_memory_order(worker, i, tensor),
            )
            names, body = pack(ranges, states, dtypes)
            meta = {
                **names,
                "workers": list(worker.comm.workers),
                "clip_norm": worker.clip_norm if self.mode == "sync" else None,
                "samples": worker.samples,
                "position": worker.position,
                "end": worker.horizon,
                "lease": self._lease(worker),
            }
            seeds.append(worker.comm.call(server, "seed", meta, [*(r.of(worker.params) for r in ranges), *body]))
        worker.comm.wait(*seeds)

    def _lease(self, worker: Worker) -> int:
        return self.lease or max(1, worker.batch_size // worker.comm.size)

    def _lr_scale(self, worker: Worker, batch: Batch) -> float:
        if self.mode == "sync":
            return 1.0
        return self.lr_scale if self.lr_scale is not None else min(1.0, batch.samples / worker.batch_size)

    @staticmethod
    def _collect(
        worker: Worker, ranges: list[Range], states: list[dict[str, Tensor]], moments: dict[str, dict[str, Tensor]]
    ) -> None:
        """Put one server's parts of the optimizer state back into whole parameters."""
        parts = [part for r in ranges for part in r.parts]
        for part, state in zip(parts, states, strict=True):
            piece = worker.flat.pieces[part.piece]
            whole = moments.setdefault(piece.name, {})
            for key, value in state.items():
                if value.dim() == 0:
                    whole[key] = value
                    continue
                if key not in whole:
                    whole[key] = torch.empty_strided(piece.shape, piece.stride, dtype=value.dtype, device=value.device)
                flat = whole[key].as_strided((piece.stop - piece.start,), (1,))
                flat[part.start : part.stop] = value


def _in_memory_order(worker: Worker, index: int, tensor: Tensor) -> Tensor:
    """A tensor shaped like a parameter, as one flat run in the order its elements lie in the buffer."""
    piece = worker.flat.pieces[index]
    flat = torch.empty(piece.stop - piece.start, dtype=tensor.dtype, device=tensor.device)
    flat.as_strided(piece.shape, piece.stride).copy_(tensor)
    return flat
