"""Batch normalization under vmap comes to what torch's own comes to, model by model."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state

from podium.errors import ConfigError
from podium.sweeps.fused.modules import stack_form
from podium.sweeps.fused.normalization import BatchNorm

MODELS, CHANNELS = 3, 4
SHAPES = {nn.BatchNorm1d: (6, CHANNELS), nn.BatchNorm2d: (5, CHANNELS, 3, 2), nn.BatchNorm3d: (3, CHANNELS, 2, 2, 2)}


def norms(kind: type[nn.BatchNorm1d] | type[nn.BatchNorm2d], **options: object) -> list[nn.Module]:
    made: list[nn.Module] = [kind(CHANNELS, **options).double() for _ in range(MODELS)]  # type: ignore[arg-type]  # of mixed kinds
    with torch.no_grad():
        for tensor in (t for module in made for t in (*module.parameters(), *module.buffers())):
            if tensor.is_floating_point():
                tensor.uniform_(0.5, 2.0)
    return made


def fused(modules: list[nn.Module], x: Tensor, training: bool) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    base = stack_form(copy.deepcopy(modules[0]))
    assert isinstance(base, BatchNorm)
    base.train(training)
    params, buffers = stack_module_state(modules)  # type: ignore[arg-type]  # of one class, called by its base's name
    params = {name: p.detach().requires_grad_() for name, p in params.items()}
    out = torch.vmap(lambda p, b, x: functional_call(base, (p, b), (x,), strict=True))(params, buffers, x)
    return out, params, buffers


@given(
    kind=st.sampled_from(list(SHAPES)),
    training=st.booleans(),
    options=st.sampled_from([{}, {"affine": False}, {"track_running_stats": False}, {"momentum": 0.3, "eps": 1e-3}]),
)
@settings(max_examples=16)
def test_it_is_the_normalization_of_each_model(
    kind: type[nn.BatchNorm2d], training: bool, options: dict[str, object]
) -> None:
    torch.manual_seed(0)
    modules = norms(kind, **options)
    x = torch.randn(MODELS, *SHAPES[kind], dtype=torch.float64, requires_grad=True)
    out, params, buffers = fused(modules, x, training)
    pull = torch.randn_like(out)
    inputs = [x, *params.values()]
    found = dict(zip(["x", *params], torch.autograd.grad(out, inputs, pull), strict=True)) | buffers
    for i, module in enumerate(modules):
        module.train(training)
        row = x[i].detach().requires_grad_()
        expected = module(row)
        own = dict(module.named_parameters())
        grads = torch.autograd.grad(expected, [row, *own.values()], pull[i])
        pairs = dict(zip(["x", *own], grads, strict=True)) | dict(module.named_buffers())
        assert torch.allclose(out[i], expected, rtol=0, atol=1e-12)
        assert pairs.keys() == found.keys()
        for name, value in pairs.items():
            assert torch.allclose(found[name][i], value, rtol=0, atol=1e-12), name


def test_half_precision_is_normalized_in_float32() -> None:
    original = nn.BatchNorm2d(CHANNELS)
    stand_in = stack_form(copy.deepcopy(original))
    assert stand_in is not None
    x = (torch.randn(8, CHANNELS, 4, 4) + 30).bfloat16()
    found, expected = stand_in(x), original(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected.float(), atol=0.02)
    for name, value in original.named_buffers():
        assert torch.allclose(dict(stand_in.named_buffers())[name], value, rtol=1e-5), name


def test_a_cumulative_average_is_refused_when_swapped() -> None:
    with pytest.raises(ConfigError, match=r"BatchNorm: momentum must be a number.*got None"):
        stack_form(nn.BatchNorm1d(3, momentum=None))


def test_one_value_per_channel_cannot_be_trained_on() -> None:
    stand_in = stack_form(nn.BatchNorm1d(3))
    assert stand_in is not None
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        stand_in(torch.randn(1, 3))
