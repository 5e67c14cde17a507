"""Error feedback and the memory it lives in: nothing is lost, and what did not happen leaves no trace."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from podium.exchange.codecs import CODECS, make_codec
from podium.exchange.codecs.base import Codec, Memory, Span, StepContext
from podium.exchange.codecs.feedback import keep_residual, with_residual
from tests.exchange.codecs.spans import decode, memory_of, noise, span_of

OPTIONS = {"dgc": {"momentum": 0.0, "ratio": 0.05, "warmup_epochs": 2}, "top-k": {"ratio": 0.05}}


def send(codec: Codec, tensor: Tensor, span: Span, turn: StepContext, memory: Memory) -> Tensor:
    q = with_residual(codec, tensor.clone(), span, memory)
    wire = codec.encode(q, span, turn, memory)
    keep_residual(codec, q, wire, span, turn, memory)
    return wire


@pytest.mark.parametrize("name", [name for name in CODECS if name != "auto"])
@settings(max_examples=8)
@given(numel=st.integers(1, 5000), steps=st.integers(1, 12), start=st.integers(0, 40), wide=st.booleans())
def test_what_was_sent_and_what_is_kept_is_what_came(name: str, numel: int, steps: int, start: int, wide: bool) -> None:
    codec, span = make_codec(name, OPTIONS.get(name, {})), span_of(numel, start)
    dtype = torch.float64 if wide else torch.float32
    memory = memory_of(span, dtype)
    came, sent = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)
    for step in range(steps):
        tensor, turn = noise(numel, step, dtype), StepContext(step=step, epoch=step / 4, seed=1)
        sent += decode(codec, send(codec, tensor, span, turn, memory), span, turn, dtype)
        memory.commit()
        came += tensor
    kept = memory.get("unsent" if name == "dgc" else "residual", span)
    assert kept is not None
    torch.testing.assert_close(sent + kept, came, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in CODECS if name != "auto"])
def test_a_step_that_did_not_happen_leaves_no_trace(name: str) -> None:
    codec, span = make_codec(name, OPTIONS.get(name, {})), span_of(3000)
    memory = memory_of(span)
    for step in range(3):
        turn = StepContext(step=step, epoch=3.0)
        lost = send(codec, noise(3000, step), span, turn, memory)
        before = [flat.clone() for flats in memory.of_span.values() for flat in flats]
        memory.forget()
        send(codec, noise(3000, 99), span, turn, memory)  # another attempt that fails
        memory.forget()
        after = [flat for flats in memory.of_span.values() for flat in flats]
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert torch.equal(send(codec, noise(3000, step), span, turn, memory), lost)
        memory.commit()


def test_nothing_that_was_put_is_seen_before_it_is_kept() -> None:
    span = Span(0, 0, 4)
    memory = memory_of(span)
    memory.put("residual", span).fill_(1.0)
    memory.put_named("q", torch.ones(2))
    assert memory.get("residual", span) is None and memory.get_named("q") is None
    memory.commit()
    kept = memory.get("residual", span)
    assert kept is not None and kept.tolist() == [1.0] * 4 and memory.get_named("q") is not None
    memory.put("residual", span).fill_(1.0)
    memory.clear()
    assert memory.get("residual", span) is None and memory.get_named("q") is None


def test_spans_that_were_not_written_stay_as_they_were() -> None:
    memory = Memory([torch.zeros(6)])
    left, right = Span(0, 0, 3), Span(0, 3, 6)
    for span in (left, right):
        memory.put("residual", span).fill_(1.0)
    memory.commit()
    memory.put("residual", left).fill_(2.0)
    memory.put("residual", left).fill_(2.0)  # asked for twice is not twice as much
    memory.commit()
    assert memory.of_span["residual"][0].tolist() == [2.0] * 3 + [1.0] * 3


def test_what_was_forgotten_does_not_come_back_with_the_first_step() -> None:
    memory = Memory([torch.zeros(6)])
    left, right = Span(0, 0, 3), Span(0, 3, 6)
    memory.put("residual", right).fill_(1.0)
    memory.forget()
    memory.put("residual", left).fill_(2.0)
    memory.commit()
    assert memory.of_span["residual"][0].tolist() == [2.0] * 3 + [0.0] * 3


def test_who_keeps_its_own_residual_gets_none() -> None:
    codec, span, tensor = make_codec("dgc"), span_of(100), noise(100)
    memory = memory_of(span)
    send(codec, tensor, span, StepContext(), memory)
    memory.commit()
    assert set(memory.of_span) == {"velocity", "unsent"}
    assert with_residual(codec, tensor, span, memory) is tensor
