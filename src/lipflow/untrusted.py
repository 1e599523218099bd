"""Read JSON and arrays from untrusted files.

The type of every value is checked before it is used, and nothing is unpickled or executed. Errors are ValueErrors that
name the file.
"""

import json
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from lipflow.files import require_file, sha256

MAX_JSON_BYTES = 2**27
RUBBISH = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, MemoryError)  # its errors
MAX_NUMBERS = 2**27  # in all values of a network for one image, as in lipflow.check: 1 GB


def require(holds: bool, path: Path, why: str) -> None:
    """Raise unless a condition holds."""
    if not holds:
        raise ValueError(f"{path} cannot be read: {why}")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file."""
    return json_object(path, read_text(path))


def read_text(path: Path) -> bytes:
    """Read a text file of at most MAX_JSON_BYTES."""
    require_file(path)
    size = path.stat().st_size
    require(size <= MAX_JSON_BYTES, path, f"it has {size} bytes, and the limit is {MAX_JSON_BYTES}")
    return path.read_bytes()


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
    """Read named arrays from an .npz file with a known SHA-256.

    Compressed arrays and those that are larger than the file are refused, so its size bounds the memory.
    """
    if not path.exists():
        raise ValueError(f"{path} is missing")
    require(sha256(path) == digest, path, "it was changed after it was written: its SHA-256 is not the recorded one")
    try:
        with zipfile.ZipFile(path) as archive:
            found = {name: _array(archive, f"{name}.npy", path.stat().st_size) for name in names}
    except Exception as error:  # NumPy and zipfile raise many types on damaged or forged files
        raise ValueError(f"{path} cannot be read: {error}") from None
    require(all(column.ndim for column in found.values()), path, "an array has no rows")
    return found


def _array(archive: zipfile.ZipFile, name: str, size: int) -> np.ndarray:
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{name} is compressed; write it with numpy.savez")
    with archive.open(name) as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{name} is not of version 1.0 of the format")
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if not dtype.hasobject and math.prod(shape) * max(dtype.itemsize, 1) > size:
        raise ValueError(
            f"{name} has the shape {shape} and the dtype {dtype}, which is more than the {size} bytes of the file"
        )
    with archive.open(name) as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def require_image_array(images: np.ndarray, path: Path, domain: tuple[float, float] = (0.0, 1.0)) -> None:
    """Raise unless an array is uint8, or floats in a domain, with at least one value per row."""
    low, high = domain
    floats = images.dtype.kind == "f" and bool(((images >= low) & (images <= high)).all())
    require(images.dtype == np.uint8 or floats, path, f"images are uint8, or floats in [{low:g}, {high:g}]")
    require(images.ndim >= 2 and all(side >= 1 for side in images.shape[1:]), path, "an image has no values")
