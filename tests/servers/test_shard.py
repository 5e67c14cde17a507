"""Shards: stepped unit by unit, in any order and however they are cut, they are torch's optimizer in bits."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from podium.engine.flat import Flat
from podium.errors import ConfigError
from podium.servers.ranges import Layout, Unit, lay_out
from podium.servers.shard import Shard, unit_of
from podium.servers.wire.moments import pack, parts_of, unpack
from podium.servers.wire.optimizer_settings import options_of

Make = Callable[..., Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": partial(SGD, lr=0.1),
    "sgd, decayed": partial(SGD, lr=0.1, weight_decay=0.03),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=0.02, weight_decay=0.01),
    "amsgrad": partial(Adam, lr=0.02, amsgrad=True),
    "adamw": partial(AdamW, lr=0.02, weight_decay=0.1),
    "adagrad": partial(Adagrad, lr=0.05, lr_decay=0.01, initial_accumulator_value=0.3),
    "rmsprop": partial(RMSprop, lr=0.01, momentum=0.5, weight_decay=0.02),
    "rmsprop, centred": partial(RMSprop, lr=0.01, centered=True),
    "uphill": partial(SGD, lr=0.1, momentum=0.9, maximize=True),
}


class Mixed(nn.Module):
    """Weights, biases, a scalar, and a few numbers in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(9, 7)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.exact = nn.Parameter(torch.randn(11, dtype=torch.float64))
        self.last = nn.Linear(7, 5)
        self.conv = nn.Conv2d(3, 4, 2)
        self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch documents it


def two_groups(model: nn.Module, make: Make) -> Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return make([{"params": weights}, {"params": others, "lr": 0.03, "weight_decay": 0.0}])


def one_group(model: nn.Module, make: Make) -> Optimizer:
    return make(model.parameters())


class Servers:
    """A model on servers, beside the same model in plain PyTorch, both given the same gradients."""

    def __init__(self, optimizer: Callable[[nn.Module], Optimizer], servers: int = 3, unit_bytes: int = 100) -> None:
        torch.manual_seed(1)
        self.plain = Mixed()
        self.optimizer = optimizer(self.plain)
        home = Mixed()
        home.load_state_dict(self.plain.state_dict())
        self.home_optimizer = optimizer(home)
        self.flat = Flat(home, self.home_optimizer, bucket_bytes=300, first_bucket_bytes=100)
        self.layouts = lay_out(self.flat, servers, unit_bytes)
        self.parameters = dict(self.plain.named_parameters())
        self.chance = random.Random(0)
        self.begin()

    def begin(self) -> None:
        """Shards as the workers seed them: with the optimizer's state of a replica that has not stepped."""
        self.shards = [Shard(self.flat, self.home_optimizer, layout) for layout in self.layouts]
        for shard in self.shards:
            states = parts_of(shard.ranges, self._state_of, lambda i, t: t.reshape(-1))
            meta, body = pack(shard.ranges, states, [p.dtype for p in self.flat.params])
            shard.load([r.of(self.flat.params) for r in shard.ranges], meta, body)

    def _state_of(self, piece: int) -> dict[str, Any]:
        state = self.home_optimizer.state.get(self.flat.parameters[piece], {})
        # All equal before the first step, so their order in memory does not matter.
        return dict(state)

    def step(self, unused: Sequence[str] = ()) -> list[Tensor]:
        """One step of both, the units in an order of chance; returns the gradients that the shards were given."""
        for piece, view in zip(self.flat.pieces, self.flat.views, strict=True):
            grad = torch.randn(piece.shape, dtype=view.dtype)
            self.parameters[piece.name].grad = None if piece.name in unused else grad
            view.copy_(torch.zeros_like(grad) if piece.name in unused else grad)
        options, left_out = options_of(self.optimizer), self.numbers(unused)
        self.optimizer.step()
        for shard in self.shards:
            for u in self.chance.sample(range(len(shard.units)), len(shard.units)):
                grads = [r.of(self.flat.grads) for r in shard.units[u].of(shard.ranges)]
                shard.step(u, grads, options, left_out)
        return self.flat.grads

    def numbers(self, names: Sequence[str]) -> list[int]:
        return [n for n, piece in enumerate(self.flat.pieces) if piece.name in names]

    def assert_same_parameters(self) -> None:
        buffers = [torch.full_like(p, float("nan")) for p in self.flat.params]
        for shard in self.shards:
            for r, p in zip(shard.ranges, shard.params, strict=True):
                r.of(buffers).copy_(p)
        for piece in self.flat.pieces:
            mine, expected = piece.view(buffers[piece.buffer]), self.parameters[piece.name]
            assert torch.equal(mine, expected), f"{piece.name} differs by {(mine - expected).abs().max():g}"

    def moments(self) -> Iterator[tuple[str, str, Tensor, Tensor]]:
        """Of every part: its parameter, the state's key, the shard's numbers and plain PyTorch's."""
        for shard in self.shards:
            meta, body = shard.dump()
            parts = [part for r in shard.ranges for part in r.parts]
            for part, state in zip(parts, unpack(shard.ranges, meta, body), strict=True):
                piece = self.flat.pieces[part.piece]
                kept = {k: v for k, v in self.optimizer.state[self.parameters[piece.name]].items() if v is not None}
                assert state.keys() == kept.keys()
                for key, value in state.items():
                    yield piece.name, key, value, _in_memory_order(kept[key], piece.stride, part.start, part.stop)


def _in_memory_order(value: Tensor, stride: tuple[int, ...], start: int, stop: int) -> Tensor:
    if value.dim() != len(stride) or not stride:
        return value.reshape(-1)
    flat = torch.empty(value.numel(), dtype=value.dtype)
    flat.as_strided(tuple(value.shape), stride).copy_(value)
    return flat[start:stop]


@pytest.mark.parametrize("groups", [one_group, two_groups])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_stepping_unit_by_unit_is_torchs_optimizer_in_bits(kind: str, groups: Callable[..., Optimizer]) -> None:
    both = Servers(partial(groups, make=OPTIMIZERS[kind]))
    for _ in range(5):
        both.step()
        both.assert_same_parameters()


@pytest.mark.parametrize(("servers", "unit_bytes"), [(1, 1 << 20), (1, 1), (2, 64), (9, 1000)])
def test_it_does_not_matter_how_the_parameters_are_cut(servers: int, unit_bytes: int) -> None:
    both = Servers(partial(two_groups, make=OPTIMIZERS["adamw"]), servers, unit_bytes)
    for _ in range(3):
        both.step()
    both.assert_same_parameters()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_pieces_that_nobody_used_are_left_alone(kind: str) -> None:
    """Their neighbours in the same unit go on, their own moments and step counts do not; later they come back."""
    both = Servers(partial(two_groups, make=OPTIMIZERS[kind]))
    for unused in ((), ("first.bias", "scale"), ("last.weight",), (), ("exact",), ()):
        both.step(unused)
        both.assert_same_parameters()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moments_travel_in_the_middle_of_it(kind: str) -> None:
    """Home from one shard and out to the next, as when a segment ends and another begins."""
    both = Servers(partial(two_groups, make=OPTIMIZERS[kind]))
    for unused in ((), ("first.bias",), ()):
        both.step(unused)
        for n, shard in enumerate(both.shards):
            fresh = Shard(both.flat, both.home_optimizer, both.layouts[n])
            meta, body = shard.dump()
            fresh.load(shard.params, meta, [t.clone() for t in body])
            both.shards[n] = fresh
    both.step()
    both.assert_same_parameters()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_moments_that_come_home_are_those_of_torchs_optimizer(kind: str) -> None:
    both = Servers(partial(two_groups, make=OPTIMIZERS[kind]))
    for unused in ((), ("first.bias",), ()):
        both.step(unused)
    for name, key, mine, expected in both.moments():
        assert torch.equal(mine.reshape(-1).to(expected.dtype), expected), f"{key} of {name}"


def test_what_was_dumped_does_not_follow_later_steps() -> None:
    both = Servers(partial(one_group, make=OPTIMIZERS["momentum"]))
    both.step()
    _, body = both.shards[0].dump()
    kept = [t.clone() for t in body]
    both.step()
    assert all(torch.equal(t, k) for t, k in zip(body, kept, strict=True))


def test_what_was_loaded_may_be_overwritten_by_its_owner() -> None:
    """It may have come in memory that is used again."""
    both = Servers(partial(one_group, make=OPTIMIZERS["adam"]))
    both.step()
    for n, shard in enumerate(both.shards):
        meta, body = shard.dump()
        params, fresh = [p.clone() for p in shard.params], Shard(both.flat, both.home_optimizer, both.layouts[n])
        fresh.load(params, meta, body)
        for tensor in (*params, *body):
            tensor.fill_(7)
        both.shards[n] = fresh
    both.step()
    both.assert_same_parameters()


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_gradients_are_not_written_to(kind: str, foreach: bool | None) -> None:
    """They may lie in the worker's own memory, and copies of the server are moved by them afterwards."""
    both = Servers(partial(two_groups, make=partial(OPTIMIZERS[kind], foreach=foreach)))
    for left_out in ([], both.numbers(["scale"]), []):
        given = [torch.randn_like(g) for g in both.flat.grads]
        kept = [g.clone() for g in given]
        for shard in both.shards:
            for u, unit in enumerate(shard.units):
                shard.step(u, [r.of(given) for r in unit.of(shard.ranges)], options_of(both.optimizer), left_out)
        assert all(torch.equal(g, k) for g, k in zip(given, kept, strict=True))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_steps_all_tensors_at_once_has_the_same_bits(kind: str) -> None:
    both = Servers(partial(two_groups, make=partial(OPTIMIZERS[kind], foreach=True)))
    for unused in ((), ("scale",), ()):
        both.step(unused)
        both.assert_same_parameters()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_two_servers_moved_by_the_same_gradients_have_the_same_bits(kind: str) -> None:
    """As a server and its copy are, the second moved by what the first left of them."""
    both = Servers(partial(two_groups, make=partial(OPTIMIZERS[kind], foreach=True)))
    twins = [Shard(both.flat, both.home_optimizer, layout) for layout in both.layouts]
    for shard, twin in zip(both.shards, twins, strict=True):
        meta, body = shard.dump()
        twin.load(shard.params, meta, body)
    for unused in ((), ("scale", "last.bias"), ()):
        options, left_out = options_of(both.optimizer), both.numbers(unused)
        grads = both.step(unused)
        for shard, twin in zip(both.shards, twins, strict=True):
            for u, unit in enumerate(twin.units):
                twin.step(u, [r.of(grads) for r in unit.of(twin.ranges)], options, left_out)
            assert all(torch.equal(p, q) for p, q in zip(shard.params, twin.params, strict=True))


def test_hyper_parameters_come_with_the_step() -> None:
    """Where a push lies in the order decides them: a schedule that runs at the workers reaches the shards."""
    both = Servers(partial(two_groups, make=OPTIMIZERS["adamw"]))
    for n in range(4):
        for group in both.optimizer.param_groups:
            group["lr"], group["betas"], group["weight_decay"] = 0.1 / (n + 1), (0.5 + 0.1 * n, 0.99), 0.02 * n
        both.step()
    both.assert_same_parameters()


def test_the_norm_of_a_gradient_is_what_clipping_would_measure() -> None:
    both = Servers(partial(one_group, make=OPTIMIZERS["sgd"]), servers=1, unit_bytes=50)
    (shard,) = both.shards
    for unused in ((), ("first.weight", "exact")):
        both.step(unused)
        norm = shard.norm([r.of(both.flat.grads) for r in shard.ranges], both.numbers(unused))
        expected = nn.utils.clip_grad_norm_(both.plain.parameters(), 1e9)
        torch.testing.assert_close(norm.double(), expected.double(), rtol=1e-6, atol=0.0)


def test_the_norm_of_nothing_is_zero() -> None:
    both = Servers(partial(one_group, make=OPTIMIZERS["sgd"]), servers=1)
    (shard,) = both.shards
    everything = list(range(len(both.flat.pieces)))
    assert float(shard.norm(shard.params, everything)) == 0.0


@pytest.mark.parametrize("unit", [-1, 2, "0", None, 1.0])
def test_a_unit_that_there_is_not_is_refused(unit: object) -> None:
    with pytest.raises(ConfigError, match="one of 2 units"):
        unit_of([Unit(0, 0, 1), Unit(1, 1, 3)], unit)


@pytest.mark.parametrize("make", [partial(Adam, fused=True), torch.optim.Adadelta])
def test_optimizers_that_cannot_be_cut_are_refused(make: Make) -> None:
    with pytest.raises(ConfigError, match="cannot run on ranges of the parameters"):
        Servers(partial(one_group, make=make))


# By rows.


class Tables:
    """An embedding that travels by rows, on servers and in plain PyTorch."""

    def __init__(self, make: Make, servers: int = 3, rows: int = 30) -> None:
        torch.manual_seed(1)
        self.plain, home = (nn.Embedding(rows, 4, sparse=True) for _ in range(2))
        home.load_state_dict(self.plain.state_dict())
        self.optimizer, self.home_optimizer = make(self.plain.parameters()), make(home.parameters())
        self.flat = Flat(home, self.home_optimizer, bucket_bytes=1 << 20, rows=True)
        self.shards = []
        for layout in lay_out(self.flat, servers, 1 << 20):
            shard = Shard(self.flat, self.home_optimizer, layout)
            state = dict(self.home_optimizer.state.get(self.flat.parameters[0], {}))
            states = parts_of(shard.ranges, partial(_always, state), lambda _, t: t.reshape(-1))
            meta, body = pack(shard.ranges, states, [torch.float32])
            shard.load([r.of(self.flat.params) for r in shard.ranges], meta, body)
            self.shards.append(shard)
        self.version = 0

    def step(self, rows: Sequence[int]) -> None:
        """One step of both, by gradients of these rows."""
        self.version += 1
        index, values = torch.tensor(rows, dtype=torch.int64), torch.randn(len(rows), 4)
        weight = self.plain.weight
        options = options_of(self.optimizer)
        with torch.sparse.check_sparse_tensor_invariants(False):
            weight.grad = torch.sparse_coo_tensor(index[None], values, weight.shape, is_coalesced=True)
            self.optimizer.step()
        for shard in self.shards:
            first, stop = self.rows_of(shard)
            mine = (index >= first) & (index < stop)
            shard.step(0, [index[mine] - first, values[mine]], options, [], self.version)

    def rows_of(self, shard: Shard) -> tuple[int, int]:
        (part,) = shard.ranges[0].parts
        return part.start // 4, part.stop // 4

    def assert_same_parameters(self) -> None:
        table = torch.cat([p for shard in self.shards for p in shard.params]).view(-1, 4)
        assert torch.equal(table, self.plain.weight)


def _always(state: dict[str, Any], _piece: int) -> dict[str, Any]:
    return state


TABLES: dict[str, Make] = {
    "sgd": partial(SGD, lr=0.1),
    "adagrad": partial(Adagrad, lr=0.05),
    "adagrad, decaying": partial(Adagrad, lr=0.05, lr_decay=0.2),
}
TOUCHED: tuple[list[int], ...] = ([0, 7, 29], [], [3, 4, 5], [12], list(range(30)), [0, 1])
"""Rows of successive steps; often none of some server's."""


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_stepped_by_rows_is_torchs_sparse_step_in_bits(kind: str) -> None:
    both = Tables(TABLES[kind])
    for rows in TOUCHED:
        both.step(rows)
        both.assert_same_parameters()


@pytest.mark.parametrize("kind", TABLES)
def test_a_tables_moments_travel_too(kind: str) -> None:
    both = Tables(TABLES[kind])
    for rows in TOUCHED:
        both.step(rows)
        for n, shard in enumerate(both.shards):
            fresh = Shard(both.flat, both.home_optimizer, Layout(shard.ranges, shard.units))
            meta, body = shard.dump()
            fresh.load(shard.params, meta, body)
            both.shards[n] = fresh
    both.assert_same_parameters()


def test_rows_that_changed_since_a_version_are_known() -> None:
    both = Tables(TABLES["sgd"])
    for rows in TOUCHED:
        both.step(rows)
    for known in range(len(TOUCHED) + 1):
        changed = {row for rows in TOUCHED[known:] for row in rows}
        found = set()
        for shard in both.shards:
            index, values = shard.rows_since(0, known)
            first, _ = both.rows_of(shard)
            found |= {first + row for row in index.tolist()}
            assert torch.equal(values, both.plain.weight.detach()[index + first])
        assert found == changed
