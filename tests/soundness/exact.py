"""Every primitive once more, in exact rational arithmetic: the maps that the certificates are about.

Written from the definitions, with loops, and with nothing shared with what runs. All stored numbers are float64, so
every map here is a rational one, which python-flint's fmpq keeps exact; but for the waves of a spectral map, which are
computed to BITS.
"""

import itertools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from flint import arb, ctx, fmpq
from torch import Tensor

from lipflow.frozen import Frozen, Primitive
from lipflow.frozen.linear import Map

Exact = np.ndarray  # of fmpq
ZERO = fmpq(0)
BITS = 500
NEGLIGIBLE = Fraction(1, 2**400)  # more than cutting waves, or an iteration that contracts, at BITS can add up to


def exact(value: float) -> fmpq:
    return fmpq(*value.as_integer_ratio())


def rational(t: Tensor) -> Exact:
    """A float64 tensor as rationals."""
    flat = [exact(v) for v in t.detach().flatten().tolist()]
    return np.array([*flat, None], dtype=object)[:-1].reshape(tuple(t.shape))


def fraction(q: fmpq) -> Fraction:
    return Fraction(int(q.p), int(q.q))


def square(x: Exact) -> fmpq:
    """‖x‖²."""
    return sum((v * v for v in x.flatten()), ZERO)


class Linear:
    """W as the list of its entries, row by row: y[i] = Σ_j K[j] x[i·stride + j·dilation - before]."""

    def __init__(self, w: Map) -> None:
        weight = rational(w.weight)
        if w.geometry is None:
            self.out_shape, self.in_shape = (weight.shape[0],), (weight.shape[1],)
            self.rows = [list(enumerate(row)) for row in weight]
            return
        g = w.geometry
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

    def matrix(self) -> np.ndarray:
        """W in float64."""
        dense = np.zeros((len(self.rows), math.prod(self.in_shape)))
        for i, row in enumerate(self.rows):
            for j, w in row:
                dense[i, j] += float(fraction(w))
        return dense


def run(p: Primitive, x: Exact, longer: int = 1) -> Exact:
    """The exact map of a primitive; an iteration is run `longer` times as long."""
    return RUN[p.kind](p, x) if p.kind != "proximal" else _proximal(p, x, longer)


def rows(p: Primitive, xs: list[Exact], longer: int = 1) -> list[Exact]:
    """The exact map of a primitive on the rows of a batch; between a mirror and its mean an image is two of them."""
    if p.kind == "mirror":
        return [row for x in xs for row in (x, x[..., ::-1])]
    if p.kind == "mean":
        return [(a + b) / 2 for a, b in zip(xs[::2], xs[1::2], strict=True)]
    return [run(p, x, longer) for x in xs]


def network(frozen: Frozen, x: Exact, longer: int = 1) -> Exact:
    xs = [x]
    for p in frozen.primitives:
        xs = rows(p, xs, longer)
    (y,) = xs
    return y


_LINEAR: WeakKeyDictionary[Map, Linear] = WeakKeyDictionary()


def linear(w: Map) -> Linear:
    """The entries of a map, listed once."""
    if w not in _LINEAR:
        _LINEAR[w] = Linear(w)
    return _LINEAR[w]


def _column(t: Tensor, x: Exact) -> Exact:
    return rational(t).reshape(-1, *[1] * (x.ndim - 1))


def _relu(x: Exact) -> Exact:
    return np.where(x > ZERO, x, ZERO)


def _hardtanh(x: Exact) -> Exact:
    return np.where(x > fmpq(1), fmpq(1), np.where(x < fmpq(-1), fmpq(-1), x))


SIGMA: dict[str, Callable[[Exact], Exact]] = {"relu": _relu, "hardtanh": _hardtanh}


def _affine(p: Any, x: Exact) -> Exact:
    y = linear(p.map).apply(x)
    return y + _column(p.bias, y)


def gradient(p: Any, x: Exact) -> Exact:
    """Wᵀσ(Wx + b)."""
    return linear(p.map).adjoint(SIGMA[p.name](_affine(p, x)))


def _descent(p: Any, x: Exact) -> Exact:
    return x - exact(p.h) * gradient(p, x)


def _proximal(p: Any, x: Exact, longer: int) -> Exact:
    """Numbers would grow by hundreds of bits an iteration, so each keeps BITS after the point: NEGLIGIBLE."""
    z, tau, h = x, exact(p.tau), exact(p.h)
    for _ in range(longer * p.iterations):
        z = z - tau * ((z - x) + h * gradient(p, z))
        z = np.array([fmpq((v * 2**BITS).floor(), 2**BITS) for v in z.flatten()] + [None])[:-1].reshape(z.shape)
    return 2 * z - x if p.reflect else z


def _series(p: Any, x: Exact) -> Exact:
    total = term = x
    for j in range(1, p.terms):
        term = linear(p.map).apply(term) * (exact(p.h) / j)
        total = total + term
    return total


def _wave(amplitude: fmpq, turns: fmpq) -> tuple[fmpq, fmpq]:
    """√amplitude·(cos, sin)(2π·turns), each rounded to BITS."""
    before, ctx.prec = ctx.prec, BITS
    try:
        parts = [(arb(amplitude).sqrt() * wave).mid().man_exp() for wave in arb.sin_cos_pi(arb(2 * turns))]
    finally:
        ctx.prec = before
    sine, cosine = (fmpq(int(man)) * fmpq(2) ** int(exp) for man, exp in parts)
    return cosine, sine


def _spectral(p: Any, x: Exact) -> Exact:
    """RᵀGᵀEGRx: the transform of real images, a matrix at each frequency, and the adjoint of the transform."""
    real, imaginary = rational(p.real), rational(p.imaginary)
    h, m, out, into = real.shape
    w = p.width
    result = np.full((out, h, w), ZERO, dtype=object)
    for f, g in itertools.product(range(h), range(m)):
        share = fmpq(1 if 2 * g % w == 0 else 2, h * w)
        waves = {(r, c): _wave(share, fmpq(f * r, h) + fmpq(g * c, w)) for r in range(h) for c in range(w)}
        # e^{-iωj}, so that the imaginary part is minus the sine
        re = [sum((wave[0] * x[i, r, c] for (r, c), wave in waves.items()), ZERO) for i in range(into)]
        im = [sum((-wave[1] * x[i, r, c] for (r, c), wave in waves.items()), ZERO) for i in range(into)]
        for o in range(out):
            a = sum((real[f, g, o, i] * re[i] - imaginary[f, g, o, i] * im[i] for i in range(into)), ZERO)
            b = sum((imaginary[f, g, o, i] * re[i] + real[f, g, o, i] * im[i] for i in range(into)), ZERO)
            for (r, c), (cosine, sine) in waves.items():
                result[o, r, c] += cosine * a - sine * b
    return result


def _center(p: Any, x: Exact) -> Exact:
    return (x - _column(p.mean, x)) * _column(p.scale, x)


def _pointwise(p: Any, x: Exact) -> Exact:
    return _relu(x) if p.name == "relu" else np.abs(x)


def _group_sort(p: Any, x: Exact) -> Exact:
    groups = x.reshape(p.group, -1, *x.shape[1:])
    return np.flip(np.sort(groups, 0), 0).reshape(x.shape)


def _householder(p: Any, x: Exact) -> Exact:
    half = len(x) // 2
    first, second = x[:half], x[half:]
    v = -_column(p.sine, x), _column(p.cosine, x)
    across = 2 * _relu(v[0] * first + v[1] * second)
    return np.concatenate([first - v[0] * across, second - v[1] * across])


def _pad(p: Any, x: Exact) -> Exact:
    return np.concatenate([x, np.full((p.channels - len(x), *x.shape[1:]), ZERO, dtype=object)])


def _avg_pool(p: Any, x: Exact) -> Exact:
    k, (channels, height, width) = p.size, x.shape
    out = np.empty((channels, height // k, width // k), dtype=object)
    for c, r, s in np.ndindex(out.shape):
        out[c, r, s] = sum(x[c, r * k : r * k + k, s * k : s * k + k].flatten(), ZERO) / k
    return out


def _max_pool(p: Any, x: Exact) -> Exact:
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = p.kernel, p.stride, p.padding, p.dilation
    spans = x.shape[1] + 2 * ph - dh * (kh - 1) - 1, x.shape[2] + 2 * pw - dw * (kw - 1) - 1
    out = np.empty((len(x), spans[0] // sh + 1, spans[1] // sw + 1), dtype=object)
    for c, r, s in np.ndindex(out.shape):
        places = [(r * sh + a * dh - ph, s * sw + b * dw - pw) for a in range(kh) for b in range(kw)]
        out[c, r, s] = max(x[c, i, j] for i, j in places if 0 <= i < x.shape[1] and 0 <= j < x.shape[2])
    return out


def _space_to_depth(p: Any, x: Exact) -> Exact:
    b, (channels, height, width) = p.block, x.shape
    out = np.empty((channels * b * b, height // b, width // b), dtype=object)
    for c, i, j in np.ndindex(x.shape):
        out[c * b * b + i % b * b + j % b, i // b, j // b] = x[c, i, j]
    return out


RUN: dict[str, Callable[[Any, Exact], Exact]] = {
    "affine": _affine,
    "descent": _descent,
    "proximal": lambda p, x: _proximal(p, x, 1),
    "series": _series,
    "spectral": _spectral,
    "center": _center,
    "pointwise": _pointwise,
    "group_sort": _group_sort,
    "householder": _householder,
    "pad": _pad,
    "avg_pool": _avg_pool,
    "max_pool": _max_pool,
    "space_to_depth": _space_to_depth,
    "flatten": lambda p, x: x.flatten(),
    "truncate": lambda p, x: x[: p.classes],
}
