"""Datasets in memory, their augmentation, and the order of an epoch.

    data = load("digits")                                   # or "cifar10", "cifar100", "folder"
    for batch in batches(len(data.train), 256, seed, epoch):
        images = augment(data.train.images[batch], batch, seed, epoch)
        x, y = to_unit(images), data.train.labels[batch]    # floats k/255; the model subtracts data.mean

Pillow and pooch are imported when an image file is read or a file downloaded, not before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path

from lipflow.data import cifar, digits, folder
from lipflow.data.augmentation import augment
from lipflow.data.dataset import DataError, Dataset, Request, Split, to_unit
from lipflow.data.order import batches, permutation, share, steps_per_epoch

__all__ = [
    "DOWNLOADS",
    "SOURCES",
    "DataError",
    "Dataset",
    "Split",
    "augment",
    "batches",
    "fetch",
    "load",
    "permutation",
    "share",
    "steps_per_epoch",
    "to_unit",
]

SOURCES: dict[str, Callable[[Request], Dataset]] = {
    "digits": digits.load,
    "cifar10": partial(cifar.load, cifar.CIFAR10),
    "cifar100": partial(cifar.load, cifar.CIFAR100),
    "folder": folder.load,
}

DOWNLOADS = {layout.name: layout for layout in (cifar.CIFAR10, cifar.CIFAR100)}


def load(
    name: str,
    data_dir: str | PathLike[str] | None = None,
    *,
    image_size: int | None = None,
    validation: int | None = None,
    download: bool = True,
) -> Dataset:
    """The dataset `name` (one of SOURCES), or a DataError that says what is wrong and what to do.

    data_dir: where the data is; without it, CIFAR comes from the cache and is downloaded to it if `download`.
    image_size: the side images of a folder are resized to.
    validation: how many training images to hold out for selection (default: 300 digits, 5000 of CIFAR, a tenth of a
    folder). Always the same ones, in the classes' proportions; the test split never depends on it.
    """
    if name not in SOURCES:
        raise DataError(f"no dataset is called {name!r}; there are {', '.join(SOURCES)}")
    where = None if data_dir is None else Path(data_dir).expanduser()
    if where is not None and not where.is_dir():
        raise DataError(
            f"the data folder {where} {'is a file' if where.exists() else 'does not exist'}; check --data-dir"
        )
    try:
        return SOURCES[name](Request(where, image_size, validation, download))
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error}") from error


def fetch(name: str, data_dir: str | PathLike[str] | None = None) -> Path:
    """Download the dataset `name` into `data_dir` (default: the cache) unless it is there; return its path."""
    if name not in DOWNLOADS:
        raise DataError(f"there is nothing to download for {name!r}; only for {', '.join(DOWNLOADS)}")
    return cifar.fetch(DOWNLOADS[name], None if data_dir is None else Path(data_dir).expanduser())
