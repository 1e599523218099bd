"""Datasets that replace CIFAR at smaller scales. Importing this module adds them to the sources of `lipflow.data`.

cifar10-8x8           CIFAR-10 with every 4×4 block of pixels averaged, for networks of a thousand layers
cifar10-synthetic     a few random images in the official layout, written to --data-dir
cifar100-synthetic    the same for CIFAR-100
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from lipflow.data import SOURCES, cifar
from lipflow.data.cifar import CIFAR10, CIFAR100, Layout
from lipflow.data.dataset import DataError, Dataset, Request, Split, assemble
from lipflow.files import write_atomic

BLOCK = 4


def _small(layout: Layout, images: int) -> Layout:
    """A layout with this number of images in each training file, and 20 test images."""
    return replace(
        layout,
        name=f"{layout.name}-synthetic",
        folder=f"{layout.name}-synthetic",
        train=dict.fromkeys(layout.train, images),
        test=dict.fromkeys(layout.test, 20),
        sha256={},
    )


SYNTHETIC = {layout.name: layout for layout in (_small(CIFAR10, 20), _small(CIFAR100, 120))}


def pooled(request: Request) -> Dataset:
    """CIFAR-10 at 8×8: a pixel is the mean of a block of 4×4, rounded."""
    whole = cifar.load(CIFAR10, request)
    train, validation, test = (_pool(split) for split in (whole.train, whole.validation, whole.test))
    return assemble("cifar10-8x8", train, validation, test, whole.class_names)


def _pool(split: Split) -> Split:
    parts = [F.avg_pool2d(part.float(), BLOCK).round().to(torch.uint8) for part in split.images.split(1000)]
    return Split(torch.cat(parts) if parts else split.images[:, :, ::BLOCK, ::BLOCK], split.labels)


def synthetic(layout: Layout, request: Request) -> Dataset:
    """A few random images with bright pixels that depend on the class; their files are written if they are missing."""
    if request.data_dir is None:
        raise DataError(f"{layout.name} is written to a folder; give --data-dir")
    folder = request.data_dir / layout.folder
    folder.mkdir(exist_ok=True)
    for seed, (name, count) in enumerate(layout.files.items()):
        if not (folder / name).exists():  # written atomically, as other processes may read it
            records = _records(layout, count, seed).tobytes()
            write_atomic(folder / name, lambda temporary, records=records: temporary.write_bytes(records))
    return cifar.load(layout, request)


def _records(layout: Layout, count: int, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).integers(0, 128, (count, layout.record_bytes), dtype=np.uint8)
    labels = np.arange(count) % len(layout.class_names)
    rows[:, layout.label_bytes - 1] = labels
    pixels = rows[:, layout.label_bytes :]
    pixels += np.where(np.arange(cifar.PIXELS) % len(layout.class_names) == labels[:, None], 127, 0).astype(np.uint8)
    return rows


OURS: dict[str, Callable[[Request], Dataset]] = {
    "cifar10-8x8": pooled,
    **{name: partial(synthetic, layout) for name, layout in SYNTHETIC.items()},
}
SOURCES.update(OURS)


def available(data: str, request: Request) -> bool:
    """Whether the images can be loaded without a download."""
    layout = {"cifar10": CIFAR10, "cifar10-8x8": CIFAR10, "cifar100": CIFAR100}.get(data)
    if layout is None:
        return data in SOURCES
    return cifar.find(layout, request.data_dir or cifar.cache_dir()) is not None
