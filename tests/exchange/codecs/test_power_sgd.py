"""PowerSGD: workers agree, lose nothing, and are exact where the rank suffices."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from podium.exchange.codecs import make_codec
from podium.exchange.codecs.base import Matrix, Memory, Rounds, RoundsCodec, Span, StepContext
from podium.exchange.codecs.feedback import keep_own_residual, with_residual
from tests.exchange.codecs.spans import decode, memory_of, noise, run_rounds, span_of

SPAN = Span(
    0, 0, 40 * 50 + 7 + 60 * 30 + 11 + 4, (Matrix("a", 7, 40, 50), Matrix("b", 2007, 60, 30), Matrix("c", 3818, 2, 2))
)


def power(rank: int = 2, **options: object) -> RoundsCodec:
    codec = make_codec("power-sgd", {"rank": rank, **options})
    assert isinstance(codec, RoundsCodec)
    return codec


def exchange(
    codec: RoundsCodec, tensors: list[Tensor], memories: list[Memory], span: Span, step: int = 0
) -> list[Tensor]:
    """One exchange with error feedback; what each worker ends with."""
    qs = [with_residual(codec, t, span, memory) for t, memory in zip(tensors, memories, strict=True)]
    workers: list[Rounds] = [
        codec.rounds(q, span, StepContext(step=step, rank=rank, workers=len(qs), seed=5), memory)
        for rank, (q, memory) in enumerate(zip(qs, memories, strict=True))
    ]
    run_rounds(workers)
    outs = []
    for rounds, q, memory in zip(workers, qs, memories, strict=True):
        outs.append(torch.full_like(q, float("nan")))
        rounds.finish(outs[-1])
        keep_own_residual(rounds, q, span, memory)
        memory.commit()
    return outs


def low_rank(rank: int, seed: int) -> Tensor:
    tensor = noise(SPAN.numel, seed)
    for _, offset, rows, cols in SPAN.matrices[:2]:
        product = noise(rows * rank, seed + 1).view(rows, rank) @ noise(rank * cols, seed + 2).view(rank, cols)
        tensor[offset : offset + rows * cols] = product.view(-1)
    return tensor


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64, torch.bfloat16))
@pytest.mark.parametrize("rank", (1, 2, 4, 10))
def test_workers_agree_and_lose_nothing(rank: int, dtype: torch.dtype) -> None:
    codec, workers = power(rank, min_rate=1), 3
    memories = [memory_of(SPAN, dtype) for _ in range(workers)]
    came, went = torch.zeros(SPAN.numel, dtype=torch.float64), torch.zeros(SPAN.numel, dtype=torch.float64)
    for step in range(5):
        tensors = [noise(SPAN.numel, 10 * step + rank, dtype) for rank in range(workers)]
        came += torch.stack(tensors).double().sum(0)
        outs = exchange(codec, tensors, memories, SPAN, step)
        assert all(torch.equal(out, outs[0]) for out in outs)
        went += outs[0].double()
        kept = [memory.get("residual", SPAN) for memory in memories]
        total = went + torch.stack([k for k in kept if k is not None]).double().sum(0)
        loose = 0.5 if dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(total, came, rtol=loose, atol=loose)
        assert all(torch.equal(m.named["q:a"], memories[0].named["q:a"]) for m in memories)


@pytest.mark.parametrize("rank", (1, 2, 3))
def test_a_matrix_of_low_rank_is_exact_at_once(rank: int) -> None:
    tensor = low_rank(rank, 3)
    outs = exchange(power(3), [tensor], [memory_of(SPAN)], SPAN)
    torch.testing.assert_close(outs[0], tensor, rtol=1e-4, atol=1e-4)


def test_a_sum_of_low_rank_is_exact_though_no_part_is() -> None:
    wanted, other = low_rank(1, 3), noise(SPAN.numel, 9)
    outs = exchange(power(1), [other, wanted - other], [memory_of(SPAN), memory_of(SPAN)], SPAN)
    torch.testing.assert_close(outs[0], wanted, rtol=1e-3, atol=1e-3)


def test_going_on_from_the_last_step_comes_nearer() -> None:
    codec, tensor, memory = power(1), noise(SPAN.numel), memory_of(SPAN)
    left = []
    for step in range(10):
        rounds = codec.rounds(tensor, SPAN, StepContext(step=step), memory)
        run_rounds([rounds])
        out = torch.empty_like(tensor)
        rounds.finish(out)
        memory.commit()
        left.append(float((tensor - out).norm()))
    assert left[-1] < 0.99 * left[0]
    assert all(after <= before + 1e-4 for before, after in itertools.pairwise(left))


def test_a_step_without_gradients_does_not_end_learning() -> None:
    codec, memory = power(2), memory_of(SPAN)
    exchange(codec, [torch.zeros(SPAN.numel)], [memory], SPAN)
    tensor = low_rank(2, 4)
    tensor[7 : 7 + 50 * 20] = 0.0  # rows that nothing touched come first
    torch.testing.assert_close(exchange(codec, [tensor], [memory], SPAN)[0], tensor, rtol=1e-3, atol=1e-3)


def test_a_rank_that_was_not_needed_is_there_later() -> None:
    codec, memory = power(2), memory_of(SPAN)
    first = exchange(codec, [low_rank(1, 4)], [memory], SPAN)[0]
    torch.testing.assert_close(first, low_rank(1, 4), rtol=1e-4, atol=1e-4)
    later = low_rank(2, 8)
    torch.testing.assert_close(exchange(codec, [later], [memory], SPAN)[0], later, rtol=1e-3, atol=1e-3)


def test_what_is_not_worth_it_travels_as_it_is() -> None:
    codec, tensor = power(1), noise(4)
    span = Span(0, 0, 4, (Matrix("c", 0, 2, 2),))
    rounds = codec.rounds(tensor, span, StepContext(), memory_of(span))
    assert rounds.next(rounds.first() * 2) is None
    out, residual = torch.empty(4), tensor.clone()
    rounds.finish(out)
    rounds.subtract_own(residual)
    assert torch.equal(out, 2 * tensor) and not residual.any()


def test_few_numbers_travel() -> None:
    rounds = power(1).rounds(noise(SPAN.numel), SPAN, StepContext(), memory_of(SPAN))
    first = rounds.first()
    assert first.numel() == 40 + 60 + 7 + 11 + 4
    second = rounds.next(first)
    assert second is not None and second.numel() == 50 + 30


@settings(max_examples=25)
@given(
    rows=st.integers(1, 90),
    cols=st.integers(1, 90),
    offset=st.integers(0, 9),
    after=st.integers(0, 9),
    rank=st.integers(1, 9),
)
def test_alone_and_in_rounds_are_one_and_the_same(rows: int, cols: int, offset: int, after: int, rank: int) -> None:
    span = Span(0, 0, offset + rows * cols + after, (Matrix("m", offset, rows, cols),))
    codec, tensor = power(rank, min_rate=1), noise(span.numel)
    alone, together = memory_of(span), memory_of(span)
    for step in range(2):
        turn = StepContext(step=step, seed=1)
        got = decode(codec, codec.encode(tensor, span, turn, alone), span, turn)
        rounds = codec.rounds(tensor, span, turn, together)
        run_rounds([rounds])
        out = torch.empty(span.numel)
        rounds.finish(out)
        torch.testing.assert_close(got, out, rtol=1e-4, atol=1e-4)
        alone.commit()
        together.commit()


def test_all_workers_start_alike_and_seeds_differ() -> None:
    codec, span, tensor = power(1), span_of(5000), noise(5000)
    first, same, other = (
        codec.rounds(tensor, span, StepContext(seed=seed, rank=rank), memory_of(span)).first()
        for seed, rank in ((1, 0), (1, 1), (2, 0))
    )
    assert torch.equal(first, same) and not torch.equal(first, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("rank", (1, 3))
def test_a_gpu_gives_what_a_cpu_does(rank: int) -> None:
    tensors = [noise(SPAN.numel, seed) for seed in (1, 2)]
    here = exchange(power(rank), tensors, [memory_of(SPAN) for _ in tensors], SPAN)
    moved = [tensor.cuda() for tensor in tensors]
    there = exchange(power(rank), moved, [memory_of(SPAN, device="cuda") for _ in tensors], SPAN)
    assert torch.equal(there[0], there[1])
    torch.testing.assert_close(there[0].cpu(), here[0], rtol=1e-3, atol=1e-3)
