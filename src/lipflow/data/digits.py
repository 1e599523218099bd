"""The 8×8 handwritten digits embedded in the package: the default dataset, with nothing to download.

E. Alpaydin and C. Kaynak (1998), Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
https://doi.org/10.24432/C50P49, licensed CC BY 4.0. These are the 1797 images of its test set, as scikit-learn ships
them (attribution in digits.txt). The same 13 writers are in all three splits.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import torch

from lipflow.data.dataset import DataError, Dataset, Request, Split, assemble, carve

TEST, VALIDATION = 300, 300


def load(request: Request) -> Dataset:
    """1197 train, 300 validation and 300 test images (1, 8, 8); the test images are the same for every `validation`.

    A pixel counts the black points of a 4×4 block, g in 0…16; it becomes the byte round(255·g/16), half to even.
    """
    if request.data_dir is not None:
        raise DataError(f"digits is part of the package and reads no files; got data_dir={str(request.data_dir)!r}")
    request.refuse_image_size("digits", 8)
    with (files("lipflow.data") / "digits.npz").open("rb") as file, np.load(file, allow_pickle=False) as archive:
        levels, labels = archive["images"], archive["labels"]
    scale = np.rint(np.arange(17) * 255 / 16).astype(np.uint8)
    whole = Split(torch.from_numpy(scale[levels][:, None]), torch.from_numpy(labels.astype(np.int64)))
    rest, test = carve("digits", whole, TEST)
    train, validation = carve("digits", rest, VALIDATION if request.validation is None else request.validation)
    return assemble("digits", train, validation, test, [str(digit) for digit in range(10)])
