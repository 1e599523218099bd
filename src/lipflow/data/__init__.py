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
from lipflow.data.dataset import DataError, Dataset, Request, Split
from lipflow.data.order import batches, permutation, share, steps_per_epoch
from lipflow.pixels import to_unit

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
    """Load the dataset `name`, one of SOURCES; raise DataError if its data is missing or damaged.

    data_dir: the folder of the data. Without it, CIFAR is read from the cache, and downloaded to it if `download`.
    image_size: the side to which the images of a folder are resized.
    validation: the number of training images held out for selection (default: 300 digits, 5000 of CIFAR, a tenth of a
    folder). They are always the same, in proportion to the classes, and the test split does not depend on them.
    """
    if name not in SOURCES:
        raise DataError(f"no dataset is called {name!r}; use one of {', '.join(SOURCES)}")
    path = None if data_dir is None else Path(data_dir).expanduser()
    if path is not None and not path.is_dir():
        fault = "is a file" if path.exists() else "does not exist"
        raise DataError(f"the data folder {path} {fault}; check --data-dir")
    try:
        return SOURCES[name](Request(path, image_size, validation, download))
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error}") from error


def fetch(name: str, data_dir: str | PathLike[str] | None = None) -> Path:
    """Download the dataset `name` into `data_dir` (default: the cache) unless it is there, and return its path."""
    if name not in DOWNLOADS:
        raise DataError(f"{name!r} cannot be downloaded; only {', '.join(DOWNLOADS)} can")
    return cifar.fetch(DOWNLOADS[name], None if data_dir is None else Path(data_dir).expanduser())
