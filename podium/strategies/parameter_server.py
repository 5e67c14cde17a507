"""Parameter server: workers push gradients to servers, which hold the parameters and move them.

How far workers may drift apart is the `mode`; `podium/servers/gate.py` has the table and the papers. In short: `sync`
is all-reduce by other means; `async` applies each push as it comes; `ssp` and `dssp` bound how far a worker may run
ahead; `softsync`, `backup` and `gba` gather pushes into larger updates.

Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014.
Dean et al., Large Scale Distributed Deep Networks, NIPS 2012 (asynchronous SGD).

Scaling, once for all modes. An update is made from U samples: the global batch B under `sync`, `ssp` with staleness 0,
`backup` and `gba`; one lease under `async`, `ssp` and `dssp`; a group's leases under `softsync`. Its gradient is the
mean over those samples, and its learning rate the task's own times U / B (the linear rule), unless `lr_scale` says
otherwise; with `mitigation=staleness-lr` the rate is divided by the staleness in place of that. Momentum, Adam's betas
and RMSprop's alpha are raised to the power U / B, so that they look back over as many samples as in one process: with
eight workers and a momentum of 0.9 per update, LeNet-5 diverged; with 0.9 to the power of an eighth it does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, final

import torch
from torch import Tensor

from podium.codecs.base import Span, Turn
from podium.errors import ConfigError, Lost
from podium.reducing import span_of
from podium.servers.gate import Rules
from podium.servers.moments import pack, parts_of, unpack
from podium.servers.options import options_of
from podium.servers.ranges import Layout, Range, lay_out
from podium.servers.server import PATIENCE
from podium.strategies.base import Strategy

if TYPE_CHECKING:
    from podium.comm.base import Handle, Message, Meta
    from podium.worker import Batch, Worker

Mode = Literal["sync", "async", "ssp", "dssp", "softsync", "backup", "gba"]


@dataclass
class PSState:
    layouts: list[Layout]  # by server
    versions: list[list[int]]  # of the parameters this worker holds, by server and unit
    outbox: list[Tensor] = field(default_factory=list)  # prefetch: gradients on their way, …
    inbox: list[Tensor] = field(default_factory=list)  # … and the parameters that come back
    pending: _Pushes | None = None
    spans: list[list[Span]] = field(default_factory=list)  # of each server's ranges, for a codec


@final
@dataclass(frozen=True, kw_only=True)
class ParameterServer(Strategy[PSState]):
    """Gradients to servers, parameters back."""

    name: ClassVar[str] = "parameter-server"
    survives_loss: ClassVar[bool] = True
    replaces_servers: ClassVar[bool] = True

    mode: Mode = "sync"
    """How far workers may drift apart, and what makes an update."""
    staleness: int = 3
    """`ssp`, `dssp`: how many steps a worker may be ahead of the slowest."""
    staleness_high: int = 8
    """`dssp`: how far the bound may be raised, where that shortens the wait."""
    groups: int = 1
    """`softsync`: updates in the time in which every worker pushes once (the paper's n)."""
    backups: int = 1
    """`backup`: how many of the workers need not be waited for."""
    drop_beyond: int | None = None
    """Pushes staler than this are dropped, and their samples lent again."""
    mitigation: Literal["none", "staleness-lr", "dc-asgd", "dc-asgd-adaptive"] = "none"
    """What servers do about stale gradients."""
    strength: float | None = None
    """DC-ASGD's lambda; 0.04, or 2 where it adapts, when not given."""
    servers: int = 1
    placement: Literal["dedicated", "colocated"] = "dedicated"
    """Whether servers have processes of their own or live in the workers'."""
    lease: int | None = None
    """Samples per push, at most, where workers lease them: a global step is cut into equal slices of no more than this.
    The global batch divided by the workers when not given."""
    lr_scale: float | None = None
    """What the learning rate of an update is multiplied by; its samples / global batch when not given."""
    overlap: bool = True
    """Whether gradients go out while backward still runs."""
    prefetch: bool = False
    """Compute on while a push is under way, on parameters that lack it: hides the network, adds 1 to staleness."""
    rows: bool = True
    """Whether only touched rows travel of embeddings with `sparse=True`; needs SGD without momentum, or Adagrad,
    without weight decay, and goes with neither clipping, `prefetch` nor DC-ASGD: then all of them travel."""
    pull: str = "dense"
    """The codec that packs what servers answer, `NAME[:K=V;…]`; the run's `codec` packs what workers push."""
    replicas: int = 1
    """How many servers hold each range; with 2 or more, a lost server loses nothing."""
    snapshot_every: int = 100
    """Updates between two snapshots of a server, from which it is restored when nobody has a copy; 0: none."""
    unit_bytes: int | None = None
    """How much travels in one message: 8 MB over a network, 32 MB in shared memory, when not given."""
    bucket_bytes: int = 8 << 20
    """Gradients are ready in buckets of about this size."""

    def __post_init__(self) -> None:
        for name in ("servers", "groups", "replicas", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"parameter-server: {name} must be at least 1, got {getattr(self, name)}")
        for name in ("staleness", "backups", "snapshot_every"):
            if getattr(self, name) < 0:
                raise ConfigError(f"parameter-server: {name} must be at least 0, got {getattr(self, name)}")
        if self.mode == "dssp" and self.staleness_high < self.staleness:
            raise ConfigError(
                f"parameter-server: staleness_high must be at least staleness ({self.staleness}), "
                f"got {self.staleness_high}"
            )
        if self.unit_bytes is not None and self.unit_bytes < 1:
            raise ConfigError(f"parameter-server: unit_bytes must be at least 1, got {self.unit_bytes}")
        if self.lease is not None and self.lease < 1:
            raise ConfigError(f"parameter-server: lease must be at least 1 sample, got {self.lease}")
        if self.lr_scale is not None and not self.lr_scale > 0:
            raise ConfigError(f"parameter-server: lr_scale must be above 0, got {self.lr_scale}")
        if self.strength is not None and not self.strength > 0:
            raise ConfigError(f"parameter-server: strength must be above 0, got {self.strength}")
        if self.drop_beyond is not None and self.drop_beyond < 0:
            raise ConfigError(f"parameter-server: drop_beyond must be at least 0, got {self.drop_beyond}")
        if self.drop_beyond is not None and self.mode not in ("async", "softsync", "gba"):
            raise ConfigError(f"parameter-server: drop_beyond has no meaning with mode={self.mode}")
        if self.mitigation != "none" and self.mode in ("sync", "backup"):
            raise ConfigError(f"parameter-server: mitigation={self.mitigation} has no meaning with mode={self.mode}")
        if self.prefetch and (self.mode not in ("async", "ssp", "dssp") or not self._streams):
            raise ConfigError(f"parameter-server: prefetch works with mode=async, ssp or dssp, got mode={self.mode}")
        if self.prefetch and self.mitigation.startswith("dc-asgd"):
            raise ConfigError(
                f"parameter-server: mitigation={self.mitigation} cannot go with prefetch: a server knows which "
                "parameters it gave last, not which ones a worker that ran ahead has used"
            )
        pull = self.pull_codec
        if pull.takes_momentum:
            raise ConfigError(f"parameter-server: pull={self.pull} packs gradients, and servers answer with parameters")
        if pull.name == "auto":
            raise ConfigError("parameter-server: pull=auto: servers choose nothing by themselves; name a codec")
        if self.prefetch and self.packs_answers:
            raise ConfigError(
                f"parameter-server: pull={self.pull} cannot go with prefetch: an answer says what has changed since "
                "the last one, which a worker that ran ahead has not taken up yet"
            )
        if self.replicas > max(1, self.servers):
            raise ConfigError(
                f"parameter-server: replicas must be at most the number of servers ({self.servers}), "
                f"got {self.replicas}"
            )

    @property
    def server_count(self) -> int:
        return self.servers

    @property
    def sends_rows(self) -> bool:
        return self.rows and not self.prefetch and not self.mitigation.startswith("dc-asgd")

    @property
    def colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def feed(self) -> Literal["step", "cursor"]:
        return "step" if self.mode == "sync" else "cursor"

    @property
    def _in_step(self) -> bool:
        """Whether all workers make every update together."""
        return self.mode == "sync" or (self.mode in ("ssp", "dssp") and self.staleness == 0 and not self._stretches)

    @property
    def _stretches(self) -> bool:
        return self.mode == "dssp" and self.staleness_high > 0

    @property
    def _streams(self) -> bool:
        """Whether every push is an update, applied unit by unit."""
        return self.mode in ("async", "ssp", "dssp") and not self._in_step and self.drop_beyond is None

    # The three of a strategy.

    def init(self, worker: Worker) -> PSState:
        """The first worker brings parameters and optimizer state to the servers; the others wait until it has."""
        workers = worker.comm.size
        if self.mode == "backup" and self.backups >= workers:
            raise ConfigError(f"parameter-server: backups must be below the number of workers, {workers}")
        layouts = lay_out(worker.flat, len(worker.comm.servers), self._unit_bytes(worker))
        state = PSState(layouts, [[0] * len(layout.units) for layout in layouts])
        state.spans = [[span_of(worker.flat, r) for r in layout.ranges] for layout in layouts]
        worker.outgoing.memory.forget()
        worker.next_lease, worker.lease_done = None, -1
        if self.prefetch:
            state.outbox = [torch.zeros_like(g) for g in worker.flat.grads]
            state.inbox = [torch.zeros_like(p) for p in worker.params]
        try:
            if worker.comm.index == 0:
                self._seed(worker, state)
            worker.comm.barrier()
        except Lost:
            # The others may be at it already: they shall not wait for us.
            worker.comm.wait(*(worker.comm.call(server, "skip", {}) for server in worker.comm.servers))
            raise
        return state

    def step(self, worker: Worker, state: PSState, batch: Batch) -> Tensor:
        batch = batch._replace(weight=self._weight(worker, batch))
        pushes = _Pushes(self, worker, state, batch)  # remembers the versions that are computed on
        early = self.overlap and not self.prefetch and (self.feed == "step" or worker.clip_norm is None)
        loss = worker.backward(batch, on_ready=pushes.bucket_ready if early else None)
        if self.feed == "cursor" and worker.clip_norm is not None:
            worker.clip_own()
        if self.prefetch:
            self._take(worker, state)
            pushes.go_from(state)
        pushes.finish(float(loss))
        state.pending = pushes
        if not self.prefetch:
            self._take(worker, state)
        worker.advance(batch)
        return loss

    def exchange(self, worker: Worker, state: PSState, batch: Batch) -> None:
        """Push the gradients as they are, and wait for the parameters: a step without its computing."""
        state.pending = _Pushes(self, worker, state, batch)
        state.pending.finish(0.0)
        self._take(worker, state)

    def finish(self, worker: Worker, state: PSState) -> None:
        """Wait until all workers are through, then take parameters and optimizer state home."""
        comm = worker.comm
        self._take(worker, state)
        calls = [comm.call(server, "leave", {}) for server in comm.servers]
        answers = comm.wait(*calls, deadline_s=PATIENCE * comm.deadline_s)
        if any(answer is None or "empty" in answer.meta for answer in answers):
            return  # the servers were never seeded: what we have is the truth
        moments: dict[str, dict[str, Tensor]] = {}
        for layout, answer in zip(state.layouts, answers, strict=True):
            assert answer is not None
            for r, tensor in zip(layout.ranges, answer.body, strict=False):
                r.of(worker.params).copy_(tensor)
            found = unpack(layout.ranges, answer.meta, answer.body[len(layout.ranges) :])
            _collect(worker, layout.ranges, found, moments)
        worker.load_optimizer_state(moments)
        assert answers[0] is not None
        if set(answers[0].meta["workers"]) != set(comm.workers):
            worker.pause_agreed = True  # somebody is gone: all hear of it here, and regroup

    @property
    def packs_answers(self) -> bool:
        return not self.pull_codec.exact

    # Inside.

    def _take(self, worker: Worker, state: PSState) -> None:
        """Wait for the answers to the last push, and learn from them."""
        pushes, state.pending = state.pending, None
        if pushes is None:
            return
        answers = worker.comm.wait(*pushes.calls, deadline_s=PATIENCE * worker.comm.deadline_s)
        lost = [a.meta["lost"] for a in answers if a is not None and "lost" in a.meta]
        if lost:
            raise Lost(f"rank {worker.comm.rank}: worker {lost[0]} was lost; this step did not happen")
        dropped = False
        for (server, unit), answer in zip(pushes.units, answers, strict=True):
            assert answer is not None
            state.versions[server][unit] = answer.meta["version"]
            pushes.scatter(server, unit, answer)
            dropped = dropped or answer.meta.get("dropped", False)
        if dropped:
            worker.outgoing.memory.forget()  # these samples will come again
        if self.prefetch:
            for mine, landed in zip(worker.params, state.inbox, strict=True):
                mine.copy_(landed)
        self._learn(worker, pushes, answers, dropped)

    def _learn(self, worker: Worker, pushes: _Pushes, answers: Sequence[Message | None], dropped: bool) -> None:
        """What the answer to the last unit says besides parameters."""
        at = max(n for n, (server, _) in enumerate(pushes.units) if server == 0)
        answer = answers[at]
        assert answer is not None
        meta = answer.meta
        if self.feed == "step":
            worker.heed(meta.get("agreed", (False, False, False)))
            worker.step_loss = meta.get("loss")
        else:
            worker.lease_done = -1 if dropped or self.prefetch else pushes.lease
            worker.next_lease = meta if "lease" in meta else None

    def _seed(self, worker: Worker, state: PSState) -> None:
        comm, dtypes = worker.comm, [p.dtype for p in worker.params]
        seeds = []
        for server, layout in zip(comm.servers, state.layouts, strict=True):
            states = parts_of(
                layout.ranges,
                lambda i: worker.optimizer.state.get(worker.flat.parameters[i], {}),
                lambda i, tensor: _in_memory_order(worker, i, tensor),
            )
            names, body = pack(layout.ranges, states, dtypes)
            meta = {**names, **self._work(worker)}
            seeds.append(comm.call(server, "seed", meta, [*(r.of(worker.params) for r in layout.ranges), *body]))
        comm.wait(*seeds)

    def _work(self, worker: Worker) -> Meta:
        """What is to be done in this stretch, as servers need to know it."""
        return {
            "workers": list(worker.comm.workers),
            "addresses": list(worker.comm.addresses.items()),
            "servers": list(worker.comm.servers),
            "rules": self._rules(worker).to_dict(),
            "mitigation": self.mitigation,
            "strength": self.strength,
            "clip_norm": worker.clip_norm if self.feed == "step" else None,
            "leases": self.feed == "cursor",
            "samples": worker.samples,
            "position": worker.position,
            "end": worker.horizon,
            "batch_size": worker.batch_size,
            "parts": self._parts(worker),
            "codec": worker.outgoing.push[0],
            "unit_bytes": self._unit_bytes(worker),
        }

    def _unit_bytes(self, worker: Worker) -> int:
        return self.unit_bytes or _unit_bytes(worker.comm.shares_memory)

    def as_recorded(self, shares_memory: bool) -> ParameterServer:
        if self.mode == "dssp" or self.replicas > 1:
            what = "mode=dssp (its gate looks at the clock)" if self.mode == "dssp" else "replicas above 1"
            raise ConfigError(f"replay: parameter-server with {what} cannot be replayed")
        return dataclasses.replace(self, unit_bytes=self.unit_bytes or _unit_bytes(shares_memory))

    def _rules(self, worker: Worker) -> Rules:
        workers = worker.comm.size
        if self._in_step:
            return Rules(bound=0, all_workers=True, wait=True)
        if self.mode == "ssp":
            return Rules(bound=self.staleness)
        if self.mode == "dssp":
            return Rules(bound=self.staleness, bound_high=self.staleness_high)
        if self.mode == "softsync":
            return Rules(pushes=self._group(workers), freshest=self.drop_beyond)
        if self.mode == "backup":
            return Rules(pushes=workers - self.backups, wait=True, freshest=0)
        if self.mode == "gba":
            return Rules(samples=worker.batch_size, freshest=self.drop_beyond)
        return Rules(freshest=self.drop_beyond, wait=self.drop_beyond is not None)

    def _group(self, workers: int) -> int:
        return max(1, workers // self.groups)

    def _parts(self, worker: Worker) -> int:
        """Into how many slices a global step is cut."""
        if self.lease is not None:
            return max(1, -(-worker.batch_size // self.lease))
        workers = worker.comm.size - (self.backups if self.mode == "backup" else 0)
        return min(workers, worker.batch_size)

    def _weight(self, worker: Worker, batch: Batch) -> float:
        """This push's share of the update that it becomes part of."""
        if self.feed == "step" or self._in_step or self.mode in ("backup", "gba"):
            return batch.weight
        if self.mode == "softsync":
            return batch.weight * self._parts(worker) / self._group(worker.comm.size)
        return 1.0

    def options(self, worker: Worker) -> list[Meta]:
        """The optimizer's settings for one update."""
        scale = self.lr_scale
        if scale is None and self.mitigation == "staleness-lr" and self._streams:
            scale = 1.0  # the staleness divides it
        return options_of(worker.optimizer, self._share(worker), scale)

    def _share(self, worker: Worker) -> float:
        """An update's samples over those of a global step."""
        if self.mode in ("sync", "gba"):
            return 1.0
        leases = 1
        if self._in_step or self.mode == "backup":
            leases = worker.comm.size - (self.backups if self.mode == "backup" else 0)
        elif self.mode == "softsync":
            leases = self._group(worker.comm.size)
        return min(1.0, leases / self._parts(worker))


def _unit_bytes(shares_memory: bool) -> int:
    return 32 << 20 if shares_memory else 8 << 20


class _Pushes:
    """The units of one push: sent as they become ready, in the order of the buckets."""

    def __init__(self, strategy: ParameterServer, worker: Worker, state: PSState, batch: Batch) -> None:
        self.worker, self.state = worker, state
        self.calls: list[Handle] = []
        self.units: list[tuple[int, int]] = []  # (server, unit) of each call
        self.lease = batch.lease if strategy.feed == "cursor" else worker.position
        self._options = strategy.options(worker)
        self._pull = strategy.pull_codec
        self._turn = worker.turn
        self._batch, self._prefetch = batch, strategy.prefetch
        self._grads, self._params = worker.flat.grads, worker.params
        self._versions = [list(versions) for versions in state.versions]
        self._sent = 0  # buckets

    def go_from(self, state: PSState) -> None:
        """Send copies, so that the next gradients may be computed meanwhile."""
        for copy, grads in zip(state.outbox, self._grads, strict=True):
            copy.copy_(grads)
        self._grads, self._params = state.outbox, state.inbox

    def bucket_ready(self, bucket: int) -> None:
        """Issue this bucket's units; never waits. A server's last unit stays back: it tells what the step came to."""
        self._sent = bucket + 1
        for m, layout in enumerate(self.state.layouts):
            for u, unit in enumerate(layout.units[:-1]):
                if unit.bucket == bucket:
                    early = self.worker.comm.in_backward
                    self._call(m, u, {"early": early, "last": False}, more=not early)

    def finish(self, loss: float) -> None:
        """Send what is left."""
        worker, batch = self.worker, self._batch
        for bucket in range(self._sent, worker.buckets):
            self.bucket_ready(bucket)
        facts = {
            "early": False,
            "last": True,
            "done": worker.lease_done,
            "wishes": list(worker.wishes),
            "loss": loss * batch.weight,
            "samples": batch.samples,
            "weight": batch.weight,
            "lend": not self._prefetch,
        }
        for m, layout in enumerate(self.state.layouts):
            self._call(m, len(layout.units) - 1, facts)

    def _call(self, m: int, u: int, facts: Meta, more: bool = False) -> None:
        worker, layout = self.worker, self.state.layouts[m]
        ranges = layout.units[u].of(layout.ranges)
        meta = {
            "unit": u,
            "lease": self.lease,
            "version": self._versions[m][u],
            "options": self._options,
            "unused": worker.unused_among(part.piece for r in ranges for part in r.parts),
            **facts,
        }
        body, into = [r.of(self._grads) for r in ranges], [r.of(self._params) for r in ranges]
        rows, (_, packing) = bool(ranges) and ranges[0].row > 0, worker.outgoing.push
        if rows:
            body = self._rows(ranges[0])
        elif packing.codec.exact:
            for grad, span in zip(body, layout.units[u].of(self.state.spans[m]), strict=True):
                worker.outgoing.add_leftover(grad, span)
        else:
            spans = layout.units[u].of(self.state.spans[m])
            body = [packing.pack(g, s, self._turn, worker.outgoing.memory) for g, s in zip(body, spans, strict=True)]
            worker.comm.clock.touch(round(packing.codec.passes * sum(span.numel for span in spans) * 4))
            meta["turn"] = list(self._turn)
        whole = not rows and self._pull.exact
        self.units.append((m, u))
        server = worker.comm.servers[m]
        self.calls.append(worker.comm.call(server, "push", meta, body, into if whole else None, more))

    def _rows(self, r: Range) -> list[Tensor]:
        """The touched rows of a range, numbered from its own first."""
        (part,) = r.parts
        index, values = self.worker.touched_rows(part.piece)
        first, stop = part.start // r.row, part.stop // r.row
        mine = (index >= first) & (index < stop)
        return [index[mine] - first, values[mine]]

    def scatter(self, m: int, u: int, answer: Message) -> None:
        """Put what came back where it belongs; whole ranges have landed by themselves."""
        layout = self.state.layouts[m]
        ranges = layout.units[u].of(layout.ranges)
        if ranges and ranges[0].row:
            index, rows = answer.body
            table = ranges[0].of(self._params).view(-1, ranges[0].row)
            table.index_copy_(0, index.to(table.device), rows.to(table.device))
        elif not self._pull.exact:
            turn = Turn(step=answer.meta["version"], rank=self.worker.comm.rank)
            spans = layout.units[u].of(self.state.spans[m])
            for r, span, tensor in zip(ranges, spans, answer.body, strict=True):
                mine = r.of(self._params)
                if answer.meta["packed"]:
                    self._pull.decode_add(tensor.to(mine.device), mine, span, turn)
                else:
                    mine.copy_(tensor)


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
