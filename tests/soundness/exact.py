"""Every primitive in exact rational arithmetic: the exact maps of the certificates.

They are written from the definitions, with loops, independently of the programs. Stored numbers are float64, so the
maps are rational and fmpq of python-flint is exact; the waves of Fourier multipliers are computed to BITS.
"""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from flint import arb, ctx, fmpq, fmpq_mat
from torch import Tensor

from lipflow.frozen import Frozen
from lipflow.operators.certified import CertifiedAdjoint, CertifiedFourier, CertifiedOperator
from lipflow.primitives import Primitive
from lipflow.primitives.nonlinearity import name_of

Exact = np.ndarray  # of fmpq
ZERO = fmpq(0)
BITS = 500
NEGLIGIBLE = Fraction(1, 2**400)  # above the errors of waves and of contracting iterations at BITS


def exact(value: float) -> fmpq:
    return fmpq(*value.as_integer_ratio())


def rational(t: Tensor) -> Exact:
    """A float64 tensor as rationals."""
    flat = [exact(v) for v in t.detach().flatten().tolist()]
    return np.array([*flat, None], dtype=object)[:-1].reshape(tuple(t.shape))


def fraction(q: fmpq) -> Fraction:
    return Fraction(int(q.p), int(q.q))


def floats(x: Exact) -> np.ndarray:
    """Rationals, each rounded to float64."""
    return np.vectorize(lambda q: float(fraction(q)))(x)


def square(x: Exact) -> fmpq:
    """‖x‖²."""
    return sum((v * v for v in x.flatten()), ZERO)


def is_above_squared_norm(bound: fmpq, matrix: Exact) -> bool:
    """Whether bound > ‖W‖²: bound·I - WWᵀ is positive definite iff its LDLᵀ has D > 0."""
    w = fmpq_mat(*matrix.shape, list(matrix.flatten()))
    gram = w * w.transpose() if w.nrows() <= w.ncols() else w.transpose() * w
    size = gram.nrows()
    rows = [[(bound if i == j else 0) - gram[i, j] for j in range(size)] for i in range(size)]
    for k, row in enumerate(rows):
        if row[k] <= 0:
            return False
        for i in range(k + 1, size):
            factor = rows[i][k] / row[k]
            if factor != 0:
                rows[i] = [a - factor * b for a, b in zip(rows[i], row, strict=True)]
    return True


class Linear:
    """The entries of W, row by row: y[i] = Σ_j K[j] x[i·stride + j·dilation - before]."""

    def __init__(self, op: CertifiedOperator) -> None:
        weight, g = rational(op.weight), op.geometry
        if weight.ndim == 2:
            self.out_shape, self.in_shape = (weight.shape[0],), (weight.shape[1],)
            self.rows = [list(enumerate(row)) for row in weight]
            return
        out, grouped, height, width = weight.shape
        size, stride, dilation, groups = g["in_size"], g["stride"], g["dilation"], g["groups"]
        before = [g["padding"][0][0], g["padding"][1][0]]
        spans = [size[i] + sum(g["padding"][i]) - dilation[i] * (k - 1) - 1 for i, k in enumerate((height, width))]
        outputs = [span // s + 1 for span, s in zip(spans, stride, strict=True)]
        self.in_shape, self.out_shape = (grouped * groups, *size), (out, *outputs)
        self.rows = []
        for o, r, c in itertools.product(*map(range, self.out_shape)):
            row: list[tuple[int, fmpq]] = []
            for i, a, b in itertools.product(range(grouped), range(height), range(width)):
                y, x = r * stride[0] + a * dilation[0] - before[0], c * stride[1] + b * dilation[1] - before[1]
                if g["padding_mode"] == "circular":
                    y, x = y % size[0], x % size[1]
                if 0 <= y < size[0] and 0 <= x < size[1]:
                    channel = o // (out // groups) * grouped + i
                    row.append(((channel * size[0] + y) * size[1] + x, weight[o, i, a, b]))
            self.rows.append(row)

    def apply(self, x: Exact) -> Exact:
        flat = x.flatten()
        values = [sum((w * flat[j] for j, w in row), ZERO) for row in self.rows]
        return np.array([*values, None], dtype=object)[:-1].reshape(self.out_shape)

    def adjoint(self, y: Exact) -> Exact:
        total = [ZERO] * math.prod(self.in_shape)
        for value, row in zip(y.flatten(), self.rows, strict=True):
            if value:
                for j, w in row:
                    total[j] += w * value
        return np.array([*total, None], dtype=object)[:-1].reshape(self.in_shape)

    def matrix(self) -> Exact:
        dense = np.full((len(self.rows), math.prod(self.in_shape)), ZERO, dtype=object)
        for i, row in enumerate(self.rows):
            for j, w in row:
                dense[i, j] += w
        return dense


class Fourier:
    """The transform of real images, a matrix at each frequency, and the adjoint of the transform."""

    def __init__(self, op: CertifiedFourier) -> None:
        self.real, self.imaginary, self.width = rational(op.real), rational(op.imaginary), op.op.in_size[1]

    def apply(self, x: Exact) -> Exact:
        h, m, out, into = self.real.shape
        w = self.width
        result = np.full((out, h, w), ZERO, dtype=object)
        for f, g in itertools.product(range(h), range(m)):
            share = fmpq(1 if 2 * g % w == 0 else 2, h * w)
            waves = {(r, c): _wave(share, fmpq(f * r, h) + fmpq(g * c, w)) for r in range(h) for c in range(w)}
            # e^{-iωj}: the imaginary part is minus the sine
            re = [sum((wave[0] * x[i, r, c] for (r, c), wave in waves.items()), ZERO) for i in range(into)]
            im = [sum((-wave[1] * x[i, r, c] for (r, c), wave in waves.items()), ZERO) for i in range(into)]
            for o in range(out):
                real, imaginary = self.real[f, g, o], self.imaginary[f, g, o]
                a = sum((real[i] * re[i] - imaginary[i] * im[i] for i in range(into)), ZERO)
                b = sum((imaginary[i] * re[i] + real[i] * im[i] for i in range(into)), ZERO)
                for (r, c), (cosine, sine) in waves.items():
                    result[o, r, c] += cosine * a - sine * b
        return result


def _wave(amplitude: fmpq, turns: fmpq) -> tuple[fmpq, fmpq]:
    """√amplitude·(cos, sin)(2π·turns), each rounded to BITS."""
    with ctx.workprec(BITS):
        parts = [(arb(amplitude).sqrt() * wave).mid().man_exp() for wave in arb.sin_cos_pi(arb(2 * turns))]
    sine, cosine = (fmpq(int(man)) * fmpq(2) ** int(exp) for man, exp in parts)
    return cosine, sine


_CACHE: WeakKeyDictionary[CertifiedOperator, Any] = WeakKeyDictionary()


def linear(op: CertifiedOperator) -> Any:
    """The exact operator, cached."""
    if op not in _CACHE:
        _CACHE[op] = Fourier(op) if isinstance(op, CertifiedFourier) else Linear(op)
    return _CACHE[op]


def apply(op: Any, x: Exact) -> Exact:
    """Wx."""
    return linear(op.inner).adjoint(x) if isinstance(op, CertifiedAdjoint) else linear(op).apply(x)


def adjoint(op: Any, y: Exact) -> Exact:
    """Wᵀy."""
    return linear(op.inner).apply(y) if isinstance(op, CertifiedAdjoint) else linear(op).adjoint(y)


def run(p: Primitive, *xs: Exact, longer: int = 1) -> Exact:
    """The exact map of a primitive, with `longer` times as many iterations."""
    return _proximal(p, *xs, longer=longer) if p.kind == "proximal" else RUN[p.kind](p, *xs)


def values(frozen: Frozen, x: Exact, longer: int = 1) -> list[Exact]:
    """The exact value of every vertex."""
    found = {id(frozen.graph.vertices[0]): x}
    for v in frozen.graph.vertices[1:]:
        found[id(v)] = run(v.primitive, *(found[id(i)] for i in v.inputs), longer=longer)
    return list(found.values())


def network(frozen: Frozen, x: Exact, longer: int = 1) -> Exact:
    return values(frozen, x, longer)[-1]


def off(frozen: Frozen, x: Tensor, longer: int = 1) -> Fraction:
    """‖executed - exact‖² on one input."""
    return fraction(square(rational(frozen(x[None])[0]) - network(frozen, rational(x), longer)))


def matrix(frozen: Frozen) -> Exact:
    """The matrix of an affine network: its columns are f(eₖ) - f(0)."""
    shape, n = frozen.in_shape, math.prod(frozen.in_shape)
    origin, *images = (
        network(frozen, rational(x.reshape(shape))).flatten()
        for x in (torch.zeros(n, dtype=torch.float64), *torch.eye(n, dtype=torch.float64))
    )
    return np.stack([image - origin for image in images], 1)


def _column(t: Tensor, x: Exact) -> Exact:
    return rational(t).reshape(-1, *[1] * (x.ndim - 1))


def _relu(x: Exact) -> Exact:
    return np.where(x > ZERO, x, ZERO)


def _hardtanh(x: Exact) -> Exact:
    return np.where(x > fmpq(1), fmpq(1), np.where(x < fmpq(-1), fmpq(-1), x))


SIGMA: dict[str, Callable[[Exact], Exact]] = {"relu": _relu, "hardtanh": _hardtanh}


def _affine(p: Any, x: Exact) -> Exact:
    y = apply(p.op, x)
    return y if p.bias is None else y + _column(p.bias, y)


def gradient(p: Any, x: Exact) -> Exact:
    """Wᵀσ(Wx + b)."""
    return adjoint(p.op, SIGMA[name_of(p.sigma)](_affine(p, x)))


def _descent(p: Any, x: Exact) -> Exact:
    return x - exact(p.h) * gradient(p, x)


def _proximal(p: Any, x: Exact, longer: int = 1) -> Exact:
    """Values are rounded to BITS after the point, as they would grow by hundreds of bits per iteration."""
    z, tau, h = x, exact(p.tau), exact(p.h)
    for _ in range(longer * p.iterations):
        z = z - tau * ((z - x) + h * gradient(p, z))
        z = np.array([fmpq((v * 2**BITS).floor(), 2**BITS) for v in z.flatten()] + [None])[:-1].reshape(z.shape)
    return 2 * z - x if p.reflect else z


def _series(p: Any, x: Exact) -> Exact:
    total = term = x
    for j in range(1, p.terms):
        term = apply(p.op, term) * (exact(p.h) / j)
        total = total + term
    return total


def _gather(p: Any, *xs: Exact) -> Exact:
    entries = [value for x in xs for value in x.flatten()]
    taken = [ZERO if i < 0 else entries[i] for i in p.index.flatten().tolist()]
    return np.array([*taken, None], dtype=object)[:-1].reshape(tuple(p.index.shape))


def _sum(p: Any, *xs: Exact) -> Exact:
    terms = [exact(c) * x for c, x in zip(p.coefficients, xs, strict=True)]
    return np.sum(np.stack(terms), 0)


def _scale(p: Any, x: Exact) -> Exact:
    return x * (rational(p.factor) if p.factor.ndim == x.ndim else _column(p.factor, x))


def _pointwise(p: Any, x: Exact) -> Exact:
    return np.abs(x) if p.name == "abs" else SIGMA[p.name](x)


def _group_sort(p: Any, x: Exact) -> Exact:
    groups = x.reshape(p.group, -1, *x.shape[1:])
    return np.flip(np.sort(groups, 0), 0).reshape(x.shape)


def _householder(p: Any, x: Exact) -> Exact:
    half = len(x) // 2
    first, second = x[:half], x[half:]
    v = -_column(p.sine, x), _column(p.cosine, x)
    across = 2 * _relu(v[0] * first + v[1] * second)
    return np.concatenate([first - v[0] * across, second - v[1] * across])


def _avg_pool(p: Any, x: Exact) -> Exact:
    (a, b), (channels, height, width) = p.window, x.shape
    out = np.empty((channels, height // a, width // b), dtype=object)
    for c, r, s in np.ndindex(out.shape):
        window = x[c, r * a : r * a + a, s * b : s * b + b]
        out[c, r, s] = sum(window.flatten(), ZERO) / exact(p.divisor)
    return out


def _max_pool(p: Any, x: Exact) -> Exact:
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = p.kernel, p.stride, p.padding, p.dilation
    spans = x.shape[1] + 2 * ph - dh * (kh - 1) - 1, x.shape[2] + 2 * pw - dw * (kw - 1) - 1
    out = np.empty((len(x), spans[0] // sh + 1, spans[1] // sw + 1), dtype=object)
    for c, r, s in np.ndindex(out.shape):
        places = [(r * sh + a * dh - ph, s * sw + b * dw - pw) for a in range(kh) for b in range(kw)]
        out[c, r, s] = max(x[c, i, j] for i, j in places if 0 <= i < x.shape[1] and 0 <= j < x.shape[2])
    return out


RUN: dict[str, Callable[..., Exact]] = {
    "constant": lambda p: rational(p.value),
    "gather": _gather,
    "sum": _sum,
    "scale": _scale,
    "affine": _affine,
    "descent": _descent,
    "proximal": _proximal,
    "series": _series,
    "avg_pool": _avg_pool,
    "max_pool": _max_pool,
    "pointwise": _pointwise,
    "group_sort": _group_sort,
    "householder": _householder,
}
