"""Many models' convolutions at once come to what a plain loop over the models comes to."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state
from torch.nn import functional

from podium.sweeps.fused.convolution import conv2d, one_model, stacked_conv2d
from podium.sweeps.fused.modules import Linear, MaxPool, pool, stack_form

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MODELS = 3
# channels in, out, height, width, taps, stride, padding
SHAPES = [
    (1, 4, 9, 9, 3, 1, 0),
    (3, 5, 8, 8, 3, 1, 1),
    (4, 6, 8, 9, 3, 2, 1),
    (4, 3, 7, 7, 1, 2, 0),
    (2, 4, 11, 10, 5, 3, 2),
]


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, stride: int, padding: int) -> Tensor:
    rows = [
        functional.conv2d(
            x[i % len(x)], weight[i], None if bias is None else bias[i], (stride, stride), (padding, padding)
        )
        for i in range(len(weight))
    ]
    return torch.stack(rows)


def drawn(
    shape: tuple[int, ...], *, shared: bool = False, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    channels, out, height, width, taps, _, _ = shape
    x = torch.randn(1 if shared else MODELS, 4, channels, height, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(MODELS, out, channels, taps, taps, dtype=dtype, requires_grad=True)
    return x, weight, torch.randn(MODELS, out, dtype=dtype, requires_grad=True)


def largest_difference(a: Tensor, b: Tensor, inputs: tuple[Tensor, ...]) -> float:
    """Of two ways to compute the same: of the values, and of the gradients of all inputs."""
    assert a.shape == b.shape
    pull = torch.randn_like(a)
    gradients = zip(torch.autograd.grad(a, inputs, pull), torch.autograd.grad(b, inputs, pull), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in [(a, b), *gradients])


@pytest.mark.parametrize("form", [conv2d, one_model])
@pytest.mark.parametrize("shape", SHAPES)
def test_under_vmap_each_model_gets_its_own_convolution(shape: tuple[int, ...], form: Callable[..., Tensor]) -> None:
    x, weight, bias = drawn(shape)
    stride, padding = [shape[5]] * 2, [shape[6]] * 2
    found = torch.vmap(lambda x, w, b: form(x, w, b, stride, padding))(x, weight, bias)
    assert largest_difference(found, plain(x, weight, bias, *shape[5:]), (x, weight, bias)) < 1e-12


@pytest.mark.parametrize("form", [conv2d, one_model])
def test_an_input_may_be_shared_and_a_bias_absent(form: Callable[..., Tensor]) -> None:
    x, weight, _ = drawn(SHAPES[1], shared=True)
    found = torch.vmap(lambda w: form(x[0], w, None, [1, 1], [1, 1]))(weight)
    assert largest_difference(found, plain(x, weight, None, 1, 1), (x, weight)) < 1e-12


def test_a_filter_may_be_shared() -> None:
    x, weight, bias = drawn(SHAPES[1])
    found = torch.vmap(lambda x: one_model(x, weight[0], bias[0], [1, 1], [1, 1]))(x)
    expected = plain(x, weight[:1].expand(MODELS, -1, -1, -1, -1), bias[:1].expand(MODELS, -1), 1, 1)
    assert largest_difference(found, expected, (x, weight, bias)) < 1e-12


@pytest.mark.parametrize("form", [conv2d, one_model])
def test_without_vmap_it_is_the_plain_convolution(form: Callable[..., Tensor]) -> None:
    x, weight, bias = drawn(SHAPES[2])
    found = form(x[0], weight[0], bias[0], [2, 2], [1, 1])
    expected = functional.conv2d(x[0], weight[0], bias[0], (2, 2), (1, 1))
    inputs = (x, weight, bias)
    assert torch.equal(found, expected) and largest_difference(found, expected, inputs) < 1e-12


@pytest.mark.parametrize(
    ("options", "channels"),
    [({"groups": 2}, 2), ({"dilation": (2, 2)}, 4), ({"padding": "same"}, 4), ({"padding": "valid"}, 4)],
)
def test_what_the_kernels_do_not_serve_is_still_right(options: dict[str, object], channels: int) -> None:
    x = torch.randn(MODELS, 2, 4, 8, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(MODELS, 6, channels, 3, 3, dtype=torch.float64, requires_grad=True)
    found = torch.vmap(lambda x, w: conv2d(x, w, None, **options))(x, weight)  # type: ignore[arg-type]  # of mixed kinds
    expected = torch.stack([functional.conv2d(a, w, None, **options) for a, w in zip(x, weight, strict=True)])  # type: ignore[call-overload]  # the same
    assert largest_difference(found, expected, (x, weight)) < 1e-12


def test_a_nan_in_one_model_reaches_no_other() -> None:
    x, weight, bias = drawn(SHAPES[1])
    clean = stacked_conv2d(x, weight, bias, [1, 1], [1, 1])
    clean_grads = torch.autograd.grad(clean.sum(), (x, weight, bias))
    with torch.no_grad():
        weight[1] = float("nan")
    spoilt = stacked_conv2d(x, weight, bias, [1, 1], [1, 1])
    grads = torch.autograd.grad(spoilt.sum(), (x, weight, bias))
    assert spoilt[1].isnan().all()
    for before, after in zip((clean, *clean_grads), (spoilt, *grads), strict=True):
        assert torch.equal(before[[0, 2]], after[[0, 2]])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.MaxPool2d(2)
        )
        self.sequence = nn.Conv1d(6, 5, 2, padding=1)
        self.head = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.sequence(self.features(x).flatten(2))
        logits: Tensor = self.head(x.flatten(1))
        return logits


def swapped(module: nn.Module) -> nn.Module:
    for name, child in module.named_children():
        stand_in = stack_form(child)
        setattr(module, name, swapped(child) if stand_in is None else stand_in)
    return module


def fused_gradients(nets: list[Net], x: Tensor, y: Tensor, backend: str | None) -> tuple[Tensor, dict[str, Tensor]]:
    base = swapped(copy.deepcopy(nets[0]))
    stacked, buffers = stack_module_state(nets)  # type: ignore[arg-type]  # a list is invariant
    params = {name: p.detach().requires_grad_() for name, p in stacked.items()}

    def loss(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(functional_call(base, (params, buffers), (x,), strict=True), y)

    def losses(params: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = torch.vmap(loss)(params, buffers, x, y)
        return found

    run = losses if backend is None else torch.compile(losses, backend=backend, fullgraph=True)
    found = run(params, buffers, x, y)
    grads = torch.autograd.grad(found.sum(), list(params.values()))
    return found, dict(zip(params, grads, strict=True)) | buffers


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_swapped_network_computes_what_each_network_computes(backend: str | None) -> None:
    torch.manual_seed(0)
    nets = [Net().double() for _ in range(MODELS)]
    x, y = torch.randn(MODELS, 5, 1, 8, 8, dtype=torch.float64), torch.randint(0, 3, (MODELS, 5))
    losses, found = fused_gradients(nets, x, y, backend)
    for i, net in enumerate(nets):
        loss = functional.cross_entropy(net(x[i]), y[i])
        loss.backward()
        assert abs(losses[i].item() - loss.item()) < 1e-12
        expected = {name: p.grad for name, p in net.named_parameters()} | dict(net.named_buffers())
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert value is not None
            assert float((found[name][i] - value).abs().max()) < 1e-12, name


def test_stand_ins_hold_the_same_parameters_under_the_same_names() -> None:
    net = Net()
    before = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    after = swapped(net)
    assert {**dict(after.named_parameters()), **dict(after.named_buffers())}.keys() == before.keys()
    assert all(p is before[name] for name, p in after.named_parameters())


def test_layers_whose_stand_in_would_change_something_stay() -> None:
    class Derived(nn.Conv2d):
        pass

    hooked = nn.Linear(2, 2)
    hooked.register_forward_hook(lambda module, inputs, output: None)
    stay = [
        hooked,
        nn.ReLU(),
        nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect"),
        Derived(1, 1, 3),
        nn.MaxPool2d(3, 2),
        nn.MaxPool2d(2, ceil_mode=True),
    ]
    assert [stack_form(module) for module in stay] == [None] * len(stay)
    assert isinstance(stack_form(nn.Linear(2, 2)), Linear) and isinstance(stack_form(nn.MaxPool2d(2)), MaxPool)


@pytest.mark.parametrize("window", [(2, 2), (1, 3), (3, 2)])
def test_pooling_picks_the_first_of_equals_and_keeps_a_nan(window: tuple[int, int]) -> None:
    x = torch.randint(-2, 3, (2, 3, 6, 7)).double()  # many equals
    x[0, 0, 0, 1], x[1, 1, 2, 2] = float("nan"), float("inf")
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    found, expected = pool(a, *window), functional.max_pool2d(b, window)
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    pull = torch.randn_like(expected)
    assert torch.equal(torch.autograd.grad(found, a, pull)[0], torch.autograd.grad(expected, b, pull)[0])


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv1d])
def test_under_autocast_a_convolution_computes_in_bfloat16(kind: type[nn.Conv1d] | type[nn.Conv2d]) -> None:
    original = kind(2, 3, 3)
    stand_in = stack_form(original)
    assert stand_in is not None
    x = torch.randn(4, 2, 8, 8) if kind is nn.Conv2d else torch.randn(4, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = stand_in(x), original(x)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.allclose(found.float(), expected.float(), rtol=0.05, atol=0.05)


# On a GPU: the kernels at the shapes of the MNIST example network and of ResNet-20 (batch 64), against float64.

KERNEL_SHAPES = [
    (1, 32, 28, 28, 3, 1, 0),
    (32, 64, 26, 26, 3, 1, 0),
    (3, 16, 32, 32, 3, 1, 1),
    (16, 16, 32, 32, 3, 1, 1),
    (16, 32, 32, 32, 3, 2, 1),
    (32, 32, 16, 16, 3, 1, 1),
    (32, 64, 16, 16, 3, 2, 1),
    (64, 64, 8, 8, 3, 1, 1),
    (20, 24, 9, 7, 3, 2, 1),
    (16, 16, 8, 8, 1, 2, 0),
]


def on_gpu(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Output and gradients by the kernels, and the same by float64 from the same rounded inputs."""
    channels, out, height, width, taps, stride, padding = shape
    scale = (channels * taps * taps) ** -0.5
    draws = (
        torch.randn(MODELS, 64, channels, height, width, device="cuda"),
        torch.randn(MODELS, out, channels, taps, taps, device="cuda") * scale,
        torch.randn(MODELS, out, device="cuda"),
    )
    inputs = tuple(t.to(dtype).requires_grad_() for t in draws)
    exact = tuple(t.detach().double().requires_grad_() for t in inputs)
    found = torch.vmap(lambda x, w, b: conv2d(x, w, b, [stride] * 2, [padding] * 2))(*inputs)
    expected = plain(*exact, stride, padding)
    pull = torch.randn_like(found)
    grads = torch.autograd.grad(found, inputs, pull)
    return [found, *grads], [expected, *torch.autograd.grad(expected, exact, pull.double())]


@gpu
@needs_cuda
@pytest.mark.parametrize(
    ("dtype", "tf32", "tolerance"),
    [(torch.float32, False, 3e-6), (torch.float32, True, 1.5e-3), (torch.bfloat16, True, 6e-3)],
    ids=["ieee", "tf32", "bf16"],
)
@pytest.mark.parametrize("shape", KERNEL_SHAPES)
def test_the_kernels_agree_with_float64(
    shape: tuple[int, ...], dtype: torch.dtype, tf32: bool, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
    for found, expected in zip(*on_gpu(shape, dtype), strict=True):
        assert found.shape == expected.shape
        assert ((found - expected).norm() / expected.norm()).item() < tolerance


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernels_repeat_themselves_bit_for_bit_and_keep_a_nan_at_home(dtype: torch.dtype) -> None:
    x = torch.randn(MODELS, 64, 16, 32, 32, device="cuda", dtype=dtype, requires_grad=True)
    weight = torch.randn(MODELS, 32, 16, 3, 3, device="cuda", dtype=dtype, requires_grad=True)

    def run() -> list[Tensor]:
        y = stacked_conv2d(x, weight, None, [1, 1], [1, 1])
        return [y, *torch.autograd.grad(y.square().sum(), (x, weight))]

    first = run()
    assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))
    with torch.no_grad():
        weight[1] = float("nan")
    for a, b in zip(first, run(), strict=True):
        assert b[1].isnan().any() and torch.equal(a[[0, 2]], b[[0, 2]])


@gpu
@needs_cuda
def test_on_a_gpu_activations_stay_with_channels_last() -> None:
    x, weight = torch.randn(2, 8, 16, 8, 8, device="cuda"), torch.randn(2, 16, 16, 3, 3, device="cuda")
    y = torch.vmap(lambda x, w: functional.max_pool2d(conv2d(x, w, padding=(1, 1)).relu(), 2))(x, weight)
    assert y.permute(0, 1, 3, 4, 2).is_contiguous()
