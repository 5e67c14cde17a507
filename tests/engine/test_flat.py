"""Flat buffers: parameters are views, ties and layouts are kept, buckets follow one another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

from podium.engine.flat import ALIGNMENT, TAIL, Flat
from podium.errors import ConfigError, TrainingError
from podium.testing.toys import UNUSUAL, Tied, TwoDtypes, channels_last_model, frozen_model, plain_model, two_groups


def flatten(model: nn.Module, bucket_bytes: int = 1 << 20, **options: Any) -> Flat:
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return Flat(model, optimizer, bucket_bytes, options.get("first", bucket_bytes))


@pytest.mark.parametrize("model", UNUSUAL)
def test_values_and_layout_of_parameters_are_kept(model: str) -> None:
    made = UNUSUAL[model]()
    before = {name: (p.detach().clone(), p.stride()) for name, p in made.named_parameters()}
    flat = flatten(made)
    for name, p in made.named_parameters():
        assert torch.equal(p, before[name][0])
        assert p.stride() == before[name][1]
    flat.check()


@pytest.mark.parametrize("bucket_bytes", [1, 100, 10_000])
@pytest.mark.parametrize("model", UNUSUAL)
def test_pieces_follow_one_another_and_padding_lies_only_between_buckets(model: str, bucket_bytes: int) -> None:
    flat = flatten(UNUSUAL[model](), bucket_bytes)
    for bucket in flat.buckets:
        pieces = [flat.pieces[i] for i in bucket.pieces]
        assert [bucket.start, *(p.stop for p in pieces)] == [*(p.start for p in pieces), bucket.stop]
        assert bucket.start % ALIGNMENT == 0
    for buffer, params in enumerate(flat.params):
        ends = [0, *(b.stop for b in flat.buckets if b.buffer == buffer)]
        starts = [b.start for b in flat.buckets if b.buffer == buffer]
        assert ends[-1] == params.numel()
        for end, start in zip(ends, starts, strict=False):
            assert 0 <= start - end < ALIGNMENT
            assert params[end:start].abs().sum() == 0


def test_parameters_are_views_both_ways() -> None:
    model = plain_model()
    flat = flatten(model)
    flat.params[0].zero_()
    assert all(p.abs().max() == 0 for p in model.parameters())
    model.load_state_dict({k: torch.ones_like(v) for k, v in model.state_dict().items()})
    assert flat.params[0].min() == 1
    flat.check()


def test_parameters_lie_in_reverse_order() -> None:
    assert [p.name for p in flatten(plain_model()).pieces] == ["2.bias", "2.weight", "0.bias", "0.weight"]


def test_a_tied_parameter_stands_once() -> None:
    model = Tied()
    flat = flatten(model)
    assert [p.name for p in flat.pieces].count("inner.weight") == 1
    assert "outer.weight" not in [p.name for p in flat.pieces]
    assert model.inner.weight is model.outer.weight


def test_frozen_parameters_and_buffers_stay_outside() -> None:
    assert "0.weight" not in [p.name for p in flatten(frozen_model()).pieces]


def test_each_dtype_has_a_buffer_of_its_own() -> None:
    flat = flatten(TwoDtypes())
    assert {p.dtype for p in flat.params} == {torch.float32, torch.float64}
    for piece in flat.pieces:
        assert flat.params[piece.buffer].dtype == (torch.float64 if piece.name[0] in "bd" else torch.float32)


def test_channels_last_weights_stay_channels_last() -> None:
    model = channels_last_model()
    flatten(model)
    assert model[1].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_strided_parameter_is_laid_out_densely() -> None:
    model = nn.Linear(4, 3)
    model.weight = nn.Parameter(torch.arange(24.0).reshape(3, 8)[:, ::2])
    before = model.weight.detach().clone()
    flatten(model).check()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("bucket_bytes", [1, 50, 100, 10_000])
@pytest.mark.parametrize("model", UNUSUAL)
def test_buckets_hold_every_piece_once_and_reach_their_size(model: str, bucket_bytes: int) -> None:
    flat = flatten(UNUSUAL[model](), bucket_bytes)
    assert sorted(i for b in flat.buckets for i in b.pieces) == list(range(len(flat.pieces)))
    for n, bucket in enumerate(flat.buckets):
        assert {flat.bucket_of[i] for i in bucket.pieces} == {n}
        assert bucket.nbytes == (bucket.stop - bucket.start) * flat.params[bucket.buffer].element_size()
        for i in bucket.pieces:
            piece = flat.pieces[i]
            assert piece.buffer == bucket.buffer
            assert bucket.start <= piece.start < piece.stop <= bucket.stop
    for bucket in flat.buckets[: -len(flat.params)]:  # each buffer may end with one that is not full
        assert bucket.nbytes >= bucket_bytes


def test_the_first_bucket_may_be_smaller() -> None:
    flat = flatten(plain_model(), 10_000, first=1)
    assert [len(b.pieces) for b in flat.buckets] == [1, 3]


@pytest.mark.parametrize("model", ["two-dtypes", "scalar"])
def test_the_tail_travels_with_the_last_bucket_and_touches_no_gradient(model: str) -> None:
    for bucket_bytes in (1, 10_000):
        flat = flatten(UNUSUAL[model](), bucket_bytes)
        for grads in flat.grads:
            grads.zero_()
        flat.tail.fill_(7)
        *others, last = [flat.bucket(n) for n in range(len(flat.buckets))]
        assert last[-TAIL:].tolist() == [7.0] * TAIL
        assert all(b.abs().max() == 0 for b in others)
        assert all(view.abs().max() == 0 for view in flat.views)


def test_groups_are_those_of_the_optimizer() -> None:
    model = plain_model()
    flat = Flat(model, two_groups(model), 1, 1)
    assert {p.name: p.group for p in flat.pieces} == {"0.weight": 0, "2.weight": 0, "0.bias": 1, "2.bias": 1}


@pytest.mark.parametrize("leave", ["double", "assign", "reshape"])
def test_a_parameter_that_left_its_buffer_is_noticed(leave: str) -> None:
    model = plain_model()
    flat = flatten(model)
    if leave == "double":
        model.double()
    elif leave == "assign":
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    else:
        model[0].weight.data = torch.zeros(6, 8)
    with pytest.raises(TrainingError, match="left its flat buffer"):
        flat.check()


@pytest.mark.parametrize("data", [torch.arange(48.0).reshape(8, 6), torch.arange(48.0).reshape(6, 8).t()])
def test_a_parameter_with_another_storage_is_brought_back(data: torch.Tensor) -> None:
    model = plain_model()
    flat = flatten(model)
    model[0].weight.data = data
    assert not flat.holds_all()
    flat.check()
    assert flat.holds_all()
    assert torch.equal(model[0].weight, data)
    assert torch.equal(flat.pieces[-1].view(flat.params[0]), data)


def test_parameters_that_share_memory_are_refused_and_those_that_lie_side_by_side_are_not() -> None:
    def halves(start: int, step: int) -> nn.Module:
        model, memory = nn.Module(), torch.zeros(10)
        model.a, model.b = nn.Parameter(memory[0:6:step]), nn.Parameter(memory[start : start + 6 : step])
        return model

    for start, step in ((6, 1), (1, 2)):
        flatten(halves(start, step)).check()
    for start, step in ((0, 1), (4, 1), (2, 2)):
        with pytest.raises(ConfigError, match=r"parameter [ab] and parameter [ab] share memory"):
            flatten(halves(start, step))


def test_what_cannot_be_flattened_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"parameter 0\.weight is trainable but the optimizer does not hold it"):
        Flat(model, SGD(model[1].parameters(), lr=0.1), 1, 1)
    complex_model = nn.Module()
    complex_model.w = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"parameter w: .*complex64"):
        flatten(complex_model)
