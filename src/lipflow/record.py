"""A certificate on disk, which another program can check: three files beside each other.

frozen.safetensors    the network: every number it computes with, and the graph of its primitives
certificate.json      what is claimed: L, E, pair bounds, each primitive's constants and how they were obtained
certified.npz         one row an image: image, truth, logits, label, radius, the paper's radius
A digest in certificate.json ties them together; `lipflow.check` re-derives bounds and radii from them with NumPy alone.
The truth, the split that images are said to be of, and which network of a run it is, are the writer's word.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from lipflow.certificate import Certificates
from lipflow.files import filled, sha256, sync_names
from lipflow.frozen import Frozen
from lipflow.graph.file import SCHEMA
from lipflow.operators.certified import CertifiedOperator

WEIGHTS, CLAIMS, ROWS = "frozen.safetensors", "certificate.json", "certified.npz"


def write(
    folder: str | Path,
    frozen: Frozen,
    certificates: Certificates,
    images: Tensor,
    truth: Tensor,
    split: str = "",
    which: str = "",
) -> None:
    """Write the certificate of some images, uint8 or floats, and their true labels.

    One that is there stays until all of the new one is on the disk; from there on, the claims go first and come last.
    `split` says which images they are, "test", "validation" or "other", and `which` of a run's networks it is, "final"
    or "best": for whoever reads it.
    """
    if truth.shape != (len(certificates),) or truth.is_floating_point() or len(images) != len(certificates):
        given = f"{len(images)} images and true labels of {truth.dtype}, {tuple(truth.shape)}"
        raise ValueError(f"{len(certificates)} certificates are of as many images and integer labels, not of {given}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    columns = dict(images=images, truth=truth, **vars(certificates))
    arrays: dict[str, Any] = {name: column.cpu().numpy() for name, column in columns.items()}

    def rows(temporary: Path) -> None:
        with temporary.open("wb") as file:  # to a path of another ending, NumPy would add its own
            np.savez(file, **arrays)

    with filled(folder / WEIGHTS, frozen.save) as weights, filled(folder / ROWS, rows) as table:
        digests = {WEIGHTS: sha256(weights), ROWS: sha256(table)}
        text = json.dumps(claims(frozen, certificates, digests, split, which), indent=1)
        with filled(folder / CLAIMS, lambda temporary: temporary.write_text(text)) as said:
            (folder / CLAIMS).unlink(missing_ok=True)  # a half-written certificate claims nothing
            weights.replace(folder / WEIGHTS)
            table.replace(folder / ROWS)
            said.replace(folder / CLAIMS)
    sync_names(folder)


def claims(
    frozen: Frozen, certificates: Certificates, digests: dict[str, str], split: str, which: str
) -> dict[str, Any]:
    """Everything that the certificate states, the digests of its two other files included, with one over all of it."""
    primitives, vertices = _ledger(frozen)
    stated = dict(
        schema=SCHEMA,
        dtype="float64",
        domain=list(frozen.domain),
        norm="L2 on the values handed to the network",
        in_shape=list(frozen.in_shape),
        classes=frozen.classes,
        images=len(certificates),
        split=split,
        which=which,
        lipschitz=frozen.lipschitz,
        rounding=frozen.rounding,
        pair_bounds=frozen.pair_bounds.tolist(),
        primitives=primitives,
        vertices=vertices,
        files=digests,
    )
    return dict(stated, digest=digest(stated))


def digest(stated: dict[str, Any]) -> str:
    """SHA-256 over the claims, which hold the digests of the files."""
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def _ledger(frozen: Frozen) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What is claimed of each primitive, its norm, in the order of the file; and of each vertex."""
    primitives: dict[int, dict[str, Any]] = {}
    vertices = []
    for vertex, row in zip(frozen.graph.vertices, frozen.ledger, strict=True):
        p = vertex.primitive
        op = getattr(p, "op", None)
        primitives.setdefault(id(p), dict(kind=p.kind, **(op.proof if isinstance(op, CertifiedOperator) else {})))
        vertices.append(dict(row._asdict(), primitive=list(primitives).index(id(p))))
    return list(primitives.values()), vertices
