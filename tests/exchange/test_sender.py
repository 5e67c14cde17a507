"""Sums over the workers, packed: nothing is lost on the way, and what did not happen leaves no trace."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from podium.comm.base import DEPARTED, Communicator
from podium.engine.batch import Batch
from podium.engine.flat import Flat
from podium.engine.worker import Worker
from podium.errors import Lost
from podium.exchange.codecs import CODECS
from podium.exchange.codecs.base import Span, StepContext
from podium.exchange.codecs.dense import Dense
from podium.exchange.collectives import COLLECTIVES, make_collective
from podium.exchange.collectives.backend import Backend
from podium.exchange.packing import Packing, make_packing
from podium.exchange.sender import Sender
from podium.exchange.spans import matrices_of, span_of, spans_of
from podium.servers.ranges import lay_out
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.testing.toys import (
    UNUSUAL,
    assert_close,
    channels_last_model,
    hashes,
    toy,
    train,
    train_in,
)
from podium.testing.worlds import Memory as Threads
from podium.testing.worlds import Real, Virtual, World

FED_BACK = {
    "fp16": "fp16:feedback=true",
    "bf16": "bf16:feedback=true",
    "int8": "int8:feedback=true",
    "sign": "sign:feedback=true",
    "ef-sign": "ef-sign",
    "one-bit": "one-bit",
    "top-k": "top-k:ratio=0.02",
    "random-k": "random-k:ratio=0.1",
    "dgc": "dgc:ratio=0.02,warmup_epochs=1,momentum=0",
    "power-sgd 1": "power-sgd",
    "power-sgd 4": "power-sgd:rank=4",
}
"""All whose wires add up to what was sent. A vote is no sum."""
ROUNDED = {"fp16": 2.0**-10, "bf16": 2.0**-7}
"""Wires that are added up in less than float32: what is rounded off there is in nobody's residual."""
LOSSY = [name for name in CODECS if name not in ("dense", "auto")]
STEPS, WORKERS = 6, 3


def model() -> nn.Module:
    """Matrices of several shapes, biases, and one matrix too small to be compressed."""
    return nn.Sequential(nn.Linear(40, 64), nn.Linear(64, 30), nn.BatchNorm1d(30), nn.Linear(30, 3))


def flat_of(bucket_bytes: int = 6000) -> Flat:
    torch.manual_seed(0)
    net = model()
    return Flat(net, SGD(net.parameters(), lr=0.1), bucket_bytes)


def gradients(flat: Flat, rank: int, step: int) -> list[Tensor]:
    """Noise of another size in every bucket; padding and tail stay zero."""
    draw, grads = torch.Generator().manual_seed(1000 * rank + step), [torch.zeros_like(g) for g in flat.grads]
    for i, span in enumerate(spans_of(flat)):
        span.of(grads).copy_(torch.randn(span.numel, generator=draw) * 10.0 ** (i - 1))
    return grads


class Sums(NamedTuple):
    """What one worker saw, over all steps."""

    came: Tensor  # its own gradients
    applied: Tensor  # what all were told that the sums are
    kept: Tensor  # what it has not sent


def exchange(sender: Sender, flats: list[Tensor], context: StepContext) -> None:
    for span in sender.spans:
        sender.sum_span(span.of(flats), sender.packing, span, context)
    sender.complete(context)
    sender.memory.commit()


def reduce_often(comm: Communicator, specs: dict[str, str], collective: str = "backend") -> dict[str, Sums]:
    """Some exchanges with each codec."""
    flat, found = flat_of(), {}
    carries = make_collective(collective).prepare(comm)
    for name, spec in specs.items():
        sender = Sender(comm, flat, make_packing(spec), carries)
        came, applied = (torch.zeros_like(flat.grads[0], dtype=torch.float64) for _ in range(2))
        for step in range(STEPS):
            grads = gradients(flat, comm.rank, step)
            came += grads[0]
            exchange(sender, grads, StepContext(step, step / 4, 5, comm.rank, comm.size))
            applied += grads[0]
        kept = sender.memory.of_span.get("unsent" if name == "dgc" else "residual")
        found[name] = Sums(came, applied, torch.zeros_like(came) if kept is None else kept[0].double())
    return found


def check_sums(found: list[dict[str, Sums]]) -> None:
    """Workers agree in bits, and what was applied and what is kept is what came."""
    assert found[0].keys() == FED_BACK.keys()
    for name in found[0]:
        sums = [one[name] for one in found]
        assert all(torch.equal(one.applied, sums[0].applied) for one in sums), f"{name}: workers disagree"
        came, kept = sum(one.came for one in sums), sum(one.kept for one in sums)
        assert isinstance(came, Tensor) and isinstance(kept, Tensor)
        size = torch.stack([one.came.abs() for one in sums]).sum(0) + came.abs() + kept.abs()
        span_size = float(size.max())
        allowed = 2e-5 * span_size + ROUNDED.get(name, 0.0) * STEPS * 4 * size
        wrong = (sums[0].applied + kept - came).abs() - allowed
        assert float(wrong.max()) <= 0, f"{name}: {float(wrong.max()):g} too much is lost"
        assert float(kept.abs().max()) > 0, f"{name}: nothing was left out, so this shows nothing"


@pytest.mark.parametrize("world", [Threads(), Virtual()], ids=lambda w: w.name)
def test_what_was_applied_and_what_workers_keep_is_the_sum_of_the_gradients(world: World) -> None:
    check_sums(world.run(partial(reduce_often, specs=FED_BACK), WORKERS))


@pytest.mark.slow
@pytest.mark.parametrize("collective", ["backend", "halving-doubling"])
def test_so_it_is_between_processes_with_any_collective(collective: str) -> None:
    check_sums(Real().run(partial(reduce_often, specs=FED_BACK, collective=collective), WORKERS))


@pytest.mark.slow
def test_threads_virtual_time_and_shared_memory_give_the_same_bits() -> None:
    """Sums run in rank order in all of them."""
    main = partial(reduce_often, specs=FED_BACK)
    threads, virtual = Threads().run(main, WORKERS), Virtual().run(main, WORKERS)
    shared = Real(shared=True).run(partial(main, collective="shared"), WORKERS)
    check_sums(shared)
    for name in FED_BACK:
        for rank in range(WORKERS):
            for other in (virtual, shared):
                for a, b in zip(threads[rank][name], other[rank][name], strict=True):
                    assert torch.equal(a, b), f"{name} on rank {rank}"


def every_pair(comm: Communicator, collectives: list[str]) -> list[str]:
    """Each codec once with each collective; where workers' sums are not the same bits on all."""
    flat, wrong = flat_of(), []
    context = StepContext(1, 0.5, 3, comm.rank, comm.size)
    for collective in collectives:
        carries = make_collective(collective).prepare(comm)
        for codec in ["dense", *LOSSY]:
            grads = gradients(flat, comm.rank, 0)
            exchange(Sender(comm, flat, make_packing(codec), carries), grads, context)
            everyone = torch.empty(comm.size * grads[0].numel())
            comm.wait(comm.all_gather(grads[0], everyone))
            rows = everyone.view(comm.size, -1)
            if not all(torch.equal(row, rows[0]) for row in rows) or not rows.any():
                wrong.append(f"{codec} with {collective}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "left_out"),
    [(Threads(), ("shared",)), (Virtual(), ("shared",)), (Real(), ("shared",)), (Real(shared=True), ())],
    ids=["memory", "virtual", "sockets", "shared memory"],
)
def test_every_codec_goes_with_every_collective(world: World, left_out: tuple[str, ...]) -> None:
    names = [name for name in COLLECTIVES if name not in left_out]
    assert world.run(partial(every_pair, collectives=names), WORKERS) == [[]] * WORKERS


def several_at_once(comm: Communicator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Exact sums, gathered wires, summed wires and rounds, all under way together."""
    flat = flat_of(bucket_bytes=1)
    spans, context = spans_of(flat), StepContext(rank=comm.rank, workers=comm.size)
    packings = [make_packing(s) for s in ("power-sgd", "dense", "top-k:ratio=1", "random-k:ratio=1")]
    sender, grads = Sender(comm, flat, packings[0], Backend()), gradients(flat, comm.rank, 0)
    alone = torch.full((3,), float(comm.rank + 1))
    for i, span in enumerate(spans):
        if i == 1:
            handle = sender.all_reduce(alone)
        sender.sum_span(span.of(grads), packings[i % len(packings)], span, context)
    sender.complete(context)
    comm.wait(handle)
    exact = [torch.stack([s.of(gradients(flat, r, 0)) for r in range(comm.size)]).sum(0) for s in spans]
    return alone, torch.cat([s.of(grads) for s in spans[1:4]]), torch.cat(exact[1:4]), torch.tensor(len(spans))


def test_buckets_packed_in_different_ways_travel_together() -> None:
    for alone, got, exact, spans in Threads().run(several_at_once, WORKERS):
        assert int(spans) >= 4, "or there is no bucket for each"
        assert alone.tolist() == [6.0] * 3
        torch.testing.assert_close(got, exact, rtol=1e-3, atol=2e-3 * float(exact.abs().max()))


# A lost exchange.


def lose_one(comm: Communicator, spec: str) -> tuple[list[Tensor], list[Tensor]] | None:
    """Two exchanges, one that is lost with a worker, and two more among those who are left."""
    flat = flat_of()
    sender = Sender(comm, flat, make_packing(spec), Backend())
    sums = []
    for step in range(4):
        if step == 2:
            if comm.rank == 1:
                return None  # it departs in the middle of things
            with pytest.raises(Lost):
                exchange(sender, gradients(flat, comm.rank, 77), StepContext(step, 0, 0, comm.rank, 3))
            sender.drop()
            comm.regroup(1, (0, 2))
        grads = gradients(flat, comm.rank, step)
        exchange(sender, grads, StepContext(step, step / 2, 0, comm.rank, comm.size))
        sums.append(grads[0])
    return sums, [flat for flats in sender.memory.of_span.values() for flat in flats]


def lose_none(comm: Communicator, spec: str) -> tuple[list[Tensor], list[Tensor]] | None:
    """The same without the exchange that was lost: a worker leaves between two."""
    flat = flat_of()
    sender, sums = Sender(comm, flat, make_packing(spec), Backend()), []
    for step in range(4):
        if step == 2:
            if comm.rank == 1:
                return None
            assert comm.recv().kind == DEPARTED
            comm.regroup(1, (0, 2))
        grads = gradients(flat, comm.rank, step)
        exchange(sender, grads, StepContext(step, step / 2, 0, comm.rank, comm.size))
        sums.append(grads[0])
    return sums, [flat for flats in sender.memory.of_span.values() for flat in flats]


@pytest.mark.parametrize("spec", FED_BACK.values(), ids=FED_BACK.keys())
def test_an_exchange_that_was_lost_leaves_no_trace(spec: str) -> None:
    broken, whole = Threads().run(partial(lose_one, spec=spec), 3), Threads().run(partial(lose_none, spec=spec), 3)
    for rank in (0, 2):
        for kind in (0, 1):
            for a, b in zip(broken[rank][kind], whole[rank][kind], strict=True):
                assert torch.equal(a, b)


# Spans.


@settings(max_examples=30)
@given(bucket_bytes=st.integers(1, 30_000), servers=st.integers(1, 4), unit_bytes=st.integers(64, 20_000))
def test_spans_cover_every_parameter_once_and_their_matrices_are_whole_rows(
    bucket_bytes: int, servers: int, unit_bytes: int
) -> None:
    flat = flat_of(bucket_bytes)
    by_bucket = spans_of(flat)
    by_range = [span_of(flat, r) for layout in lay_out(flat, servers, unit_bytes) for r in layout.ranges]
    for spans in (by_bucket, by_range):
        marks = [torch.zeros_like(p) for p in flat.params]
        for span in spans:
            span.of(marks).add_(1)
            ends = 0
            for matrix in span.matrices:
                assert ends <= matrix.offset and matrix.offset + matrix.rows * matrix.cols <= span.numel
                ends = matrix.offset + matrix.rows * matrix.cols
                name, _, first = matrix.name.rpartition("@")
                piece = next(p for p in flat.pieces if p.name == name)
                view = piece.view(flat.params[piece.buffer]).reshape(piece.shape[0], -1)
                here = span.of(flat.params)[matrix.offset : ends].view(matrix.rows, matrix.cols)
                assert torch.equal(here, view[int(first) : int(first) + matrix.rows]), "it is not where it says"
        for piece in flat.pieces:
            assert (marks[piece.buffer][piece.start : piece.stop] == 1).all()


def test_a_matrix_whose_rows_do_not_lie_one_after_the_other_is_none() -> None:
    net = channels_last_model()
    flat = Flat(net, SGD(net.parameters(), lr=0.1), 1 << 20)
    for span in spans_of(flat):
        for matrix in span.matrices:
            piece = next(p for p in flat.pieces if p.name == matrix.name.rpartition("@")[0])
            assert piece.stride[0] == matrix.cols
    assert matrices_of([]) == ()


def test_one_worker_sums_nothing_and_loses_nothing() -> None:
    for spec in FED_BACK.values():
        (found,) = Threads().run(partial(alone, spec=spec), 1)
        assert found is None or torch.equal(*found)


def alone(comm: Communicator, spec: str) -> tuple[Tensor, Tensor] | None:
    flat, packing = flat_of(), make_packing(spec)
    if packing.codec.takes_momentum:
        return None  # it changes more than how gradients are packed
    grads = gradients(flat, 0, 0)
    exchange(Sender(comm, flat, packing, Backend()), grads, StepContext())
    return grads[0], gradients(flat, 0, 0)[0]


# Any flat tensors: a strategy that sends what some local steps came to.


Anchor = list[Tensor]
"""What all workers last agreed on."""


@final
@dataclass(frozen=True, kw_only=True)
class LocalSteps(Strategy[Anchor]):
    """Every worker trains alone for some steps; then all move by the mean of how far each went."""

    name: ClassVar[str] = "local-steps"
    period: int = 3
    bucket_bytes: int = 100

    def init(self, worker: Worker) -> Anchor:
        return [p.clone() for p in worker.params]

    def step(self, worker: Worker, state: Anchor, batch: Batch) -> Tensor:
        loss = worker.train_locally(batch)
        if worker.steps_done % self.period == 0:
            self._meet(worker, state)
        return loss

    def finish(self, worker: Worker, state: Anchor) -> None:
        self._meet(worker, state)

    def _meet(self, worker: Worker, state: Anchor) -> None:
        drift = [(a - p) / worker.comm.size for a, p in zip(state, worker.params, strict=True)]
        for packing, span in zip(worker.sender.packings, spans_of(worker.flat), strict=True):
            worker.sender.sum_span(span.of(drift), packing, span, worker.context)
        worker.sender.complete(worker.context)
        worker.sender.step_done()
        for anchor, moved, mine in zip(state, drift, worker.params, strict=True):
            anchor -= moved
            mine.copy_(anchor)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_local_steps_of_one_with_plain_sgd_are_all_reduce(workers: int) -> None:
    task = toy(optimizer="sgd", samples=48)  # steps of 12, so that all workers have equal parts
    mine = train(task, LocalSteps(period=1), workers)
    assert len(hashes(mine)) == 1
    assert_close(mine[0].state, train(task, AllReduce(), workers)[0].state)


@pytest.mark.parametrize("codec", ["dense", *LOSSY, "auto"])
def test_any_codec_packs_what_local_steps_came_to(codec: str) -> None:
    task = toy(optimizer="momentum", samples=48, epochs=3)
    spec = f"{codec}:ratio=0.3" if codec in ("top-k", "random-k", "dgc") else codec
    threads = train(task, LocalSteps(), 3, codec=spec)
    virtual = train_in(Virtual(), task, LocalSteps(), 3, codec=spec if codec != "auto" else "auto:candidates=fp16")
    for trained in (threads, virtual):
        assert len(hashes(trained)) == 1
        assert sum(trained[0].losses[-4:]) < sum(trained[0].losses[:4])
    if codec != "auto":  # which looks at the clock
        assert hashes(threads) == hashes(virtual)


@pytest.mark.parametrize("name", UNUSUAL)
def test_local_steps_work_for_any_model(name: str) -> None:
    task = toy(model=UNUSUAL[name], optimizer="sgd", samples=48)
    for codec in ("dense", "top-k:ratio=0.5", "power-sgd"):
        assert len(hashes(train(task, LocalSteps(), 2, codec=codec))) == 1


def test_dense_is_exact_and_needs_no_memory() -> None:
    """Whatever else is set: a residual of nothing would still cost a copy of the gradients."""
    found: list[Any] = Threads().run(_dense, 2)
    assert found == [([], 2.0)] * 2


def _dense(comm: Communicator) -> tuple[list[str], float]:
    flat = flat_of()
    flats = [torch.ones_like(flat.grads[0])]
    sender = Sender(comm, flat, Packing(Dense(), feedback=True), Backend())
    sender.sum_span(flats[0], sender.packing, Span(0, 0, flats[0].numel()), StepContext())
    sender.complete(StepContext())
    sender.memory.commit()
    return list(sender.memory.of_span), float(flats[0].mean())
