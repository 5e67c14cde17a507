"""Parameter server: workers push gradients to servers, which hold the parameters and move them.

The `mode` says how far workers may drift apart (`podium/servers/modes.py`; `podium/servers/gate.py` has the table and
the papers). `sync` equals all-reduce to rounding; `async` applies each push as it arrives; `ssp` and `dssp` bound
how far a worker may run ahead; `softsync`, `backup` and `gba` gather pushes into larger updates.

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

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch import Tensor

from podium.balance.ranges import check_ranges, weights_of
from podium.errors import ConfigError
from podium.servers.leases.lease import NO_LEASE
from podium.servers.modes import Mode, ModeName, Sizes, make_mode
from podium.servers.wire.messages import Seed, lease_of
from podium.servers.wire.optimizer_settings import options_of, scaled
from podium.servers.worker_side.collecting import leave
from podium.servers.worker_side.link_cost import Exposure
from podium.servers.worker_side.optimizer_states import collect, own_states, take_states_home
from podium.servers.worker_side.pushing import Pushes, PushPlan
from podium.servers.worker_side.seeding import seed_for, seed_together, seeded_here
from podium.servers.worker_side.served import Served, meet, unit_bytes_for
from podium.strategies.base import Strategy
from podium.strategies.checks import above_zero, at_least
from podium.strategies.traits import Cadence, Payload, ServerSpec

if TYPE_CHECKING:
    from podium.comm.base import Meta
    from podium.engine.batch import Batch
    from podium.engine.worker import Worker


@dataclass
class PSState:
    served: Served
    share: float  # an update's samples over those of a global step
    exposure: Exposure | None = None  # where workers take steps together and their parts may be changed
    outbox: list[Tensor] = field(default_factory=list)  # prefetch: gradients on their way, …
    inbox: list[Tensor] = field(default_factory=list)  # … and the parameters that come back
    pending: Pushes | None = None


@final
@dataclass(frozen=True, kw_only=True)
class ParameterServer(Strategy[PSState]):
    """Gradients to servers, parameters back."""

    name: ClassVar[str] = "parameter-server"

    mode: ModeName = "sync"
    """How far workers may drift apart, and what makes an update."""
    staleness: int = 3
    """`ssp`, `dssp`: how many steps a worker may be ahead of the slowest."""
    staleness_high: int = 8
    """`dssp`: how far the bound may be raised, where that shortens the wait."""
    groups: int = 1
    """`softsync`: updates in the time in which every worker pushes once (the paper's n)."""
    backups: int = 1
    """`backup`: how many workers an update need not wait for."""
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
    """How much of the parameters each server holds: `equal`, by `speed` (of its link and memory in the cluster file),
    or in proportion to numbers, one per server that the run began with: `2/1/1`, or with `,`."""
    only_serve: int = 0
    """The last `only_serve` workers do not train; the colocated servers beside them have their processes alone."""
    lease: int | None = None
    """Samples per push, at most, where workers lease them: a global step is cut into equal slices of no more than this.
    The global batch divided by the workers when not given."""
    lr_scale: float | None = None
    """Factor on an update's learning rate; its samples / global batch when not given."""
    rate: float = 1.0
    """A further factor on the learning rate: stale gradients are stable at lower rates only."""
    overlap: bool = True
    """Whether gradients are sent while backward still runs."""
    prefetch: bool = False
    """Train on while a push is in flight, on parameters without it: hides the network, adds 1 to staleness."""
    rows: bool = True
    """Send only touched rows of embeddings with `sparse=True`. Needs SGD without momentum, or Adagrad, without weight
    decay, and neither clipping, `prefetch` nor DC-ASGD: otherwise all rows are sent."""
    pull: str = "dense"
    """The codec that packs the servers' answers, `NAME[:K=V;…]`; the run's `codec` packs the workers' pushes."""
    replicas: int = 1
    """How many servers hold each range; with 2 or more, a lost server loses nothing."""
    snapshot_every: int = 100
    """Updates between two snapshots of a server, from which it is restored when no server has a copy; 0: none."""
    unit_bytes: int | None = None
    """Size of one message: 8 MB over a network, 32 MB in shared memory, when not given."""
    bucket_bytes: int = 8 << 20
    """Backward fills buckets of gradients of about this size."""

    def __post_init__(self) -> None:
        at_least(1, self, "servers", "groups", "replicas", "bucket_bytes", "unit_bytes", "lease")
        at_least(0, self, "staleness", "backups", "snapshot_every", "only_serve", "drop_beyond")
        above_zero(self, "lr_scale", "rate", "strength")
        check_ranges(self.name, self.ranges, self.servers)
        self.server_spec.check_options(self.name)
        for wrong, why in self._contradictions():
            if wrong:
                raise ConfigError(f"{self.name}: {why}")

    def _contradictions(self) -> Iterator[tuple[bool, str]]:
        """Combinations of options that are errors, and why."""
        mode, compensates = self._mode, self.mitigation.startswith("dc-asgd")
        yield (
            self.drop_beyond is not None and not mode.can_drop,
            f"drop_beyond has no meaning with mode={self.mode}",
        )
        yield (
            self.mitigation != "none" and not mode.can_mitigate,
            f"mitigation={self.mitigation} has no meaning with mode={self.mode}",
        )
        yield (
            self.prefetch and not mode.streams,
            f"prefetch works with mode=async, ssp or dssp, got mode={self.mode}",
        )
        yield (
            self.prefetch and compensates,
            f"mitigation={self.mitigation} does not work with prefetch: a server knows which parameters it sent last, "
            "not which ones a worker that ran ahead has used",
        )
        yield (
            self.prefetch and not self.server_spec.pull_codec.exact,
            f"pull={self.pull} does not work with prefetch: an answer holds the changes since the last one, which a "
            "worker that ran ahead has not applied yet",
        )
        yield (
            self.only_serve > 0 and not (mode.by_leases and self.server_spec.colocated),
            "only_serve needs placement=colocated and a mode in which workers lease samples, "
            f"got placement={self.placement}, mode={self.mode}",
        )

    @cached_property
    def _mode(self) -> Mode:
        return make_mode(self.mode, self)

    @cached_property
    def cadence(self) -> Cadence:
        return Cadence(every="lease" if self._mode.by_leases else "step", survives_loss=True)

    @cached_property
    def payload(self) -> Payload:
        return Payload(share=self._share)

    @cached_property
    def server_spec(self) -> ServerSpec:
        return ServerSpec(
            count=self.servers,
            colocated=self.placement == "colocated",
            replicas=self.replicas,
            snapshot_every=self.snapshot_every,
            pull=self.pull,
            only_serve=self.only_serve,
            replaceable=True,
            sends_rows=self.rows and not self.prefetch and not self.mitigation.startswith("dc-asgd"),
            not_replayed=self._mode.not_replayed,
        )

    def check(self, workers: int) -> None:
        super().check(workers)
        if self.only_serve >= workers:
            raise ConfigError(f"{self.name}: only_serve must be below the number of workers, {workers}")
        self._mode.check(self.name, workers - self.only_serve)

    # init, step, finish.

    def init(self, worker: Worker) -> PSState:
        """Send parameters and optimizer state to the servers; all workers wait until they have arrived."""
        if not worker.comm.generation:  # later, too few workers are not the user's mistake
            self._mode.check(self.name, self._sizes(worker).workers)
        served = meet(worker, self._unit_bytes(worker), self._weights(worker))
        state = PSState(served, self._share(worker))
        if not self.cadence.by_leases:
            state.exposure = Exposure(worker, served, early=self._is_early(worker), pull=self.server_spec.pull_codec)
            worker.gradients.times.expose(state.exposure.seconds)
        if self.prefetch:
            state.outbox = [torch.zeros_like(g) for g in worker.flat.grads]
            state.inbox = [torch.zeros_like(p) for p in worker.params]
        places = seeded_here(worker, self.server_spec.colocated, self.only_serve)
        seed_together(worker, state.served, places, self._seed(worker), own_states(worker, state.share))
        worker.replica.step_check.servers_begin()
        return state

    def step(self, worker: Worker, state: PSState, batch: Batch) -> Tensor:
        batch = batch._replace(weight=self._mode.weight(batch.weight, self._sizes(worker)))
        pushes = self._pushes(worker, state, batch)  # stores the versions on which the gradient is computed
        loss = worker.backward(batch, on_ready=pushes.bucket_ready if self._is_early(worker) else None)
        if state.exposure is not None and batch.samples:
            state.exposure.saw_pass(batch.samples)
        if self.cadence.by_leases:
            worker.replica.clip()
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
        """Push the gradients as they are and wait for the parameters: a step without forward and backward."""
        state.pending = self._pushes(worker, state, batch)
        state.pending.finish(0.0)
        self._take(worker, state)

    def settle(self, worker: Worker, state: PSState) -> None:
        self._take(worker, state)

    def finish(self, worker: Worker, state: PSState) -> None:
        """Wait for all workers' last pushes, then copy parameters and optimizer state from the servers."""
        worker.gradients.times.expose(None)
        worker.replica.step_check.servers_end()
        self._take(worker, state)
        moments: dict[str, dict[str, Any]] = {}
        live = leave(worker, state.served, lambda ranges, states: collect(worker, ranges, states, moments))
        if live is None:
            return  # the servers were never seeded: this worker's own state is valid
        take_states_home(worker, moments, state.share)

    # Inside.

    def _pushes(self, worker: Worker, state: PSState, batch: Batch) -> Pushes:
        lease, size = batch.lease, batch.samples
        if not self.cadence.by_leases:
            lease, size = worker.position, batch.end - worker.position
        options, lend = self.options(worker), not self.prefetch
        times = worker.gradients.times
        busy = times.take_s_per_sample() if times.sent_to_servers else 0.0
        plan = PushPlan(lease, size, options, self.server_spec.pull_codec, lend=lend, busy=busy)
        return Pushes(worker, state.served, batch, plan)

    def _take(self, worker: Worker, state: PSState) -> None:
        """Wait for the answers to the last push and apply them."""
        pushes, state.pending = state.pending, None
        if pushes is None:
            return
        reply = pushes.take()
        if reply.dropped:
            worker.sender.memory.forget()  # these samples will be lent again
        if self.prefetch:
            for mine, landed in zip(worker.params, state.inbox, strict=True):
                mine.copy_(landed)
        worker.replica.step_check.parameters_came()
        if not self.cadence.by_leases:
            worker.votes.agree(reply.agreed)
            worker.votes.set_mean_loss(reply.loss)
        else:
            worker.leases.applied(NO_LEASE if reply.dropped or self.prefetch else pushes.lease)
            worker.leases.put(lease_of(reply))
            worker.gradients.times.tell(dict(reply.busy))

    def _seed(self, worker: Worker) -> Seed:
        """The servers' settings for this segment."""
        sizes = self._sizes(worker)
        return seed_for(worker, self._mode.rules(sizes), self._unit_bytes(worker))._replace(
            weights=self._weights(worker),
            mitigation=self.mitigation,
            strength=self.strength,
            clip_norm=None if self.cadence.by_leases else worker.replica.clip_norm,
            leases=self.cadence.by_leases,
            parts=sizes.slices,
            serving=self._serve_only(worker),
        )

    def _serve_only(self, worker: Worker) -> list[int]:
        """Workers that do not train. Workers that join later train; where no other worker is left, all train."""
        comm = worker.comm
        if not self.only_serve:
            return []
        first = min(comm.servers)  # the run began with this many workers, numbered before the servers
        serve_only = [rank for rank in comm.workers if first - self.only_serve <= rank < first]
        return serve_only if len(serve_only) < comm.size else []

    def _sizes(self, worker: Worker) -> Sizes:
        """How a global step is divided among the workers that train."""
        training, batch_size = worker.comm.size - len(self._serve_only(worker)), worker.progress.batch_size
        if self.lease is not None:
            return Sizes(training, batch_size, max(1, -(-batch_size // self.lease)))
        return Sizes(training, batch_size, min(self._mode.slices(training), batch_size))

    def _is_early(self, worker: Worker) -> bool:
        """Whether gradients leave while backward still runs."""
        return self.overlap and not self.prefetch and (not self.cadence.by_leases or worker.replica.clip_norm is None)

    def _weights(self, worker: Worker) -> tuple[float, ...] | None:
        """How much of the parameters each server holds."""
        updates = self._mode.updates(self._sizes(worker).workers)
        return weights_of(self.name, self.ranges, worker.comm, updates)

    def _unit_bytes(self, worker: Worker) -> int:
        return self.unit_bytes or unit_bytes_for(worker)

    def options(self, worker: Worker) -> list[Meta]:
        """The optimizer's settings for one update."""
        scale = self.lr_scale
        if scale is None and self.mitigation == "staleness-lr" and self._mode.streams:
            scale = 1.0  # servers divide it by the staleness
        return scaled(options_of(worker.optimizer, self._share(worker), scale), self.rate)

    def _share(self, worker: Worker) -> float:
        """An update's samples over those of a global step."""
        return self._mode.share(self._sizes(worker))
