"""A folder of images by class, as ImageNet is laid out.

    root/train/<class>/*.png    root/val/<class>/*.png    root/test/<class>/*.png     (val may be called validation)
    root/<class>/*.png                                                                (split here, 80/10/10)

Without test/, val/ is the test split (as papers do with ImageNet's) and validation is held out of train/; without
val/ likewise. What is held out is a tenth of each class, and at least one image of it. Classes are numbered in the
alphabetical order of their folders. Test and validation images are mixed, always in the same way, so that the first so
many of them are of all classes. Hidden files and files that are not images by their suffix are skipped; anything else
that is wrong is an error that names the file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from lipflow.data.dataset import SPLIT_SEED, DataError, Dataset, Request, Split, assemble, held_out, quotas
from lipflow.data.order import permutation

_DEEP = re.compile(r"^[IF].*|\w+;(16|32)[BLNSF]+")  # modes of more than 8 bits; Pillow reads RGB;16B as RGB
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".pnm", ".tif", ".tiff")


def load(request: Request) -> Dataset:
    """Images (3, s, s) with s = image_size; without it, all images must have one size already, and keep it."""
    if request.data_dir is None:
        raise DataError("--data folder needs --data-dir ROOT, a folder with one folder of images a class")
    if request.image_size is not None and request.image_size < 1:
        raise DataError(f"image_size must be a positive number of pixels; got {request.image_size}")
    names, files = _splits(request.data_dir, request.validation)
    example = files[0].paths[0], _pixels(files[0].paths[0], request.image_size)
    _refuse_more_than_memory(request.data_dir, sum(len(part.paths) for part in files), example[1])
    train, validation, test = (_read(part, request.image_size, *example) for part in files)
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

    def mixed(self) -> _Files:
        return self.take(permutation(len(self.paths), SPLIT_SEED, 1))


def _splits(root: Path, size: int | None) -> tuple[list[str], tuple[_Files, _Files, _Files]]:
    """The classes, and the files of the training, validation and test split; `size` is that of the validation split."""
    parts = [name for name in ("train", "val", "validation", "test") if (root / name).is_dir()]
    if not parts:
        names = _class_names(root)
        whole = _list(root, names)
        tenth = _quota(root, names, whole, None, splits=2 if size == 0 else 3)
        rest, test = whole.carve(tenth)
        train, validation = rest.carve(tenth if size is None else _quota(root, names, rest, size))
        return names, (train, validation.mixed(), test.mixed())

    if parts[0] != "train" or len(parts) == 1 or {"val", "validation"} <= set(parts):
        found = " and ".join(f"{part}/" for part in parts)
        raise DataError(
            f"{root} has {found}; it needs train/ and val/ (or validation/) or test/, or class folders only"
        )
    names = _class_names(root / "train")
    train, *others = (_list(root / part, names) for part in parts)
    if len(others) == 1:
        train, validation = train.carve(_quota(root / "train", names, train, size))
    elif size is not None:
        raise DataError(f"{root / parts[1]} is the validation split already; drop validation={size}")
    else:
        validation = others[0]
    return names, (train, validation.mixed(), others[-1].mixed())


def _quota(folder: Path, names: list[str], files: _Files, size: int | None, splits: int = 2) -> torch.Tensor:
    """How many of each class are held out: `size` in all, or a tenth of each and at least one."""
    if size is not None:
        return quotas("folder", files.labels, size)
    counts = torch.bincount(files.labels)
    if int(counts.min()) < splits:
        least = int(counts.argmin())
        has = f"{folder / names[least]} has {counts[least]} of the {splits} images"
        raise DataError(f"{has} that a class needs to be in every split")
    return ((counts + 5) // 10).clamp(min=1)


def _visible(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=lambda path: path.name)


def _class_names(folder: Path) -> list[str]:
    names = [path.name for path in _visible(folder) if path.is_dir()]
    if len(names) < 2:
        found = f"{len(names)} folder{'' if len(names) == 1 else 's'}"
        raise DataError(f"{folder} must have one folder of images a class, of two classes or more; it has {found}")
    return names


def _files(folder: Path) -> list[Path]:
    """The image files in a class's folder and the folders within it, in alphabetical order."""
    found = []
    for here, inner, files in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        found += [Path(here, name) for name in files if not name.startswith(".") and name.lower().endswith(SUFFIXES)]
    return sorted(found)


def _list(folder: Path, names: list[str]) -> _Files:
    if (found := _class_names(folder)) != names:
        odd = sorted(set(found) ^ set(names))[0]
        raise DataError(f"{folder} and the training split differ in the class {odd!r}; every split has every class")
    files = [_files(folder / name) for name in names]
    for name, of_class in zip(names, files, strict=True):
        if not of_class:
            raise DataError(f"{folder / name} has no images ({', '.join(SUFFIXES)})")
    paths = [path for of_class in files for path in of_class]
    return _Files(
        paths, torch.repeat_interleave(torch.arange(len(names)), torch.tensor([len(of_class) for of_class in files]))
    )


def _read(files: _Files, size: int | None, first: Path, alike: np.ndarray) -> Split:
    """The images of a split, each of the size of the first one."""
    images = np.empty((len(files.paths), *alike.shape), np.uint8)
    for i, path in enumerate(files.paths):
        pixels = _pixels(path, size)
        if pixels.shape != alike.shape:
            sizes = f"{path} is {_dimensions(pixels)} and {first} {_dimensions(alike)}"
            raise DataError(f"{sizes}; give --image-size to bring all images to one size")
        images[i] = pixels
    return Split(torch.from_numpy(images), files.labels)


def _dimensions(pixels: np.ndarray) -> str:
    return f"{pixels.shape[1]}×{pixels.shape[2]}"


def _refuse_more_than_memory(folder: Path, count: int, pixels: np.ndarray) -> None:
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
    """The image upright in RGB, on white where it is transparent; with `size`, the square in its middle of that side.

    It is the usual "resize the shorter side, then cut the middle out", without rounding the middle to a pixel.
    Pillow's bicubic resize antialiases: it widens the kernel when it shrinks an image.
    """
    image_module, image_ops = _pillow()
    try:
        with image_module.open(path) as image:
            mode = _DEEP.search(str(image.tile)) or _DEEP.search(image.mode)
            deep = any(tile[0].startswith("ppm") and tile[3][-1] > 255 for tile in image.tile)
            upright = image_ops.exif_transpose(image)
            if upright.has_transparency_data:
                upright = upright.convert("RGBA")
                upright = image_module.alpha_composite(image_module.new("RGBA", upright.size, "white"), upright)
            upright = upright.convert("RGB")
    except Exception as error:  # what the decoders raise on damaged files is not documented, and varied
        raise DataError(f"{path} cannot be read as an image ({error}); repair or remove it") from None
    if mode or deep:
        found = mode[0] if mode else "RGB;16"
        raise DataError(f"{path} has pixels of mode {found}, not bytes; convert it to 8 bits a channel")
    if size is not None:
        shorter = min(upright.size)
        left, top = ((side - shorter) / 2 for side in upright.size)
        middle = (left, top, left + shorter, top + shorter)
        upright = upright.resize((size, size), image_module.Resampling.BICUBIC, box=middle)
    return np.asarray(upright).transpose(2, 0, 1)


def _pillow() -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise DataError("reading image files needs Pillow: pip install pillow") from None
    return Image, ImageOps
