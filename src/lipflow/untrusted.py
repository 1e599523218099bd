"""Read JSON and arrays from untrusted files.

The type of every value is checked before it is used, and nothing is unpickled or executed. Errors are ValueErrors that
name the file.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from lipflow.files import sha256


def require(holds: bool, path: Path, why: str) -> None:
    """Raise unless a condition holds."""
    if not holds:
        raise ValueError(f"{path} cannot be read: {why}")


def json_object(path: Path, text: bytes) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: it is not JSON ({error})") from None
    return mapping(values, path, "a line" if path.suffix == ".jsonl" else "it")


def mapping(value: Any, path: Path, name: str) -> dict[str, Any]:
    require(isinstance(value, dict), path, f"{name} is not a JSON object")
    return value


def flags(value: Any, path: Path) -> np.ndarray:
    """Convert a list of booleans to an array."""
    booleans = isinstance(value, list) and all(type(v) is bool for v in value)
    require(booleans, path, f"a list has values that are not true or false: {str(value)[:100]}")
    return np.array(value, dtype=bool)


def count(value: Any, path: Path, name: str) -> int:
    require(type(value) is int and value >= 0, path, f"{name} is not an integer of at least 0: {value!r}")
    return value


def number(value: Any, path: Path, name: str) -> float:
    require(isinstance(value, int | float) and not isinstance(value, bool), path, f"{name} is not a number: {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def arrays(path: Path, digest: Any, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Read named arrays from an .npz file with a known SHA-256."""
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    require(sha256(path) == digest, path, "it was changed after it was written: its SHA-256 is not the recorded one")
    try:
        with np.load(path, allow_pickle=False) as columns:
            found = {name: columns[name] for name in names}
    except Exception as error:  # NumPy and zipfile raise many types on damaged or forged files
        raise ValueError(f"{path} cannot be read: {error}") from None
    require(all(column.ndim for column in found.values()), path, "an array has no rows")
    return found


def require_image_array(images: np.ndarray, path: Path, domain: tuple[float, float] = (0.0, 1.0)) -> None:
    """Raise unless an array is uint8, or floats in a domain, with at least one value per row."""
    low, high = domain
    floats = images.dtype.kind == "f" and bool(((images >= low) & (images <= high)).all())
    require(images.dtype == np.uint8 or floats, path, f"images are uint8, or floats in [{low:g}, {high:g}]")
    require(images.ndim >= 2 and all(side >= 1 for side in images.shape[1:]), path, "an image has no values")
