"""A worker's pushes and pulls: gradients to all servers, parameters back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from podium.errors import Lost
from podium.exchange.codecs.base import Codec, StepContext
from podium.servers.leases.lease import PATIENCE
from podium.servers.ranges import Range, groups_of
from podium.servers.wire.long_settings import fold
from podium.servers.wire.messages import Options, Pull, Push, PushReply, decode, encode

if TYPE_CHECKING:
    from podium.comm.base import Handle, Message
    from podium.engine.batch import Batch
    from podium.engine.worker import Worker
    from podium.servers.worker_side.served import Served


class PushPlan(NamedTuple):
    """A strategy's settings for one push."""

    lease: int
    size: int
    """Samples of the lease, or of the whole global step."""
    options: Options
    """The optimizer's settings for the update, of each parameter group."""
    pull: Codec
    """How answers are packed."""
    whole: bool = False
    """Whether it is the result of several steps, so that no parameter counts as unused."""
    lend: bool = True
    """Whether the answer shall hold the next lease, …"""
    bare: bool = False
    """… but no parameters."""
    busy: float = 0.0
    """Seconds of computing per sample; 0: not measured."""
    pace: float = 0.0
    """Nanoseconds per local step; 0: not measured."""


class Pushes:
    """The units of one push: sent as they become ready, in the order of the buckets."""

    def __init__(self, worker: Worker, served: Served, batch: Batch, plan: PushPlan) -> None:
        self.lease = plan.lease
        self._worker, self._served, self._batch, self._plan = worker, served, batch, plan
        self._calls: list[Handle] = []
        self._units: list[tuple[int, int]] = []  # (server, unit) of each call
        self._context = worker.context
        self._grads, self._params = worker.flat.grads, worker.params
        self._versions = [list(versions) for versions in served.versions]
        self._sent = 0  # buckets

    def go_from(self, outbox: list[Tensor], inbox: list[Tensor]) -> None:
        """Send copies, so that the next gradients may be computed meanwhile; parameters land in `inbox`."""
        for copy, grads in zip(outbox, self._grads, strict=True):
            copy.copy_(grads)
        self._grads, self._params = outbox, inbox

    def bucket_ready(self, bucket: int) -> None:
        """Issue this bucket's units; never waits. A server's last unit, which carries the loss, is sent by `finish`."""
        self._sent = bucket + 1
        for m, layout in enumerate(self._served.layouts):
            for u, unit in enumerate(layout.units[:-1]):
                if unit.bucket == bucket:
                    early = self._worker.comm.in_backward
                    self._call(m, self._push(m, u, early=early), more=not early)

    def finish(self, loss: float) -> None:
        """Send the remaining units."""
        worker, batch, plan = self._worker, self._batch, self._plan
        for bucket in range(self._sent, worker.buckets):
            self.bucket_ready(bucket)
        for m, layout in enumerate(self._served.layouts):
            push = self._push(
                m,
                len(layout.units) - 1,
                last=True,
                done=worker.leases.last_applied,
                votes=worker.votes.requested,
                loss=loss * batch.weight,
                samples=batch.samples,
                weight=batch.weight,
                lend=plan.lend,
                busy=plan.busy,
                pace=plan.pace,
            )
            self._call(m, push)

    def _push(self, m: int, u: int, **said: Any) -> Push:
        """The fields that all units of a push have, with those of this unit."""
        layout, plan = self._served.layouts[m], self._plan
        ranges = layout.units[u].of(layout.ranges)
        unused = [] if plan.whole else self._unused(ranges)
        options, version = self._options_of(ranges), self._versions[m][u]
        return Push(u, plan.lease, plan.size, version, options, unused, bare=plan.bare, **said)

    def _call(self, m: int, push: Push, more: bool = False) -> None:
        worker, layout, plan = self._worker, self._served.layouts[m], self._plan
        unit = layout.units[push.unit]
        ranges = unit.of(layout.ranges)
        body, into = [r.of(self._grads) for r in ranges], [r.of(self._params) for r in ranges]
        rows, (_, packing) = bool(ranges) and ranges[0].row > 0, worker.sender.push
        if rows:
            body = self._rows(ranges[0])
        elif packing.codec.exact:
            for grad, span in zip(body, unit.of(self._served.spans[m]), strict=True):
                worker.sender.residuals.add_to(grad, span)
        else:
            spans = unit.of(self._served.spans[m])
            body = [packing.pack(g, s, self._context, worker.sender.memory) for g, s in zip(body, spans, strict=True)]
            worker.comm.clock.touch(round(packing.codec.passes * sum(span.numel for span in spans) * 4))
            push = push._replace(context=list(self._context))
        lands = not rows and plan.pull.exact and not plan.bare
        self._units.append((m, push.unit))
        meta, sent = fold(encode(push), body)
        call = worker.comm.call(worker.comm.servers[m], "push", meta, sent, into if lands else None, more)
        self._calls.append(call)

    def _unused(self, ranges: Sequence[Range]) -> list[int]:
        """Parameters in these ranges that got no gradient."""
        exact = self._worker.sender.push[1].codec.exact
        return self._worker.gradients.unused_among((part.piece for r in ranges for part in r.parts), exact=exact)

    def _options_of(self, ranges: Sequence[Range]) -> Options:
        """The settings of the groups that these ranges belong to."""
        options = self._plan.options
        return options if len(options) == 1 else [options[g] for g in groups_of(ranges)]

    def _rows(self, r: Range) -> list[Tensor]:
        """The touched rows of a range, numbered from its first row."""
        (part,) = r.parts
        index, values = self._worker.flat.touched_rows(part.piece)
        first, stop = part.start // r.row, part.stop // r.row
        mine = (index >= first) & (index < stop)
        return [index[mine] - first, values[mine]]

    def take(self) -> PushReply:
        """Wait for all answers and store the parameters; returns the first server's reply.

        A push counts as dropped where one server dropped it.
        """
        worker, comm = self._worker, self._worker.comm
        answers = [answer for answer in comm.wait(*self._calls, deadline_s=PATIENCE * comm.deadline_s) if answer]
        replies = [decode(PushReply, answer) for answer in answers]
        lost = [reply.lost for reply in replies if reply.lost is not None]
        if lost:
            raise Lost(f"rank {comm.rank}: worker {lost[0]} was lost; this step did not happen")
        for (m, u), answer, reply in zip(self._units, answers, replies, strict=True):
            self._served.versions[m][u] = reply.version
            if not self._plan.bare:
                _scatter(worker, self._served, (m, u), answer, reply, self._params, self._plan.pull)
        first = replies[max(n for n, (m, _) in enumerate(self._units) if m == 0)]
        return first._replace(dropped=any(reply.dropped for reply in replies))


def pull(worker: Worker, served: Served, into: Sequence[Tensor], codec: Codec, *, lease: int, size: int) -> None:
    """Pull the servers' present parameters into flat buffers that hold the previous pull."""
    calls, units, comm = [], served.units, worker.comm
    for m, u in units:
        layout = served.layouts[m]
        landing = [r.of(into) for r in layout.units[u].of(layout.ranges)] if codec.exact else None
        last = u == len(layout.units) - 1
        asked = Pull(u, lease, size, served.versions[m][u], last)
        calls.append(comm.call(comm.servers[m], "pull", encode(asked), (), landing, not last))
    came = comm.wait(*calls, deadline_s=PATIENCE * comm.deadline_s)
    for (m, u), answer in zip(units, came, strict=True):
        assert answer is not None
        reply = decode(PushReply, answer)
        served.versions[m][u] = reply.version
        _scatter(worker, served, (m, u), answer, reply, into, codec)


def _scatter(
    worker: Worker,
    served: Served,
    place: tuple[int, int],
    answer: Message,
    reply: PushReply,
    params: Sequence[Tensor],
    codec: Codec,
) -> None:
    """Store the answer of (server, unit); unpacked ranges were already received in place."""
    m, u = place
    layout = served.layouts[m]
    ranges = layout.units[u].of(layout.ranges)
    if ranges and ranges[0].row:
        index, rows = answer.body
        table = ranges[0].of(params).view(-1, ranges[0].row)
        table.index_copy_(0, index.to(table.device), rows.to(table.device))
    elif not codec.exact:
        context = StepContext(step=reply.version, rank=worker.comm.rank)
        spans = layout.units[u].of(served.spans[m])
        for r, span, tensor in zip(ranges, spans, answer.body, strict=True):
            mine = r.of(params)
            if reply.packed:
                codec.decode_add(tensor.to(mine.device), mine, span, context)
            else:
                mine.copy_(tensor)
