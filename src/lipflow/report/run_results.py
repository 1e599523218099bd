"""A run's folder, read for a report: the record, the log, the certificate and the attack, as far as they are there.

A folder may come from a stranger. Every value is checked for its type and shape before it is used, files that belong
together are held against their digests, and nothing is unpickled or executed. What is missing is None; what is damaged
is an error that names the file.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np

from lipflow.attack import EXAMPLES, OUTCOMES
from lipflow.graph.file import SCHEMA
from lipflow.record import CLAIMS, ROWS, digest
from lipflow.rounding import down
from lipflow.train.recipe import radius as parse_radius
from lipflow.train.record import FINAL, Record


@dataclass(frozen=True)
class Epoch:
    """A line of log.jsonl on validation images: accuracies, certified ones by estimate."""

    number: float
    clean: float | None
    certified: Mapping[str, float]


@dataclass(frozen=True)
class Primitive:
    """A line of the ledger: what the layer is, its constant and how that was obtained, what its rounding adds to E."""

    kind: str
    name: str
    size: str
    how: str
    lipschitz: float
    rounding: float
    norm: float | None


COLUMNS = ("images", "truth", "label", "radius", "paper_radius", "logits")  # of a certificate, one row an image


@dataclass(frozen=True, eq=False)
class Certificate:
    """certificate.json and certified.npz: the claims, and one row an image."""

    lipschitz: float
    rounding: float
    digest: str
    split: str  # which images: "test", "validation", or "" if it is not said
    which: str  # which network of the run: "final", "best", or "" if it is not said
    ledger: tuple[Primitive, ...]
    images: np.ndarray  # (n, channels, height, width) uint8, or float64 in [0, 1]
    truth: np.ndarray  # (n,) int64
    label: np.ndarray  # (n,) int64
    radius: np.ndarray  # (n,) float64
    paper_radius: np.ndarray  # (n,) float64
    logits: np.ndarray  # (n, classes) float64

    @cached_property
    def right(self) -> np.ndarray:  # (n,) bool
        return self.label == self.truth

    def first(self, count: int) -> "Certificate":
        """The same of the first images only."""
        return replace(self, **{name: getattr(self, name)[:count] for name in COLUMNS})

    def certified(self, eps: Fraction) -> np.ndarray:
        """Which images are right and have R > eps exactly: `(n,)`, bool."""
        return self.right & (self.radius > down(eps))


@dataclass(frozen=True, eq=False)
class Examples:
    """attack.npz: some images, the strongest attack in each one's certified ball, and the nearest adversarial found."""

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
    """attack.json: per ε, in increasing order, which of the first images of the certificate still had their label."""

    steps: int
    restarts: int
    clean: np.ndarray  # (m,) bool
    standing: Mapping[str, np.ndarray]  # (m,) bool for each ε
    examples: Examples | None

    def __len__(self) -> int:
        return len(self.clean)


@dataclass(frozen=True, eq=False)
class RunResults:
    """All that a run has to show."""

    name: str
    folder: Path
    record: Record
    ended: bool
    losses: tuple[tuple[float, float], ...]  # (step, training loss)
    epochs: tuple[Epoch, ...]
    certificate: Certificate | None
    outcome: Outcome | None
    stale: bool = False  # it has an attack on another certificate, which says nothing about this one

    @property
    def part(self) -> int:
        """How many images were attacked, the first ones, if those are not all that are certified; else 0."""
        if self.certificate is None or self.outcome is None or len(self.outcome) == len(self.certificate.truth):
            return 0
        return len(self.outcome)

    @property
    def missing(self) -> list[str]:
        """What it lacks, each with the command that adds it."""
        lacks = []
        if not self.ended:
            lacks.append(f"training has not ended: lipflow train --out {self.folder} --resume")
        if self.certificate is None:
            lacks.append(f"no certificate yet: lipflow certify {self.folder}")
        if self.stale:
            lacks.append(f"{OUTCOMES} is of another certificate, and left out: lipflow attack {self.folder}")
        elif self.outcome is None:
            lacks.append(f"not attacked yet: lipflow attack {self.folder}")
        return lacks


def read_all(folders: tuple[Path, ...], names: tuple[str, ...] = ()) -> list[RunResults]:
    """Runs in the order given, each under its own name: that of its folder, unless names are given."""
    if not folders:
        raise ValueError("give the folders of one or more runs, such as runs/demo")
    if names and len(names) != len(folders):
        raise ValueError(f"--names takes one name a run: {len(folders)} runs, {len(names)} names")
    called: dict[str, Path] = {}
    for folder, name in zip(folders, names or [f.resolve().name for f in folders], strict=True):
        if name in called:
            both = f"{called[name]} and {folder}"
            raise ValueError(f"two runs are called {name!r}: {both}; give each its own name with --names")
        called[name] = folder
    return [read(folder, name) for name, folder in called.items()]


def read(folder: Path, name: str) -> RunResults:
    """One run; what is there has to fit together."""
    record = Record.read(folder)
    certificate = read_certificate(folder) if (folder / CLAIMS).is_file() else None
    if certificate is not None:
        _pictures(certificate.images, folder / ROWS)
    attacked = certificate is not None and (folder / OUTCOMES).is_file()
    outcome = _outcome(folder, certificate) if certificate is not None and attacked else None
    losses, epochs = _log(folder / "log.jsonl")
    ended, stale = (folder / FINAL).is_file(), attacked and outcome is None
    return RunResults(name, folder, record, ended, losses, epochs, certificate, outcome, stale)


def read_certificate(folder: Path) -> Certificate:
    """The certificate in a folder; what does not fit its digests is refused."""
    path = folder / CLAIMS
    said = _json(path, path.read_bytes())
    stated = {key: value for key, value in said.items() if key != "digest"}
    other = f"it has schema {said.get('schema')!r}, of another version of lipflow; certify the network again"
    _hold(said.get("schema") == SCHEMA, path, other)
    _hold(said.get("digest") == digest(stated), path, "it was changed after it was written: its digest does not fit")
    rows = folder / ROWS
    columns = _arrays(rows, _table(said.get("files"), path, "files").get(ROWS), COLUMNS)
    count = len(columns["truth"])
    _hold(all(len(column) == count for column in columns.values()), rows, "its columns differ in length")
    _hold(columns["logits"].ndim == 2, rows, "logits are (n, classes)")
    _hold(all(columns[k].ndim == 1 for k in ("truth", "label", "radius", "paper_radius")), rows, "one value an image")
    _hold(all(columns[k].dtype.kind in "iu" for k in ("truth", "label")), rows, "labels are integers")
    floats = [columns[k] for k in ("radius", "paper_radius", "logits")]
    _hold(all(c.dtype == np.float64 for c in floats), rows, "radii and logits are float64")
    _hold(bool((columns["radius"] >= 0).all()), rows, "a radius is at least 0")
    label, classes = columns["label"], columns["logits"].shape[1]
    _hold(classes >= 2 and bool(((label >= 0) & (label < classes)).all()), rows, "a label is beyond the classes")
    _pixels(columns["images"], rows)
    held: Any = said.get("primitives")
    lines: Any = said.get("vertices")
    _hold(isinstance(held, list) and isinstance(lines, list), path, "it has no lists of primitives and vertices")
    ledger = tuple(_primitive(_table(line, path, "a vertex"), held, path) for line in lines)
    lipschitz, rounding = (_number(said.get(key), path, key) for key in ("lipschitz", "rounding"))
    split, which = said.get("split", ""), said.get("which", "")
    _hold(isinstance(split, str) and isinstance(which, str), path, "split and which are words")
    return Certificate(lipschitz, rounding, said["digest"], split, which, ledger, **columns)


def _primitive(line: Mapping[str, Any], held: list[Any], path: Path) -> Primitive:
    kind, name, size, how = (line.get(key) for key in ("kind", "name", "size", "how"))
    words = all(isinstance(word, str) for word in (kind, name, size, how))
    _hold(words, path, "a vertex has a kind, a name, a size and a proof, in words")
    which = line.get("primitive")
    _hold(isinstance(which, int) and 0 <= which < len(held), path, "a vertex has a primitive of the list")
    claim = _table(held[cast(int, which)], path, "a primitive")
    lipschitz, rounding = (_number(line.get(key), path, key) for key in ("lipschitz", "rounding"))
    norm = None if claim.get("norm") is None else _number(claim["norm"], path, "norm")
    return Primitive(str(kind), str(name), str(size), str(how), lipschitz, rounding, norm)


def _outcome(folder: Path, certificate: Certificate) -> Outcome | None:
    """The attack on a certificate; None if it was on another one, by its digest or, without one, by its labels."""
    path = folder / OUTCOMES
    said = _json(path, path.read_bytes())
    if said.get("certificate", certificate.digest) != certificate.digest:
        return None
    clean, standing = _flags(said.get("clean"), path), _table(said.get("standing"), path, "standing")
    fits = len(clean) <= len(certificate.right) and bool((clean == certificate.right[: len(clean)]).all())
    if "certificate" not in said and not fits:
        return None
    _hold(fits, path, "which images are clean is not what its certificate says")
    _hold(len(clean) > 0, path, "it attacks no image")
    _hold(len(standing) > 0, path, "it attacks at no radius")
    try:
        names = sorted(standing, key=parse_radius)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    columns = {name: _flags(standing[name], path) for name in names}
    _hold(all(len(column) == len(clean) for column in columns.values()), path, "its lists differ in length")
    steps, restarts = (_count(said.get(key), path, key) for key in ("steps", "restarts"))
    examples = _examples(folder / EXAMPLES, said["examples"], certificate) if "examples" in said else None
    return Outcome(steps, restarts, clean, columns, examples)


def _examples(path: Path, expected: Any, certificate: Certificate) -> Examples:
    columns = _arrays(path, expected, tuple(Examples.__dataclass_fields__))
    index, shape = columns["index"], certificate.images.shape[1:]
    _hold(index.ndim == 1 and index.dtype.kind in "iu", path, "an index is an integer")
    _hold(all(len(c) == len(index) for c in columns.values()), path, "its columns differ in length")
    _hold(bool(((index >= 0) & (index < len(certificate.truth))).all()), path, "an index lies beyond the certificate")
    kinds = {"inside_label": "iu", "nearest_label": "iu", "found": "b"}
    for name in set(columns) - {"index", "inside", "nearest"}:
        column = columns[name]
        _hold(column.ndim == 1 and column.dtype.kind in kinds.get(name, "f"), path, f"{name} is of another type")
    for name in ("inside_distance", "nearest_distance"):
        _hold(bool(((columns[name] >= 0) & (columns[name] <= 1e6)).all()), path, f"{name} is no distance")
    for name in ("inside", "nearest"):
        _hold(columns[name].shape[1:] == shape, path, f"{name} are images of another shape")
        _pixels(columns[name], path)
        _pictures(columns[name], path)
    return Examples(**columns)


def _log(path: Path) -> tuple[tuple[tuple[float, float], ...], tuple[Epoch, ...]]:
    """The steps and the epochs of a log; a last line that is cut off belongs to a run at work, or killed."""
    texts = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    lines = [_json(path, text) for text in texts]
    steps = [line for line in lines if line.get("kind") == "step"]
    losses = tuple((_number(s.get("step"), path, "step"), _number(s.get("loss"), path, "loss")) for s in steps)
    return losses, tuple(_epoch(line, path) for line in lines if line.get("kind") == "epoch")


def _epoch(line: Mapping[str, Any], path: Path) -> Epoch:
    number, validation = _number(line.get("epoch"), path, "epoch"), line.get("validation")
    if validation is None:
        return Epoch(number, None, {})
    validation = _table(validation, path, "validation")
    certified = _table(validation.get("certified_estimated", {}), path, "certified_estimated")
    values = {str(key): _number(value, path, key) for key, value in certified.items()}
    return Epoch(number, _number(validation.get("clean"), path, "clean"), values)


def _hold(holds: bool, path: Path, why: str) -> None:
    if not holds:
        raise ValueError(f"{path} cannot be read: {why}")


def _json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: it is not JSON ({error})") from None
    return _table(values, path, "a line" if path.suffix == ".jsonl" else "it")


def _table(values: Any, path: Path, name: str) -> dict[str, Any]:
    _hold(isinstance(values, dict), path, f"{name} is not a table")
    return values


def _arrays(path: Path, expected: Any, names: tuple[str, ...]) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    fits = hashlib.sha256(path.read_bytes()).hexdigest() == expected
    _hold(fits, path, "its digest is not the one that was written down; it was changed since")
    try:
        with np.load(path, allow_pickle=False) as columns:
            found = {name: columns[name] for name in names}
    except Exception as error:  # what NumPy and zipfile raise on damaged or forged files is varied
        raise ValueError(f"{path} cannot be read: {error}") from None
    _hold(all(column.ndim for column in found.values()), path, "a column has a row for each image")
    return found


def _pixels(images: np.ndarray, path: Path) -> None:
    floats = images.dtype.kind == "f" and bool(((images >= 0) & (images <= 1)).all())
    _hold(images.dtype == np.uint8 or floats, path, "images are uint8, or floats in [0, 1]")
    _hold(images.ndim >= 2 and all(side >= 1 for side in images.shape[1:]), path, "images have at least one entry each")


def _pictures(images: np.ndarray, path: Path) -> None:
    _hold(images.ndim == 4, path, "images are (n, channels, height, width)")


def _flags(values: Any, path: Path) -> np.ndarray:
    _hold(isinstance(values, list) and all(type(v) is bool for v in values), path, "true or false, one an image")
    return np.array(values, dtype=bool)


def _count(value: Any, path: Path, name: str) -> int:
    _hold(type(value) is int and value >= 0, path, f"{name} is not a whole number, at least 0: {value!r}")
    return value


def _number(value: Any, path: Path, name: str) -> float:
    _hold(isinstance(value, int | float) and not isinstance(value, bool), path, f"{name} is not a number: {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf
