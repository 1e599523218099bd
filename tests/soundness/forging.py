"""Certificates on disk, honest and forged, with matching digests."""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

import lipflow
from lipflow import check
from lipflow.certificate import file as certificate_file
from lipflow.graph.file import describe

Claims = dict[str, Any]
Description = dict[str, Any]
Tensors = dict[str, np.ndarray]
Forgery = Callable[[Description, Tensors, Claims], Any]  # changes its arguments in place


def certificate(folder: Path, frozen: lipflow.Frozen, images: Tensor) -> lipflow.Certificates:
    """Write the honest certificate of some images."""
    certificates = lipflow.certify(frozen, images)
    certificate_file.save(folder, frozen, certificates, images, certificates.label)
    return certificates


def derived(frozen: lipflow.Frozen) -> tuple[check.Network, list[Fraction], list[Fraction]]:
    """The network as the checker reads it, with the L and E that it derives for each vertex."""
    description, tensors = describe(frozen.graph, frozen.domain)
    low = torch.full((1, *frozen.in_shape), frozen.domain[0], dtype=torch.float64)
    claims = certificate_file.claims(frozen, lipflow.certify(frozen, low), {}, "", "")
    arrays = {name: t.numpy() for name, t in tensors.items()}
    network = check.Network(json.loads(json.dumps(description)), arrays, claims)
    return network, *network.fold(claims["domain"], claims["vertices"])


def claims_of(folder: Path) -> Claims:
    return json.loads((folder / certificate_file.CLAIMS).read_text())


def sign(folder: Path, claims: Claims | None = None) -> None:
    """Write claims, by default those of the folder, with matching digests."""
    claims = claims_of(folder) if claims is None else claims
    names = certificate_file.WEIGHTS, certificate_file.ROWS
    files = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names}
    stated = {k: v for k, v in claims.items() if k != "digest"} | dict(files=files)
    (folder / certificate_file.CLAIMS).write_text(json.dumps(dict(stated, digest=certificate_file.digest(stated))))


def changed(values: Any, path: Sequence, change: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts and lists in which the entry at a path is changed."""
    values = inner = copy.deepcopy(values)
    *way, key = path
    for step in way:
        inner = inner[step]
    inner[key] = change(inner[key])
    return values


def lowered(claims: Claims) -> Iterator[tuple[tuple, Claims]]:
    """(path, claims) with one claimed number too low, for the numbers of a network; pairs of the first 3 classes."""
    pairs = [("pair_bounds", i, j) for i, j in permutations(range(min(3, claims["classes"])), 2)]
    norms = [("primitives", i, "norm") for i, p in enumerate(claims["primitives"]) if "norm" in p]
    rows = [("vertices", i, key) for i in range(len(claims["vertices"])) for key in ("lipschitz", "rounding", "reach")]
    factors = dict(primitives=1 - 1e-5, reach=0.49)  # a reach includes 4E, and the checker needs 2E
    for path in [("lipschitz",), ("rounding",), *pairs, *norms, *rows]:
        factor = factors.get(path[-1], factors.get(path[0], 1 - 1e-6))
        if path[0] == "pair_bounds" and claims["pair_bounds"][path[1]][path[2]] < 1e-9:
            factor = 0.3  # it is the rounding error of rows, of which three are stated and one is needed
        lie = changed(claims, path, lambda value, factor=factor: value * factor if value > 2.0**-1000 else value)
        if lie != claims:
            yield path, lie


def change_rows(folder: Path, **changes: Callable[[np.ndarray], np.ndarray]) -> None:
    """Change columns of certified.npz, and sign the certificate."""
    with np.load(folder / certificate_file.ROWS) as rows:
        columns = {name: rows[name] for name in rows.files}
    np.savez(folder / certificate_file.ROWS, **{**columns, **{k: f(columns[k].copy()) for k, f in changes.items()}})
    sign(folder)


def forge(folder: Path, frozen: lipflow.Frozen, change: Forgery) -> None:
    """Change the certificate of a network in a folder, and sign it."""
    description, _ = describe(frozen.graph, frozen.domain)
    description, claims = json.loads(json.dumps(description)), claims_of(folder)
    tensors = load_file(folder / certificate_file.WEIGHTS)
    change(description, tensors, claims)
    save_file(tensors, folder / certificate_file.WEIGHTS, {"lipflow": json.dumps(description)})
    sign(folder, claims)


def rejected(folder: Path, **options: Any) -> str:
    """The reason why the checker rejects a folder; empty if it accepts it."""
    try:
        check.check(folder, **(options or dict(full=True)))
    except check.Rejected as reason:
        return str(reason)
    return ""


def bytes_of(frozen: lipflow.Frozen, count: int, seed: int = 1) -> Tensor:
    """Random images as bytes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (count, *frozen.in_shape), generator=generator).to(torch.uint8)
