"""A certificate on disk: three files that `lipflow.check` verifies.

frozen.safetensors    the network: its tensors and the graph of its primitives
certificate.json      the claims: L, E, the constants of pairs, and each norm with how it was obtained
certified.npz         one row per image: image, true label, scores, label, radius, the paper's radius

certificate.json contains the SHA-256 of the two other files and of its own claims.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from torch import Tensor

from lipflow.certificate.rule import Certificates, Labels, as_labels
from lipflow.files import save_arrays, sha256, sync_names, temporary_file
from lipflow.frozen import Frozen, LedgerRow
from lipflow.graph import Domain
from lipflow.graph.file import SCHEMA
from lipflow.operators.certified import CertifiedOperator
from lipflow.rounding import down
from lipflow.untrusted import arrays, mapping, number, read_json, require, require_image_array

WEIGHTS, CLAIMS, ROWS = "frozen.safetensors", "certificate.json", "certified.npz"
COLUMNS = ("images", "truth", "label", "radius", "paper_radius", "logits")  # of certified.npz


def save(
    folder: str | Path,
    frozen: Frozen,
    certificates: Certificates,
    images: Tensor,
    truth: Labels,
    split: str = "",
    network: str = "",
) -> None:
    """Write the certificates of images, uint8 or floats, with their true labels.

    A previous certificate in the folder is not changed until the whole new one is on the disk. `split` ("test",
    "validation" or "other") and `network` ("final" or "best" of a run) are for the reader: the checker cannot verify
    them.
    """
    if len(images) != len(certificates):
        raise ValueError(f"these are {len(certificates)} certificates of {len(images)} images")
    labels = as_labels(truth, *certificates.logits.shape)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    columns = dict(images=images, truth=labels, **vars(certificates))
    rows = {name: column.cpu().numpy() for name, column in columns.items()}
    write_rows = partial(save_arrays, rows)
    with temporary_file(folder / WEIGHTS, frozen.save) as weights, temporary_file(folder / ROWS, write_rows) as table:
        digests = {WEIGHTS: sha256(weights), ROWS: sha256(table)}
        text = json.dumps(claims(frozen, certificates, digests, split, network), indent=1)
        with temporary_file(folder / CLAIMS, lambda temporary: temporary.write_text(text)) as claimed:
            # Delete certificate.json first and write it last, so that it is never next to files of another certificate.
            (folder / CLAIMS).unlink(missing_ok=True)
            weights.replace(folder / WEIGHTS)
            table.replace(folder / ROWS)
            claimed.replace(folder / CLAIMS)
    sync_names(folder)


def claims(
    frozen: Frozen, certificates: Certificates, digests: dict[str, str], split: str, network: str
) -> dict[str, Any]:
    """The content of certificate.json."""
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
        network=network,
        lipschitz=frozen.lipschitz,
        rounding=frozen.rounding,
        pair_bounds=frozen.pair_bounds.tolist(),
        primitives=primitives,
        vertices=vertices,
        files=digests,
    )
    return dict(stated, digest=digest(stated))


def digest(stated: dict[str, Any]) -> str:
    """The SHA-256 of the claims."""
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def _ledger(frozen: Frozen) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The claims on each primitive, in the order of the file, and on each vertex."""
    primitives: list[dict[str, Any]] = []
    vertices: list[dict[str, Any]] = []
    places: dict[int, int] = {}
    for vertex, row in zip(frozen.graph.vertices, frozen.ledger, strict=True):
        p = vertex.primitive
        if id(p) not in places:
            op = getattr(p, "op", None)
            places[id(p)] = len(primitives)
            primitives.append(dict(kind=p.kind, **(op.proof if isinstance(op, CertifiedOperator) else {})))
        stated = dict(row._asdict(), primitive=places[id(p)])
        del stated["norm"]  # it is a claim on the primitive
        vertices.append(stated)
    return primitives, vertices


@dataclass(frozen=True, eq=False)
class CertificateFile:
    """What `save` wrote: the claims of certificate.json, and the rows of certified.npz."""

    domain: Domain
    lipschitz: float
    rounding: float
    digest: str
    split: str  # "test", "validation", "other", or "" if unknown
    network: str  # "final", "best", or "" if unknown
    ledger: tuple[LedgerRow, ...]
    images: np.ndarray  # (n, channels, height, width) uint8, or floats in the domain
    truth: np.ndarray  # (n,) int64
    label: np.ndarray  # (n,) int64
    radius: np.ndarray  # (n,) float64
    paper_radius: np.ndarray  # (n,) float64
    logits: np.ndarray  # (n, classes) float64

    @cached_property
    def right(self) -> np.ndarray:  # (n,) bool
        return self.label == self.truth

    def first(self, count: int) -> "CertificateFile":
        """Keep the first images only."""
        return replace(self, **{name: getattr(self, name)[:count] for name in COLUMNS})

    def certified(self, eps: Fraction) -> np.ndarray:
        """Return which images have the right label and R > eps, compared exactly: (n,), bool."""
        return self.right & (self.radius > down(eps))


def load(folder: str | Path) -> CertificateFile:
    """Read a certificate and check that its files belong together and have valid types. This verifies no bound."""
    path, rows = Path(folder) / CLAIMS, Path(folder) / ROWS
    stated = read_json(path)
    claimed = {key: value for key, value in stated.items() if key != "digest"}
    other = f"it has schema {stated.get('schema')!r}, of another version of lipflow; certify the network again"
    require(stated.get("schema") == SCHEMA, path, other)
    require(stated.get("digest") == digest(claimed), path, "it was changed after it was written: its digest is wrong")
    columns = arrays(rows, mapping(stated.get("files"), path, "files").get(ROWS), COLUMNS)
    images, truth, label, radius, paper, logits = (columns[name] for name in COLUMNS)
    require(len({len(column) for column in columns.values()}) == 1, rows, "its columns differ in length")
    require(logits.ndim == 2, rows, "logits are not (n, classes)")
    vectors = truth.ndim == label.ndim == radius.ndim == paper.ndim == 1
    require(vectors, rows, "it needs one label and one radius per image")
    require(truth.dtype.kind in "iu" and label.dtype.kind in "iu", rows, "labels are not integers")
    floats = radius.dtype == paper.dtype == logits.dtype == np.float64
    require(floats, rows, "radii and logits are not float64")
    require(bool((radius >= 0).all()), rows, "a radius is negative or NaN")
    classes = logits.shape[1]
    known = all(bool(((column >= 0) & (column < classes)).all()) for column in (truth, label))
    require(classes >= 2 and known, rows, "a label is not one of the classes")
    ends = stated.get("domain")
    if not (isinstance(ends, list) and len(ends) == 2):
        raise ValueError(f"{path} cannot be read: domain is not (low, high)")
    low, high = (number(end, path, "domain") for end in ends)
    require_image_array(images, rows, (low, high))
    primitives, vertices = stated.get("primitives"), stated.get("vertices")
    if not (isinstance(primitives, list) and isinstance(vertices, list)):
        raise ValueError(f"{path} cannot be read: primitives and vertices are not lists")
    ledger = tuple(_ledger_row(mapping(row, path, "a vertex"), primitives, path) for row in vertices)
    lipschitz, rounding = (number(stated.get(key), path, key) for key in ("lipschitz", "rounding"))
    split, network = stated.get("split", ""), stated.get("network", "")
    require(isinstance(split, str) and isinstance(network, str), path, "split and network are not strings")
    return CertificateFile((low, high), lipschitz, rounding, stated["digest"], split, network, ledger, **columns)


def _ledger_row(row: Mapping[str, Any], primitives: list[Any], path: Path) -> LedgerRow:
    kind, name, size, how = words = [row.get(key) for key in ("kind", "name", "size", "how")]
    require(all(isinstance(word, str) for word in words), path, "kind, name, size and how of a vertex are not strings")
    index = row.get("primitive")
    known = isinstance(index, int) and 0 <= index < len(primitives)
    require(known, path, "a vertex has no primitive of the list")
    claim = mapping(primitives[cast(int, index)], path, "a primitive")
    lipschitz, rounding, reach = (number(row.get(key), path, key) for key in ("lipschitz", "rounding", "reach"))
    norm = None if claim.get("norm") is None else number(claim["norm"], path, "norm")
    return LedgerRow(str(kind), str(name), str(size), lipschitz, str(how), rounding, reach, norm)
