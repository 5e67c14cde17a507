"""One server's parameters, their versions, and which samples have moved them.

Only a store changes parameters: in the server's loop or, for large shards, in apply threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from podium.servers.applied import Applied, Span
from podium.servers.outer import make_outer
from podium.servers.pushes.mitigation import make_mitigation
from podium.servers.ranges import Layout, Unit, lay_out
from podium.servers.shard import Shard

if TYPE_CHECKING:
    from podium.comm.base import Meta
    from podium.comm.clocks import Clock
    from podium.engine.flat import Flat
    from podium.servers.pushes.apply_threads import ApplyThreads
    from podium.servers.wire.messages import Seed
    from podium.servers.wire.push_codec import PushCodec

_THREAD_BYTES = 16 << 20
"""A server with fewer bytes of parameters moves them in its loop: passing them to a thread would take longer."""


class Store:
    """One server's parameters."""

    def __init__(self, flat: Flat, optimizer: Optimizer, clock: Clock, threads: ApplyThreads, codec: PushCodec) -> None:
        self.threads, self.codec, self._clock = threads, codec, clock
        self._flat, self._optimizer = flat, optimizer
        self.mitigation = make_mitigation("none")
        self.versions: list[int] = []
        """By unit: updates since the present segment began; a push names the version that it was computed from."""
        self.applied: list[Applied] = []
        """By unit: the samples that have moved it since the segment began."""
        self.updates = 0
        """Updates of the first unit, over all segments."""
        self.recorded: Counter[int] = Counter()
        """By unit: updates that have a record, over all segments; only those of leases have one."""
        self.restored = False
        """Whether this server replaces a lost one."""
        self._counts = False  # whether updates have records
        self._threaded: list[bool] = []  # by unit: whether an apply thread moves it
        self._ahead: dict[int, int] = {}  # by unit: updates that a restored server lacks, by workers' versions
        self._laid_out: tuple[Any, ...] = ()

    def hold(self, rank: int, seed: Seed) -> None:
        """Make the shard of the seed's layout, unless it is the present one."""
        asked = (tuple(seed.servers), seed.unit_bytes, seed.outer, None if seed.weights is None else list(seed.weights))
        if asked != self._laid_out:
            self._laid_out = asked
            self.shard = self.make_shard(rank, seed)

    def make_shard(self, rank: int, seed: Seed) -> Shard:
        """The shard of one of the seed's servers; an empty one for any other server."""
        layouts = lay_out(self._flat, len(seed.servers), seed.unit_bytes, seed.weights)
        servers = list(seed.servers)
        layout = layouts[servers.index(rank)] if rank in servers else Layout([], [Unit(0, 0, 0)])
        groups = len(self._optimizer.param_groups)
        return Shard(self._flat, self._optimizer if seed.outer is None else make_outer(groups, seed.outer), layout)

    def begin(self, rank: int, seed: Seed, *, copied: bool) -> None:
        """Begin the seed's segment; parameters and optimizer state are loaded separately.

        `copied`: other servers hold copies, which follow update by update.
        """
        self.hold(rank, seed)
        self.mitigation = make_mitigation(seed.mitigation, seed.strength)
        self.codec.begin(seed.codec)
        units = range(len(self.shard.units))
        self.versions = [0 for _ in units]
        self.applied = [Applied(seed.position) for _ in units]
        self._counts = seed.leases
        # Not where the loop itself needs a unit's present values: for rows, mitigation, packed answers, copies.
        seen = copied or self.mitigation.compares or self.codec.packs_answers
        large = bool(self.threads) and self.shard.nbytes >= _THREAD_BYTES and not seen
        self._threaded = [large and not self.shard.by_rows(unit) for unit in units]

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Take over the lost server's counts from its copy; parameters and optimizer state are loaded already."""
        self.versions, self.updates = list(facts["versions"]), facts["updates"]
        self.recorded = Counter(facts["recorded"])
        self.applied = [Applied.of(plain) for plain in facts["once"]]
        self.shard.all_rows_changed(self.versions)
        self.restored = True

    def by_thread(self, unit: int) -> bool:
        """Whether an apply thread moves this unit."""
        return self._threaded[unit]

    def in_thread(self, unit: int, job: Callable[[], None]) -> None:
        """Run this in the unit's apply thread, after all its earlier jobs."""
        self.threads.run(unit, job)

    def apply(
        self,
        unit: int,
        grads: Sequence[Tensor],
        options: Sequence[Meta],
        unused: Sequence[int],
        spans: Sequence[Span],
        out: Sequence[Tensor] | None = None,
    ) -> None:
        """Move one unit by gradients over these samples; `out`: also copy its parameters there."""
        for span in spans:  # first: a snapshot that is taken now must include them
            self.applied[unit].add(span)
        self.versions[unit] += 1
        shard, version = self.shard, self.versions[unit]
        if self._threaded[unit]:
            self.threads.run(unit, lambda: shard.step(unit, grads, options, unused, version, out))
        else:
            self.threads.settle()
            shard.step(unit, grads, options, unused, version)
        touched = grads if shard.by_rows(unit) else shard.of(unit)
        self._clock.touch(sum(p.nbytes for p in touched))
        self.updates += unit == 0
        self.recorded[unit] += self._counts

    def staleness(self, unit: int, version: int) -> int:
        """Updates of a unit since this version."""
        return max(0, self.versions[unit] - version)

    def newly_lost(self, unit: int, version: int) -> int:
        """After a restore: updates that a worker has seen and this server lacks; 0 where no more than known before."""
        ahead = version - self.versions[unit]
        if ahead <= self._ahead.get(unit, 0):
            return 0
        self._ahead[unit] = ahead
        return ahead

    def edges(self) -> set[int]:
        """Where applied samples begin and end."""
        return {edge for applied in self.applied for edge in applied.edges()}
