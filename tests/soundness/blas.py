"""Certificates of every kind of network, written and read under the BLAS settings of a process.

    python -m tests.soundness.blas WRITE READ SEEDS

writes a folder of certificates, reads another one, and prints what it found as JSON.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import lipflow
from lipflow import blocks
from lipflow.certificate.file import WEIGHTS
from lipflow.flows import Flow
from lipflow.flows.field import ConvexPotential
from lipflow.flows.step import ImplicitEuler, Midpoint
from lipflow.flows.weight import ConvWeight, DenseWeight
from tests.soundness.forging import bytes_of, certificate, rejected
from tests.soundness.graphs import Draw, chain, matrix, points, random_graph

CONV = (3, 8, 8)


def _headed(layer: nn.Module, shape: tuple[int, ...]) -> lipflow.Frozen:
    """A layer and three scores."""
    network = nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(3)).double().eval()
    network(torch.zeros(1, *shape, dtype=torch.float64))
    return lipflow.freeze(network, shape)


def similar_classes() -> lipflow.Frozen:
    """Two matrices, and rows of classes whose distance is mostly rounding."""
    first, last = torch.randn(60, 300, dtype=torch.float64), torch.randn(1, 60, dtype=torch.float64)
    nearly = last + 1e-10 * torch.randn(4, 60, dtype=torch.float64)
    return chain((300,), matrix(first), matrix(nearly))


def proximal(seed: int) -> lipflow.Frozen:
    """A dense or convolutional proximal layer of random sizes, every other one with a reflection."""
    torch.manual_seed(seed)
    draw = Draw(torch.Generator().manual_seed(seed))
    step = (Midpoint if draw.integer(0, 1) else ImplicitEuler)(draw.choose([0.1, 0.5, 1.0, 3.0]))
    if draw.integer(0, 1):
        field = ConvexPotential(ConvWeight(CONV[0], draw.integer(2, 12)), draw.choose(["relu", "hardtanh"]))
        return _headed(Flow(field, step), CONV)
    features = draw.integer(3, 150)
    return _headed(Flow(ConvexPotential(DenseWeight(features, draw.integer(3, 150))), step), (features,))


def _pools() -> nn.Module:
    return nn.Sequential(
        blocks.Normalize(0.5, 0.25),
        nn.Conv2d(3, 8, 3, padding=1),
        blocks.MaxMin(),
        nn.MaxPool2d(3, stride=2, padding=1),
        lipflow.cpl_conv(8, 12, stride=2, padding=1),
        blocks.Householder(8),
        nn.AvgPool2d(2),
    )


def _named(name: str, **options: Any) -> lipflow.Frozen:
    return lipflow.freeze(lipflow.build(name, classes=10, in_shape=CONV, **options))


KINDS = {
    "cpl": partial(_named, "cpl", channels=6, depth=2, inner=8, features=30),
    "cpl, lln": partial(_named, "cpl-digits", channels=6, depth=2, inner=8, features=30, lln=True),
    "cpl-fast": partial(_named, "cpl-fast", channels=12, depth=(1, 1), inner=(4, 4), features=30, mirror=True),
    "soc": partial(_named, "soc-10", channels=4, stages=2, block=1),
    "cayley": partial(_named, "cayley-kw3", channels=4, hidden=40, features=12),
    "bcop": partial(_named, "bcop-large", channels=4, hidden=20, features=12, lln=True),
    "soc dense": lambda: _headed(lipflow.soc(70, h=2.0), (70,)),
    "cayley dense": lambda: _headed(lipflow.cayley(70), (70,)),
    "similar classes": similar_classes,
    "pools": lambda: _headed(_pools(), CONV),
}


def networks(seeds: int) -> Iterator[tuple[str, lipflow.Frozen]]:
    """Every kind; then a proximal layer and a random graph for each seed."""
    for name, make in KINDS.items():
        torch.manual_seed(0)
        yield name, make()
    for seed in range(seeds):
        yield f"proximal {seed}", proximal(seed)
        yield f"graph {seed}", random_graph(seed)


def write(folder: Path, seeds: int) -> dict[str, list[str]]:
    """Write the certificate of every network; return the certified norms, and a digest of numbers by NumPy."""
    normal = np.random.default_rng(0).standard_normal((200, 300))
    norms = {"numpy": [hashlib.sha256(np.linalg.cholesky(normal @ normal.T).tobytes()).hexdigest()]}
    for name, frozen in networks(seeds):
        certificate(folder / name, frozen, bytes_of(frozen, 3) if frozen.domain == (0, 1) else points(frozen, 3))
        norms[name] = [row.norm.hex() for row in frozen.ledger if row.norm is not None]
    return norms


def read(folder: Path) -> dict[str, str]:
    """Load and check every certificate of a folder; return why some are refused."""
    refused = {}
    for path in sorted(folder.iterdir()):
        try:
            lipflow.Frozen.load(path / WEIGHTS)
        except ValueError as error:
            refused[f"{path.name}, load"] = str(error)
        if reason := rejected(path):
            refused[f"{path.name}, check"] = reason
    return refused


if __name__ == "__main__":
    written = write(Path(sys.argv[1]), int(sys.argv[3]))
    print(json.dumps(dict(norms=written, refused=read(Path(sys.argv[2])))))
