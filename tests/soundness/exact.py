"""Frozen networks in exact rational arithmetic, from their files: the exact maps of the certificates.

This file imports nothing of lipflow. Every primitive is written from its definition in docs/soundness.md, with loops.
Stored numbers are float64, so the maps are rational and fmpq of python-flint is exact; the waves of Fourier multipliers
and the iterates of proximal maps are computed to BITS.
"""

import itertools
import json
import math
import tempfile
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from flint import arb, ctx, fmpq, fmpq_mat
from safetensors import safe_open

Exact = np.ndarray  # of fmpq
ZERO = fmpq(0)
BITS = 2000
STEP = fmpq(1, 2**1200)  # of differences, which are exact derivatives of piecewise affine maps unless a kink is as near
NEGLIGIBLE = Fraction(1, 2**400)  # above the errors of waves, of iterates and of their differences


def exact(value: float | Fraction) -> fmpq:
    return fmpq(*value.as_integer_ratio())


def array(values: Iterable[Any], shape: Sequence[int]) -> Exact:
    return np.array([*values, None], dtype=object)[:-1].reshape(tuple(shape))


def rational(t: Any) -> Exact:
    """A float64 tensor or array as rationals."""
    t = np.asarray(t.detach() if hasattr(t, "detach") else t)
    return array(map(exact, t.ravel().tolist()), t.shape)


def fraction(q: fmpq) -> Fraction:
    return Fraction(int(q.p), int(q.q))


def floats(x: Exact) -> np.ndarray:
    """Rationals, each rounded to float64."""
    return np.vectorize(lambda q: float(fraction(q)))(x)


def square(x: Exact) -> Fraction:
    """‖x‖²."""
    return fraction(sum((v * v for v in x.flatten()), ZERO))


def root(q: Fraction) -> Fraction:
    """At least √q, and within a relative 2⁻¹⁰⁰ of it."""
    k = max(0, 100 - (q.numerator.bit_length() - q.denominator.bit_length()) // 2)
    return Fraction(math.isqrt((q.numerator << 2 * k) // q.denominator) + 1, 1 << k) if q else q


def bounds_squared_norm(bound: fmpq, matrix: Exact) -> bool:
    """Whether bound ≥ ‖W‖²: bound·I - WWᵀ is positive semidefinite iff elimination meets no pivot that is negative, or
    0 in a row that is not."""
    w = fmpq_mat(*matrix.shape, list(matrix.flatten()))
    gram = w * w.transpose() if w.nrows() <= w.ncols() else w.transpose() * w
    size = gram.nrows()
    rows = [[(bound if i == j else 0) - gram[i, j] for j in range(size)] for i in range(size)]
    for k, row in enumerate(rows):
        if row[k] < 0 or (row[k] == 0 and any(row[k:])):
            return False
        for i in range(k + 1, size):
            if rows[i][k] != 0:
                factor = rows[i][k] / row[k]
                rows[i] = [a - factor * b for a, b in zip(rows[i], row, strict=True)]
    return True


class Linear:
    """The entries of W, row by row: for each output, pairs of an input and a weight."""

    def __init__(self, in_shape: Sequence[int], out_shape: Sequence[int], rows: list[list[tuple[int, fmpq]]]) -> None:
        self.in_shape, self.out_shape, self.rows = tuple(in_shape), tuple(out_shape), rows

    def apply(self, x: Exact) -> Exact:
        flat = x.flatten()
        return array((sum((w * flat[j] for j, w in row), ZERO) for row in self.rows), self.out_shape)

    def transposed(self) -> "Linear":
        columns: list[list[tuple[int, fmpq]]] = [[] for _ in range(math.prod(self.in_shape))]
        for i, row in enumerate(self.rows):
            for j, w in row:
                columns[j].append((i, w))
        return Linear(self.out_shape, self.in_shape, columns)

    def matrix(self) -> Exact:
        dense = np.full((len(self.rows), math.prod(self.in_shape)), ZERO, dtype=object)
        for i, row in enumerate(self.rows):
            for j, w in row:
                dense[i, j] += w
        return dense


def _matrix(weight: Exact, geometry: Any) -> Linear:
    return Linear(weight.shape[1:], weight.shape[:1], [list(enumerate(row)) for row in weight])


def _convolution(weight: Exact, g: dict[str, Any]) -> Linear:
    """y[o, i] = Σ_{c, j} K[o, c, j] x[c, i·stride + j·dilation - before], with 0 outside or on a torus."""
    (out, grouped, height, width), size, stride, dilation = weight.shape, g["in_size"], g["stride"], g["dilation"]
    before, per_group = [sides[0] for sides in g["padding"]], out // g["groups"]
    spans = [size[i] + sum(g["padding"][i]) - dilation[i] * (k - 1) - 1 for i, k in enumerate((height, width))]
    out_shape = out, *(span // s + 1 for span, s in zip(spans, stride, strict=True))
    rows = []
    for o, r, c in itertools.product(*map(range, out_shape)):
        row: list[tuple[int, fmpq]] = []
        for i, a, b in itertools.product(range(grouped), range(height), range(width)):
            y, x = r * stride[0] + a * dilation[0] - before[0], c * stride[1] + b * dilation[1] - before[1]
            if g["padding_mode"] == "circular":
                y, x = y % size[0], x % size[1]
            if 0 <= y < size[0] and 0 <= x < size[1]:
                row.append((((o // per_group * grouped + i) * size[0] + y) * size[1] + x, weight[o, i, a, b]))
        rows.append(row)
    return Linear((grouped * g["groups"], *size), out_shape, rows)


def _fourier(real: Exact, imaginary: Exact, g: dict[str, Any]) -> Linear:
    """Σ over frequencies of c/(hw)·Re(e^{iωj}·M·e^{-iωj'}): c counts a frequency and its mirror image, if different.

    It depends on j - j' only, so it is a circular convolution with the kernel Σ c/(hw)·Re(M·e^{iωj}).
    """
    (h, m, out, into), w = real.shape, g["in_size"][1]
    kernel = np.full((out, into, h, w), ZERO, dtype=object)
    for f, k, r, c in itertools.product(range(h), range(m), range(h), range(w)):
        cosine, sine = _wave(fmpq(f * r, h) + fmpq(k * c, w))
        kernel[:, :, r, c] += (real[f, k] * cosine - imaginary[f, k] * sine) * fmpq(1 if 2 * k % w == 0 else 2, h * w)
    places = list(itertools.product(range(h), range(w)))
    rows = [
        [((i * h + y) * w + x, kernel[o, i, (r - y) % h, (c - x) % w]) for i in range(into) for y, x in places]
        for o in range(out)
        for r, c in places
    ]
    return Linear((into, h, w), (out, h, w), rows)


def _wave(turns: fmpq) -> tuple[fmpq, fmpq]:
    """cos and sin of 2π·turns, rounded to BITS."""
    with ctx.workprec(BITS):
        sine, cosine = (wave.mid().man_exp() for wave in arb.sin_cos_pi(arb(2 * turns)))
    rounded = [fmpq(int(man)) * fmpq(2) ** int(exp) for man, exp in (cosine, sine)]
    return rounded[0], rounded[1]


OPERATORS: dict[str, Callable[..., Linear]] = {"matrix": _matrix, "convolution": _convolution, "fourier": _fourier}


class Network:
    """The primitives and vertices of a file. The operator of a primitive is `w`; of a step, its adjoint is `wt`."""

    def __init__(self, description: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        self.domain, self.vertices = description["domain"], description["vertices"]
        self.primitives = [_primitive(p, tensors) for p in description["primitives"]]

    def kinds(self) -> list[str]:
        return [self.primitives[which].kind for which, *_ in self.vertices]

    def values(self, x: Exact, longer: int = 1) -> list[Exact]:
        """The value of every vertex, with `longer` times as many iterations."""
        found = [x]
        for which, *inputs in self.vertices[1:]:
            found.append(run(self.primitives[which], *(found[j] for j in inputs), longer=longer))
        return found

    def __call__(self, x: Exact, longer: int = 1) -> Exact:
        return self.values(x, longer)[-1]


def _primitive(p: dict[str, Any], tensors: dict[str, np.ndarray]) -> Any:
    """A primitive whose numbers are exact: integers, rationals, arrays of them, and operators."""
    fields: dict[str, Any] = {}
    for key, value in p.items():
        if isinstance(value, str) and value in tensors:
            value = tensors[value] if tensors[value].dtype.kind == "i" else rational(tensors[value])
        elif isinstance(value, dict):
            weights = (rational(tensors[value[name]]) for name in ("weight", "real", "imaginary") if name in value)
            w = OPERATORS[value["kind"]](*weights, value["geometry"])
            fields["w"] = w.transposed() if value["adjoint"] else w
            if "sigma" in p:
                fields["wt"] = fields["w"].transposed()
        elif isinstance(value, float):
            value = exact(value)
        fields[key] = value
    return SimpleNamespace(**fields)


_CACHE: WeakKeyDictionary[Any, Network] = WeakKeyDictionary()


def of(frozen: Any) -> Network:
    """The exact map of a frozen network, from the file that it saves."""
    if frozen not in _CACHE:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "frozen.safetensors"
            frozen.save(path)
            with safe_open(path, "numpy") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                _CACHE[frozen] = Network(json.loads(file.metadata()["lipflow"]), tensors)
    return _CACHE[frozen]


def off(frozen: Any, x: Any, longer: int = 1) -> Fraction:
    """‖executed - exact‖² on one input."""
    return square(rational(frozen(x[None])[0]) - of(frozen)(rational(x), longer))


def jacobians(function: Callable[..., Exact], *xs: Exact) -> list[Exact]:
    """The matrices of derivatives by each input, of a piecewise affine map, at a point that is not on a kink."""
    origin, found = function(*xs), []
    for k, x in enumerate(xs):
        columns = []
        for place in np.ndindex(x.shape):
            moved = x.copy()
            moved[place] += STEP
            columns.append((function(*xs[:k], moved, *xs[k + 1 :]) - origin).flatten() / STEP)
        found.append(np.stack(columns, 1))
    return found


# The primitives


def run(p: Any, *xs: Exact, longer: int = 1) -> Exact:
    """The exact map of a primitive, with `longer` times as many iterations."""
    return _proximal(p, *xs, longer=longer) if p.kind == "proximal" else RUN[p.kind](p, *xs)


def _column(t: Exact, x: Exact) -> Exact:
    return t.reshape(-1, *[1] * (x.ndim - 1))


def _relu(x: Exact) -> Exact:
    return np.where(x > ZERO, x, ZERO)


def _hardtanh(x: Exact) -> Exact:
    return np.where(x > fmpq(1), fmpq(1), np.where(x < fmpq(-1), fmpq(-1), x))


POINTWISE: dict[str, Callable[[Exact], Exact]] = {"relu": _relu, "hardtanh": _hardtanh, "abs": np.abs}


def _affine(p: Any, x: Exact) -> Exact:
    y = p.w.apply(x)
    return y if p.bias is None else y + _column(p.bias, y)


def gradient(p: Any, x: Exact) -> Exact:
    """Wᵀσ(Wx + b)."""
    return p.wt.apply(POINTWISE[p.sigma](_affine(p, x)))


def _proximal(p: Any, x: Exact, longer: int = 1) -> Exact:
    """Values are rounded to BITS after the point, as they would grow by hundreds of bits per iteration."""
    z = x
    for _ in range(longer * p.iterations):
        z = z - p.tau * ((z - x) + p.h * gradient(p, z))
        z = array((fmpq((v * 2**BITS).floor(), 2**BITS) for v in z.flatten()), z.shape)
    return 2 * z - x if p.reflect else z


def _series(p: Any, x: Exact) -> Exact:
    total = term = x
    for j in range(1, p.terms):
        term = p.w.apply(term) * (p.h / j)
        total = total + term
    return total


def _gather(p: Any, *xs: Exact) -> Exact:
    entries = [value for x in xs for value in x.flatten()]
    return array((ZERO if i < 0 else entries[i] for i in p.index.flatten().tolist()), p.index.shape)


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
        out[c, r, s] = sum(window.flatten(), ZERO) / p.divisor
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
    "constant": lambda p: p.value,
    "gather": _gather,
    "sum": lambda p, *xs: sum(exact(c) * x for c, x in zip(p.coefficients, xs, strict=True)),
    "scale": lambda p, x: x * (p.factor if p.factor.ndim == x.ndim else _column(p.factor, x)),
    "affine": _affine,
    "descent": lambda p, x: x - p.h * gradient(p, x),
    "proximal": _proximal,
    "series": _series,
    "avg_pool": _avg_pool,
    "max_pool": _max_pool,
    "pointwise": lambda p, x: POINTWISE[p.name](x),
    "group_sort": lambda p, x: np.flip(np.sort(x.reshape(p.group, -1, *x.shape[1:]), 0), 0).reshape(x.shape),
    "householder": _householder,
}
