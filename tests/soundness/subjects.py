"""Networks of all kinds, for the attacks on certificates; each is determined by a seed.

A subject is a frozen network, and a function that draws inputs: bytes, or floats in its domain.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

import lipflow
from lipflow import blocks
from lipflow.data import batches, load, to_unit
from lipflow.frozen import Frozen
from lipflow.graph import UNIT, Domain
from lipflow.losses import MultiMargin
from lipflow.operators import ConvOperator, DenseOperator
from lipflow.operators.certified import certified_operator
from lipflow.primitives import (
    NONLINEARITIES,
    Affine,
    Descent,
    Gather,
    GroupSort,
    Pointwise,
    Primitive,
    TruncatedExponential,
)
from tests import contract
from tests.soundness import graphs
from tests.soundness.graphs import Draw, Shape


class Subject(NamedTuple):
    frozen: Frozen
    inputs: Callable[[int, Draw], Tensor]


def _uniform(frozen: Frozen) -> Subject:
    """Bytes or float32 for some subjects in [0, 1], otherwise random float64 numbers of the domain."""

    def inputs(count: int, draw: Draw) -> Tensor:
        low, high = frozen.domain
        x = torch.rand(count, *frozen.in_shape, generator=draw.generator, dtype=torch.float64)
        way = draw.integer(0, 3) if frozen.domain == UNIT else 0
        if way == 1:
            return (255 * x).round().to(torch.uint8)
        return x.float() if way == 2 else (low + (high - low) * x).clamp(low, high)

    return Subject(frozen, inputs)


def random_graph(seed: int) -> Subject:
    return _uniform(graphs.random_graph(seed, classes=2 + seed % 3))


HEADS: list[Callable[[int], nn.Module]] = [
    lambda features: nn.Identity(),
    lambda features: blocks.Truncate(min(features, 5)),
    lambda features: blocks.LastLayerNormalization(features, 4),
    lambda features: nn.Linear(features, 3),
]
DOMAINS: list[Domain] = [UNIT, UNIT, (-1.0, 1.0), (-5.0, 2.0), (0.0, 255.0)]


def layer(seed: int) -> Subject:
    """A layer of the contract after some steps of training, and a head."""
    name, draw = contract.FREEZABLE[seed % len(contract.FREEZABLE)], Draw(torch.Generator().manual_seed(seed))
    body, shape = nn.Sequential(contract.make(name, seed, trained=True), nn.Flatten()), contract.LAYERS[name].shape
    features = body(torch.zeros(1, *shape, dtype=torch.float64)).shape[1]
    head = draw.choose(HEADS)(features)
    return _uniform(lipflow.freeze(nn.Sequential(body, head.double()), shape, draw.choose(DOMAINS)))


# Networks that are trained on the digits


KW = dict(channels=4, hidden=16, features=12)
DIGITS: list[tuple[str, dict]] = [
    ("cpl-digits", dict()),
    ("cpl-digits", dict(lln=True, channels=8, features=32)),
    ("cpl-fast", dict(channels=8, depth=(2, 2), inner=(6, 6), features=16, mirror=True)),
    ("soc-10", dict(channels=4, stages=2, block=1)),
    ("soc+-10", dict(channels=4, stages=2, block=1)),
    ("cayley-kw3", KW),
    ("bcop-large", dict(KW, lln=True)),
    ("proximal", {}),
]


@cache
def _digits(which: int) -> tuple[Frozen, Tensor]:
    """A trained network, and all images as bytes."""
    torch.manual_seed(which)
    data, (name, options) = load("digits"), DIGITS[which]
    if name == "proximal":
        pooled = lipflow.proximal(4, 6, 3, iterations=20), blocks.AvgPool(2), blocks.MaxPool(2), nn.Flatten()
        network: nn.Module = nn.Sequential(
            blocks.PadChannels(4), *pooled, lipflow.proximal(16, 24), blocks.Truncate(10)
        )
    else:
        network = lipflow.build(name, in_shape=(1, 8, 8), **options)
    loss, optimiser = MultiMargin(0.5), torch.optim.Adam(network.parameters(), 1e-2)
    for epoch in range(3):
        for batch in batches(len(data.train), 64, which, epoch):
            optimiser.zero_grad()
            loss(network(to_unit(data.train.images[batch])), data.train.labels[batch]).backward()
            optimiser.step()
    images = torch.cat([data.train.images, data.validation.images, data.test.images])
    return lipflow.freeze(network.eval(), (1, 8, 8)), images


def digits(seed: int) -> Subject:
    """Mixtures of two digits, as bytes or floats."""
    frozen, images = _digits(seed % len(DIGITS))

    def inputs(count: int, draw: Draw) -> Tensor:
        a, b = images[torch.randint(len(images), (2, count), generator=draw.generator)]
        t = torch.rand(count, 1, 1, 1, generator=draw.generator, dtype=torch.float64)
        mixed = ((1 - t) * to_unit(a, torch.float64) + t * to_unit(b, torch.float64)).clamp(0, 1)
        return (255 * mixed).round().to(torch.uint8) if draw.integer(0, 1) else mixed

    return Subject(frozen, inputs)


# Networks that are isometries almost everywhere, so that the nearest other label is at the radius, up to its slack


def _orthogonal(draw: Draw, size: int) -> Tensor:
    return torch.linalg.qr(draw.normal(size, size)).Q


def _reflection(draw: Draw, shape: Shape) -> Primitive:
    """A Convex Potential Layer of one unit."""
    op = certified_operator(DenseOperator(draw.normal(1, *shape)))
    return Descent(op, draw.normal(1), NONLINEARITIES["relu"], float(2 / op.norm**2 * (1 - 2.0**-52)))


def _permutation(draw: Draw, shape: Shape) -> Primitive:
    size = torch.Size(shape).numel()
    return Gather(torch.randperm(size, generator=draw.generator).reshape(shape), [size])


def _mixed_channels(draw: Draw, shape: Shape) -> Primitive:
    kernel = _orthogonal(draw, shape[0])[:, :, None, None]
    return Affine(certified_operator(ConvOperator(kernel, shape[1:], 0)), draw.normal(shape[0]))


def _cayley(draw: Draw, shape: Shape) -> Primitive:
    torch.manual_seed(draw.integer(0, 10**6))
    found = lipflow.freeze(nn.Sequential(lipflow.cayley_conv(shape[0], shape[0]).double()), shape)
    return graphs.primitives(found, "affine")[0]


ISOMETRIES: list[Callable[[Draw, Shape], Primitive]] = [
    _permutation,
    lambda draw, shape: Pointwise("abs"),
    lambda draw, shape: GroupSort(draw.choose([2, shape[0]])),
    graphs.householder,
    lambda draw, shape: TruncatedExponential(graphs.skew(draw, shape), 0.1, 14),
]
VECTORS = [*ISOMETRIES, _reflection, lambda draw, shape: graphs.matrix(_orthogonal(draw, *shape), draw.normal(*shape))]
IMAGES = [*ISOMETRIES, _mixed_channels, _mixed_channels, _cayley]


def tight(seed: int) -> Subject:
    """Up to five isometries, and orthonormal, unit or opposite rows as a head, with equal scores near the centre."""
    draw = Draw(torch.Generator().manual_seed(seed))
    shape = draw.choose([(1,), (2,), (6,), (12,), (2, 2, 3), (4, 2, 2)])
    kinds = [VECTORS[-1], VECTORS[1]] if shape == (1,) else VECTORS if len(shape) == 1 else IMAGES
    body = [draw.choose(kinds)(draw, shape) for _ in range(draw.integer(1, 5))]
    size = torch.Size(shape).numel()
    classes = 2 if size == 1 else draw.integer(2, min(size, 10))
    rows = _orthogonal(draw, size)[:classes] if size > 1 else torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    if draw.integer(0, 1):
        rows = torch.nn.functional.normalize(draw.normal(classes, size))
    flat = Gather(torch.arange(size), [size])
    low, high = domain = draw.choose([(-1.0, 1.0), UNIT, (-30.0, 50.0), (-1e6, 1e6)])
    middle = low + (high - low) * (0.4 + 0.2 * torch.rand(1, *shape, generator=draw.generator, dtype=torch.float64))
    for p in (*body, flat):
        middle = p.run(middle)
    return _uniform(graphs.chain(shape, *body, flat, graphs.matrix(rows, -rows @ middle[0]), domain=domain))


FAMILIES: dict[str, Callable[[int], Subject]] = {
    "random graphs": random_graph,
    "layers": layer,
    "digits": digits,
    "tight": tight,
}
