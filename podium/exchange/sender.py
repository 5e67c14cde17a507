"""What a worker sends: by which collective, how it is packed, and what was left out of it.

The gradients themselves are the worker's; this is all that stands between them and the network, and what must be kept
of it from one step to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from podium.comm.base import Communicator
from podium.engine.flat import Flat
from podium.exchange.codec_choice import Check, choose
from podium.exchange.codecs.auto import AutoCodec
from podium.exchange.codecs.base import Memory, Span, Turn
from podium.exchange.codecs.dense import Dense
from podium.exchange.codecs.feedback import RESIDUAL, UNSENT
from podium.exchange.collectives.base import Collective
from podium.exchange.reducing import Packing, Reducer, spans_of, take_leftover
from podium.records.recorder import Recorder


class Outgoing:
    """One worker's way out to the others."""

    def __init__(self, comm: Communicator, flat: Flat, packing: Packing, collective: Collective) -> None:
        self.comm, self.flat, self._asked = comm, flat, collective
        self.memory = Memory(flat.grads, sum(p.stop - p.start for p in flat.pieces if not p.row))
        """What the codec remembers of what was left out."""
        self.reducer = Reducer(comm, collective, self.memory)
        self.spans = spans_of(flat)
        """What each bucket is made of, for a codec."""
        self.news: list[dict[str, Any]] = []
        """What was decided about packing since somebody asked."""
        self.leftovers_shared = False
        """Whether every worker has an equal part of what all have not sent."""
        self._emptied = False  # whether what was left out went out with the present step
        self._set(packing)

    def _set(self, packing: Packing) -> None:
        self.packing = packing
        self.packings = [packing] * len(self.spans)
        """How each bucket is packed."""
        self.push: tuple[str | None, Packing] = (None, packing)
        """How what goes to servers is packed; with its name, where it is not what the run began with."""
        self._check: Check | None = None
        self._prepared_for = -1

    def use(self, packing: Packing, name: str | None) -> None:
        """Pack otherwise from here on; what was left out so far goes out with what comes next."""
        kept = self.leftovers()
        self.memory.clear()
        self._set(packing)
        self.push = (name, packing)
        self.add_leftovers(kept)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is left out."""
        return all(packing.codec.exact for packing in self.packings)

    @property
    def _is_alone(self) -> bool:
        """Whether there is nobody to pack anything for."""
        return self.comm.size == 1 and not self.packing.codec.takes_momentum and not self.comm.servers

    # A step.

    def issue(self, bucket: int, turn: Turn) -> None:
        """Begin to sum a bucket's gradients over the workers; never waits."""
        packing, span = self.packings[bucket], self.spans[bucket]
        if packing.codec.exact or self._is_alone:
            self.add_leftover(span.of(self.flat.grads), span)
            return self.reducer.issue_exactly(self.flat.bucket(bucket))
        self.reducer.issue(span.of(self.flat.grads), packing, span, turn)
        if bucket == len(self.spans) - 1:
            self.reducer.issue_exactly(self.flat.tail)

    def add_leftover(self, tensor: Tensor, span: Span) -> None:
        """Where nothing is packed any more, what was left out before goes out with this gradient, once."""
        self._emptied = take_leftover(self.memory, tensor, span) or self._emptied

    def complete(self, turn: Turn) -> None:
        """Wait until all issued buckets hold the sums."""
        self.reducer.complete(turn)
        spent, self.reducer.spent_ns = self.reducer.spent_ns, 0
        if self._check is not None:
            found = self._check.add(spent, self.comm)
            if found is not None:
                self._learn(found)

    def step_done(self) -> None:
        """A step became true, and with it what it left out."""
        self.memory.commit()
        if self._emptied and (self._is_alone or self.is_exact):
            self.memory.clear()
        self._emptied = False

    def settle_leftovers(self, *, happened: bool) -> None:
        """After a step in flight was lost here: whether it happened all the same, with what we had sent for it."""
        if happened:
            self.memory.commit()
        else:
            self.memory.forget()
        self._emptied = False

    # Choices.

    def prepare(self) -> None:
        """Make the collective ready for the present members, and choose codecs where that is left to us.

        Collective, and does nothing a second time.
        """
        if self._prepared_for == self.comm.generation:
            return
        self.reducer.collective = self._asked.prepare(self.comm)
        self._prepared_for = self.comm.generation
        codec = self.packing.codec
        if isinstance(codec, AutoCodec):
            choice = choose(codec, self.comm, self.reducer.collective, self.spans, self.flat.grads)
            self.packings, self.push = choice.packings, (choice.specs[0], choice.packings[0])
            self.news.append({"kind": "codec", **choice.facts})
            self._check = Check(choice, codec.check_after) if codec.check_after else None

    def tell_news(self, recorder: Recorder, step: int) -> None:
        """Put on record what was decided about packing."""
        news, self.news = self.news, []
        for facts in news:
            kind = facts.pop("kind")
            recorder.write(kind, self.comm.clock.now_ns(), step=step, **facts)

    def _learn(self, found: dict[str, Any]) -> None:
        """Packing is given up where it takes longer than going without was predicted to."""
        assert self._check is not None
        self.news.append({"kind": "codec_check", **found})
        if not found["keeps"]:
            self.packings = [Packing(Dense(), feedback=False)] * len(self.packings)
        self._check = None

    # What was left out, when workers come, go or are saved.

    def share_leftovers(self) -> None:
        """Before somebody joins or leaves: every worker gets an equal part of what all have not sent. Collective.

        All or nothing: a member may be lost over it. One that has sent nothing yet takes part all the same.
        """
        names = [*self.packing.codec.remembers]
        has = torch.tensor([float(name in self.memory.of_span) for name in names])
        self.comm.wait(self.comm.all_reduce(has))
        nothing = [torch.zeros_like(flat) for flat in self.flat.grads] if has.any() else []
        shared = {
            name: [flat.clone() for flat in self.memory.of_span.get(name, nothing)]
            for name, anywhere in zip(names, has.tolist(), strict=True)
            if anywhere
        }
        self.comm.wait(*(self.comm.all_reduce(flat) for flats in shared.values() for flat in flats))
        for name, flats in shared.items():
            self.memory.of_span[name] = [flat.div_(self.comm.size) for flat in flats]
        self.leftovers_shared = True

    def scale_leftovers(self, factor: float) -> None:
        """Take over the parts of those who have left, where all had an equal part."""
        shared, self.leftovers_shared = self.leftovers_shared, False
        for flats in self.memory.of_span.values() if shared else ():
            for flat in flats:
                flat *= factor

    def leftovers(self) -> dict[str, Any]:
        """What the codec remembers, by name: a checkpoint keeps it as this worker's own."""
        of_span = {name: self.flat.by_name(flats) for name, flats in self.memory.of_span.items()}
        return {"of_span": of_span, "named": {k: v.clone() for k, v in self.memory.named.items()}}

    def add_leftovers(self, kept: Mapping[str, Any]) -> None:
        """Take over what a worker, this one or one that is no more, had not sent.

        What a codec that keeps its own residual had not sent is a residual to any other, and the other way round; the
        momentum that such a codec kept ends with it.
        """
        for was, parts in kept["of_span"].items():
            name = was
            if was in (RESIDUAL, UNSENT):
                name = UNSENT if self.packing.codec.keeps_residual else RESIDUAL
            elif not self.packing.codec.keeps_residual:
                continue
            if name not in self.memory.of_span:
                self.memory.of_span[name] = [torch.zeros_like(flat) for flat in self.flat.grads]
            self.flat.add_by_name(self.memory.of_span[name], parts)
        for name, tensor in kept["named"].items():
            self.memory.named.setdefault(name, tensor.to(self.flat.grads[0].device))
