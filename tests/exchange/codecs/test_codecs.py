"""What holds for every codec: the size of its wire, how much it loses, and what it leaves alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from podium.errors import ConfigError, UnknownName
from podium.exchange.codecs import CODECS, find_codec, make_codec
from podium.exchange.codecs.base import Codec, Span, StepContext
from tests.exchange.codecs.spans import decode, memory_of, noise, span_of

SIZES = (1, 7, 8, 9, 2047, 2048, 2049, 65536, 65537, 150_001)
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
OPTIONS: dict[str, dict[str, Any]] = {"dgc": {"warmup_epochs": 1}, "power-sgd": {"rank": 2}}
CONTEXT = StepContext(step=3, epoch=0.5, seed=11, rank=1, workers=2)
NAMES = [name for name in CODECS if name != "auto"]  # which only stands in for the others
SUMMED = [name for name in NAMES if find_codec(name).reduction == "sum" and name != "power-sgd"]
GATHERED = [name for name in NAMES if find_codec(name).reduction == "gather"]
LAST_BITS = {torch.float32: 1e-6, torch.float64: 1e-6, torch.bfloat16: 0.02}


def codec_of(name: str) -> Codec:
    return make_codec(name, OPTIONS.get(name, {}))


def pack(codec: Codec, tensor: Tensor, span: Span, context: StepContext = CONTEXT) -> Tensor:
    return codec.encode(tensor, span, context, memory_of(span, tensor.dtype, str(tensor.device)))


def awkward(numel: int) -> dict[str, Tensor]:
    tensors = {
        "normal": noise(numel),
        "zero": torch.zeros(numel),
        "constant": torch.full((numel,), -0.25),
        "heavy": noise(numel, 1) ** 9,
        "tiny": noise(numel, 2) * 1e-41,
        "huge": noise(numel, 3) * 1e37,
        "one": torch.zeros(numel),
        "nan": torch.full((numel,), math.nan),
        "inf": torch.full((numel,), -math.inf),
    }
    tensors["one"][numel // 2] = -3.0
    return tensors


def allowed_loss(name: str, tensor: Tensor) -> Tensor:
    """How far each element may be from what was packed."""
    size = tensor.double().abs()
    if name == "dense":
        return size * 0
    if name == "fp16":
        return size * 2.0**-11 + 2.0**-25
    if name == "bf16":
        return size * 2.0**-8
    assert name == "int8"
    chunks = torch.nn.functional.pad(size, (0, -size.numel() % 2048)).view(-1, 2048)
    return chunks.amax(1).repeat_interleave(2048)[: size.numel()] / 127 * 1.001


@settings(max_examples=12)
@example(1, torch.float32)
@example(2049, torch.float64)
@example(65537, torch.bfloat16)
@example(150_001, torch.float32)
@given(st.sampled_from(SIZES) | st.integers(1, 70_000), st.sampled_from(DTYPES))
@pytest.mark.parametrize("name", NAMES)
def test_what_comes_out_is_near_what_went_in(name: str, numel: int, dtype: torch.dtype) -> None:
    codec, span, tensor = codec_of(name), span_of(numel), noise(numel, numel, dtype)
    got = decode(codec, pack(codec, tensor, span), span, CONTEXT, dtype)
    lost = (got.double() - tensor.double()).abs()
    slack = LAST_BITS[dtype]
    if name in ("dense", "fp16", "bf16", "int8"):
        assert (lost <= allowed_loss(name, tensor) + (slack if name == "int8" else 1e-7) * tensor.double().abs()).all()
    elif codec.biased:  # each takes a part of the tensor away, and adds nothing
        assert lost.norm() <= tensor.double().norm() * (1 + slack)
    if codec.exact:
        assert torch.equal(got, tensor)


@pytest.mark.parametrize("name", [name for name in NAMES if not codec_of(name).biased])
def test_an_unbiased_codec_is_right_on_average_along_any_direction(name: str) -> None:
    codec, span, tensor = codec_of(name), span_of(4099), noise(4099)
    contexts = [CONTEXT._replace(step=step) for step in range(64)]
    drawn = torch.stack([decode(codec, pack(codec, tensor, span, at), span, at) for at in contexts]).double()
    for direction in (tensor.double(), tensor.sign().double(), torch.ones(4099).double()):
        along = drawn @ direction
        rounding = 5e-3 * tensor.double().norm() * direction.norm() / math.sqrt(4099)
        off = (along.mean() - tensor.double() @ direction).abs()
        assert off <= 5 * along.std() / math.sqrt(len(contexts)) + rounding


@pytest.mark.parametrize("name", NAMES)
def test_the_wire_depends_on_the_span_and_the_context_only(name: str) -> None:
    for numel in (1, 9, 2049, 65537):
        codec, span = codec_of(name), span_of(numel)
        wires = [pack(codec, tensor, span, CONTEXT) for tensor in awkward(numel).values()]
        wires.append(pack(codec, noise(numel, 9), span, CONTEXT._replace(rank=0)))
        assert {(wire.shape, wire.dtype) for wire in wires} == {(wires[0].shape, wires[0].dtype)}
        assert wires[0].dim() == 1 and wires[0].is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_packing_leaves_the_tensor_alone_and_shares_nothing_with_it(name: str) -> None:
    for numel in (9, 65537):
        codec, span, tensor = codec_of(name), span_of(numel), noise(numel)
        before = tensor.clone()
        wire = pack(codec, tensor, span)
        assert torch.equal(tensor, before)
        kept = wire.clone()
        tensor.fill_(7.0)
        assert torch.equal(wire, kept)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_context_gives_the_same_wire(name: str) -> None:
    codec, span, tensor = codec_of(name), span_of(65537), noise(65537)
    assert torch.equal(pack(codec, tensor, span), pack(codec, tensor, span))


@pytest.mark.parametrize("name", NAMES)
def test_an_empty_span_has_a_wire_too(name: str) -> None:
    codec, span = codec_of(name), Span(0, 5, 5)
    out = torch.zeros(0)
    codec.decode_add(codec.encode(torch.zeros(0), span, CONTEXT, memory_of(span)), out, span, CONTEXT)


@pytest.mark.parametrize("name", NAMES)
def test_zeros_stay_zeros(name: str) -> None:
    for numel in (1, 9, 65537):
        codec, span = codec_of(name), span_of(numel)
        assert not decode(codec, pack(codec, torch.zeros(numel), span), span, CONTEXT).any()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "random-k"])
def test_what_is_not_finite_stays_visible(name: str) -> None:
    codec, span, tensor = codec_of(name), span_of(70_001), noise(70_001)
    for bad in (math.nan, math.inf, -math.inf):
        tensor[66_000] = bad
        assert not decode(codec, pack(codec, tensor, span), span, CONTEXT).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_decoding_adds_a_multiple(name: str) -> None:
    codec, span, tensor = codec_of(name), span_of(65537), noise(65537)
    wire = pack(codec, tensor, span)
    out = torch.ones(span.numel)
    codec.decode_add(wire, out, span, CONTEXT, alpha=-0.5)
    torch.testing.assert_close(out, 1 - 0.5 * decode(codec, wire, span, CONTEXT))


@pytest.mark.parametrize("name", NAMES)
def test_the_remainder_is_what_the_wire_does_not_say(name: str) -> None:
    codec, span, tensor = codec_of(name), span_of(65537), noise(65537)
    wire = pack(codec, tensor, span)
    apart = torch.full_like(tensor, math.nan)
    codec.remainder(wire, tensor, apart, span, CONTEXT)
    torch.testing.assert_close(apart + decode(codec, wire, span, CONTEXT), tensor)
    codec.remainder(wire, tensor, tensor, span, CONTEXT)
    assert torch.equal(tensor, apart)


@pytest.mark.parametrize("name", SUMMED)
def test_wires_that_are_summed_say_the_sum(name: str) -> None:
    for numel in (9, 2049, 65537):
        codec, span = codec_of(name), span_of(numel)
        wires = [pack(codec, noise(numel, rank), span, CONTEXT._replace(rank=rank)) for rank in range(3)]
        total = torch.stack(wires).sum(0)
        said = torch.stack([decode(codec, wire, span, CONTEXT) for wire in wires]).sum(0)
        torch.testing.assert_close(decode(codec, total, span, CONTEXT), said, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", [name for name in GATHERED if name != "vote"])
def test_wires_that_are_gathered_say_the_sum(name: str) -> None:
    for numel in (1, 9, 2049, 65537):
        codec, span = codec_of(name), span_of(numel)
        wires = [pack(codec, noise(numel, rank), span, CONTEXT._replace(rank=rank)) for rank in range(3)]
        out = torch.full((numel,), math.nan)
        codec.combine(torch.stack(wires), out, span, CONTEXT)
        said = torch.stack([decode(codec, wire, span, CONTEXT) for wire in wires]).sum(0)
        torch.testing.assert_close(out, said)


@pytest.mark.parametrize("name", GATHERED)
def test_a_wire_may_lie_at_an_odd_place(name: str) -> None:
    for numel in (9, 2049):
        codec, span = codec_of(name), span_of(numel)
        wire = pack(codec, noise(numel), span)
        moved = torch.empty(wire.numel() + 1, dtype=wire.dtype)[1:].copy_(wire)
        assert torch.equal(decode(codec, moved, span, CONTEXT), decode(codec, wire, span, CONTEXT))


@pytest.mark.parametrize(("name", "most"), [("dense", 1.0), ("fp16", 0.5), ("bf16", 0.5), ("int8", 0.2506)])
def test_bytes_of_codecs_that_keep_every_element(name: str, most: float) -> None:
    assert bytes_ratio(name, {}) <= most


@pytest.mark.parametrize("name", ("sign", "ef-sign", "vote", "one-bit"))
def test_a_sign_takes_one_bit(name: str) -> None:
    assert bytes_ratio(name, {}) == pytest.approx(1 / 32, abs=1e-4)
    assert bytes_ratio(name, {"chunk": 2048}) == pytest.approx(1 / 32, abs=1.1e-3)  # and a magnitude or two per chunk


@pytest.mark.parametrize("ratio", (0.01, 0.1))
@pytest.mark.parametrize("name", ("top-k", "random-k", "dgc"))
def test_the_ratio_is_of_elements_and_of_bytes(name: str, ratio: float) -> None:
    assert bytes_ratio(name, {"ratio": ratio}) == pytest.approx(ratio, abs=1e-4)


def bytes_ratio(name: str, options: dict[str, Any]) -> float:
    span, tensor = span_of(150_000), noise(150_000)
    wire = pack(make_codec(name, options), tensor, span, CONTEXT._replace(epoch=9.0))
    return wire.nbytes / tensor.nbytes


def test_names_and_options_are_checked() -> None:
    with pytest.raises(UnknownName, match="top-k"):
        find_codec("topk")
    with pytest.raises(ConfigError, match="key=value"):
        find_codec("top-k:0.1")
    with pytest.raises(ConfigError, match="must be a codec class"):
        find_codec("podium.exchange.codecs:make_codec")
    with pytest.raises(UnknownName, match="ratio"):
        make_codec("top-k", {"ration": 0.1})
    for name, option in {"top-k": "ratio", "random-k": "ratio", "dgc": "clip", "int8": "chunk"}.items():
        with pytest.raises(ConfigError, match=option):
            make_codec(name, {option: 0})
    with pytest.raises(ConfigError, match="min_rate"):
        make_codec("power-sgd", {"min-rate": 0.5})
    assert make_codec("top-k", {"ratio": "0.25", "select": "exact"}) == make_codec(
        "podium.exchange.codecs.top_k:TopK", {"ratio": 0.25, "select": "exact"}
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_codec_carries_its_name(name: str) -> None:
    assert find_codec(name).name == name


def test_who_is_fed_back() -> None:
    fed_back = {name for name in NAMES if make_codec(name).wants_feedback}
    assert fed_back == {"ef-sign", "one-bit", "top-k", "random-k", "power-sgd"}
    assert not make_codec("random-k", {"unbias": True}).wants_feedback
    assert make_codec("int8", {"stochastic": False}).wants_feedback


class TestHalf:
    def test_beyond_the_range_is_cut_off_and_not_infinite(self) -> None:
        tensor, span = torch.tensor([1e6, -1e6, 65504.0, math.inf, 1.0]), span_of(5)
        got = decode(make_codec("fp16"), pack(make_codec("fp16"), tensor, span), span, CONTEXT)
        assert got.tolist() == [65504.0, -65504.0, 65504.0, math.inf, 1.0]

    def test_beyond_the_range_of_bf16_too(self) -> None:
        tensor, span = torch.tensor([3.4e38, -3.4e38]), span_of(2)
        assert decode(make_codec("bf16"), pack(make_codec("bf16"), tensor, span), span, CONTEXT).isfinite().all()


class TestInt8:
    @pytest.mark.slow
    def test_it_is_right_on_average(self) -> None:
        codec, numel, draws = make_codec("int8", {"chunk": 500}), 1100, 4000
        span, tensor, total = span_of(numel), noise(numel), torch.zeros(numel)
        memory = memory_of(span)
        for step in range(draws):
            turn = CONTEXT._replace(step=step)
            codec.decode_add(codec.encode(tensor, span, turn, memory), total, span, turn)
        scale = tensor.abs().max() / 127
        assert (total / draws - tensor).abs().max() < 5 * scale / 2 / math.sqrt(draws)

    def test_rounding_to_the_nearest_is_not(self) -> None:
        codec, span, tensor = make_codec("int8", {"stochastic": False}), span_of(2), torch.tensor([127.0, 0.4])
        assert decode(codec, pack(codec, tensor, span), span, CONTEXT).tolist() == pytest.approx([127.0, 0.0], rel=1e-5)

    @pytest.mark.parametrize("change", [{"step": 4}, {"rank": 0}, {"seed": 12}])
    def test_each_turn_has_noise_of_its_own(self, change: dict[str, int]) -> None:
        codec, span, tensor = make_codec("int8"), span_of(65537), noise(65537)
        assert not torch.equal(pack(codec, tensor, span), pack(codec, tensor, span, CONTEXT._replace(**change)))

    def test_each_span_has_noise_of_its_own(self) -> None:
        codec, tensor = make_codec("int8"), noise(3000)
        assert not torch.equal(pack(codec, tensor, span_of(3000)), pack(codec, tensor, span_of(3000, start=3000)))

    @pytest.mark.parametrize("chunk", (1, 3, 2048, 65536))
    def test_chunks_of_any_size(self, chunk: int) -> None:
        codec, span, tensor = make_codec("int8", {"chunk": chunk}), span_of(66_001), noise(66_001)
        got = decode(codec, pack(codec, tensor, span), span, CONTEXT)
        assert (got - tensor).abs().max() <= tensor.abs().max() / 126

    def test_one_bad_number_spoils_its_chunk_only(self) -> None:
        codec, span, tensor = make_codec("int8", {"chunk": 8}), span_of(24), noise(24)
        tensor[9] = math.nan
        assert decode(codec, pack(codec, tensor, span), span, CONTEXT).isfinite().view(3, 8).all(1).tolist() == [
            True,
            False,
            True,
        ]

    def test_numbers_too_small_for_a_scale_count_as_zero(self) -> None:
        codec, span, tensor = make_codec("int8"), span_of(3000), noise(3000) * 1e-39
        assert decode(codec, pack(codec, tensor, span), span, CONTEXT).abs().max() < 1e-36

    def test_the_largest_never_wraps_around(self) -> None:
        codec, span = make_codec("int8", {"chunk": 2}), span_of(40_000)
        tensor = noise(20_000).abs().add_(1e-3).repeat_interleave(2)
        tensor[::2].neg_()
        for step in range(5):
            got = decode(codec, pack(codec, tensor, span, CONTEXT._replace(step=step)), span, CONTEXT)
            torch.testing.assert_close(got, tensor, rtol=0.01, atol=0)


class TestSigns:
    @pytest.mark.slow
    @pytest.mark.parametrize("chunk", (0, 8, 2048, 65536, 131072))
    def test_a_sign_is_on_the_scale_of_its_chunks_mean(self, chunk: int) -> None:
        codec, span, tensor = make_codec("sign", {"chunk": chunk}), span_of(150_001), noise(150_001)
        got = decode(codec, pack(codec, tensor, span), span, CONTEXT)
        for part, found in zip(tensor.split(chunk or 150_001), got.split(chunk or 150_001), strict=True):
            torch.testing.assert_close(found, part.sign() * part.abs().mean())

    @pytest.mark.parametrize("chunk", (0, 2048, 131072))
    def test_one_bit_sends_two_means(self, chunk: int) -> None:
        codec, span, tensor = make_codec("one-bit", {"chunk": chunk}), span_of(150_001), noise(150_001) + 0.5
        got = decode(codec, pack(codec, tensor, span), span, CONTEXT)
        for part, found in zip(tensor.split(chunk or 150_001), got.split(chunk or 150_001), strict=True):
            below, above = part[part < 0].sum() / max(1, int((part < 0).sum())), part[part >= 0].mean()
            torch.testing.assert_close(found, torch.where(part < 0, below, above))

    @pytest.mark.parametrize("chunk", (-8, 7, 24, 65544))
    def test_a_chunk_must_fit_blocks_and_bytes(self, chunk: int) -> None:
        with pytest.raises(ConfigError, match="chunk must be"):
            make_codec("ef-sign", {"chunk": chunk})

    def test_the_majority_decides(self) -> None:
        codec, span = make_codec("vote"), span_of(3)
        tensors = [torch.tensor(t) for t in ([1.0, 1.0, -1.0], [2.0, -2.0, -2.0], [3.0, -3.0, 3.0])]
        out = torch.full((3,), math.nan)
        codec.combine(torch.stack([pack(codec, t, span) for t in tensors]), out, span, CONTEXT)
        assert out.tolist() == [6.0, -6.0, -6.0]

    def test_where_all_agree_the_vote_is_the_sum(self) -> None:
        vote, sign, span, tensor = make_codec("vote"), make_codec("sign"), span_of(70_001), noise(70_001)
        wires = torch.stack([pack(vote, tensor * (rank + 1), span) for rank in range(3)])
        out, said = torch.empty(span.numel), torch.empty(span.numel)
        vote.combine(wires, out, span, CONTEXT)
        sign.combine(wires, said, span, CONTEXT)
        torch.testing.assert_close(out, said)

    def test_even_votes_and_those_without_an_opinion_give_zero(self) -> None:
        codec, span = make_codec("vote"), span_of(2)
        tensors = [torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0]), torch.zeros(2)]
        out = torch.full((2,), math.nan)
        codec.combine(torch.stack([pack(codec, t, span) for t in tensors]), out, span, CONTEXT)
        assert out.tolist() == [0.0, 2.0]


class TestRandomK:
    def test_all_workers_keep_the_same_elements(self) -> None:
        codec, span = make_codec("random-k", {"ratio": 0.1}), span_of(1003)
        first, second = noise(1003, 1), noise(1003, 2)
        total = pack(codec, first, span, CONTEXT) + pack(codec, second, span, CONTEXT._replace(rank=0))
        got = decode(codec, total, span, CONTEXT)
        kept = got != 0
        assert kept.sum() == 100
        torch.testing.assert_close(got[kept], (first + second)[kept])

    def test_every_element_has_its_turn(self) -> None:
        codec, span, tensor = make_codec("random-k", {"ratio": 0.1}), span_of(103), torch.ones(103)
        total = torch.zeros(103)
        for step in range(2000):
            turn = CONTEXT._replace(step=step)
            codec.decode_add(pack(codec, tensor, span, turn), total, span, turn)
        assert total.min() > 150 and total.max() < 250

    def test_with_the_factor_it_is_right_on_average(self) -> None:
        codec, span, tensor = make_codec("random-k", {"ratio": 0.1, "unbias": True}), span_of(103), noise(103)
        total, draws = torch.zeros(103), 4000
        for step in range(draws):
            turn = CONTEXT._replace(step=step)
            codec.decode_add(pack(codec, tensor, span, turn), total, span, turn)
        # One draw is 11 times the element or nothing, so its spread is about 3.2 times the element.
        assert ((total / draws - tensor).abs() <= 5 * 3.2 * tensor.abs() / math.sqrt(draws)).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_packs_as_a_cpu_does(name: str) -> None:
    for numel in (1, 9, 2049, 70_001):
        codec, span, tensor = codec_of(name), span_of(numel), noise(numel)
        here, there = pack(codec, tensor, span), pack(codec, tensor.cuda(), span)
        assert there.is_cuda and there.shape == here.shape and there.dtype == here.dtype
        got = decode(codec, there, span, CONTEXT)
        known = decode(codec, here, span, CONTEXT)
        near = tensor.abs().max().item() / 127 * 1.01 if name == "int8" else 1e-4
        differ = ~torch.isclose(got.cpu(), known, rtol=1e-3, atol=near)
        # An unbiased codec may round an element up on one device and down on the other.
        assert differ.double().mean() <= (0.0 if codec.biased or codec.exact or name == "int8" else 0.01)
        apart = torch.empty_like(got)
        codec.remainder(there, tensor.cuda(), apart, span, CONTEXT)
        torch.testing.assert_close(apart + got, tensor.cuda())
        if codec.reduction == "gather":
            codec.combine(torch.stack([there, there]), apart, span, CONTEXT)
            torch.testing.assert_close(apart, 2 * got)
