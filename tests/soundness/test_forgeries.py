"""Forgeries: primitives and files whose parts do not fit together, and scores that are as false as a check allows.

Broadcasting a tensor of k entries against one channel makes k copies of the image, so a map that is claimed to be
1-Lipschitz stretches by √k. `Frozen.load` and the checker must both refuse such files.
"""

import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lipflow
from lipflow import check
from lipflow.certificate import file as certificate_file
from lipflow.graph import Graph
from lipflow.graph.file import describe
from lipflow.node import Vertex
from lipflow.operators import ConvOperator, DenseOperator
from lipflow.operators.certified import certified_operator
from lipflow.primitives import (
    NONLINEARITIES,
    Affine,
    AvgPool,
    Constant,
    Gather,
    GroupSort,
    Householder,
    Input,
    MaxPool,
    Pointwise,
    Proximal,
    Scale,
    Sum,
    TruncatedExponential,
)
from tests.soundness.forging import certificate, change_rows, changed, forge, rejected
from tests.soundness.graphs import Step, chain, matrix, points, wired

COPIES = 16
REFUSED = (ValueError, TypeError, RuntimeError)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


def _joined(copies: int) -> Tensor:
    """The mean of the copies of each of two pixels, times √copies: its norm is 1."""
    weight = _zeros(2, 2 * copies)
    weight[0, 0::2] = weight[1, 1::2] = 1 / math.sqrt(copies)
    return weight


def _split(copies: int) -> Tensor:
    weight = _zeros(2, 2 * copies)
    weight[0, :copies], weight[1, copies:] = 1 / math.sqrt(copies), -1 / math.sqrt(copies)
    return weight


def _flat(entries: int) -> Gather:
    return Gather(torch.arange(entries), [entries])


def _too_small() -> list[Step]:
    """A second difference with the norm of one pixel, 2, applied to two pixels, where its norm is 3."""
    kernel = torch.tensor([[[[-1.0, 2.0, -1.0]]]], dtype=torch.float64)
    return [(Affine(certified_operator(ConvOperator(kernel, (1, 1), (0, 1))), None), (0,)), (_flat(2), (1,))]


def _one_by_one() -> ConvOperator:
    return ConvOperator(torch.ones(1, 1, 1, 1, dtype=torch.float64), (1, 2), 0)


def _then_joined(*steps: Step, copies: int) -> list[Step]:
    last = len(steps)
    return [*steps, (_flat(2 * copies), (last,)), (matrix(_joined(copies)), (last + 1,))]


FORGERIES: dict[str, tuple[Callable[..., list[Step]], tuple[int, ...]]] = {
    "a factor for each of many channels": (
        lambda k=COPIES: _then_joined((Scale(1 + _zeros(k)), (0,)), copies=k),
        (1, 1, 2),
    ),
    "a constant of many channels": (
        lambda k=COPIES: _then_joined((Constant(_zeros(k, 1, 2)), ()), (Sum([1.0, 1.0]), (0, 1)), copies=k),
        (1, 1, 2),
    ),
    "a bias for each of many channels": (
        lambda k=COPIES: _then_joined((Affine(certified_operator(_one_by_one()), _zeros(k)), (0,)), copies=k),
        (1, 1, 2),
    ),
    "an angle for each of many pairs": (
        lambda k=COPIES: [(Householder(_zeros(k), 1 + _zeros(k)), (0,)), (matrix(_split(k)), (1,))],
        (2,),
    ),
    "a norm at another size": (_too_small, (1, 1, 2)),
    "a gather of more entries than there are": (lambda: [(Gather(torch.tensor([0, 3]), [4]), (0,))], (2,)),
    "a gather of other inputs": (lambda: [(Gather(torch.tensor([0, 2]), [1, 2]), (0, 0))], (2,)),
    "one factor too many": (lambda: [(Scale(1 + _zeros(3)), (0,))], (2,)),
    "factors of many channels alone": (lambda: [(Scale(1 + _zeros(COPIES)), (0,))], (1, 1, 2)),
    "a constant of fewer entries": (lambda: [(Constant(_zeros(1)), ()), (Sum([1.0, 1.0]), (0, 1))], (2,)),
    "angles of too many pairs": (lambda: [(Householder(_zeros(2), 1 + _zeros(2)), (0,))], (2,)),
    "a group of too many": (lambda: [(GroupSort(3), (0,))], (4,)),
    "a matrix of other inputs": (lambda: [(matrix(_zeros(2, 3)), (0,))], (2,)),
    "an average past the image": (lambda: [(AvgPool((2, 2), 4.0), (0,))], (1, 1, 2)),
    "fewer inputs than coefficients": (lambda: [(Sum([1.0, 1.0]), (0,))], (2,)),
    "more inputs than coefficients": (lambda: [(Sum([1.0]), (0, 0))], (2,)),
    "two inputs for a function of one": (lambda: [(Pointwise("relu"), (0, 0))], (2,)),
    "a constant with an input": (lambda: [(Constant(_zeros(2)), (0,))], (2,)),
    "a window past the image": (lambda: [(MaxPool((2, 2), (1, 1), (0, 0), (1, 1)), (0,)), (_flat(1), (1,))], (1, 1, 2)),
    "a window of padding alone": (
        lambda: [(MaxPool((1, 2), (1, 1), (0, 1), (1, 4)), (0,)), (_flat(1), (1,))],
        (1, 1, 3),
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_primitives_that_do_not_fit_their_inputs_are_refused(name):
    make, shape = FORGERIES[name]
    with pytest.raises(REFUSED):
        wired(shape, *make())


# The first cannot be constructed, and the second has a value that is not finite.
NOT_BY_SHAPE = ("a bias for each of many channels", "a window of padding alone")


@pytest.mark.parametrize("name", [name for name in FORGERIES if name not in NOT_BY_SHAPE])
def test_the_checker_refuses_shapes_that_do_not_fit(name):
    """When it reads the network, before any value is computed."""
    make, shape = FORGERIES[name]
    vertices = [Vertex(Input(shape), (), shape, "")]
    for p, places in make():
        vertices.append(Vertex(p, tuple(vertices[i] for i in places), (), ""))
    unchecked = lipflow.Frozen(Graph(tuple(vertices)), (0.0, 1.0), (), 1.0, 0.0, torch.zeros(0, 0))
    description, tensors = describe(unchecked.graph, unchecked.domain)
    operators = [getattr(v.primitive, "op", None) for v in vertices]
    stated = [
        dict(kind=v.primitive.kind, **(op.proof if op else {})) for v, op in zip(vertices, operators, strict=True)
    ]
    with pytest.raises(check.Rejected):
        check.Network(description, {name: t.numpy() for name, t in tensors.items()}, dict(primitives=stated))


PRIMITIVES: dict[str, Callable[[], object]] = {
    "an index of nothing": lambda: Gather(torch.zeros(0, dtype=torch.int64), [3]),
    "an empty input": lambda: Gather(torch.tensor([0]), [3, 0]),
    "no coefficients": lambda: Sum([]),
    "padding of more than half of a window": lambda: chain((1, 3, 3), MaxPool((2, 2), (1, 1), (2, 0), (1, 1))),
}


@pytest.mark.parametrize("name", PRIMITIVES)
def test_invalid_primitives_are_refused(name):
    with pytest.raises(REFUSED):
        PRIMITIVES[name]()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e300, 2.0**-1030])
def test_numbers_out_of_range_are_refused(bad):
    t = torch.tensor([1.0, bad], dtype=torch.float64)
    for steps in (
        [(Scale(t), (0,))],
        [(Constant(t), ()), (Sum([1.0, 1.0]), (0, 1))],
        [(Householder(t[1:], t[:1]), (0,))],
    ):
        with pytest.raises(REFUSED):
            wired((2,), *steps)


# The same in files: one tensor of a true certificate is enlarged


COPIED = dict(zip(list(FORGERIES)[:4], [("factor",), ("value",), ("bias",), ("sine", "cosine")], strict=True))


@pytest.mark.parametrize("name", COPIED)
def test_the_checker_and_load_refuse_copies(name, tmp_path):
    make, shape = FORGERIES[name]
    frozen = wired(shape, *make(1))
    certificate(tmp_path, frozen, points(frozen, 2))
    assert not rejected(tmp_path)

    def enlarge(description: dict, tensors: dict, claims: dict) -> None:
        for p in description["primitives"]:
            for field in set(COPIED[name]) & {key for key, value in p.items() if value is not None}:
                tensors[p[field]] = np.repeat(tensors[p[field]], COPIES, 0)

    forge(tmp_path, frozen, enlarge)
    assert re.search("inputs of these shapes|bias does not fit", rejected(tmp_path))
    with pytest.raises(REFUSED):
        lipflow.Frozen.load(tmp_path / certificate_file.WEIGHTS)


# Files in which one thing is changed, with matching digests


@pytest.fixture(scope="module")
def honest() -> lipflow.Frozen:
    """Vertices: 0 input, 1 gather, 2 affine, 3 relu, 4 sum, 5 constant, 6 sum, 7 scale, 8 affine."""
    torch.manual_seed(0)
    w, last = torch.randn(3, 3, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    bias = Constant(torch.tensor([0.25, -0.5, 0.75], dtype=torch.float64))
    return wired(
        (4,),
        (Gather(torch.tensor([0, 2, 3]), [4]), (0,)),
        (matrix(w), (1,)),
        (Pointwise("relu"), (2,)),
        (Sum([0.5, 0.3]), (1, 3)),
        (bias, ()),
        (Sum([1.0, -1.0]), (4, 5)),
        (Scale(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)), (6,)),
        (matrix(last, _zeros(2)), (7,)),
    )


def _of_description(*path: Any) -> Callable:
    """Put the last argument at the path of the others."""
    *way, value = path
    return lambda description, tensors, claims: description.update(changed(description, way, lambda _: value))


def _of_tensor(place: int, field: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable:
    """Change the tensor of a primitive."""

    def forgery(description: dict, tensors: dict, claims: dict) -> None:
        p = description["primitives"][place]
        name = (p["op"] if field == "weight" else p)[field]
        tensors[name] = change(tensors[name])

    return forgery


def _swapped(a: int, b: int) -> Callable:
    """Swap the kinds of two primitives, in the file and in the claims."""

    def forgery(description: dict, tensors: dict, claims: dict) -> None:
        for listed in (description["primitives"], claims["primitives"]):
            listed[a]["kind"], listed[b]["kind"] = listed[b]["kind"], listed[a]["kind"]

    return forgery


def _exchanged(a: int, b: int) -> Callable:
    """Swap two vertices, in the file and in the claims."""

    def forgery(description: dict, tensors: dict, claims: dict) -> None:
        for listed in (description["vertices"], claims["vertices"]):
            listed[a], listed[b] = listed[b], listed[a]

    return forgery


def _domain(domain: list) -> Callable:
    return lambda description, tensors, claims: (description.update(domain=domain), claims.update(domain=domain))


def _filled(value: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda t: np.where(np.arange(t.size).reshape(t.shape) == 1, value, t)


CHANGED: dict[str, Callable] = {
    "an index past the end": _of_tensor(1, "index", lambda t: t + 2),
    "an index below -1": _of_tensor(1, "index", lambda t: t - 2),
    "an index of floats": _of_tensor(1, "index", lambda t: t.astype(np.float64)),
    "an index of 64 bits": _of_tensor(1, "index", lambda t: t.astype(np.int64)),
    "an index of another shape": _of_tensor(1, "index", lambda t: t.reshape(3, 1)),
    "sizes that lie": _of_description("primitives", 1, "sizes", [5]),
    "sizes of two inputs": _of_description("primitives", 1, "sizes", [2, 2]),
    "no sizes": _of_description("primitives", 1, "sizes", []),
    "sizes of floats": _of_description("primitives", 1, "sizes", [4.0]),
    "an input that does not exist": _of_description("vertices", 2, [2, 99]),
    "an input that comes later": _of_description("vertices", 2, [2, 3]),
    "an input that is itself": _of_description("vertices", 2, [2, 2]),
    "an input from the end": _of_description("vertices", 2, [2, -1]),
    "an input that is not an integer": _of_description("vertices", 2, [2, 1.5]),
    "an input too many": _of_description("vertices", 2, [2, 1, 1]),
    "no input": _of_description("vertices", 2, [2]),
    "a primitive that does not exist": _of_description("vertices", 3, [99, 2]),
    "the input not first": _exchanged(0, 5),
    "a vertex before its input": _exchanged(2, 3),
    "the input twice": _of_description("vertices", 5, [0]),
    "no vertices": _of_description("vertices", []),
    "no primitives": _of_description("primitives", []),
    "another shape of the input": _of_description("primitives", 0, "shape", [5]),
    "an input of nothing": _of_description("primitives", 0, "shape", [0]),
    "an unknown kind": _of_description("primitives", 3, "kind", "tanh"),
    "an unknown function": _of_description("primitives", 3, "name", "tanh"),
    "an unknown operator": _of_description("primitives", 2, "op", "kind", "identity"),
    "a matrix as a convolution": _of_description("primitives", 2, "op", "kind", "convolution"),
    "a bias that is missing": _of_description("primitives", 8, "bias", "t99"),
    "a bias that does not fit": _of_description("primitives", 8, "bias", "t4"),
    "a weight of another layer": _of_description("primitives", 2, "op", "weight", "t5"),
    "affine and sum swapped": _swapped(2, 4),
    "scale and affine swapped": _swapped(7, 8),
    "gather and relu swapped": _swapped(1, 3),
    "constant and scale swapped": _swapped(5, 7),
    "a kind that the claims do not know": _of_description("primitives", 3, "kind", "gather"),
    "a coefficient of nan": _of_description("primitives", 4, "coefficients", [math.nan, 0.3]),
    "a coefficient of inf": _of_description("primitives", 4, "coefficients", [math.inf, 0.3]),
    "a subnormal coefficient": _of_description("primitives", 4, "coefficients", [0.5, 2.0**-1030]),
    "a coefficient that is a string": _of_description("primitives", 4, "coefficients", ["much", 0.3]),
    "a coefficient too few": _of_description("primitives", 4, "coefficients", [0.5]),
    "a coefficient too many": _of_description("primitives", 4, "coefficients", [0.5, 0.3, 0.0]),
    "a weight of nan": _of_tensor(2, "weight", _filled(math.nan)),
    "a weight of inf": _of_tensor(2, "weight", _filled(math.inf)),
    "a subnormal weight": _of_tensor(2, "weight", _filled(2.0**-1030)),
    "a huge weight": _of_tensor(2, "weight", _filled(1e300)),
    "weights of float32": _of_tensor(2, "weight", lambda t: t.astype(np.float32)),
    "weights of integers": _of_tensor(2, "weight", lambda t: np.full(t.shape, -(2**31), np.int32)),
    "factors of integers": _of_tensor(7, "factor", lambda t: np.full(t.shape, -(2**31), np.int32)),
    "constants of integers": _of_tensor(5, "value", lambda t: np.full(t.shape, -(2**31), np.int32)),
    "a factor of nan": _of_tensor(7, "factor", _filled(math.nan)),
    "a factor of another shape": _of_tensor(7, "factor", lambda t: t[:2].copy()),
    "a constant of another shape": _of_tensor(5, "value", lambda t: t[:1].copy()),
    "a domain of one point": _domain([1, 1]),
    "a reversed domain": _domain([1, 0]),
    "an infinite domain": _domain([0, math.inf]),
    "a domain of three numbers": _domain([0, 1, 2]),
}
# These are valid networks, but not those of the certificate.
OTHERWISE: dict[str, Callable] = {
    "larger weights": _of_tensor(2, "weight", lambda t: t * 1.01),
    "smaller weights": _of_tensor(2, "weight", lambda t: t * 0.99),
    "another entry": _of_tensor(1, "index", lambda t: t[::-1].copy()),
    "an entry twice": _of_tensor(1, "index", lambda t: np.array([0, 2, 2], np.int32)),
    "no entries": _of_tensor(1, "index", lambda t: np.full(3, -1, np.int32)),
    "another constant": _of_tensor(5, "value", lambda t: t + 1),
    "another factor": _of_tensor(7, "factor", lambda t: -t),
    "another coefficient": _of_description("primitives", 4, "coefficients", [0.5, -0.3]),
    "another input": _of_description("vertices", 6, [6, 4, 4]),
    "the adjoint": _of_description("primitives", 2, "op", "adjoint", True),
    "another function": _of_description("primitives", 3, "name", "abs"),
    "another domain in the file": _of_description("domain", [0.0, 2.0]),
    "a smaller domain in the file": _of_description("domain", [0.25, 0.75]),
    "a larger domain": _domain([-1.0, 2.0]),
    "a domain without the images": _domain([0.0, 0.001]),
    "a domain of strings": _domain(["0", "1"]),
    "the last vertex left out": lambda d, tensors, claims: d["vertices"].pop(),
    "the last vertex left out of both": lambda d, tensors, claims: (d["vertices"].pop(), claims["vertices"].pop()),
    "a vertex that is not claimed": lambda d, tensors, claims: d["vertices"].insert(1, [3, 0]),
    "a primitive that is not claimed": lambda d, tensors, claims: d["primitives"].append(dict(d["primitives"][3])),
}


@pytest.fixture
def forged(honest, tmp_path) -> Path:
    """The folder of a true certificate, to be changed."""
    certificate(tmp_path, honest, points(honest, 6))
    return tmp_path


def test_a_certificate_that_is_written_again_is_accepted(honest, forged):
    forge(forged, honest, lambda description, tensors, claims: None)
    assert not rejected(forged)
    assert lipflow.Frozen.load(forged / certificate_file.WEIGHTS).digest == honest.digest


@pytest.mark.parametrize("name", CHANGED)
def test_invalid_files_are_rejected_and_not_loaded(name, honest, forged):
    forge(forged, honest, CHANGED[name])
    assert rejected(forged)
    with pytest.raises(REFUSED):
        lipflow.Frozen.load(forged / certificate_file.WEIGHTS)


@pytest.mark.parametrize("name", OTHERWISE)
def test_certificates_of_another_network_are_rejected(name, honest, forged):
    forge(forged, honest, OTHERWISE[name])
    assert rejected(forged)


# A change, the word of the checker, and the word of `load`: otherwise the constant 1 would be false.
CONDITIONS: dict[str, tuple[Callable, str, str]] = {
    "steps of a proximal layer": (_of_description("primitives", 1, "tau", 1.0), "too large", "does not contract"),
    "skew map of a series": (_of_tensor(2, "weight", np.abs), "a skew map", "series"),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_both_programs_check_the_conditions_of_a_constant(name, tmp_path):
    turn = certified_operator(DenseOperator(torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)))
    proximal = Proximal(turn, None, NONLINEARITIES["relu"], 1.0, 0.5, 5, False)
    frozen = chain((2,), proximal, TruncatedExponential(turn, 1.0, 5))
    certificate(tmp_path, frozen, points(frozen, 2))
    assert not rejected(tmp_path)
    change, ours, theirs = CONDITIONS[name]
    forge(tmp_path, frozen, change)
    assert ours in rejected(tmp_path)
    with pytest.raises(ValueError, match=theirs):
        lipflow.Frozen.load(tmp_path / certificate_file.WEIGHTS)


# Scores that are as false as the checker allows


def test_radii_of_forged_scores_within_the_tolerance_are_sound(tmp_path):
    """Stored scores may differ from the checker's by 2E. Moving the best score up and the next one down by √2·E each
    gains 2√2·E of the slack; the rest must still cover the rounding errors at both points."""
    layer = nn.Linear(3, 3).double()
    layer.weight = nn.Parameter(torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q)
    frozen = lipflow.freeze(nn.Sequential(layer), in_shape=(3,))
    x = torch.rand(1, 3, dtype=torch.float64)
    honest = lipflow.certify(frozen, x).logits[0]
    best, next_ = honest.topk(2).indices.tolist()
    logits, shift = honest.clone(), math.sqrt(2) * frozen.rounding * 0.9  # 0.9 as the checker rounds, too
    logits[best] += shift
    logits[next_] -= shift
    forged = lipflow.certificate.from_logits(logits[None], frozen.pair_bounds, frozen.rounding)
    certificate_file.save(tmp_path, frozen, forged, x, forged.label)
    check.check(tmp_path, full=True)
    margin = Fraction(honest[best].item()) - Fraction(honest[next_].item())
    rest = margin - Fraction(forged.radius.item()) * Fraction(frozen.pair_bounds[best, next_].item())
    assert rest > 0
    assert rest**2 >= 8 * Fraction(frozen.rounding) ** 2


def test_radii_above_the_rule_by_E_are_rejected(tmp_path):
    """For a margin of about 200E, as constants are stated with a relative slack of 2⁻³²."""
    frozen = chain((3,), matrix(torch.eye(3, dtype=torch.float64)))
    certificate(tmp_path, frozen, torch.tensor([[0.5, 0.5 + 2.0**-43, 0.0]], dtype=torch.float64))
    assert not rejected(tmp_path)
    change_rows(tmp_path, radius=lambda radius: radius + frozen.rounding)
    assert "more than can be derived" in rejected(tmp_path)


@pytest.mark.parametrize("scale", [1.0, 1e-100, 1e-154, 1e-165, 1e-200, 1e-300, 1e150, 1e250])
@pytest.mark.parametrize("lie", [2.01, 1.8])  # in units of E; the checker's E is a little less where values underflow
def test_scores_of_any_size_are_compared_within_2E(scale, lie, tmp_path):
    """Also where squares underflow or overflow. With weights of 1e-200, any score of 1e-165 was once accepted."""
    frozen = chain((3,), matrix(scale * torch.eye(3, dtype=torch.float64)))
    x = torch.tensor([[0.2, 0.9, 0.0]], dtype=torch.float64)
    logits = lipflow.certify(frozen, x).logits.clone()
    logits[0, 2] = lie * frozen.rounding  # the true score is 0
    forged = lipflow.certificate.from_logits(logits, frozen.pair_bounds, frozen.rounding)
    certificate_file.save(tmp_path, frozen, forged, x, forged.label)
    assert ("not those of this network" in rejected(tmp_path)) == (lie > 2)
    assert bool(rejected(tmp_path)) == (lie > 2)
