"""The global order: every sample once per epoch, whoever reads it, in whatever pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.data.order import GlobalOrder, Slice, divide, share_of
from podium.errors import ConfigError

settings.register_profile("podium", deadline=None)  # a busy machine is not a failure
settings.load_profile("podium")

sizes = st.integers(1, 300)
seeds = st.integers(0, 2**63 - 1)
shares = st.lists(st.floats(0, 1e6), min_size=1, max_size=8).filter(lambda parts: sum(parts) > 0)


@given(samples=sizes, seed=seeds, batches=st.lists(st.integers(1, 50), min_size=1), parts=st.lists(shares, min_size=1))
def test_every_sample_is_used_once_per_epoch_whatever_the_batches_and_shares(
    samples: int, seed: int, batches: list[int], parts: list[list[float]]
) -> None:
    order, position, step = GlobalOrder(samples, seed), 0, 0
    for epoch in range(2):
        seen: list[int] = []
        while position < (epoch + 1) * samples:
            piece = order.slice_at(position, batches[step % len(batches)])
            now = parts[step % len(parts)]  # workers come, go and change their share between steps
            for index in range(len(now)):
                seen += order.indices(share_of(piece, now, index)).tolist()
            position, step = position + piece.count, step + 1
        assert position == (epoch + 1) * samples
        assert sorted(seen) == list(range(samples))


@given(samples=sizes, seed=seeds, position=st.integers(0, 1000), count=st.integers(1, 400))
def test_a_slice_never_crosses_the_end_of_an_epoch(samples: int, seed: int, position: int, count: int) -> None:
    piece = GlobalOrder(samples, seed).slice_at(position, count)
    assert 1 <= piece.count <= count
    assert piece.epoch * samples + piece.offset == position
    assert piece.offset + piece.count <= samples


@given(count=st.integers(0, 10_000), parts=shares)
def test_divided_numbers_add_up_and_lie_within_one_of_their_share(count: int, parts: list[float]) -> None:
    counts = divide(count, parts)
    assert sum(counts) == count
    for got, share in zip(counts, parts, strict=True):
        assert abs(got - count * share / sum(parts)) < 1 + 1e-6


@given(count=st.integers(0, 500), workers=st.integers(1, 16))
def test_equal_shares_differ_by_one_at_most(count: int, workers: int) -> None:
    counts = divide(count, [1.0] * workers)
    assert max(counts) - min(counts) <= 1
    assert counts == sorted(counts, reverse=True)


@given(count=st.integers(0, 500), parts=shares)
def test_shares_of_a_step_lie_end_to_end(count: int, parts: list[float]) -> None:
    piece = Slice(position=1000, count=count, epoch=3, offset=40)
    cuts = [share_of(piece, parts, index) for index in range(len(parts))]
    place = 0
    for cut in cuts:
        assert (cut.position, cut.offset, cut.epoch) == (1000 + place, 40 + place, 3)
        place += cut.count
    assert place == count


@pytest.mark.parametrize("parts", [[0.0, 0.0], [1.0, -0.5]])
def test_shares_that_mean_nothing_are_refused(parts: list[float]) -> None:
    with pytest.raises(ConfigError, match="shares must not be negative"):
        divide(10, parts)


@given(samples=sizes, seed=seeds, epoch=st.integers(0, 5))
def test_keys_belong_to_the_sample_not_to_the_slice(samples: int, seed: int, epoch: int) -> None:
    order = GlobalOrder(samples, seed)
    whole = order.slice_at(epoch * samples, samples)
    by_sample = dict(zip(order.indices(whole).tolist(), order.keys(whole).tolist(), strict=True))
    fresh = GlobalOrder(samples, seed)  # another rank, which has read nothing before
    for offset in range(0, samples, 7):
        piece = fresh.slice_at(epoch * samples + offset, 7)
        for sample, key in zip(fresh.indices(piece).tolist(), fresh.keys(piece).tolist(), strict=True):
            assert by_sample[sample] == key


def test_keys_differ_between_samples_epochs_and_seeds() -> None:
    def keys(seed: int, epoch: int) -> set[int]:
        order = GlobalOrder(1000, seed)
        return set(order.keys(order.slice_at(epoch * 1000, 1000)).tolist())

    sets = [keys(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set.union(*sets)) == 4000


def test_every_bit_of_the_keys_is_set_about_half_of_the_time() -> None:
    order = GlobalOrder(4096, 0)
    keys = order.keys(order.slice_at(0, 4096))
    ones = ((keys[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).mean(0)
    assert np.abs(ones - 0.5).max() < 0.06  # over seven deviations


def test_order_and_keys_are_the_same_on_every_machine() -> None:
    order = GlobalOrder(8, 3)
    piece = order.slice_at(8, 3)
    assert order.indices(piece).tolist() == [0, 7, 6]
    assert order.keys(piece).tolist() == [11810286367831575873, 4270312243260898756, 14997331610811993866]


def test_epochs_are_shuffled_differently() -> None:
    order = GlobalOrder(100, 0)
    assert order.permutation(0).tolist() != order.permutation(1).tolist()


def test_no_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one sample"):
        GlobalOrder(0, 0)


@given(samples=sizes, batch_size=st.integers(1, 400), epochs=st.integers(1, 3))
def test_the_number_of_steps_is_what_walking_takes(samples: int, batch_size: int, epochs: int) -> None:
    order, position, steps = GlobalOrder(samples, 0), 0, 0
    while position < samples * epochs:
        position, steps = position + order.slice_at(position, batch_size).count, steps + 1
    assert order.steps(batch_size, epochs) == steps
