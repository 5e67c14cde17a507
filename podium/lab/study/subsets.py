"""Where the images of the published studies come from: subsets that are not the data sets' own training files.

Told by their numbers of images, so that a page made from other files does not claim it.
"""

from __future__ import annotations

_ORIGIN = {
    ("mnist", 8_000, 2_000): "both training and test images are taken from MNIST's 10,000 test images",
    ("cifar10", 10_000, 2_000): "a part of CIFAR-10 whose pixels went through JPEG once",
}


def origin(task: str, train: int, test: int) -> str:
    """In words; empty for data that are not one of these subsets."""
    return _ORIGIN.get((task.partition("-")[0], train, test), "")
