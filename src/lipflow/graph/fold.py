"""Constants of a graph, from its input to every vertex: L, E and reach; and the constants of pairs of classes.

Let f_v be the exact map from the input of a network to vertex v, and f̂_v what is computed. Over the box [low, high]ᵈ,

    L_v = lipschitz(L of the inputs),    E_v = lipschitz(E of the inputs) + the vertex's own error,
    ‖f̂_v(x)‖ ≤ X_v = ‖f̂_v(c)‖ + L_v·r + 4E_v,    c the centre of the box and r the distance from c to a corner.

L_v bounds the Lipschitz constant of f_v, E_v bounds ‖f̂_v - f_v‖, and the reach X_v bounds the inputs of the next
vertices. Of its 4E_v, 2E_v are for the checker, whose value at c may differ from ours by as much. Proofs:
docs/theory.md, sections 1 and 2; docs/soundness.md has those of pairs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import NamedTuple, SupportsFloat

import torch
from torch import Tensor

from lipflow.graph.graph import Graph, numel
from lipflow.node import LoweringError, Vertex
from lipflow.operators import DenseOperator, LinearOperator
from lipflow.operators.certified import CertifiedProduct
from lipflow.primitives import Affine, Constant, Gather, Norm, Scale, Sum
from lipflow.rounding import (
    NORMAL,
    RANGE,
    SLACK,
    TINY,
    U,
    above,
    gamma,
    in_range,
    is_power_of_two,
    norm_up,
    power_of_two,
    sqrt_up,
    up,
)

Domain = tuple[float, float]
UNIT: Domain = (0.0, 1.0)
MAX_ENTRIES = 2**24  # of the rows on a vertex, classes × entries: larger ones are not carried backwards (Note [pairs])


class Constants(NamedTuple):
    """Upper bounds for one vertex."""

    lipschitz: float  # on the Lipschitz constant, from the input of the network to the vertex
    error: float  # on ‖computed value - exact value‖
    reach: float  # on the norm of the computed value
    stretch: float  # on the change of its value if each input changes by 1, except constant ones
    added: float  # on the error that its primitive adds


@dataclass(frozen=True)
class Fold:
    """The constants of every vertex, in the order of the graph; and those of pairs of classes at the output."""

    vertices: tuple[Constants, ...]
    pairs: Tensor  # Lipschitz constants of fᵢ - fⱼ  # (classes, classes); empty for other outputs than scores

    @property
    def lipschitz(self) -> float:
        return self.vertices[-1].lipschitz

    @property
    def error(self) -> float:
        return self.vertices[-1].error


def fold(
    graph: Graph,
    norm: Callable[[LinearOperator], SupportsFloat],
    domain: Domain = UNIT,
    rounding: bool = False,
) -> Fold:
    """Compute the constants of a graph from the input on. `norm` gives the norms of operators: bounds, or estimates.

    With `rounding`, for a certified graph, errors include the rounding of the program; without it they are those of
    real arithmetic, such as the unsolved part of an iteration.
    """
    norm_of = cache(lambda op: float(norm(op)))  # each operator once
    centre, radius = box(domain, graph.in_shape)
    start = torch.full((1, *graph.in_shape), centre, dtype=torch.float64)
    known: dict[int, Constants] = {}
    for vertex, value in zip(graph.vertices, graph.values(start), strict=True):
        if vertex is graph.vertices[0]:
            # Some processors read subnormal pixels as 0, those of float32 too.
            added = Fraction(numel(vertex), 2**126) if rounding else Fraction(0)
            lipschitz, stretch, error = 1.0, 1.0, up(added)
        else:
            inputs = [known[id(v)] for v in vertex.inputs]
            lipschitz = _stretch(vertex, norm_of, [k.lipschitz for k in inputs])
            stretch = _stretch(vertex, norm_of, [float(k.lipschitz > 0) for k in inputs])
            added = _added(vertex, norm_of, [k.reach for k in inputs], rounding)
            carried = _stretch(vertex, norm_of, [k.error for k in inputs])
            error = math.inf if added is None or math.isinf(carried) else up(Fraction(carried) + added)
        at_centre = norm_up(value)
        if rounding and math.isinf(at_centre):
            raise LoweringError(f"{vertex}: its numbers are not finite; use smaller weights and biases")
        reach = math.inf
        if all(map(math.isfinite, (at_centre, lipschitz, error))):
            reach = up((Fraction(at_centre) + Fraction(lipschitz) * radius + 4 * Fraction(error)) * (1 + SLACK))
        if rounding and reach > RANGE:  # checked for the output too, which is the input of no vertex
            raise LoweringError(f"{vertex}: its numbers may be beyond float64; use smaller weights and biases")
        known[id(vertex)] = Constants(lipschitz, error, reach, stretch, math.inf if added is None else up(added))
    constants = tuple(known[id(vertex)] for vertex in graph.vertices)
    return Fold(constants, pairs_of(graph, [k.lipschitz for k in constants], norm_of))


def box(domain: Domain, shape: Sequence[int]) -> tuple[float, Fraction]:
    """The centre of the box of a domain, and a bound on the distance from it to a corner."""
    if not isinstance(domain, tuple | list) or len(domain) != 2:
        raise ValueError(f"domain is a pair (low, high), not {domain!r}")
    low, high = domain
    if not (math.isfinite(low) and math.isfinite(high) and low < high and max(abs(low), abs(high)) <= float(RANGE)):
        raise ValueError(f"domain is (low, high) with finite low < high, within ±2⁹⁰⁰, not {domain!r}")
    centre = low + (high - low) / 2
    half = max(Fraction(high) - Fraction(centre), Fraction(centre) - Fraction(low))
    return centre, half * sqrt_up(Fraction(math.prod(shape)))


def _stretch(vertex: Vertex, norm: Norm, distances: Sequence[float]) -> float:
    """`lipschitz` of the primitive of a vertex, rounded up."""
    if any(math.isinf(d) for d in distances):
        return math.inf
    try:
        return up(vertex.primitive.lipschitz(norm, *map(Fraction, distances)))
    except (ValueError, TypeError) as error:
        raise LoweringError(f"{vertex}: {error}") from error


def _added(vertex: Vertex, norm: Norm, reaches: Sequence[float], rounding: bool) -> Fraction | None:
    """The error that a vertex adds; None if it has no bound."""
    p, entries = vertex.primitive, max(numel(v) for v in (vertex, *vertex.inputs))
    try:
        if not rounding:
            tolerance = p.tolerance(norm, *reaches)
            return Fraction(tolerance) if math.isfinite(tolerance) else None
        if not all(map(math.isfinite, reaches)):
            raise ValueError("the constants of this network are beyond float64")
        return in_range(p.rounding(entries, *(in_range(Fraction(reach)) for reach in reaches))) * (1 + SLACK)
    except (ValueError, TypeError) as error:
        raise LoweringError(f"{vertex}: {error}") from error


# Note [pairs]: f_i - f_j = (e_i - e_j)·f. The rows M, from the identity at the output, are carried backwards: a matrix
# W makes them MW, a scale or a sum scales them, a gather scatters them; rows that come to a vertex on several paths are
# added. A path ends at any other vertex v: (M_i - M_j)·f_v is ‖M_i - M_j‖·L_v-Lipschitz. Each row has an error bound.


def pairs_of(graph: Graph, lipschitz: Sequence[float], norm: Norm) -> Tensor:
    """Bounds on the Lipschitz constants of fᵢ - fⱼ at the output of a graph  # (classes, classes)."""
    classes = graph.output.shape[0] if len(graph.output.shape) == 1 else 0
    if classes < 2:
        return torch.zeros(0, 0, dtype=torch.float64)
    carried = {id(graph.output): (torch.eye(classes, dtype=torch.float64), [Fraction(0)] * classes)}
    total = torch.zeros(classes, classes, dtype=torch.float64)
    for vertex, constant in zip(reversed(graph.vertices), reversed(lipschitz), strict=True):
        if id(vertex) not in carried:
            continue
        rows, errors = carried.pop(id(vertex))
        steps = _back(vertex, rows, norm) if classes * numel(vertex) <= MAX_ENTRIES else None
        if steps is None:
            # One error of each row is needed. The rows of the checker may differ from ours by both programs' errors.
            both_errors = torch.tensor([[up(3 * (a + b)) for a in errors] for b in errors], dtype=torch.float64)
            apart = above(row_distances(rows) + both_errors)
            if math.isinf(constant):
                total = total + math.inf
            elif constant > 0:
                total = above(total + above(apart * up(Fraction(constant) * (1 + SLACK))))
            continue
        lengths = [Fraction(norm_up(row)) for row in rows]
        for v, more, factor, unit in steps:
            underflow = numel(vertex) * numel(v) * TINY  # an entry of a row is a sum over the vertex
            new_errors = [factor * e + unit * length + underflow for e, length in zip(errors, lengths, strict=True)]
            if id(v) in carried:
                before, old_errors = carried[id(v)]
                more = before + more
                added = [2 * U * Fraction(norm_up(row)) + numel(v) * TINY for row in more]
                new_errors = [a + b + c for a, b, c in zip(old_errors, new_errors, added, strict=True)]
            carried[id(v)] = more, new_errors
    return total.clamp_min(NORMAL).fill_diagonal_(0.0)


CarriedRows = tuple[Vertex, Tensor, Fraction, Fraction]


def _back(vertex: Vertex, rows: Tensor, norm: Norm) -> list[CarriedRows] | None:
    """Rows on a vertex as rows on its inputs; None if the vertex is not linear.

    For each input: the vertex, the rows, the factor by which errors grow, and the rounding error relative to ‖row‖.
    """
    p = vertex.primitive
    if isinstance(p, Constant):
        return []
    if isinstance(p, Sum):
        terms = [(v, c, abs(Fraction(c))) for c, v in zip(p.coefficients, vertex.inputs, strict=True)]
        return [(v, c * rows, factor, Fraction(0) if is_power_of_two(c) else U * factor) for v, c, factor in terms]
    if isinstance(p, Scale):
        greatest = Fraction(float(p.factor.abs().max()))
        return [(vertex.inputs[0], p.run(rows), greatest, U * greatest)]
    if isinstance(p, Gather):
        flat, most = p.index.flatten(), max(p.multiplicities)
        spread = rows.new_zeros(sum(p.sizes), len(rows)).index_add(0, flat[flat >= 0], rows.flatten(1).T[flat >= 0]).T
        root = sqrt_up(Fraction(most))
        parts = zip(vertex.inputs, spread.split(p.sizes, 1), strict=True)
        return [(v, new.reshape(len(rows), *v.shape), root, root * gamma(max(most, 1) - 1)) for v, new in parts]
    if isinstance(p, Affine) and (weight := _matrix(p.op)) is not None:
        spread = Fraction(p.op.spread if isinstance(p.op, CertifiedProduct) else norm_up(weight))
        rounded = Fraction(0) if selects(rows) else gamma(len(weight)) * spread
        return [(vertex.inputs[0], rows @ weight.double(), Fraction(norm(p.op)), rounded)]
    return None


def _matrix(op: LinearOperator) -> Tensor | None:
    op = op.op if isinstance(op, CertifiedProduct) else op
    return op.weight if isinstance(op, DenseOperator) else None


def selects(rows: Tensor) -> bool:
    """Whether every row has at most one nonzero entry, and that is a power of two: no product with a matrix rounds."""
    mantissa = torch.frexp(rows).mantissa.abs()
    return bool(((mantissa == 0) | (mantissa == 0.5)).all()) and int((rows != 0).flatten(1).sum(1).max()) <= 1


def row_distances(rows: Tensor) -> Tensor:
    """‖wᵢ - wⱼ‖ for all pairs of rows, rounded up  # (classes, classes), float64."""
    w = rows.detach().to("cpu", torch.float64).flatten(1)
    if not bool(torch.isfinite(w).all()):
        raise ValueError("the last layer has NaN or infinite weights")
    features = min(w.shape[1], 2 * int((w != 0).sum(1).max()))  # zeros add without rounding
    scale = power_of_two(float(w.abs().max())) or 1.0
    w = w / scale
    # The difference and its square round once each, the sum by γ_features at most, the root once. A square that
    # underflows loses at most 2⁻¹⁰²², so that a root loses at most 2⁻⁵¹¹ for each, and so does the scaling.
    inflate, underflow = up(1 + gamma(features + 8)), up(Fraction(features + 2, 2**511))
    distances = torch.stack([(w - row).square().sum(1).sqrt() for row in w]) * inflate + underflow
    return above(above(distances) * scale).fill_diagonal_(0.0)
