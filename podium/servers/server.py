"""A parameter server: it holds ranges of the parameters, and only it changes them.

One loop, one message at a time, so updates cannot race. What it understands:

    seed    rank 0 brings parameters, optimizer state and the work to be done; a new stretch of training begins
    draw    a worker wants the next lease (first server only)
    push    a worker's gradients; the answer is the parameters afterwards
    leave   a worker is through; once all are, each gets parameters and optimizer state to take home

Synchronous training waits until every worker has pushed, adds up in rank order (so a run has the same bits however
messages race) and answers all. Asynchronous training applies each push as it comes and answers at once; its staleness
is the number of updates between the parameters it was computed from and now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from podium.comm.base import DEPARTED, Communicator, Message, Meta
from podium.data.order import GlobalOrder
from podium.errors import CommError, ConfigError, Lost
from podium.flat import Flat, Piece
from podium.measure.records import Recorder
from podium.optim import FlatOptimizer, is_elementwise
from podium.servers.cursor import Cursor
from podium.servers.moments import pack, unpack
from podium.servers.ranges import Range, divide_ranges
from podium.servers.replay import Arrivals, AsTheyCome


class Shard:
    """The parameters, gradients and optimizer of a server's ranges."""

    def __init__(self, flat: Flat, optimizer: Optimizer, ranges: Sequence[Range]) -> None:
        """Takes over `optimizer`: from now on it moves this shard's parts and nothing else."""
        if not is_elementwise(optimizer):
            raise ConfigError(
                f"parameter-server: {type(optimizer).__name__} cannot run on ranges of the parameters: it looks at "
                "whole tensors (or is fused); use SGD, Adam, AdamW, Adagrad or RMSprop"
            )
        self.ranges = ranges
        self.params = [r.of(flat.params).detach().clone() for r in ranges]
        self.grads = [torch.zeros_like(p) for p in self.params]
        self.parts: list[nn.Parameter] = []
        self.pieces: list[Piece] = []
        for n, range_ in enumerate(ranges):
            for part in range_.parts:
                stop = part.offset + part.stop - part.start
                self.parts.append(nn.Parameter(self.params[n][part.offset : stop]))
                self.parts[-1].grad = self.grads[n][part.offset : stop]
                self.pieces.append(Piece("", n, part.offset, stop, range_.group, (stop - part.offset,), (1,)))
        self.owners = [part.piece for r in ranges for part in r.parts]
        self._views = [p.grad for p in self.parts]
        self.optimizer = optimizer
        optimizer.state.clear()
        for g, group in enumerate(optimizer.param_groups):
            group["params"] = [p for p, piece in zip(self.parts, self.pieces, strict=True) if piece.group == g]
        self._fast = FlatOptimizer(optimizer, self.parts, self.pieces, self.params, self.grads)

    @property
    def nbytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.params)

    def load(self, params: Sequence[Tensor], meta: Meta, state: Sequence[Tensor]) -> None:
        for mine, theirs in zip(self.params, params, strict=True):
            mine.copy_(theirs)
        self.optimizer.state.clear()
        for part, kept in zip(self.parts, unpack(self.ranges, meta, state), strict=True):
            if kept:
                self.optimizer.state[part] = {k: v.clone() for k, v in kept.items()}
        self._fast.reload()

    def dump(self) -> tuple[Meta, list[Tensor]]:
        """Optimizer state to take home."""
        states = [self.optimizer.state.get(p, {}) for p in self.parts]
        dtypes = {r.buffer: p.dtype for r, p in zip(self.ranges, self.params, strict=True)}
        return pack(self.ranges, states, [dtypes.get(b, torch.float32) for b in range(max(dtypes, default=0) + 1)])

    def step(self, options: Sequence[Meta], unused: set[int], clip_norm: float | None) -> None:
        """One optimizer step on the gradients in `grads`; pieces in `unused` are left alone."""
        for group, given in zip(self.optimizer.param_groups, options, strict=True):
            group.update(given)
        for p, view, piece in zip(self.parts, self._views, self.owners, strict=True):
            p.grad = None if piece in unused else view
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parts[::-1], clip_norm)
        self._fast.step(all_used=not unused)


class Server:
    """One server's loop."""

    def __init__(
        self,
        comm: Communicator,
        flat: Flat,
        optimizer: Optimizer,
        *,
        asynchronous: bool,
        recorder: Recorder,
        arrivals: Arrivals | None = None,
    ) -> None:
        self.comm, self.asynchronous, self.recorder = comm, asynchronous, recorder
        index = comm.servers.index(comm.rank)
        sizes = [p.element_size() for p in flat.params]
        self.shard = Shard(flat, optimizer, divide_ranges(flat.pieces, sizes, len(comm.servers))[index])
        self.version = 0
        """Updates since the present stretch began: what a push names as its origin."""
        self.updates = 0
        """Updates in all."""
        self.workers: tuple[int, ...] = comm.workers
        self.cursor: Cursor | None = None
        self._arrivals = arrivals or AsTheyCome()
        self._clip_norm: float | None = None
        self._pushed: dict[int, Message] = {}
        self._parked: list[Message] = []
        self._left: dict[int, Message] = {}
        self._gone: set[int] = set()
        self._fresh: set[int] = set()  # workers that have not pushed since the last seed

    def serve(self) -> None:
        """Until every worker has departed."""
        do = {"seed": self._seed, "draw": self._draw, "push": self._push, "leave": self._leave}
        while len(self._gone) < len(self.workers):
            message = self._arrivals.next(self.comm)
            if message.kind == DEPARTED:
                self._departed(message)
            elif message.kind in do:
                do[message.kind](message)
            else:
                raise CommError(f"server {self.comm.rank}: rank {message.source} sent an unknown {message.kind!r}")

    def _seed(self, message: Message) -> None:
        meta, ranges = message.meta, len(self.shard.ranges)
        self.shard.load(message.body[:ranges], meta, message.body[ranges:])
        self.workers = tuple(meta["workers"])
        self._clip_norm = meta["clip_norm"]
        self.version = 0
        self._left.clear()
        self._fresh = set(self.workers)
        order = GlobalOrder(meta["samples"], seed=0)  # lends positions only, so its permutation does not matter
        self.cursor = Cursor(order, meta["position"], meta["end"], meta["lease"])
        self.comm.reply(message, {})

    # Asynchronous: leases.

    def _draw(self, message: Message) -> None:
        assert self.cursor is not None
        self._note(message)
        self.cursor.applied(message.meta["done"])
        if message.meta["stop"]:
            self.cursor.close()
        self._lend(message)
        if self.cursor.drained:
            for parked in self._parked:
                self.comm.reply(parked, {"position": self.cursor.position})
            self._parked.clear()

    def _lend(self, message: Message) -> None:
        assert self.cursor is not None
        lease = self.cursor.draw(message.source)
        if lease is None:
            self._parked.append(message)
        else:
            self.comm.reply(message, {"lease": lease.number, "piece": list(lease.piece)})

    # Gradients.

    def _push(self, message: Message) -> None:
        if self.asynchronous:
            self._apply_one(message)
        else:
            self._pushed[message.source] = message
            if len(self._pushed) == len(self.workers):
                self._apply_all([self._pushed[w] for w in self.workers])
                self._pushed.clear()

    def _apply_one(self, message: Message) -> None:
        self._note(message)
        for grad, pushed in zip(self.shard.grads, message.body, strict=True):
            grad.copy_(pushed)
        staleness = self.version - message.meta["version"]
        self._step([message])
        self._record(message.source, staleness, message.meta["lease"])
        self.comm.reply(message, {"version": self.version}, self.shard.params)

    def _apply_all(self, messages: list[Message]) -> None:
        for n, grad in enumerate(self.shard.grads):
            grad.copy_(messages[0].body[n])
            for message in messages[1:]:
                grad += message.body[n]
        self._step(messages)
        meta = {
            "version": self.version,
            "stop": any(m.meta["stop"] for m in messages),
            "loss": sum(m.meta["loss"] for m in messages),
        }
        for message in messages:
            self.comm.reply(message, meta, self.shard.params)

    def _step(self, messages: list[Message]) -> None:
        unused = set.intersection(*(set(m.meta["unused"]) for m in messages))
        self.shard.step(messages[0].meta["options"], unused, self._clip_norm)
        self.comm.clock.touch(self.shard.nbytes)
        self.version += 1
        self.updates += 1

    # Ends.

    def _leave(self, message: Message) -> None:
        self._left[message.source] = message
        if len(self._left) == len(self.workers):
            meta, state = self.shard.dump()
            for waiting in self._left.values():
                self.comm.reply(waiting, meta, [*self.shard.params, *state])

    def _departed(self, message: Message) -> None:
        rank = message.source
        if rank not in self.workers:
            return
        self._gone.add(rank)
        if rank not in self._left:
            raise Lost(f"server {self.comm.rank}: worker {rank} was lost before it was through")

    # Records.

    def _note(self, message: Message) -> None:
        """The order of arrivals is the run's order: with it the run can be replayed."""
        self.recorder.write(
            "arrival",
            self.comm.clock.now_ns(),
            source=message.source,
            what=message.kind,
            lease=message.meta.get("lease", message.meta.get("done")),
        )

    def _record(self, worker: int, staleness: int, lease: int) -> None:
        self.recorder.write(
            "update",
            self.comm.clock.now_ns(),
            version=self.version,
            worker=worker,
            staleness=staleness,
            lease=lease,
            first=worker in self._fresh,
        )
        self._fresh.discard(worker)


def options_of(optimizer: Optimizer, lr_scale: float = 1.0) -> list[dict[str, Any]]:
    """Each group's numbers, to travel with a push: where it lies in the order decides them, not when it arrives."""
    options = []
    for group in optimizer.param_groups:
        plain = {k: v.item() if isinstance(v, Tensor) and v.dim() == 0 else v for k, v in group.items()}
        numbers = {k: v for k, v in plain.items() if _is_number(v)}
        several = {k: v for k, v in group.items() if isinstance(v, tuple) and all(map(_is_number, v))}  # Adam's betas
        options.append({**numbers, **several, "lr": float(numbers["lr"]) * lr_scale})
    return options


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
