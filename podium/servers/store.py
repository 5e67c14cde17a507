"""What one server holds: parameters, their versions, and which samples have moved them.

Only a store changes parameters. It does so where the loop is or, for large shards, in apply threads.
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
"""A server with fewer bytes of parameters moves them itself: handing them over would take longer."""


class Store:
    """One server's parameters."""

    def __init__(self, flat: Flat, optimizer: Optimizer, clock: Clock, threads: ApplyThreads, codec: PushCodec) -> None:
        self.threads, self.codec, self._clock = threads, codec, clock
        self._flat, self._optimizer = flat, optimizer
        self.mitigation = make_mitigation("none")
        self.versions: list[int] = []
        """By unit: updates since the present segment began, which a push names as its origin."""
        self.applied: list[Applied] = []
        """By unit: the samples that have moved it since the segment began."""
        self.updates = 0
        """Updates of the first unit in all."""
        self.recorded: Counter[int] = Counter()
        """By unit: updates in all that have a record, which those of shares of global steps have not."""
        self.restored = False
        """Whether this server took another's place."""
        self._counts = False  # whether updates have records
        self._threaded: list[bool] = []  # by unit: whether an apply thread moves it
        self._ahead: dict[int, int] = {}  # by unit: updates that a restored server lacks, as workers say
        self._laid_out: tuple[Any, ...] = ()

    def hold(self, rank: int, seed: Seed) -> None:
        """Hold a server's part, as the seed lays the parameters out; nothing where that is so already."""
        asked = (tuple(seed.servers), seed.unit_bytes, seed.outer, None if seed.weights is None else list(seed.weights))
        if asked != self._laid_out:
            self._laid_out = asked
            self.shard = self.make_shard(rank, seed)

    def make_shard(self, rank: int, seed: Seed) -> Shard:
        """The shard of one of the seed's servers; an empty one for a server that is not among them yet."""
        layouts = lay_out(self._flat, len(seed.servers), seed.unit_bytes, seed.weights)
        servers = list(seed.servers)
        layout = layouts[servers.index(rank)] if rank in servers else Layout([], [Unit(0, 0, 0)])
        groups = len(self._optimizer.param_groups)
        return Shard(self._flat, self._optimizer if seed.outer is None else make_outer(groups, seed.outer), layout)

    def begin(self, rank: int, seed: Seed, *, copied: bool) -> None:
        """Make ready for what a seed says; parameters and optimizer state come separately.

        `copied`: other servers keep copies, which follow update by update.
        """
        self.hold(rank, seed)
        self.mitigation = make_mitigation(seed.mitigation, seed.strength)
        self.codec.begin(seed.codec)
        units = range(len(self.shard.units))
        self.versions = [0 for _ in units]
        self.applied = [Applied(seed.position) for _ in units]
        self._counts = seed.leases
        # Not where the loop itself has to see a unit as it is now: its rows, what mends it, its copies.
        seen = copied or self.mitigation.compares or self.codec.packs_answers
        large = bool(self.threads) and self.shard.nbytes >= _THREAD_BYTES and not seen
        self._threaded = [large and not self.shard.by_rows(unit) for unit in units]

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Count as the lost server did, as far as its copy knows; parameters and optimizer state are here already."""
        self.versions, self.updates = list(facts["versions"]), facts["updates"]
        self.recorded = Counter(facts["recorded"])
        self.applied = [Applied.of(plain) for plain in facts["once"]]
        self.shard.all_rows_changed(self.versions)
        self.restored = True

    def by_thread(self, unit: int) -> bool:
        """Whether an apply thread moves this unit."""
        return self._threaded[unit]

    def in_thread(self, unit: int, job: Callable[[], None]) -> None:
        """Do this in the unit's apply thread, after all that was asked of it before."""
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
        """Move one unit by gradients over these samples; `out`: where its parameters are wanted at once, too."""
        for span in spans:  # before: a snapshot that is taken now must know of them
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
        """After a restore: updates that a worker has seen and this server lacks, where more than was known so far."""
        ahead = version - self.versions[unit]
        if ahead <= self._ahead.get(unit, 0):
            return 0
        self._ahead[unit] = ahead
        return ahead

    def edges(self) -> set[int]:
        """Where applied samples begin and end."""
        return {edge for applied in self.applied for edge in applied.edges()}
