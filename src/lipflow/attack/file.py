"""The outcome of an attack on disk, in the folder of the certificate.

attack.json    the settings of the attack, and for each ε the images that kept their label
attack.npz     for some images, the strongest attack in the certified ball and the nearest adversarial image found
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lipflow.attack.projected_gradient import PGD
from lipflow.certificate import CertificateFile
from lipflow.files import save_arrays, sha256, write_atomic, write_text
from lipflow.radius import MAX_RADIUS, parse_radius
from lipflow.untrusted import arrays, count, flags, mapping, read_json, require, require_image_array

OUTCOME, EXAMPLES = "attack.json", "attack.npz"


@dataclass(frozen=True, eq=False)
class Examples:
    """Some images, the strongest attack in the certified ball of each, and the nearest adversarial image found."""

    index: np.ndarray  # (k,) int64, rows of the certificate
    inside: np.ndarray  # (k, channels, height, width) float64
    inside_label: np.ndarray
    inside_distance: np.ndarray
    inside_margin: np.ndarray
    found: np.ndarray  # (k,) bool
    nearest: np.ndarray
    nearest_label: np.ndarray
    nearest_distance: np.ndarray


@dataclass(frozen=True, eq=False)
class Outcome:
    """For each ε, in increasing order, which of the first images of the certificate kept their label under attack."""

    steps: int
    restarts: int
    clean: np.ndarray  # (m,) bool: the label was right without an attack
    robust: Mapping[str, np.ndarray]  # (m,) bool for each ε
    examples: Examples | None

    def __len__(self) -> int:
        return len(self.clean)


def save(folder: Path, outcome: Outcome, attack: PGD, certificate: CertificateFile) -> Path:
    """Write an outcome, and its examples if it has any.

    Return the file of the examples; without examples, that of the outcome.
    """
    stated: dict[str, Any] = {"attack": "L2-PGD", **asdict(attack), "certificate": certificate.digest}
    stated["clean"] = outcome.clean.tolist()
    stated["robust"] = {eps: column.tolist() for eps, column in outcome.robust.items()}
    path, examples = folder / OUTCOME, folder / EXAMPLES
    if outcome.examples is not None:
        write_atomic(examples, partial(save_arrays, vars(outcome.examples)))
        stated["examples"] = sha256(examples)
    write_text(path, json.dumps(stated))
    if outcome.examples is None:
        examples.unlink(missing_ok=True)  # of a previous attack
    return path if outcome.examples is None else examples


def load(folder: Path, certificate: CertificateFile) -> Outcome | None:
    """Read the outcome of an attack on a certificate; None if another certificate was attacked."""
    path = folder / OUTCOME
    stated = read_json(path)
    if stated.get("certificate") != certificate.digest:
        return None
    clean, robust = flags(stated.get("clean"), path), mapping(stated.get("robust"), path, "robust")
    agrees = len(clean) <= len(certificate.right) and bool((clean == certificate.right[: len(clean)]).all())
    require(agrees, path, "its list `clean` does not agree with the labels of the certificate")
    require(len(clean) > 0, path, "it has no attacked images")
    require(len(robust) > 0, path, "it has no radii")
    try:
        names = sorted(robust, key=parse_radius)
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    columns = {name: flags(robust[name], path) for name in names}
    require(all(len(column) == len(clean) for column in columns.values()), path, "its lists differ in length")
    steps, restarts = (count(stated.get(key), path, key) for key in ("steps", "restarts"))
    examples = _examples(folder / EXAMPLES, stated["examples"], certificate) if "examples" in stated else None
    return Outcome(steps, restarts, clean, columns, examples)


def _examples(path: Path, digest: Any, certificate: CertificateFile) -> Examples:
    columns = arrays(path, digest, tuple(Examples.__dataclass_fields__))
    index, shape = columns["index"], certificate.images.shape[1:]
    require(index.ndim == 1 and index.dtype.kind in "iu", path, "index is not a vector of integers")
    require(all(len(column) == len(index) for column in columns.values()), path, "its columns differ in length")
    inside = bool(((index >= 0) & (index < len(certificate.truth))).all())
    require(inside, path, "an index is not a row of the certificate")
    kinds = {"inside_label": "iu", "nearest_label": "iu", "found": "b"}
    for name in set(columns) - {"index", "inside", "nearest"}:
        column = columns[name]
        require(column.ndim == 1 and column.dtype.kind in kinds.get(name, "f"), path, f"{name} has the wrong type")
    for name in ("inside_distance", "nearest_distance"):
        possible = (columns[name] >= 0) & (columns[name] <= MAX_RADIUS)
        require(bool(possible.all()), path, f"{name} is not a distance")
    for name in ("inside", "nearest"):
        require(columns[name].shape[1:] == shape, path, f"the images of {name} have another shape")
        require_image_array(columns[name], path)
    return Examples(**columns)
