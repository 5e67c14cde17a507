"""Packed pushes and answers, on a server: nothing is lost, workers and server agree, and nonsense is refused."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from podium.comm.base import Communicator, Message
from podium.config import RunConfig, parse_spec
from podium.engine.batch import Batch
from podium.engine.build import Job, build_worker
from podium.engine.flat import Flat
from podium.engine.training import run_server
from podium.errors import CommError, ConfigError
from podium.exchange.codecs import CODECS, make_codec
from podium.exchange.codecs.base import Memory, StepContext
from podium.exchange.codecs.dense import Dense
from podium.exchange.spans import span_of
from podium.records.recorder import Recorder
from podium.servers.build import make_server
from podium.servers.ranges import Range, lay_out
from podium.servers.wire.push_codec import PushCodec
from podium.strategies.parameter_server import ParameterServer
from podium.testing.toys import CLASSES, FEATURES, toy
from podium.testing.worlds import Memory as Threads
from podium.testing.worlds import Real, Virtual, World

FED_BACK = {
    "fp16": "fp16:feedback=true",
    "int8": "int8:feedback=true",
    "ef-sign": "ef-sign",
    "one-bit": "one-bit",
    "top-k": "top-k:ratio=0.05",
    "random-k": "random-k:ratio=0.1",
    "dgc": "dgc:ratio=0.05,warmup_epochs=1",
    "power-sgd": "power-sgd:min_rate=1",
    "power-sgd 3": "power-sgd:rank=3,min_rate=1",
}
PULLS = [name for name in CODECS if name not in ("dense", "auto", "dgc")]
STEPS, LR = 6, 0.5


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 24), nn.Linear(24, 24), nn.Linear(24, CLASSES))


def flat_of() -> Flat:
    torch.manual_seed(1)
    net = model()
    return Flat(net, SGD(net.parameters(), lr=LR), 1 << 20)


def ranges_of(flat: Flat) -> list[Range]:
    return [r for layout in lay_out(flat, 2, 500) for r in layout.ranges]


def noise(numel: int, *key: int) -> Tensor:
    seed = sum(k * 1009**i for i, k in enumerate(key))
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


# Through a whole parameter server.


class Held(NamedTuple):
    """What one worker came to."""

    began: Tensor
    pushed: Tensor  # the sum of its gradients
    kept: Tensor  # what it has not sent
    mid: list[Tensor]  # its parameters after each push
    home: Tensor  # and what it took home


def sgd(net: nn.Module) -> SGD:
    return SGD(net.parameters(), lr=LR)


def push_often(comm: Communicator, spec: str, pull: str, servers: int, mode: str) -> Held | None:
    """Some pushes of noise in place of gradients."""
    strategy = ParameterServer(pull=pull, servers=servers, mode=mode, unit_bytes=900)  # type: ignore[arg-type]  # text
    task = toy(model=model, optimizer=sgd, samples=12 * STEPS, epochs=1)
    config = RunConfig(task="toy", workers=comm.size, codec=spec)
    job = Job(config, task, strategy, task_is_named=False)
    if comm.rank in comm.servers:
        run_server(make_server(job, comm, Recorder(comm.rank)))
        return None
    worker = build_worker(job, comm, STEPS, torch.device("cpu"))
    worker.progress.train_on(12 * STEPS, 12)
    worker.progress.run_until(12 * STEPS)
    worker.sender.prepare()
    state, began = strategy.init(worker), worker.params[0].clone()
    pushed, mid = torch.zeros_like(began, dtype=torch.float64), []
    for step in range(STEPS):
        grads = worker.flat.grads[0]
        for piece in worker.flat.pieces:
            grads[piece.start : piece.stop] = noise(piece.stop - piece.start, comm.rank, step, piece.start)
            pushed[piece.start : piece.stop] += grads[piece.start : piece.stop]
        for i in range(len(worker.flat.pieces)):
            worker.gradients.used[i] = True
        batch = Batch(None, None, 12 // comm.size, 1.0 / comm.size, end=12 * (step + 1))
        strategy.exchange(worker, state, batch)
        worker.advance(batch)
        mid.append(worker.params[0].clone())
    strategy.finish(worker, state)
    flats = worker.sender.memory.of_span.get("unsent" if "dgc" in spec else "residual")
    kept = torch.zeros_like(pushed) if flats is None else flats[0][: pushed.numel()].double()
    return Held(began, pushed, kept, mid, worker.params[0].clone())


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("spec", FED_BACK.values(), ids=FED_BACK.keys())
def test_what_servers_applied_and_what_workers_keep_is_the_sum_of_the_gradients(spec: str, servers: int) -> None:
    main = partial(push_often, spec=spec, pull="dense", servers=servers, mode="sync")
    workers: list[Held] = Threads().run(main, 3, servers)[:3]
    applied = (workers[0].began.double() - workers[0].home.double()) / LR
    pushed, kept = (sum(getattr(w, what) for w in workers) for what in ("pushed", "kept"))
    assert all(torch.equal(w.home, workers[0].home) for w in workers)
    torch.testing.assert_close(applied + kept, pushed, rtol=1e-3, atol=2e-3)
    assert float(torch.as_tensor(kept).abs().max()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("world", [Threads(), Virtual(), Real()], ids=lambda w: w.name)
@pytest.mark.parametrize("servers", [1, 2])
def test_everyone_takes_the_servers_own_parameters_home_whatever_the_answers_left_out(
    world: World, servers: int
) -> None:
    main = partial(push_often, spec="dense", pull="top-k:ratio=0.1", servers=servers, mode="sync")
    plain = partial(push_often, spec="dense", pull="dense", servers=servers, mode="sync")
    packed: list[Held] = world.run(main, 3, servers)[:3]
    whole: list[Held] = Threads().run(plain, 3, servers)[:3]
    for one in packed:
        torch.testing.assert_close(one.home, whole[0].home)
        assert torch.equal(one.home, packed[0].home)
        assert torch.equal(one.mid[0], packed[0].mid[0]), "the first answer is whole"
        assert not torch.allclose(one.mid[-1], one.home, atol=1e-4), "nothing was left out, so this shows nothing"


# The server's side alone.


def answers(pull: str, steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Some answers to one worker: what the server has, what it thinks the worker has, what that really has."""
    flat = flat_of()
    ranges, codec = ranges_of(flat), make_codec(*parse_spec(pull))
    server, spans = PushCodec(flat, Dense(), codec), [span_of(flat, r) for r in ranges]
    params, mine = [r.of(flat.params).clone() for r in ranges], [r.of(flat.params).clone() for r in ranges]
    found = []
    for version in range(steps):
        for i, p in enumerate(params):
            p += noise(p.numel(), version, i) * 0.1
        body, held = server.pack(4, 0, ranges, params, version)
        context = StepContext(step=version, rank=4)
        for wire, now, span in zip(body, mine, spans, strict=True):
            if body is params:
                now.copy_(wire)
            else:
                codec.decode_add(wire, now, span, context)
        found.append((torch.cat(list(params)), torch.cat(list(held)), torch.cat(mine)))
    return found


@pytest.mark.parametrize("pull", [*PULLS, "power-sgd:min_rate=1", "top-k:ratio=0.2"])
def test_a_server_knows_in_bits_what_its_worker_holds(pull: str) -> None:
    for _, thought, real in answers(pull, 5):
        assert torch.equal(thought, real)


@pytest.mark.parametrize("pull", ["fp16", "int8", "one-bit", "ef-sign", "top-k:ratio=0.2", "power-sgd:min_rate=1"])
def test_what_an_answer_left_out_comes_with_the_next_ones(pull: str) -> None:
    """Without a new update, answers bring the worker ever closer."""
    flat = flat_of()
    ranges = ranges_of(flat)
    server = PushCodec(flat, Dense(), make_codec(*parse_spec(pull)))
    params = [r.of(flat.params).clone() for r in ranges]
    server.pack(0, 0, ranges, params, 0)
    for i, p in enumerate(params):
        p += noise(p.numel(), i)
    first = 0.0
    for version in range(1, 60):
        _, held = server.pack(0, 0, ranges, params, version)
        apart = max(float((p - h).abs().max()) for p, h in zip(params, held, strict=True))
        first = first or apart
    assert apart < 0.3 * first or apart < 1e-6


def test_workers_and_units_are_kept_apart() -> None:
    flat = flat_of()
    ranges = ranges_of(flat)
    server = PushCodec(flat, Dense(), make_codec("int8"))
    params = [r.of(flat.params).clone() for r in ranges]
    assert server.pack(0, 0, ranges, params, 0)[0] is params
    assert server.pack(1, 0, ranges, params, 0)[0] is params
    assert server.pack(0, 1, ranges, params, 0)[0] is params
    assert server.pack(0, 0, ranges, params, 1)[0] is not params
    server.begin(None)
    assert server.pack(0, 0, ranges, params, 0)[0] is params, "a new segment begins with whole answers"


def test_what_is_answered_whole_is_not_changed_by_later_answers() -> None:
    """The server goes on moving its own parameters."""
    flat = flat_of()
    ranges = ranges_of(flat)
    server = PushCodec(flat, Dense(), make_codec("top-k", {"ratio": 0.5}))
    params = [r.of(flat.params).clone() for r in ranges]
    server.pack(0, 0, ranges, params, 0)
    before = [p.clone() for p in params]
    for p in params:
        p += 1.0
    _, held = server.pack(0, 0, ranges, params, 1)
    assert all(not torch.equal(h, b) for h, b in zip(held, before, strict=True))
    assert all(torch.equal(p, b + 1.0) for p, b in zip(params, before, strict=True)), "the server's own are its own"


# Nonsense.


def packed(codec: str, flat: Flat, ranges: list[Range]) -> list[Tensor]:
    made = make_codec(*parse_spec(codec))
    memory = Memory(flat.grads)
    return [
        made.encode(noise(r.stop - r.start, i), span_of(flat, r), StepContext(), memory) for i, r in enumerate(ranges)
    ]


CONTEXT = list(StepContext())


def push(body: list[Tensor]) -> Message:
    return Message(7, "push", {}, tuple(body))


@pytest.mark.parametrize("codec", [*PULLS, "dgc"])
def test_a_push_is_unpacked_as_it_was_meant(codec: str) -> None:
    flat = flat_of()
    ranges = ranges_of(flat)
    server = PushCodec(flat, make_codec(codec), Dense())
    grads = server.unpack(push(packed(codec, flat, ranges)), CONTEXT, ranges).body
    assert [g.numel() for g in grads] == [r.stop - r.start for r in ranges]
    for i, grad in enumerate(grads):
        meant = noise(grad.numel(), i)
        assert float(torch.dot(grad, meant)) > 0


@pytest.mark.parametrize("codec", [*PULLS, "dgc"])
def test_a_push_of_another_size_is_refused(codec: str) -> None:
    flat = flat_of()
    ranges = ranges_of(flat)
    good = packed(codec, flat, ranges)
    server = PushCodec(flat, make_codec(codec), Dense())
    for body in (
        [torch.cat([good[0], good[0][:3]]), *good[1:]],
        [good[0][: len(good[0]) // 2], *good[1:]],
        [good[0][:0], *good[1:]],
        [torch.empty(0, dtype=good[0].dtype) for _ in good],
        good[:-1],
        [*good, good[0]],
        [],
    ):
        with pytest.raises(CommError, match="a push of rank 7 is not packed as"):
            server.unpack(push(body), CONTEXT, ranges)


@pytest.mark.parametrize("codec", [*PULLS, "dgc"])
def test_a_push_of_another_type_is_refused(codec: str) -> None:
    flat = flat_of()
    ranges = ranges_of(flat)
    good = packed(codec, flat, ranges)
    server = PushCodec(flat, make_codec(codec), Dense())
    other = torch.int64 if good[0].dtype != torch.int64 else torch.float32
    with pytest.raises(CommError, match="a push of rank 7 is not packed as"):
        server.unpack(push([wire.to(other) for wire in good]), CONTEXT, ranges)


@pytest.mark.parametrize("context", [None, 3, [0] * 9, ["a"] * 5, [0, "x", 0, 0, 1], [0, float("nan"), 0, 0, 1]])
def test_a_push_with_a_strange_context_is_refused(context: Any) -> None:
    flat = flat_of()
    ranges = ranges_of(flat)
    server = PushCodec(flat, make_codec("dgc"), Dense())
    with pytest.raises(CommError, match="a push of rank 7 is not packed as dgc"):
        server.unpack(push(packed("dgc", flat, ranges)), context, ranges)


def test_a_context_long_before_the_beginning_is_refused() -> None:
    flat = flat_of()
    ranges = ranges_of(flat)
    server = PushCodec(flat, make_codec("dgc"), Dense())
    with pytest.raises(CommError):
        server.unpack(push(packed("dgc", flat, ranges)), [0, -1e6, 0, 0, 1], ranges)


UNCHECKED = """
import torch
from podium.exchange.codecs.sparse import pack, unpack, choose
from podium.errors import CommError

tensor = torch.randn(5000)
for count in ({counts}):
    wire = pack(tensor, choose(tensor, 50, "exact"), 50)
    wire[4:8].view(torch.int32).fill_(count)
    try:
        places, values = unpack(wire, 5000, 50)
        tensor.clone().index_add_(0, places, values)
    except (ValueError, RuntimeError, IndexError, CommError):
        pass
"""


@pytest.mark.slow
def test_a_wire_that_says_that_it_holds_more_than_it_does_breaks_nothing() -> None:
    """In a process of its own: what is written past the end of a tensor may end it."""
    code = UNCHECKED.format(counts="-1, 51, 60, 100_000, 2_000_000, -(1 << 31), (1 << 31) - 1")
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-500:]


@settings(max_examples=60)
@given(
    codec=st.sampled_from([*PULLS, "dgc"]),
    data=st.binary(min_size=0, max_size=400),
    context=st.integers(-3, 1 << 70),
)
def test_whatever_bytes_come_the_server_takes_them_or_refuses_them(codec: str, data: bytes, context: int) -> None:
    """A peer has the run's secret, but may be broken: it must not break the server, nor what it holds."""
    flat = flat_of()
    ranges = ranges_of(flat)[:1]
    server = PushCodec(flat, make_codec(codec), Dense())
    (good,) = packed(codec, flat, ranges)
    raw = good.view(torch.uint8).clone()
    given_ = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)
    count = min(len(raw), len(given_))
    raw[:count] = given_[:count]
    try:
        (grad,) = server.unpack(push([raw.view(good.dtype)]), [context, 0.5, 1, 2, 3], ranges).body
    except CommError:
        return
    assert grad.shape == (ranges[0].stop - ranges[0].start,)


def test_only_podiums_own_codecs_may_be_chosen_over_the_network() -> None:
    server = PushCodec(flat_of(), Dense(), Dense())
    for name in ("os:system", "tests.servers.test_push_codec:PushCodec", "nothing"):
        with pytest.raises(ConfigError, match="unknown codec"):
            server.begin(name)
    server.begin("top-k:ratio=0.5")
    server.begin(None)


def test_a_chosen_servermay_say_who_feeds_back() -> None:
    """That is the workers' business, and stands in the same text."""
    PushCodec(flat_of(), Dense(), Dense()).begin("top-k:ratio=0.5;feedback=false")
