"""Augmentation depends on a sample's key and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from podium.data.augment import CropAndFlip
from podium.data.base import ArrayDataset
from podium.data.order import GlobalOrder
from podium.errors import ConfigError


def batch(samples: int = 64) -> tuple[Tensor, np.ndarray]:
    order = GlobalOrder(samples, seed=5)
    images = torch.arange(samples * 3 * 8 * 8, dtype=torch.float32).reshape(samples, 3, 8, 8) + 1
    return images, order.keys(order.slice_at(0, samples))


def test_a_sample_looks_the_same_in_any_batch() -> None:
    images, keys = batch()
    augment = CropAndFlip(padding=2)
    together = augment(images, keys)
    order = np.random.default_rng(0).permutation(len(keys))
    assert torch.equal(augment(images[order], keys[order]), together[order])
    assert torch.equal(torch.cat([augment(images[i : i + 1], keys[i : i + 1]) for i in range(len(keys))]), together)


def test_torchs_generator_is_neither_read_nor_moved() -> None:
    images, keys = batch()
    before = torch.get_rng_state()
    first = CropAndFlip()(images, keys)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(CropAndFlip()(images, keys), first)


def test_each_result_is_a_crop_of_the_padded_image_perhaps_mirrored() -> None:
    images, keys = batch()
    padded, seen = pad(images, [2, 2, 2, 2]), set()
    for i, result in enumerate(CropAndFlip(padding=2)(images, keys)):
        fits = [
            (down, right, mirrored)
            for down in range(5)
            for right in range(5)
            for mirrored in (False, True)
            if torch.equal(
                padded[i, :, down : down + 8, right : right + 8].flip(2)
                if mirrored
                else padded[i, :, down : down + 8, right : right + 8],
                result,
            )
        ]
        assert len(fits) == 1
        seen.add(fits[0])
    assert {down for down, _, _ in seen} == set(range(5))
    assert {right for _, right, _ in seen} == set(range(5))
    assert {mirrored for _, _, mirrored in seen} == {False, True}


def test_half_of_the_images_are_mirrored() -> None:
    images, keys = batch(1024)
    unmoved = CropAndFlip(padding=0)(images, keys)
    share = (unmoved != images).flatten(1).any(1).float().mean()
    assert 0.42 < share < 0.58


def test_without_padding_and_flip_nothing_changes() -> None:
    images, keys = batch()
    assert torch.equal(CropAndFlip(padding=0, flip=False)(images, keys), images)


def test_data_without_keys_are_left_alone() -> None:
    images, keys = batch()
    data = ArrayDataset(images, torch.zeros(len(images)), augment=CropAndFlip())
    indices = np.arange(len(images))
    assert torch.equal(data.gather(indices)[0], images)
    assert not torch.equal(data.gather(indices, keys)[0], images)


def test_an_empty_batch_stays_empty() -> None:
    images, keys = batch()
    assert CropAndFlip()(images[:0], keys[:0]).shape == (0, 3, 8, 8)


def test_negative_padding_is_refused() -> None:
    with pytest.raises(ConfigError, match="padding must be 0 or more, got -1"):
        CropAndFlip(padding=-1)
