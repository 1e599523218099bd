"""The official Python version of CIFAR, which is pickled: only the published files, bit for bit, are read.

A pickle can run code. The published MD5 is checked before the file is unpickled (forging a file with a given MD5 is a
second-preimage attack, which is infeasible), and the unpickler allows only the three names that a NumPy array needs.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from lipflow.data.dataset import DataError

_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): np.empty(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


def read_batch(path: Path, md5: str, labels_key: bytes, remedy: str) -> tuple[np.ndarray, np.ndarray]:
    """(pixels (n, 3072) uint8, labels (n,)) of one file."""
    if not path.is_file():
        raise DataError(f"{path} is missing, so this copy is not complete; {remedy}")
    content = path.read_bytes()
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise DataError(f"{path} is a pickle with MD5 {found}, not the published {md5}, and is not opened; {remedy}")
    batch = ArrayUnpickler(io.BytesIO(content), encoding="bytes").load()
    return batch[b"data"], np.asarray(batch[labels_key], dtype=np.int64)


class ArrayUnpickler(pickle.Unpickler):
    """Unpickles dicts, lists, numbers, bytes and NumPy arrays; raises on every other name."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        try:
            return _ALLOWED[module_name, global_name]
        except KeyError:
            raise pickle.UnpicklingError(f"it asks for {module_name}.{global_name}") from None
