"""A folder of images by class, as ImageNet is laid out.

    root/train/<class>/*.png    root/val/<class>/*.png    root/test/<class>/*.png     (val may be called validation)
    root/<class>/*.png                                                                (split here, 80/10/10)

Without test/, val/ is the test split (as papers use that of ImageNet). Without test/ or without val/, validation images
are held out of train/: a tenth of each class, at least one image. Classes are numbered in the alphabetical order of
their folders. Test and validation images are shuffled, always in the same way, so that the first n have images of all
classes. Hidden files and files without an image suffix are skipped. All other problems raise an error with the file.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lipflow.data.dataset import SPLIT_SEED, DataError, Dataset, Request, Split, assemble, held_out, quotas
from lipflow.data.order import permutation

_DEEP = re.compile(r"^[IF].*|\w+;(16|32)[BLNSF]+")  # modes of more than 8 bits a channel; Pillow reads RGB;16B as RGB
MAX_PIXELS, MAX_SIDE = 2**26, 2**13  # of an image, and of a resized one: otherwise a small file could fill the memory
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".pnm", ".tif", ".tiff")


def load(request: Request) -> Dataset:
    """Images (3, s, s) with s = image_size; without image_size, all images must have the same size."""
    if request.data_dir is None:
        raise DataError("--data folder needs --data-dir ROOT, a folder with one folder of images for each class")
    if request.image_size is not None and not 1 <= request.image_size <= MAX_SIDE:
        raise DataError(f"image_size must be from 1 to {MAX_SIDE} pixels; got {request.image_size}")
    names, files = _splits(request.data_dir, request.validation)
    first = files[0].paths[0]
    example = _pixels(first, request.image_size)
    _require_memory(request.data_dir, sum(len(part.paths) for part in files), example)
    train, validation, test = (_read(part, request.image_size, first, example) for part in files)
    return assemble("folder", train, validation, test, names)


class _Files(NamedTuple):
    """The files of a split, and their labels."""

    paths: list[Path]
    labels: torch.Tensor

    def take(self, indices: torch.Tensor) -> _Files:
        return _Files([self.paths[i] for i in indices.tolist()], self.labels[indices])

    def carve(self, quota: torch.Tensor) -> tuple[_Files, _Files]:
        held = held_out(self.labels, quota)
        return self.take((~held).nonzero()[:, 0]), self.take(held.nonzero()[:, 0])

    def shuffled(self) -> _Files:
        return self.take(permutation(len(self.paths), SPLIT_SEED, 1))


def _splits(root: Path, size: int | None) -> tuple[list[str], tuple[_Files, _Files, _Files]]:
    """The classes and the files of the three splits; `size` is the number of validation images, None for a tenth."""
    parts = [name for name in ("train", "val", "validation", "test") if (root / name).is_dir()]
    if not parts:
        names = _class_names(root)
        whole = _labelled_files(root, names)
        tenth = _quota(root, names, whole, None, splits=2 if size == 0 else 3)
        rest, test = whole.carve(tenth)
        train, validation = rest.carve(tenth if size is None else _quota(root, names, rest, size))
        return names, (train, validation.shuffled(), test.shuffled())

    if parts[0] != "train" or len(parts) == 1 or {"val", "validation"} <= set(parts):
        found = " and ".join(f"{part}/" for part in parts)
        raise DataError(
            f"{root} has {found}; it needs train/ and val/ (or validation/) or test/, or class folders only"
        )
    names = _class_names(root / "train")
    train, *others = (_labelled_files(root / part, names) for part in parts)
    if len(others) == 1:
        train, validation = train.carve(_quota(root / "train", names, train, size))
    elif size is not None:
        raise DataError(f"{root / parts[1]} is the validation split already; drop validation={size}")
    else:
        validation = others[0]
    return names, (train, validation.shuffled(), others[-1].shuffled())


def _quota(folder: Path, names: list[str], files: _Files, size: int | None, splits: int = 2) -> torch.Tensor:
    """The number of held-out images of each class: `size` in all, or a tenth of each and at least one."""
    if size is not None:
        return quotas("folder", files.labels, size)
    counts = torch.bincount(files.labels)
    if int(counts.min()) < splits:
        least = int(counts.argmin())
        has = f"{folder / names[least]} has {counts[least]} of the {splits} images"
        raise DataError(f"{has} that a class needs to be in every split")
    return ((counts + 5) // 10).clamp(min=1)


def _class_names(folder: Path) -> list[str]:
    names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    if len(names) < 2:
        raise DataError(f"{folder} needs a folder of images for each of at least 2 classes; its folders: {names}")
    return names


def _image_files(folder: Path) -> list[Path]:
    """The image files of a folder and its subfolders, in alphabetical order."""
    found = []
    for here, inner, files in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        found += [Path(here, name) for name in files if not name.startswith(".") and name.lower().endswith(SUFFIXES)]
    return sorted(found)


def _labelled_files(folder: Path, names: list[str]) -> _Files:
    if (found := _class_names(folder)) != names:
        odd = sorted(set(found) ^ set(names))[0]
        raise DataError(f"{folder} and the training split differ in the class {odd!r}; every split needs every class")
    paths, labels = [], []
    for label, name in enumerate(names):
        files = _image_files(folder / name)
        if not files:
            raise DataError(f"{folder / name} has no images ({', '.join(SUFFIXES)})")
        paths += files
        labels += [label] * len(files)
    return _Files(paths, torch.tensor(labels))


def _read(files: _Files, size: int | None, first: Path, example: np.ndarray) -> Split:
    """The images of a split, which must have the size of the first one."""
    images = np.empty((len(files.paths), *example.shape), np.uint8)
    for i, path in enumerate(files.paths):
        pixels = _pixels(path, size)
        if pixels.shape != example.shape:
            sizes = f"{path} is {_dimensions(pixels)} and {first} {_dimensions(example)}"
            raise DataError(f"{sizes}; give --image-size to resize all images to one size")
        images[i] = pixels
    return Split(torch.from_numpy(images), files.labels)


def _dimensions(pixels: np.ndarray) -> str:
    return f"{pixels.shape[1]}×{pixels.shape[2]}"


def _require_memory(folder: Path, count: int, pixels: np.ndarray) -> None:
    needed, installed = count * pixels.size, _installed_memory()
    if installed is not None and needed > installed:
        sizes = f"{count} images of {_dimensions(pixels)} take {needed / 1e9:.1f} GB, this machine has"
        raise DataError(f"{folder}: {sizes} {installed / 1e9:.1f} GB; give a smaller --image-size")


def _installed_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _pixels(path: Path, size: int | None) -> np.ndarray:  # (3, height, width), uint8
    """The image in RGB, rotated by its EXIF data, on white; with `size`, its central square resized to that side.

    This is the usual resize of the shorter side followed by a central crop, without rounding the crop to pixels.
    Pillow's bicubic resize antialiases: it widens the kernel when it shrinks an image.
    """
    from PIL import Image, ImageOps

    if not path.is_file():
        raise DataError(f"{path} is not a regular file; remove it")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # of more than MAX_PIXELS
            opened = Image.open(path)
        with opened as image:
            if math.prod(image.size) > MAX_PIXELS:
                raise ValueError(f"it has {math.prod(image.size)} pixels, above the limit, {MAX_PIXELS}")
            tiles: Any = image.tile
            mode = _DEEP.search(str(tiles)) or _DEEP.search(image.mode)
            deep = any(tile[0].startswith("ppm") and tile[3][-1] > 255 for tile in tiles)
            upright = ImageOps.exif_transpose(image)
            if upright.has_transparency_data:
                upright = upright.convert("RGBA")
                upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
            upright = upright.convert("RGB")
    except Exception as error:  # decoders raise many undocumented types on damaged files
        raise DataError(f"{path} cannot be read as an image ({error}); repair or remove it") from None
    if mode or deep:
        found = mode[0] if mode else "RGB;16"
        raise DataError(f"{path} has pixels of mode {found}, not bytes; convert it to 8 bits a channel")
    if size is not None:
        shorter = min(upright.size)
        left, top = ((side - shorter) / 2 for side in upright.size)
        middle = (left, top, left + shorter, top + shorter)
        upright = upright.resize((size, size), Image.Resampling.BICUBIC, box=middle)
    return np.asarray(upright).transpose(2, 0, 1)
