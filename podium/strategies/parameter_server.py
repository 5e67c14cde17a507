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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch import Tensor

from podium.balance.ranges import check_ranges, weights_of
from podium.errors import ConfigError
from podium.exchange.residuals import Unit
from podium.servers import client
from podium.servers.gate import Rules
from podium.servers.options import options_of, scaled
from podium.strategies.base import Strategy

if TYPE_CHECKING:
    from podium.comm.base import Meta
    from podium.engine.worker import Batch, Worker

Mode = Literal["sync", "async", "ssp", "dssp", "softsync", "backup", "gba"]


@dataclass
class PSState:
    served: client.Served
    share: float  # of a global step's samples, in an update
    exposure: client.Exposure | None = None  # where workers go in step and their parts may be changed
    outbox: list[Tensor] = field(default_factory=list)  # prefetch: gradients on their way, …
    inbox: list[Tensor] = field(default_factory=list)  # … and the parameters that come back
    pending: client.Pushes | None = None


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
    ranges: str = "equal"
    """How much of the parameters each server holds: `equal`, by `speed` (as fast as its link and memory are by the
    cluster file), or in proportion to numbers, one per server that the run began with: `2/1/1`, or with `,`."""
    only_serve: int = 0
    """The last so many workers train nothing meanwhile: they become servers, with the colocated servers beside them."""
    lease: int | None = None
    """Samples per push, at most, where workers lease them: a global step is cut into equal slices of no more than this.
    The global batch divided by the workers when not given."""
    lr_scale: float | None = None
    """What the learning rate of an update is multiplied by; its samples / global batch when not given."""
    rate: float = 1.0
    """What the learning rate is multiplied by besides: stale gradients are stable at lower rates only."""
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
        for name in ("staleness", "backups", "snapshot_every", "only_serve"):
            if getattr(self, name) < 0:
                raise ConfigError(f"parameter-server: {name} must be at least 0, got {getattr(self, name)}")
        if self.mode == "dssp" and self.staleness_high < self.staleness:
            raise ConfigError(
                f"parameter-server: staleness_high must be at least staleness ({self.staleness}), "
                f"got {self.staleness_high}"
            )
        check_ranges("parameter-server", self.ranges, self.servers)
        if self.unit_bytes is not None and self.unit_bytes < 1:
            raise ConfigError(f"parameter-server: unit_bytes must be at least 1, got {self.unit_bytes}")
        if self.lease is not None and self.lease < 1:
            raise ConfigError(f"parameter-server: lease must be at least 1 sample, got {self.lease}")
        if self.lr_scale is not None and not self.lr_scale > 0:
            raise ConfigError(f"parameter-server: lr_scale must be above 0, got {self.lr_scale}")
        if not self.rate > 0:
            raise ConfigError(f"parameter-server: rate must be above 0, got {self.rate}")
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
        if self.only_serve and (self.mode == "sync" or not self.colocated):
            raise ConfigError(
                "parameter-server: only_serve needs placement=colocated and a mode in which workers lease samples, "
                f"got placement={self.placement}, mode={self.mode}"
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

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.mode == "backup" and self.backups >= workers - self.only_serve:
            raise ConfigError(f"parameter-server: backups must be below the number of workers, {workers}")
        if self.only_serve >= workers:
            raise ConfigError(f"parameter-server: only_serve must be below the number of workers, {workers}")

    def unit(self, worker: Worker) -> Unit:
        return Unit(self.sends, self._share(worker))

    # The three of a strategy.

    def init(self, worker: Worker) -> PSState:
        """Parameters and optimizer state go to the servers; all wait until they are there."""
        if self.mode == "backup" and self.backups >= self._training(worker) and not worker.comm.generation:
            raise ConfigError(
                f"parameter-server: backups must be below the number of workers, {self._training(worker)}"
            )
        served = client.meet(worker, self._unit_bytes(worker), self._weights(worker))
        state = PSState(served, self._share(worker))
        if self.feed == "step":
            state.exposure = client.Exposure(worker, served, early=self._is_early(worker), pull=self.pull_codec)
            worker.exposure = state.exposure.seconds
        if self.prefetch:
            state.outbox = [torch.zeros_like(g) for g in worker.flat.grads]
            state.inbox = [torch.zeros_like(p) for p in worker.params]
        places = client.seeded_here(worker, self.colocated, self.only_serve)
        client.seed_together(worker, state.served, places, self._work(worker), client.own_states(worker, state.share))
        worker.step_check.servers_begin()
        return state

    def step(self, worker: Worker, state: PSState, batch: Batch) -> Tensor:
        batch = batch._replace(weight=self._weight(worker, batch))
        pushes = self._pushes(worker, state, batch)  # remembers the versions that are computed on
        loss = worker.backward(batch, on_ready=pushes.bucket_ready if self._is_early(worker) else None)
        if state.exposure is not None and batch.samples:
            state.exposure.saw_pass(batch.samples)
        if self.feed == "cursor" and worker.clip_norm is not None:
            worker.clip_own()
        if self.prefetch:
            self._take(worker, state)
            pushes.go_from(state.outbox, state.inbox)
        pushes.finish(float(loss))
        state.pending = pushes
        if not self.prefetch:
            self._take(worker, state)
        worker.advance(batch)
        return loss

    def exchange(self, worker: Worker, state: PSState, batch: Batch) -> None:
        """Push the gradients as they are, and wait for the parameters: a step without its computing."""
        state.pending = self._pushes(worker, state, batch)
        state.pending.finish(0.0)
        self._take(worker, state)

    def settle(self, worker: Worker, state: PSState) -> None:
        self._take(worker, state)

    def finish(self, worker: Worker, state: PSState) -> None:
        """Wait until all workers are through, then take parameters and optimizer state home."""
        worker.exposure, worker.step_check.served = None, False
        self._take(worker, state)
        moments: dict[str, dict[str, Any]] = {}
        live = client.leave(
            worker, state.served, lambda ranges, states: client.collect(worker, ranges, states, moments)
        )
        if live is None:
            return  # the servers were never seeded: what we have is the truth
        client.take_states_home(worker, moments, state.share)

    @property
    def packs_answers(self) -> bool:
        return not self.pull_codec.exact

    # Inside.

    def _pushes(self, worker: Worker, state: PSState, batch: Batch) -> client.Pushes:
        lease, size = batch.lease, batch.samples
        if self.feed == "step":
            lease, size = worker.position, batch.end - worker.position
        options, lend = self.options(worker), not self.prefetch
        facts = {"busy": worker.take_pace()} if worker.tells_pace else None
        return client.Pushes(
            worker,
            state.served,
            batch,
            lease=lease,
            size=size,
            options=options,
            pull=self.pull_codec,
            lend=lend,
            facts=facts,
        )

    def _take(self, worker: Worker, state: PSState) -> None:
        """Wait for the answers to the last push, and learn from them."""
        pushes, state.pending = state.pending, None
        if pushes is None:
            return
        answers, facts = pushes.take()
        dropped = any(answer.meta.get("dropped", False) for answer in answers)
        if dropped:
            worker.outgoing.memory.forget()  # these samples will come again
        if self.prefetch:
            for mine, landed in zip(worker.params, state.inbox, strict=True):
                mine.copy_(landed)
        worker.step_check.parameters_came()
        if self.feed == "step":
            worker.heed(facts.get("agreed", (False, False, False)))
            worker.step_loss = facts.get("loss")
        else:
            worker.lease_done = -1 if dropped or self.prefetch else pushes.lease
            worker.next_lease = facts if "lease" in facts else None
            worker.paces = dict(facts.get("busy", ()))

    def _work(self, worker: Worker) -> Meta:
        """What is to be done in this stretch, as servers need to know it."""
        return {
            **client.common_work(worker, self._unit_bytes(worker), self._weights(worker)),
            "rules": self._rules(worker).to_dict(),
            "mitigation": self.mitigation,
            "strength": self.strength,
            "clip_norm": worker.clip_norm if self.feed == "step" else None,
            "leases": self.feed == "cursor",
            "parts": self._parts(worker),
            "sitting": self._sitting(worker),
        }

    def _sitting(self, worker: Worker) -> list[int]:
        """Workers that only serve. Those who join later train; where nobody else is left, all do."""
        comm = worker.comm
        if not self.only_serve:
            return []
        first = min(comm.servers)  # the run began with this many workers, numbered before the servers
        sitting = [rank for rank in comm.workers if first - self.only_serve <= rank < first]
        return sitting if len(sitting) < comm.size else []

    def _training(self, worker: Worker) -> int:
        return worker.comm.size - len(self._sitting(worker))

    def _backups(self, worker: Worker) -> int:
        """Fewer than asked for where so many workers were lost that nobody would be left to wait for."""
        return min(self.backups, self._training(worker) - 1)

    def _is_early(self, worker: Worker) -> bool:
        """Whether gradients leave while backward still runs."""
        return self.overlap and not self.prefetch and (self.feed == "step" or worker.clip_norm is None)

    def _weights(self, worker: Worker) -> tuple[float, ...] | None:
        """How much of the parameters each server holds."""
        workers = self._training(worker)
        updates = 1
        if self.mode == "softsync":
            updates = workers // self._group(workers)
        elif self._streams:
            updates = workers
        return weights_of("parameter-server", self.ranges, worker.comm, updates)

    def _unit_bytes(self, worker: Worker) -> int:
        return self.unit_bytes or client.unit_bytes_for(worker)

    def as_recorded(self, shares_memory: bool) -> ParameterServer:
        if self.mode == "dssp" or self.replicas > 1:
            what = "mode=dssp (its gate looks at the clock)" if self.mode == "dssp" else "replicas above 1"
            raise ConfigError(f"replay: parameter-server with {what} cannot be replayed")
        default = client.SHARED_UNIT_BYTES if shares_memory else client.UNIT_BYTES
        return dataclasses.replace(self, unit_bytes=self.unit_bytes or default)

    def _rules(self, worker: Worker) -> Rules:
        workers = self._training(worker)
        if self._in_step:
            return Rules(bound=0, all_workers=True, wait=True)
        if self.mode == "ssp":
            return Rules(bound=self.staleness)
        if self.mode == "dssp":
            return Rules(bound=self.staleness, bound_high=self.staleness_high)
        if self.mode == "softsync":
            return Rules(pushes=self._group(workers), freshest=self.drop_beyond)
        if self.mode == "backup":
            return Rules(pushes=workers - self._backups(worker), wait=True, freshest=0)
        if self.mode == "gba":
            return Rules(samples=worker.batch_size, freshest=self.drop_beyond)
        return Rules(freshest=self.drop_beyond, wait=self.drop_beyond is not None)

    def _group(self, workers: int) -> int:
        return max(1, workers // self.groups)

    def _parts(self, worker: Worker) -> int:
        """Into how many slices a global step is cut."""
        if self.lease is not None:
            return max(1, -(-worker.batch_size // self.lease))
        workers = self._training(worker) - (self._backups(worker) if self.mode == "backup" else 0)
        return min(workers, worker.batch_size)

    def _weight(self, worker: Worker, batch: Batch) -> float:
        """This push's share of the update that it becomes part of."""
        if self.feed == "step" or self._in_step or self.mode in ("backup", "gba"):
            return batch.weight
        if self.mode == "softsync":
            return batch.weight * self._parts(worker) / self._group(self._training(worker))
        return 1.0

    def options(self, worker: Worker) -> list[Meta]:
        """The optimizer's settings for one update."""
        scale = self.lr_scale
        if scale is None and self.mitigation == "staleness-lr" and self._streams:
            scale = 1.0  # the staleness divides it
        return scaled(options_of(worker.optimizer, self._share(worker), scale), self.rate)

    def _share(self, worker: Worker) -> float:
        """An update's samples over those of a global step."""
        if self.mode in ("sync", "gba"):
            return 1.0
        leases = 1
        if self._in_step or self.mode == "backup":
            leases = self._training(worker) - (self._backups(worker) if self.mode == "backup" else 0)
        elif self.mode == "softsync":
            leases = self._group(self._training(worker))
        return min(1.0, leases / self._parts(worker))
