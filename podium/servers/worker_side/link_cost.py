"""The time of an exchange with servers on a worker's own link that its computing does not hide."""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from podium.balance.ranges import Parcel, Way, exposed_s, ways_from
from podium.servers.wire.messages import Probe, encode

if TYPE_CHECKING:
    from podium.engine.worker import Worker
    from podium.exchange.codecs.base import Codec
    from podium.servers.worker_side.served import Served

_BACKWARD = 2 / 3
"""Backward's fraction of a pass, as in virtual time: it takes about twice as long as forward."""
_PASSES = 8
"""Recent passes whose duration is used."""
_PROBE_BYTES, _PROBES = 256 << 10, 3
"""Size and number of probes that measure a link: 20 ms each over 100 Mbit/s."""


class Exposure:
    """Seconds of an exchange on this worker's own link that its computing does not hide; for one segment."""

    def __init__(self, worker: Worker, served: Served, *, early: bool, pull: Codec) -> None:
        """`early`: gradients leave while backward still runs."""
        self._worker, self._served, self._early, self._pull = worker, served, early, pull
        self._ways: list[Way] | None = None
        self._passes: deque[tuple[int, int]] = deque(maxlen=_PASSES)

    def saw_pass(self, samples: int) -> None:
        """The worker has done a pass over this many samples."""
        self._passes.append((samples, self._worker.gradients.times.last_ns))

    def seconds(self) -> float:
        """For a pass like the last ones. Measures the links the first time, unless a cluster file describes them."""
        if self._ways is None:
            self._ways = _ways(self._worker)
        last = self._passes[-1][0] if self._passes else 0
        pass_ns = statistics.median(ns for samples, ns in self._passes if samples == last) if self._passes else 0
        backward_s = _BACKWARD * pass_ns / self._worker.gradients.options.accumulate / 1e9
        return exposed_s(self._pushed(), self._pulled(), self._ways, backward_s)

    def _pushed(self) -> list[Parcel]:
        """In the order in which they are sent; a server's last unit waits until the pass is over."""
        flat, codec = self._worker.flat, self._worker.sender.push[1].codec
        done = list(itertools.accumulate(bucket.nbytes for bucket in flat.buckets))
        found = []
        for m, u in self._served.units:
            layout = self._served.layouts[m]
            bucket, is_last = layout.units[u].bucket, u == len(layout.units) - 1
            ready = 1.0 if is_last or not self._early or bucket == len(done) - 1 else done[bucket] / done[-1]
            found.append((is_last, bucket, Parcel(m, self._nbytes(m, u, codec), ready)))
        return [parcel for *_, parcel in sorted(found, key=lambda each: each[:2])]

    def _pulled(self) -> list[Parcel]:
        return [Parcel(m, self._nbytes(m, u, self._pull), 1.0) for m, u in self._served.units]

    def _nbytes(self, m: int, u: int, codec: Codec) -> int:
        """Bytes of a unit on the wire; rows are not counted: their number is unknown beforehand, and small."""
        layout, total = self._served.layouts[m], 0
        unit = layout.units[u]
        for r, span in zip(unit.of(layout.ranges), unit.of(self._served.spans[m]), strict=True):
            dtype = self._worker.params[r.buffer].dtype
            if codec.exact:
                total += 0 if r.row else (r.stop - r.start) * dtype.itemsize
            elif not r.row:
                numel, packed = codec.wire_like(span, self._worker.context, dtype)
                total += numel * packed.itemsize
        return total


def _ways(worker: Worker) -> list[Way]:
    """The links to each server, from the cluster file or measured; none where messages move no bytes."""
    comm = worker.comm
    if comm.ground is not None:
        return ways_from(comm.ground, comm.servers)
    if comm.shares_memory or comm.shares_process:
        return []
    return [_measured(worker, server) for server in comm.servers]


def _measured(worker: Worker, server: int) -> Way:
    """Time a small round trip, a large send, and a large round trip, and take the best of a few tries each.

    Other workers measure at the same time, as they will push at the same time.
    """
    comm, small, large = worker.comm, torch.zeros(1), torch.zeros(_PROBE_BYTES // 4)

    def seconds(body: Tensor, back: bool) -> float:
        times = []
        for _ in range(_PROBES):
            began = comm.clock.now_ns()
            comm.wait(comm.call(server, "probe", encode(Probe(back)), [body]))
            times.append(comm.clock.now_ns() - began)
        return min(times) / 1e9

    empty, there = seconds(small, back=False), seconds(large, back=False)
    both = seconds(large, back=True)
    up, down = _PROBE_BYTES / max(1e-9, there - empty), _PROBE_BYTES / max(1e-9, both - there)
    return Way(up, up, down, down, empty / 2)
