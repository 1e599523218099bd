"""Datasets: three splits of uint8 images in memory, their class names, and the moments of the training images."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from lipflow.data.order import permutation

SplitName = Literal["train", "validation", "test"]
SPLIT_SEED = 2022


class DataError(ValueError):
    """Data that is missing, damaged, or not as requested. The message is one line for the user."""


@dataclass(frozen=True, eq=False)
class Split:
    """Images and their labels."""

    images: Tensor  # (n, channels, height, width), uint8
    labels: Tensor  # (n,), int64

    def __post_init__(self) -> None:
        if self.images.dim() != 4 or self.images.dtype != torch.uint8:
            found = f"{self.images.dtype} of shape {tuple(self.images.shape)}"
            raise DataError(f"images must be uint8 of shape (n, channels, height, width); got {found}")
        if self.labels.shape != self.images.shape[:1] or self.labels.dtype != torch.int64:
            found = f"{self.labels.dtype} of shape {tuple(self.labels.shape)}"
            raise DataError(f"labels must be int64 of shape ({len(self.images)},); got {found}")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Split:
        return Split(self.images[indices], self.labels[indices])


@dataclass(frozen=True, eq=False)
class Dataset:
    """Train, validation and test splits. Selection uses validation; test is for the final numbers only.

    `mean` and `std` are those of the training pixels, per channel, for pixels k/255 in [0, 1]. Networks subtract the
    mean; dividing by std makes the input layer 1/min(std)-Lipschitz.
    """

    name: str
    train: Split
    validation: Split
    test: Split
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def classes(self) -> int:
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of an image."""
        channels, height, width = self.train.images.shape[1:]
        return channels, height, width

    def digest(self, split: SplitName) -> str:
        """SHA-256 of the images and labels of a split, in order, and of the class names."""
        part: Split = getattr(self, split)
        sha = hashlib.sha256(json.dumps([self.class_names, part.images.shape]).encode())
        for tensor in (part.images, part.labels):
            sha.update(tensor.reshape(-1).numpy().data)
        return sha.hexdigest()


@dataclass(frozen=True)
class Request:
    """The arguments of `load` for a source; None stands for the default of the source."""

    data_dir: Path | None = None
    image_size: int | None = None
    validation: int | None = None
    download: bool = True

    def refuse_image_size(self, name: str, native: int) -> None:
        if self.image_size not in (None, native):
            raise DataError(
                f"{name} images are {native}×{native} and are not resized; got image_size={self.image_size} "
                "(--image-size is for --data folder)"
            )


def assemble(name: str, train: Split, validation: Split, test: Split, class_names: Sequence[str]) -> Dataset:
    """A Dataset with the moments of its training images."""
    return Dataset(name, train, validation, test, tuple(class_names), *moments(train.images))


def moments(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Per-channel mean and (population) standard deviation of k/255 over uint8 images, from exact integer sums."""
    means, stds = [], []
    for channel in images.unbind(1):
        counts = torch.bincount(channel.reshape(-1), minlength=256).tolist()
        n = sum(counts)
        total = sum(k * count for k, count in enumerate(counts))
        squares = sum(k * k * count for k, count in enumerate(counts))
        means.append(total / (255 * n))
        stds.append(math.sqrt(n * squares - total * total) / (255 * n))
    return tuple(means), tuple(stds)


def carve(name: str, split: Split, size: int) -> tuple[Split, Split]:
    """(the rest, `size` held-out images), both in file order. The same images of each class are always held out."""
    held = held_out(split.labels, quotas(name, split.labels, size))
    return split.take(~held), split.take(held)


def quotas(name: str, labels: Tensor, size: int) -> Tensor:
    """The number of held-out images of each class, `size` in all  # (classes,)

    It is ⌊size · n_c / n⌋ for a class of n_c of the n images, and one more for the classes with the largest remainders.
    """
    n = len(labels)
    if not 0 <= size < n:
        raise DataError(f"{name}: cannot hold out {size} of {n} training images; the size must be in [0, {n})")
    counts = torch.bincount(labels)
    quota, remainder = counts * size // n, counts * size % n
    quota[remainder.argsort(descending=True, stable=True)[: size - int(quota.sum())]] += 1
    return quota


def held_out(labels: Tensor, quota: Tensor) -> Tensor:
    """A mask of the held-out images, `quota` of each class, always the same ones  # (n,) bool"""
    order = permutation(len(labels), SPLIT_SEED, 0)
    ordered_labels = labels[order]
    held = torch.zeros(len(labels), dtype=torch.bool)
    for label, count in enumerate(quota.tolist()):
        held[order[ordered_labels == label][:count]] = True
    return held
