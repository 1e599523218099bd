"""The independent checker of certificates.

    python -m lipflow.check FOLDER [--full]

It needs Python and NumPy and imports nothing else of lipflow. From the weights it verifies every claimed norm and
derives L, the rounding bound E and the pair bounds. From the stored scores it derives every label and radius. From the
images it recomputes the scores: of all images with --full, otherwise of a random sample. It cannot verify the true
labels, the names of the split and the network, and the texts `name`, `size` and `how` of the ledger.
Proofs: docs/norms.md and docs/soundness.md.
"""

import hashlib
import json
import math
import stat
import sys
import zipfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

U, TINY = Fraction(1, 2**53), Fraction(1, 2**1022)


class Rejected(Exception):
    """The certificate is not accepted; the message says why."""


def require(holds, why):
    if not holds:
        raise Rejected(why)


# Limits. Otherwise a few bytes could claim a shape or a torus that fills the memory, and a pipe would never end

FILE_BYTES = 2**27  # of certificate.json, and of the header of frozen.safetensors
NUMBERS = 2**27  # in an array, and in the values of a network for an image: 1 GB. cpl-xl has less than 2²⁴ values


def limited(numbers, name):
    require(numbers <= NUMBERS, f"{name} takes {numbers} numbers, above the limit of this checker, {NUMBERS}")
    return numbers


def regular_file(path, limit=math.inf):
    status = path.stat()
    require(stat.S_ISREG(status.st_mode), f"{path.name} is not a regular file")
    require(
        status.st_size <= limit, f"{path.name} has {status.st_size} bytes, above the limit of this checker, {limit}"
    )
    return path


# What a description of a network may be. The fields, types and names of a file are checked here and nowhere else


class Either(tuple):
    """A pattern that matches what one of several patterns matches."""


def matches(x, pattern):
    """Whether a value has a type, is in a range, equals a constant, or matches a list of some, a tuple or a dict."""
    if isinstance(pattern, Either):
        return any(matches(x, p) for p in pattern)
    if isinstance(pattern, type):
        return type(x) is pattern
    if isinstance(pattern, range):
        return type(x) is int and x in pattern
    if isinstance(pattern, list):
        return type(x) is list and len(x) > 0 and all(matches(y, pattern[0]) for y in x)
    if isinstance(pattern, tuple):
        return type(x) is list and len(x) == len(pattern) and all(map(matches, x, pattern))
    if isinstance(pattern, dict):
        return type(x) is dict and x.keys() == pattern.keys() and all(matches(x[k], p) for k, p in pattern.items())
    return type(x) is type(pattern) and x == pattern


COUNT, SIZE = range(2**31), range(1, 2**31)
SIZES = SIZE, SIZE
BIAS, SIGMA = Either((str, None)), Either(("relu", "hardtanh"))
PADDING = dict(padding=((COUNT, COUNT), (COUNT, COUNT)), padding_mode=Either(("zeros", "circular")))
WINDOWS = dict(in_size=SIZES, **PADDING, stride=SIZES, dilation=SIZES, groups=SIZE)
OPERATOR = Either(
    (
        dict(kind="matrix", adjoint=bool, geometry={}, weight=str),
        dict(kind="convolution", adjoint=bool, geometry=WINDOWS, weight=str),
        dict(kind="fourier", adjoint=bool, geometry=dict(in_size=SIZES), real=str, imaginary=str),
    )
)
STEP = dict(op=OPERATOR, bias=BIAS, sigma=SIGMA, h=float)
PRIMITIVE = Either(
    (
        dict(kind="input", shape=[SIZE]),
        dict(kind="constant", value=str),
        dict(kind="gather", index=str, sizes=[SIZE]),
        dict(kind="sum", coefficients=[float]),
        dict(kind="scale", factor=str),
        dict(kind="affine", op=OPERATOR, bias=BIAS),
        dict(kind="descent", **STEP, follows=bool),
        dict(kind="proximal", **STEP, tau=float, iterations=SIZE, reflect=bool),
        dict(kind="series", op=OPERATOR, h=float, terms=SIZE),
        dict(kind="avg_pool", window=SIZES, divisor=float),
        dict(kind="max_pool", kernel=SIZES, stride=SIZES, padding=(COUNT, COUNT), dilation=SIZES),
        dict(kind="pointwise", name=Either(("relu", "hardtanh", "abs"))),
        dict(kind="group_sort", group=SIZE),
        dict(kind="householder", sine=str, cosine=str),
    )
)
NETWORK = dict(schema=2, domain=(float, float), primitives=list, vertices=[[COUNT]], names=[str], note=str)
TENSORS = ("bias", "value", "factor", "index", "sine", "cosine")  # the fields of a primitive that name a tensor


def require_description(description, tensors):
    """Require that a description has the right fields, and that every primitive and every tensor is used."""
    require(matches(description, NETWORK), "the network, its domain, a name or a vertex has a wrong field or type")
    primitives, names = description["primitives"], set()
    for i, p in enumerate(primitives):
        require(matches(p, PRIMITIVE), f"primitive {i} has an unknown kind, or a wrong field or type: {str(p)[:200]}")
        op = p.get("op", {})
        names |= {p[key] for key in TENSORS if p.get(key) is not None}
        names |= {op[key] for key in ("weight", "real", "imaginary") if key in op}
    require(names == tensors.keys(), f"tensors are missing or not used: {sorted(names ^ tensors.keys())[:9]}")
    used = {which for which, *_ in description["vertices"]}
    require(used == set(range(len(primitives))), "a vertex has no primitive, or a primitive has no vertex")
    require(len(description["names"]) == len(description["vertices"]), "the network has not one name for each vertex")


# Exact rationals, rounded outwards at the end


def number(x):
    """A number of a file as a rational. Strings are rejected: Fraction("1e999999999") would fill the memory."""
    require(isinstance(x, int | float), f"{x!r} is not a number")
    return Fraction(x)


def gamma(n):
    require(n < 2**51, f"the error model does not cover sums of {n} terms")
    return n * U / (1 - n * U)


def in_range(error):
    """The error, if it is at most 2⁹⁰⁰. It is at least u times every intermediate value, so none has overflowed."""
    require(error <= 2**900, "intermediate values may be beyond float64")
    return error


def up(q):
    x = max(float(q), 2.0**-1022) if q > 0 else float(q)  # some processors read smaller numbers as 0
    return x if math.isinf(x) or Fraction(x) >= q else math.nextafter(x, math.inf)


def shortened(q):
    """A number of at least 0, rounded up to 64 bits: exact sums and products of many terms are long."""
    power = Fraction(2) ** (64 + q.denominator.bit_length() - q.numerator.bit_length())
    return math.ceil(q * power) / power


def sqrt_up(q):
    a, b = q.numerator, q.denominator
    k = max(0, 61 - (a * b).bit_length() // 2)
    square = a * b << 2 * k
    root = math.isqrt(square)
    return Fraction(root + (root * root < square), b << k)


def square_sum(x):
    """The greatest Σ x² over the last two axes in a batch, rounded up."""
    terms = x.shape[-1] * x.shape[-2]
    return (Fraction(float((x * x).sum((-2, -1)).max())) + terms * TINY) / (1 - gamma(terms))


def norm_up(x):
    scale = power_of_two(x)
    if not scale:
        return Fraction(0)
    return (sqrt_up(square_sum((x / scale).reshape(1, -1))) + x.size * TINY) * Fraction(scale)


def power_of_two(x):
    top = float(np.abs(x).max()) if x.size else 0.0
    return math.ldexp(1.0, min(max(math.frexp(top)[1] - 1, -1021), 1021)) if top else 0.0


# Norms: the claimed bound is verified, which is cheaper than computing one (docs/norms.md)


def transposed(x):
    return np.swapaxes(x, -1, -2)


def symmetric(g):
    return np.tril(g) + transposed(np.tril(g, -1))


def verify_gram(w, ceiling, name):
    """Prove λmax(WWᵀ) ≤ ceiling for a batch of matrices."""
    w = w if w.shape[-2] <= w.shape[-1] else transposed(w)
    m, n = w.shape[-2:]
    verify_band((w @ transposed(w))[:, None], None, gamma(n) * square_sum(w) + m * n * TINY, ceiling, name)


def verify_band(diagonal, below, product, ceiling, name):
    """Prove λmax(G) + product ≤ ceiling for G with these blocks (batch, strips, q, q) on the diagonal and below it.

    `product` bounds the rounding of G. The proof is a Cholesky factor of μI - G, with μ below the ceiling by a slack.
    """
    strips, q = diagonal.shape[1:3]
    length, band, entries = min(strips, 2) * q, min(strips, 3) * q, np.arange(q)
    least = Fraction(float(np.trace(diagonal, axis1=-2, axis2=-1).sum(-1).min()))
    slack = gamma(length) * (strips * q * ceiling - least) + 8 * U * length * sqrt_up(Fraction(strips)) * ceiling
    mu = float(ceiling - product - slack)
    require(mu >= 2.0**-900, f"{name}: the claimed norm is below what can be proved")
    shifted = -symmetric(diagonal)
    shifted[..., entries, entries] += mu
    residual, weight, last = Fraction(0), Fraction(0), np.empty(0)
    for t in range(strips):
        row = pivot = shifted[:, t]
        try:
            if t:
                row = -transposed(np.linalg.solve(last, transposed(below[:, t - 1])))
                residual += 2 * square_sum(-below[:, t - 1] - row @ transposed(last))
                pivot = pivot - row @ transposed(row)
            last = np.tril(np.linalg.cholesky(pivot))
        except np.linalg.LinAlgError:
            raise Rejected(f"{name}: the claimed norm is below the true one") from None
        row = np.concatenate([row, last], -1) if t else last
        residual += square_sum(shifted[:, t] - symmetric(row @ transposed(row)))
        weight += square_sum(row)
    pivot = Fraction(float(np.abs(shifted[..., entries, entries]).max()))
    proved = Fraction(mu) + sqrt_up(residual) / (1 - U) + gamma(length) * weight + product
    proved += U * pivot / (1 - U) + band * (length + 1) * TINY
    require(proved <= ceiling, f"{name}: the claimed norm could not be proved")


def verify_strips(taps, axis, ceiling, name):
    """Prove λmax(WWᵀ) ≤ ceiling for a convolution along one axis, whose taps are matrices (taps, a, b).

    The outputs are cut into strips so thick that only neighbours read a common input: WWᵀ is block tridiagonal.
    """
    (_, a, b), stride, extent = taps.shape, axis["stride"], axis["extent"]
    thick = max(1, -(-extent // stride) - 1)
    count, step, window = -(-axis["outputs"] // thick), thick * stride, (thick - 1) * stride + extent
    limited(count * (3 * (thick * a) ** 2 + window + thick), f"{name}: the proof of its norm")
    whole, t = toeplitz(taps, thick, axis), np.arange(count)[:, None]
    q, n, shared = thick * a, window * b, max(window - step, 0) * b
    places = t * step + np.arange(window) - axis["before"]
    inside = (places >= 0) & (places < axis["size"])
    exist = np.concatenate([t * thick + np.arange(thick) < axis["outputs"], inside], 1)
    pairs = np.concatenate([np.roll(exist, 1, 0) & (t > 0), exist], 1)
    kinds, kind = np.unique(pairs, axis=0, return_inverse=True)  # all strips away from the border are equal
    diagonal, below, squares = [], [], []
    for pair in kinds.reshape(-1, 2, thick + window):
        last, this = ((whole * e[:thick, None, None, None] * e[thick:, None]).reshape(q, n) for e in pair)
        diagonal.append(this @ this.T)
        below.append(this[:, :shared] @ last[:, n - shared :].T)
        squares.append(square_sum(this[None]))
    kind = kind.reshape(-1)
    product = gamma(n) * sum(squares[k] for k in kind) + min(count, 3) * q * n * TINY
    verify_band(np.stack(diagonal)[None, kind], np.stack(below)[None, kind[1:]], product, ceiling, name)


def toeplitz(taps, outputs, axis):
    """The matrix of some outputs along one axis: taps (taps, a, b) to (outputs, a, positions, b)."""
    (_, a, b), stride, extent = taps.shape, axis["stride"], axis["extent"]
    positions = (outputs - 1) * stride + extent
    limited(outputs * a * positions * b, "a matrix of outputs")
    matrix = np.zeros((outputs, a, positions, b))
    for i in range(outputs):
        matrix[i, :, i * stride : i * stride + extent : axis["dilation"]] = np.swapaxes(taps, 0, 1)
    return matrix


def verify_norm(w, claim, name):
    """Prove ‖W‖ ≤ claim["norm"] for a matrix or a convolution, the `Linear` w."""
    scale, norm = power_of_two(w.weight), number(claim["norm"])
    if not scale:
        return
    weight, underflow = w.weight / scale, w.weight.size * w.entries * TINY
    norm = norm / Fraction(scale) - underflow
    require(norm > 0, f"{name}: the claimed norm is below the true one")
    if w.axes is None:
        verify_gram(weight[None], norm**2, name)
        return
    (rows, columns), exact = w.axes, [not w.circular and list(side) == [0, 0] for side in claim["torus"]]
    integral = all(type(n) is int and n < 2**29 for side in claim["torus"] for n in side)
    require(integral and len(exact) == 2 and exact[0] >= exact[1], f"{name}: {claim['torus']} is not a torus")
    kernels = weight.reshape(w.groups, -1, *weight.shape[1:])
    if all(exact):
        limited(weight.size * columns["outputs"] * columns["size"], f"{name}: the proof of its norm")
        for kernel in kernels:
            taps = np.stack([toeplitz(k, columns["outputs"], columns) for k in kernel.transpose(2, 3, 0, 1)])
            taps = taps[:, :, :, columns["before"] : columns["before"] + columns["size"]]
            taps = taps.reshape(len(taps), math.prod(taps.shape[1:3]), math.prod(taps.shape[3:]))
            verify_strips(taps, rows, norm**2, name)
        return
    tori = [
        (1, 1, 1) if is_exact else torus(axis, w.circular, side, name)
        for axis, side, is_exact in zip(w.axes, claim["torus"], exact, strict=True)
    ]
    twist, taps = [t for _, t in claim["torus"]], math.prod(weight.shape[2:])
    for kernel in kernels:
        magnitude = sqrt_up(square_sum(np.abs(kernel).sum((2, 3)))) / (1 - gamma(taps))
        error = 2 * (gamma(taps) + 16 * U) * magnitude + 2 * weight.size * taps * TINY
        rest = norm / sqrt_up(Fraction(tori[0][2] * tori[1][2])) - error
        require(rest > 0, f"{name}: the claimed norm is below the rounding error of its symbol")
        ceiling, (out, grouped, height, width) = rest**2 * tori[0][1] * tori[1][1], kernel.shape
        if exact[0]:
            kernel = kernel.transpose(2, 0, 1, 3).reshape(height * out, grouped, width, 1)
            for s in symbols_of(kernel, (columns, rows), tori[::-1], twist[::-1]):
                s = s.reshape(2, height, out, -1).transpose(1, 0, 2, 3).reshape(height, 2 * out, -1)
                verify_strips(s, rows, ceiling, name)
            continue
        for s in symbols_of(kernel, w.axes, tori, twist):
            verify_gram(s, ceiling, name)


def torus(axis, circular, claimed, name):
    """(side, stride whose aliases add, most outputs at one position) of a claimed torus that must fit this axis."""
    n, k, s, before = axis["size"], axis["kernel"], axis["stride"], axis["before"]
    side, twist = claimed
    if circular:
        require((side, twist) == (n, 0), f"{name}: circular padding needs the torus [{n}, 0], not {claimed}")
        places = n // math.gcd(n, s)  # of the outputs, one after the other, again and again
        return n, s if n % s == 0 else 1, -(-axis["outputs"] // places)
    least = s if k == 1 else max(n + before, (axis["outputs"] - 1) * s - before + axis["extent"])
    fits = least <= side <= 2 * (least + s) and side % s == 0
    require(fits, f"{name}: the torus needs a side of {least} or slightly more, a multiple of {s}, not {side}")
    require(twist in (0, 1), f"{name}: a twist is 0 or 1, not {twist}")
    return side, s, 1


def symbols_of(kernel, axes, tori, twist):
    """Σ_j K_j e^{iω·dj} at half of the frequencies, aliases side by side, as real matrices [[Re, -Im], [Im, Re]]."""
    out, grouped, height, width = kernel.shape
    (n1, s1, _), (n2, s2, _) = tori
    c1, c2 = n1 // s1, n2 // s2
    limited(4 * s1 * n2 * (out * grouped + height * width), "a symbol")
    sizes = zip(axes, (height, width), (2 * n1, 2 * n2), strict=True)  # reduced here, so integers are below 2⁶²
    taps1, taps2 = (np.array([[axis["dilation"] * j % turn] for j in range(k)]) for axis, k, turn in sizes)
    for f in range((c1 + 1) // 2 if twist[0] else c1 // 2 + 1):
        rows = f + c1 * np.arange(s1)
        columns = (np.arange(c2)[:, None] + c2 * np.arange(s2)).reshape(-1)
        turn1 = (2 * rows[None] + twist[0]) * taps1 % (2 * n1)
        turn2 = (2 * columns[None] + twist[1]) * taps2 % (2 * n2)
        turns = turn1[:, None, :, None] * n2 + turn2[None, :, None, :] * n1
        cosine, sine = unit_circle(turns % (2 * n1 * n2), 2 * n1 * n2)
        parts = []
        for wave in (cosine, sine):
            part = wave.reshape(height * width, -1).T @ kernel.reshape(out * grouped, -1).T
            part = part.reshape(s1, c2, s2, out, grouped).transpose(1, 3, 0, 2, 4)
            parts.append(part.reshape(c2, out, s1 * s2 * grouped))
        re, im = parts
        yield np.concatenate([np.concatenate([re, -im], -1), np.concatenate([im, re], -1)], -2)


def unit_circle(t, turn):
    """cos and sin of 2π·t/turn for integers 0 ≤ t < turn, reduced to an eighth of a turn: with errors of at most 8u."""
    octant, rest = t * 8 // turn, t * 8 % turn
    angle = np.where(octant % 2 == 1, turn - rest, rest) * (math.pi / 4) / turn
    swap = (octant + 1) // 2 % 2 == 1
    x, y = np.where(swap, np.sin(angle), np.cos(angle)), np.where(swap, np.cos(angle), np.sin(angle))
    return np.where((octant >= 2) & (octant < 6), -x, x), np.where(octant >= 4, -y, y)


# Linear operators and their rounding errors


class Operator:
    """A linear map with a claimed norm. Subclasses have `apply`, `adjoint`, and bounds on their rounding errors."""

    in_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    norm = Fraction(0)

    @property
    def entries(self):
        return math.prod(self.in_shape) + math.prod(self.out_shape)


class Adjoint(Operator):
    def __init__(self, op):
        self.op, self.in_shape, self.out_shape, self.norm = op, op.out_shape, op.in_shape, op.norm
        self.apply, self.adjoint = op.adjoint, op.apply
        self.apply_error, self.adjoint_error = op.adjoint_error, op.apply_error


class Linear(Operator):
    """A matrix, or a convolution with its geometry."""

    verify = verify_norm

    def __init__(self, weight, geometry):
        self.axes: Any = None
        self.weight, self.groups, self.circular, self.repeats = weight, 1, False, 1
        if geometry is None:
            require(weight.ndim == 2 and weight.size > 0, f"a weight of shape {weight.shape} is not a matrix")
            self.dots, (self.out_shape, self.in_shape) = weight.shape[::-1], [(n,) for n in weight.shape]
            sums = np.abs(weight).sum(1), np.abs(weight).sum(0)
        else:
            sums = self._convolution(geometry)
        terms = max(weight.shape) if geometry is None else weight.size
        product = Fraction(float(sums[0].max())) * Fraction(float(sums[1].max())) * self.repeats
        self.spread = sqrt_up(product / (1 - gamma(terms)) ** 2) + terms * TINY

    def _convolution(self, geometry):
        require(self.weight.ndim == 4 and self.weight.size > 0, f"a kernel has four axes, not {self.weight.ndim}")
        out, grouped, height, width = self.weight.shape
        self.groups, self.circular = geometry["groups"], geometry["padding_mode"] == "circular"
        require(out % self.groups == 0, "groups do not divide the channels")
        self.axes = []
        for i, k in enumerate((height, width)):
            n, (before, after) = geometry["in_size"][i], geometry["padding"][i]
            s, d = geometry["stride"][i], geometry["dilation"][i]
            extent = d * (k - 1) + 1
            outputs = (n + before + after - extent) // s + 1
            require(outputs >= 1, "the kernel does not fit its input")
            self.axes.append(
                dict(size=n, kernel=k, before=before, after=after, stride=s, dilation=d, extent=extent, outputs=outputs)
            )
        self.in_shape = (self.groups * grouped, *(a["size"] for a in self.axes))
        self.out_shape = (out, *(a["outputs"] for a in self.axes))
        padded = self.in_shape[0] * math.prod(a["size"] + a["before"] + a["after"] for a in self.axes)
        limited(padded + math.prod(self.out_shape), "a convolution")
        if self.circular:
            self.repeats = math.prod(-(-(a["size"] + a["before"] + a["after"]) // a["size"]) for a in self.axes)
        self.dots = grouped * height * width + 1, out // self.groups * height * width + 1 + self.repeats
        magnitude = np.abs(self.weight)
        return magnitude.sum((1, 2, 3)), magnitude.reshape(self.groups, -1, *self.weight.shape[1:]).sum((1, 3, 4))

    def apply_error(self, reach):
        return self._error(self.dots[0], reach)

    def adjoint_error(self, reach):
        return self._error(self.dots[1], reach)

    def _error(self, dot, reach):
        return in_range(gamma(dot) * self.spread * reach + dot * self.repeats * self.entries * TINY)

    def _windows(self):
        for a in range(self.weight.shape[2]):
            for b in range(self.weight.shape[3]):
                spans = []
                for axis, tap in zip(self.axes, (a, b), strict=True):
                    start = tap * axis["dilation"]
                    spans.append(slice(start, start + (axis["outputs"] - 1) * axis["stride"] + 1, axis["stride"]))
                yield self.weight[:, :, a, b].reshape(self.groups, -1, self.weight.shape[1]), tuple(spans)

    def _places(self):
        return [np.arange(-a["before"], a["size"] + a["after"]) for a in self.axes]

    def apply(self, x):
        if self.axes is None:
            return x @ self.weight.T
        x = x.reshape(len(x), self.groups, -1, *x.shape[2:])
        if self.circular:
            rows, columns = (p % a["size"] for p, a in zip(self._places(), self.axes, strict=True))
            padded = x[..., rows, :][..., columns]
        else:
            padded = np.pad(x, [(0, 0)] * 3 + [(a["before"], a["after"]) for a in self.axes])
        sizes = [a["outputs"] for a in self.axes]
        total: Any = 0.0
        for tap, (rows, columns) in self._windows():
            window = padded[..., rows, columns]
            total = total + tap @ window.reshape(*window.shape[:3], -1)
        return total.reshape(len(x), -1, *sizes)

    def adjoint(self, y):
        if self.axes is None:
            return y @ self.weight
        grouped, sizes = self.weight.shape[1], [a["outputs"] for a in self.axes]
        y = y.reshape(len(y), self.groups, -1, math.prod(sizes))
        spans = [a["size"] + a["before"] + a["after"] for a in self.axes]
        padded = np.zeros((len(y), self.groups, grouped, *spans))
        for tap, (rows, columns) in self._windows():
            padded[..., rows, columns] += (np.swapaxes(tap, 1, 2) @ y).reshape(*padded.shape[:3], *sizes)
        for axis, places, dim in zip(self.axes, self._places(), (-2, -1), strict=True):
            moved = np.moveaxis(padded, dim, 0)
            folded = np.zeros((axis["size"], *moved.shape[1:]))
            inside = slice(None) if self.circular else slice(axis["before"], axis["before"] + axis["size"])
            np.add.at(folded, places[inside] % axis["size"], moved[inside])
            padded = np.moveaxis(folded, 0, dim)
        return padded.reshape(len(y), -1, *padded.shape[3:])

    def skew(self):
        """Whether W = -Wᵀ exactly."""
        w = self.weight
        if self.axes is None:
            return w.shape[0] == w.shape[1] and np.array_equal(w, -w.T)
        centred = all(a["stride"] == 1 and 2 * a["before"] == 2 * a["after"] == a["extent"] - 1 for a in self.axes)
        if not centred or w.shape[0] != w.shape[1] * self.groups:
            return False
        blocks = w.reshape(self.groups, w.shape[1], *w.shape[1:])
        return np.array_equal(blocks, -np.swapaxes(blocks, 1, 2)[..., ::-1, ::-1])


class Fourier(Operator):
    """A matrix at each frequency, between real Fourier transforms (docs/soundness-spectral.md)."""

    def __init__(self, real, imaginary, geometry):
        self.re, self.im, (h, w) = real, imaginary, geometry["in_size"]
        fits = self.re.ndim == 4 and self.re.shape == self.im.shape and self.re.size
        require(fits and self.re.shape[:2] == (h, w // 2 + 1), "a Fourier map needs h × (w // 2 + 1) matrices")
        self.width, m = w, self.re.shape[1]
        self.in_shape, self.out_shape = (self.re.shape[3], h, w), (self.re.shape[2], h, w)
        limited(4 * h * h + 2 * m * w, "a Fourier transform")
        c = np.array([1.0 if 2 * f % w == 0 else 2.0 for f in range(m)])
        cosine, sine = (np.sqrt(c / w)[:, None] * t for t in unit_circle(np.outer(np.arange(m), np.arange(w)) % w, w))
        self.rows = np.concatenate([cosine, -sine])
        cosine, sine = (np.sqrt(1 / h) * t for t in unit_circle(np.outer(np.arange(h), np.arange(h)) % h, h))
        self.columns = np.block([[cosine, sine], [-sine, cosine]])
        magnitude, terms = np.abs(self.re) + np.abs(self.im), 2 * max(self.re.shape[2:])
        product = math.prod(Fraction(float(magnitude.sum(i).max())) for i in (-1, -2))
        self.spread = sqrt_up(product / (1 - gamma(terms)) ** 2) + terms * TINY

    def verify(self, claim, name):
        scale = max(power_of_two(self.re), power_of_two(self.im))
        if not scale:
            return
        norm = number(claim["norm"]) / Fraction(scale) - 4 * self.re[0, 0].size * TINY
        require(norm > 0, f"{name}: the claimed norm is below the rounding error of its proof")
        for re, im in zip(self.re / scale, self.im / scale, strict=True):
            verify_gram(np.block([[re, -im], [im, re]]), norm**2, name)

    def apply(self, x):
        (n, into), (h, m, out, _) = x.shape[:2], self.re.shape
        z = (x @ self.rows.T).reshape(n, into, h, 2, m).transpose(0, 1, 4, 3, 2).reshape(n, into, m, 2 * h)
        a, b = (z @ self.columns.T).reshape(n, into, m, 2, h).transpose(3, 4, 2, 1, 0)
        y = np.stack([self.re @ a - self.im @ b, self.im @ a + self.re @ b]).transpose(4, 3, 2, 0, 1)
        y = (y.reshape(n, out, m, 2 * h) @ self.columns).reshape(n, out, m, 2, h).transpose(0, 1, 4, 3, 2)
        return y.reshape(n, out, h, 2 * m) @ self.rows

    def apply_error(self, reach):
        (h, m, out, into), w, error = self.re.shape, self.width, Fraction(0)
        row = 1, sqrt_up(Fraction(w)), 12 * U * sqrt_up(Fraction(2 * w))
        column = 1, sqrt_up(Fraction(2 * h)), 24 * U * sqrt_up(Fraction(h))
        products = (w, row), (2 * h, column), (2 * into, (self.norm, self.spread, 0)), (2 * h, column), (2 * m, row)
        for n, (norm, spread, off) in products:
            local = (gamma(n) * (spread + off) + off) * (reach + error) + n * 2 * h * m * max(out, into) * TINY
            error, reach = norm * error + local, norm * reach
        return in_range(error)

    def adjoint(self, y):
        raise Rejected("the adjoint of a Fourier map is not supported")

    adjoint_error = adjoint


def tensor_of(tensors, name, kind="f"):
    """A tensor of floats, or of integers. Integer weights are rejected: in int32, |-2³¹| = -2³¹."""
    require(tensors[name].dtype.kind == kind, f"{name} has the wrong dtype {tensors[name].dtype}")
    return tensors[name]


def operator_of(p, tensors, claim, name):
    """An operator of the file, with its claimed norm verified."""
    geometry, kind = p["geometry"], p["kind"]
    if kind == "fourier":
        op = Fourier(tensor_of(tensors, p["real"]), tensor_of(tensors, p["imaginary"]), geometry)
    else:
        op = Linear(tensor_of(tensors, p["weight"]), geometry if kind == "convolution" else None)
    op.norm = number(claim["norm"])
    require(op.norm >= 0, f"{name}: the claimed norm is negative")
    op.verify(claim, name)
    return Adjoint(op) if p["adjoint"] else op


# The primitives: what they compute, their Lipschitz bounds, and their rounding errors on inputs of bounded norm


POINTWISE = {"relu": lambda y: np.maximum(y, 0.0), "hardtanh": lambda y: np.clip(y, -1.0, 1.0), "abs": np.abs}


class Primitive:
    """The base class of all kinds: `p` is the description in the file, `t` its tensors, `op` its operator."""

    def __init__(self, p, tensors, claim, name):
        kinds = {key: "i" if key == "index" else "f" for key in TENSORS if p.get(key) is not None}
        self.p, self.t = p, {key: tensor_of(tensors, p[key], kind) for key, kind in kinds.items()}
        self.op: Any = operator_of(p["op"], tensors, claim, name) if "op" in p else None
        self.bias = self.t.get("bias")
        if self.op is not None:
            require(self.bias is None or self.bias.shape == self.op.out_shape[:1], f"{name}: its bias does not fit")
        self.setup()

    def setup(self):
        pass

    def out_shape(self, *shapes):
        """The shape of the output. Inputs that would be broadcast are rejected: the bounds do not cover them."""
        self.fit(len(shapes) == 1 and (self.op is None or shapes[0] == self.op.in_shape))
        return shapes[0]

    def fit(self, holds):
        require(holds, f"a {self.p['kind']} does not take inputs of these shapes")

    def lipschitz(self, *distances):
        """A bound on the distance of two outputs, for inputs at these distances."""
        return distances[0]

    def error(self, entries, *reaches):
        """A bound on the rounding error, for inputs of norms at most `reaches` and tensors of at most `entries`."""
        return Fraction(0)

    def column(self, t, x):
        return t.reshape(-1, *[1] * (x.ndim - 2))


class Input(Primitive):
    def out_shape(self, *shapes):
        self.fit(not shapes)
        require(len(self.p["shape"]) <= 8, "an input of more than 8 axes is above the limit of this checker")
        return tuple(self.p["shape"])


class Constant(Primitive):
    def setup(self):
        require(self.t["value"].size > 0, "a constant has no entries")

    def out_shape(self, *shapes):
        self.fit(not shapes)
        return self.t["value"].shape

    def run(self):
        return self.t["value"][None]

    def lipschitz(self, *distances):
        return Fraction(0)


class Gather(Primitive):
    """Entry i of the output is entry index[i] of the inputs, flattened and concatenated; -1 stands for a zero."""

    def setup(self):
        self.index, self.sizes = self.t["index"], self.p["sizes"]
        require(self.index.size > 0, "a gather needs an index")
        require(self.index.min() >= -1 and self.index.max() < sum(self.sizes), "an index of a gather is out of range")
        self.flat = self.index.reshape(-1)
        counts = np.bincount(self.flat[self.flat >= 0], minlength=limited(sum(self.sizes), "a gather"))
        ends = np.cumsum(self.sizes)
        self.counts = [int(part.max()) for part in np.split(counts, ends[:-1])]

    def out_shape(self, *shapes):
        self.fit([math.prod(shape) for shape in shapes] == self.sizes)
        return self.index.shape

    def run(self, *xs):
        batch = max(map(len, xs))
        joined = np.concatenate([np.broadcast_to(x.reshape(len(x), -1), (batch, x[0].size)) for x in xs], 1)
        taken = np.where(self.flat < 0, 0.0, joined[:, np.maximum(self.flat, 0)])
        return taken.reshape(batch, *self.index.shape)

    def lipschitz(self, *distances):
        if self.counts == [1]:
            return distances[0]
        return sqrt_up(sum((m * d * d for m, d in zip(self.counts, distances, strict=True)), Fraction(0)))

    def back(self, rows):
        spread = np.zeros((sum(self.sizes), len(rows)))
        np.add.at(spread, self.flat[self.flat >= 0], rows.reshape(len(rows), -1).T[self.flat >= 0])
        root = sqrt_up(Fraction(max(self.counts)))
        for new in np.split(spread.T, np.cumsum(self.sizes)[:-1], 1):
            yield new, root, root * gamma(max(*self.counts, 1) - 1)


def is_power_of_two(c):
    return abs(math.frexp(c)[0]) in (0.0, 0.5)


class Sum(Primitive):
    def setup(self):
        self.c = self.p["coefficients"]
        require(all(c == 0 or abs(Fraction(c)) >= TINY for c in self.c), "a sum has a subnormal coefficient")

    def out_shape(self, *shapes):
        self.fit(len(shapes) == len(self.c) and len(set(shapes)) == 1)
        return shapes[0]

    def run(self, *xs):
        total = self.c[0] * xs[0]
        for c, x in zip(self.c[1:], xs[1:], strict=True):
            total = total + c * x
        return total

    def lipschitz(self, *distances):
        return sum((abs(Fraction(c)) * d for c, d in zip(self.c, distances, strict=True)), Fraction(0))

    def error(self, entries, *reaches):
        roundings = len(self.c) - 1 + (not all(map(is_power_of_two, self.c)))
        return gamma(roundings) * self.lipschitz(*reaches) + len(self.c) * entries * TINY

    def back(self, rows):
        for c in self.c:
            yield c * rows, abs(Fraction(c)), U * (not is_power_of_two(c)) * abs(Fraction(c))


class Scale(Primitive):
    def setup(self):
        require(self.t["factor"].size > 0, "a scale has no factors")
        self.greatest = Fraction(float(np.abs(self.t["factor"]).max()))

    def out_shape(self, *shapes):
        self.fit(len(shapes) == 1 and shapes[0] and self.t["factor"].shape in (shapes[0], shapes[0][:1]))
        return shapes[0]

    def run(self, x):
        factor = self.t["factor"]
        return x * (factor if factor.ndim == x.ndim - 1 else self.column(factor, x))

    def lipschitz(self, *distances):
        return self.greatest * distances[0]

    def error(self, entries, *reaches):
        return U * self.greatest * reaches[0] + entries * TINY

    def back(self, rows):
        yield self.run(rows), self.greatest, U * self.greatest


class Affine(Primitive):
    def out_shape(self, *shapes):
        super().out_shape(*shapes)
        return self.op.out_shape

    def run(self, x):
        y = self.op.apply(x)
        return y if self.bias is None else y + self.column(self.bias, y)

    def lipschitz(self, *distances):
        return self.op.norm * distances[0]

    def bias_norm(self):
        if self.bias is None:
            return Fraction(0)
        return norm_up(self.bias) * sqrt_up(Fraction(math.prod(self.op.out_shape) // self.bias.size))

    def affine_error(self, reach):
        product = self.op.apply_error(reach)
        if self.bias is None:
            return product
        return in_range(product + U * (self.op.norm * reach + product + self.bias_norm()) + self.op.entries * TINY)

    def error(self, entries, *reaches):
        return self.affine_error(reaches[0])

    def back(self, rows):
        unit = 0 if selects(rows) else gamma(len(self.op.weight)) * self.op.spread
        yield rows @ self.op.weight, self.op.norm, unit


class Convex(Affine):
    """A step of the flow of -∇f, where ∇f(x) = Wᵀσ(Wx + b) and σ has slopes in [0, 1]."""

    out_shape = Primitive.out_shape

    def setup(self):
        self.h = Fraction(self.p["h"])
        require(self.h == 0 or self.h >= TINY, "a step needs h ≥ 0")

    def gradient(self, x):
        return self.op.adjoint(POINTWISE[self.p["sigma"]](Affine.run(self, x)))

    def gradient_error(self, reach):
        """(error of the computed gradient, bound on its norm)."""
        e = self.affine_error(reach)
        inner = self.op.norm * reach + self.bias_norm() + e
        product = self.op.adjoint_error(inner)
        return self.op.norm * e + product, self.op.norm * inner + product


class Descent(Convex):
    def run(self, x):
        return x - float(self.h) * self.gradient(x)

    def lipschitz(self, *distances):
        return max(Fraction(1), self.h * self.op.norm**2 - 1) * distances[0]

    def error(self, entries, *reaches):
        error, size = self.gradient_error(reaches[0])
        return self.h * error + 3 * U * (reaches[0] + self.h * size) + 2 * self.op.entries * TINY


class Proximal(Convex):
    """n gradient steps of size τ towards the z with z + h∇f(z) = x; with `reflect`, 2z - x."""

    def setup(self):
        super().setup()
        self.tau, self.n = Fraction(self.p["tau"]), self.p["iterations"]
        fine = self.h > 0 and TINY <= self.tau <= 1 and self.n <= 10**4
        require(fine, "a proximal layer needs h > 0, 0 < τ ≤ 1 and 1 to 10⁴ iterations")

    def run(self, x):
        z = x
        for _ in range(self.n):
            z = z - float(self.tau) * ((z - x) + float(self.h) * self.gradient(z))
        return 2 * z - x if self.p["reflect"] else z

    def lipschitz(self, *distances):
        require(self.tau * (2 + self.h * self.op.norm**2) <= 2, "a proximal layer's τ is too large for its norm")
        return distances[0]

    def error(self, entries, *reaches):
        (reach,), norm = reaches, self.op.norm
        within = 2 * (reach + 2 * self.h * norm * self.bias_norm())
        error, size = self.gradient_error(within)
        step = self.tau * self.h * error + gamma(6) * (3 * within + self.h * size)
        total = (step + 8 * self.op.entries * TINY * (1 + self.h)) / self.tau
        require(total <= within / 2, "the rounding error of a proximal layer is larger than its output")
        if not self.p["reflect"]:
            return total
        left = Fraction(up((1 - self.tau) ** self.n)) * self.h * norm * (norm * reach + self.bias_norm())
        return 2 * total + 2 * left + 2 * U * (2 * within + reach)


class Series(Primitive):
    """Σ (hA)ʲx/j! over j < terms, where A is skew-symmetric."""

    def setup(self):
        self.h, self.terms = Fraction(self.p["h"]), self.p["terms"]
        fine = self.h >= 1000 * TINY and self.terms <= 1000
        require(fine and type(self.op) is Linear and self.op.skew(), "a series needs h > 0, terms and a skew map")

    def run(self, x):
        total = term = x
        for j in range(1, self.terms):
            term = self.op.apply(term) * (float(self.h) / j)
            total = total + term
        return total

    def lipschitz(self, *distances):
        angle = self.h * self.op.norm
        if self.terms <= 2:
            return (sqrt_up(1 + angle**2) if self.terms == 2 else 1) * distances[0]
        return (1 + angle**self.terms / math.factorial(self.terms)) * distances[0]

    def error(self, entries, *reaches):
        size, error, total, sums = reaches[0], Fraction(0), Fraction(0), reaches[0]
        growth = shortened((1 + 2 * U) ** self.terms)
        for j in range(1, self.terms):
            scale = self.h / j
            error = scale * (self.op.norm * error + self.op.apply_error(size + error))
            size = shortened(scale * self.op.norm * size)
            error = shortened(error + 4 * U * (size + error) + self.op.entries * TINY)
            sums = shortened(sums + size + error)
            total = shortened(total + error + U * sums * growth)
        return total


class AvgPool(Primitive):
    def setup(self):
        self.window, self.divisor = self.p["window"], Fraction(self.p["divisor"])
        require(self.divisor >= TINY, "an average needs a positive divisor")

    def out_shape(self, *shapes):
        (a, b), (shape,) = self.window, shapes
        self.fit(len(shape) == 3 and a <= shape[1] and b <= shape[2])
        return shape[0], shape[1] // a, shape[2] // b

    def run(self, x):
        (a, b), h, w = self.window, x.shape[2] // self.window[0], x.shape[3] // self.window[1]
        sums = x[:, :, : h * a, : w * b].reshape(*x.shape[:2], h, a, w, b).sum((3, 5))
        return sums / float(self.divisor)

    def lipschitz(self, *distances):
        return sqrt_up(Fraction(math.prod(self.window))) / self.divisor * distances[0]

    def error(self, entries, *reaches):
        area = math.prod(self.window)
        return gamma(area) * self.lipschitz(*reaches) + entries * TINY * (1 + area / self.divisor)


class MaxPool(Primitive):
    def setup(self):
        pairs = [self.p[k] for k in ("kernel", "stride", "padding", "dilation")]
        self.axes = list(zip(*pairs, strict=True))
        require(all(2 * p <= k for k, _, p, _ in self.axes), "pooling needs padding of at most half the window")

    def out_shape(self, *shapes):
        self.fit(len(shapes) == 1 and len(shapes[0]) == 3)
        sizes = zip(shapes[0][1:], self.axes, strict=True)
        out = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, (k, s, p, d) in sizes]
        self.fit(min(out) >= 1)
        limited(math.prod(k for k, *_ in self.axes) * math.prod(out) * shapes[0][0], "the windows of a max_pool")
        return shapes[0][0], *out

    def run(self, x):
        (kh, sh, ph, dh), (kw, sw, pw, dw) = self.axes
        _, h, w = self.out_shape(x.shape[1:])
        x = np.pad(x, [(0, 0), (0, 0), (ph, ph), (pw, pw)], constant_values=-np.inf)
        taps = [(a * dh, b * dw) for a in range(kh) for b in range(kw)]
        windows = [x[:, :, a : a + (h - 1) * sh + 1 : sh, b : b + (w - 1) * sw + 1 : sw] for a, b in taps]
        return np.max(windows, 0)

    def lipschitz(self, *distances):
        overlap = math.prod(-(-k * math.gcd(d, s) // s) for k, s, _, d in self.axes)
        return sqrt_up(Fraction(overlap)) * distances[0]


class Pointwise(Primitive):
    def run(self, x):
        return POINTWISE[self.p["name"]](x)


class GroupSort(Primitive):
    def out_shape(self, *shapes):
        group = self.p["group"]
        self.fit(len(shapes) == 1 and shapes[0] and shapes[0][0] % group == 0)
        return shapes[0]

    def run(self, x):
        groups = x.reshape(len(x), self.p["group"], -1, *x.shape[2:])
        return -np.sort(-groups, 1).reshape(x.shape)


class Householder(Primitive):
    def setup(self):
        sine, cosine = self.t["sine"], self.t["cosine"]
        fits = sine.ndim == 1 and sine.size > 0 and sine.shape == cosine.shape
        require(fits, "a Householder activation needs as many sines as cosines")
        squares = (Fraction(s) ** 2 + Fraction(c) ** 2 for s, c in zip(sine.tolist(), cosine.tolist(), strict=True))
        self.square = max(squares)

    def out_shape(self, *shapes):
        self.fit(len(shapes) == 1 and shapes[0] and shapes[0][0] == 2 * self.t["sine"].size)
        return shapes[0]

    def run(self, x):
        first, second = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        sine, cosine = self.column(self.t["sine"], x), self.column(self.t["cosine"], x)
        across = np.maximum(cosine * second - sine * first, 0.0)
        return np.concatenate([first + 2 * sine * across, second - 2 * cosine * across], 1)

    def lipschitz(self, *distances):
        return max(Fraction(1), 2 * self.square - 1) * distances[0]

    def error(self, entries, *reaches):
        size = (1 + 2 * self.square) * reaches[0]
        return (gamma(2) * 2 * self.square + gamma(4)) * size + 8 * entries * TINY * (1 + 2 * self.square)


MAPS = dict(input=Input, constant=Constant, gather=Gather, sum=Sum, scale=Scale, affine=Affine)
STEPS = dict(descent=Descent, proximal=Proximal, series=Series)
LAYERS = dict(avg_pool=AvgPool, max_pool=MaxPool, pointwise=Pointwise, group_sort=GroupSort, householder=Householder)
KINDS: dict[str, type[Primitive]] = {**MAPS, **STEPS, **LAYERS}


# The certificate


def read_safetensors(path):
    """(metadata, tensors) of a safetensors file: a length, a JSON header, and float64 or int32 numbers."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    require(length <= FILE_BYTES, f"the header of {path.name} has {length} bytes, above the limit, {FILE_BYTES}")
    header = json.loads(raw[8 : 8 + length])
    metadata, tensors = header.pop("__metadata__", {}), {}
    spans = [entry["data_offsets"] for entry in header.values()]
    apart = all(0 <= first <= last for first, last in spans) and sum(b - a for a, b in spans) <= len(raw) - 8 - length
    require(apart, f"the tensors of {path.name} overlap")
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        require(entry["dtype"] in ("F64", "I32"), f"{name} is neither float64 nor int32")
        kind = "<f8" if entry["dtype"] == "F64" else "<i4"
        tensor = np.frombuffer(raw[8 + length + first : 8 + length + last], kind).reshape(entry["shape"])
        if kind == "<f8":
            bits = tensor.view("<i8")  # some processors read subnormal numbers as 0
            fit = (((bits & 2047 << 52) != 0) | (bits << 1 == 0)) & (np.abs(tensor) <= 2.0**900)
            require(bool(fit.all()), f"{name} has numbers that are not finite, subnormal, or above 2⁹⁰⁰")
        tensors[name] = tensor
    return json.loads(metadata["lipflow"]), tensors


def read_rows(path, names):
    """Columns of an .npz file. None is compressed or larger than the file, so its size bounds the memory."""
    with zipfile.ZipFile(path) as archive:
        members = [archive.getinfo(f"{name}.npy") for name in names]
        for member in members:
            require(member.compress_type == zipfile.ZIP_STORED, f"{member.filename} is compressed; use numpy.savez")
            with archive.open(member) as file:
                require(np.lib.format.read_magic(file) == (1, 0), f"{member.filename} is not of version 1.0")
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
            fits = not dtype.hasobject and math.prod(shape) * max(dtype.itemsize, 1) <= path.stat().st_size
            require(fits, f"{member.filename} of shape {shape} and dtype {dtype} is not in a file of that size")
        return [np.lib.format.read_array(archive.open(member), allow_pickle=False) for member in members]


class Network:
    """Primitives, and vertices [primitive, *inputs] in topological order: the input first, the output last."""

    def __init__(self, description, tensors, claims):
        require_description(description, tensors)
        listed = description["primitives"], claims["primitives"]
        require(len(listed[0]) == len(listed[1]), "the ledger does not list every primitive")
        self.primitives, self.vertices, self.shapes, numbers = [], description["vertices"], [], 0
        for i, (p, claim) in enumerate(zip(*listed, strict=True)):
            require(p["kind"] == claim["kind"], f"primitive {i}: the ledger states another kind, {claim['kind']!r}")
            self.primitives.append(KINDS[p["kind"]](p, tensors, claim, f"primitive {i} ({p['kind']})"))
        for i, (which, *inputs) in enumerate(self.vertices):
            require(all(j < i for j in inputs), f"vertex {i} does not come after its inputs")
            p = self.primitives[which]
            require((type(p) is Input) == (i == 0), f"vertex {i}: the first vertex must be the input, and no other")
            self.shapes.append(tuple(p.out_shape(*(self.shapes[j] for j in inputs))))
            numbers = limited(numbers + math.prod(self.shapes[i]), f"the network up to vertex {i}")
        self.chunk = max(1, min(50, NUMBERS // numbers))  # images to evaluate at once

    def values(self, x):
        """The value of every vertex."""
        values = [x]
        for which, *inputs in self.vertices[1:]:
            values.append(self.primitives[which].run(*(values[j] for j in inputs)))
        return values

    def fold(self, domain, stated):
        """(L, E) of every vertex over the box of the domain; rejected if the ledger states less."""
        require(len(stated) == len(self.vertices), "the ledger does not list every vertex")
        low, high = (float(number(end)) for end in domain)
        require(-(2.0**900) <= low < high <= 2.0**900, f"the domain {domain} is not an interval")
        centre = low + (high - low) / 2
        half = max(Fraction(high) - Fraction(centre), Fraction(centre) - Fraction(low))
        radius = half * sqrt_up(Fraction(math.prod(self.shapes[0])))
        values = self.values(np.full((1, *self.shapes[0]), centre))
        constants, errors, reaches = [], [], []
        for i, ((which, *inputs), value, claim) in enumerate(zip(self.vertices, values, stated, strict=True)):
            p, entries = self.primitives[which], max(math.prod(self.shapes[j]) for j in (i, *inputs))
            local, own, total, carried = Fraction(entries, 2**126), Fraction(1), Fraction(1), Fraction(0)
            if i:
                local = in_range(p.error(entries, *(reaches[j] for j in inputs)))
                own = p.lipschitz(*(Fraction(constants[j] > 0) for j in inputs))
                total, carried = (p.lipschitz(*(known[j] for j in inputs)) for known in (constants, errors))
            constants.append(Fraction(up(total)))
            errors.append(Fraction(up(carried + local)))
            require(np.isfinite(value).all(), f"vertex {i}: its value at the centre is not finite")
            reaches.append(in_range(Fraction(up(norm_up(value) + constants[i] * radius + 2 * errors[i]))))
            require(own <= number(claim["lipschitz"]), f"vertex {i}: L = {claim['lipschitz']} is stated too low")
            require(local <= number(claim["rounding"]), f"vertex {i}: its rounding is stated too low")
            require(reaches[i] <= number(claim["reach"]), f"vertex {i}: the norm of its value is stated too low")
        return constants, errors

    def pair_bounds(self, constants):
        """Bounds on the Lipschitz constants of fᵢ - fⱼ.

        The rows of the identity are multiplied by the matrices of linear primitives, from the output backwards. At a
        vertex that is not linear, ‖rowᵢ - rowⱼ‖·L is added to the bound.
        """
        classes, last = self.shapes[-1][0], len(self.vertices) - 1
        carried = {last: (np.eye(classes), [Fraction(0)] * classes)}
        total = np.zeros((classes, classes))
        for i in range(last, -1, -1):
            if i not in carried:
                continue
            (rows, errors), (which, *inputs) = carried.pop(i), self.vertices[i]
            p = self.primitives[which]
            matrix = type(p) is Affine and type(p.op) is Linear and p.op.axes is None
            linear = matrix or isinstance(p, Sum | Scale | Gather)
            if type(p) is Constant:
                continue
            if not linear or classes * math.prod(self.shapes[i]) > 2**24:
                apart = nextafter(row_distances(rows) + np.array([[up(a + b) for a in errors] for b in errors]))
                total = nextafter(total + nextafter(apart * up(constants[i]))) if constants[i] > 0 else total
                continue
            lengths = [norm_up(row) for row in rows]
            for j, (more, factor, unit) in zip(inputs, p.back(rows), strict=True):
                more = more.reshape(classes, *self.shapes[j])
                entries = math.prod(self.shapes[j])
                slack = math.prod(self.shapes[i]) * entries * TINY
                new_errors = [factor * e + unit * n + slack for e, n in zip(errors, lengths, strict=True)]
                if j in carried:
                    before, old_errors = carried[j]
                    more = before + more
                    sums = zip(old_errors, new_errors, more, strict=True)
                    new_errors = [a + b + 2 * U * norm_up(row) + entries * TINY for a, b, row in sums]
                carried[j] = more, new_errors
        return np.maximum(total, 2.0**-1022)


def nextafter(x):
    return np.maximum(np.nextafter(x, np.inf), 2.0**-1022)


def selects(rows):
    """Whether every row has at most one nonzero entry, and that is a power of two: then products are exact."""
    mantissa = np.abs(np.frexp(rows)[0])
    return bool(((mantissa == 0) | (mantissa == 0.5)).all()) and (rows != 0).sum(1).max() <= 1


def row_distances(rows):
    """‖wᵢ - wⱼ‖ for all pairs of rows, rounded up."""
    rows = rows.reshape(len(rows), -1)
    scale = power_of_two(rows) or 1.0
    w, terms = rows / scale, min(rows.shape[1], 2 * int((rows != 0).sum(1).max()))
    squares = [((w - row) ** 2).sum(1) for row in w]
    roots = np.sqrt(squares) * up(1 + gamma(terms + 8)) + up(Fraction(terms + 2, 2**511))
    return nextafter(nextafter(roots) * scale)


def least_ratio(logits, label, bounds, slack=0.0, below=lambda x: x):
    """min over rivals j of (f_y - f_j - slack)/d_yj, at least 0; `below` rounds down after every operation."""
    rows = np.arange(len(logits))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratios = below(below(below(logits[rows, label][:, None] - logits) - slack) / bounds[label])
    ratios[rows, label] = np.inf
    return np.maximum(ratios.min(1), 0.0)


def check(folder, full=False, sample=32, seed=None):
    """Verify the certificate in a folder: return a summary, or raise `Rejected` with the reason.

    Without `full`, scores are recomputed for `sample` random images only.
    """
    folder = Path(folder)
    try:
        claims = json.loads(regular_file(folder / "certificate.json", FILE_BYTES).read_text())
        stated = {k: v for k, v in claims.items() if k != "digest"}
        canonical = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
        require(claims["digest"] == canonical, "certificate.json was changed: its digest does not match")
        require(set(claims["files"]) == {"frozen.safetensors", "certified.npz"}, "the list of files is wrong")
        for name, digest in claims["files"].items():
            found = hashlib.sha256(regular_file(folder / name).read_bytes()).hexdigest()
            require(found == digest, f"{name} was changed: its digest does not match")
        return _check(folder, claims, full, sample, seed)
    except Rejected:
        raise
    except FileNotFoundError as error:
        raise Rejected(f"{error.filename} is missing") from None
    except Exception as error:  # damaged and forged files raise many types
        raise Rejected(" ".join(f"the certificate cannot be read: {type(error).__name__}: {error}".split())) from error


def _check(folder, claims, full, sample, seed):
    require(claims["schema"] == 2, f"this checker reads schema 2, not {claims['schema']}: certify the network again")
    require(claims["dtype"] == "float64", "this checker verifies float64 only")
    require(claims["norm"] == "L2 on the values handed to the network", "this checker verifies the L2 norm only")
    description, tensors = read_safetensors(folder / "frozen.safetensors")
    require(description["schema"] == 2, f"this checker reads networks of schema 2, not {description['schema']}")
    require(description["domain"] == claims["domain"], "the domains do not agree")
    network = Network(description, tensors, claims)
    in_shape = claims["in_shape"]
    require(len(in_shape) >= 1 and list(network.shapes[0]) == in_shape, "the shapes do not agree")
    constants, errors = network.fold(claims["domain"], claims["vertices"])
    total, error, low, high = constants[-1], errors[-1], *claims["domain"]
    require(len(network.shapes[-1]) == 1 and network.shapes[-1][0] >= 2, "the output is not a vector of scores")
    classes, claimed = network.shapes[-1][0], np.asarray(claims["pair_bounds"], dtype=np.float64)
    require(claimed.shape == (classes, classes), "there is not one pair bound for each pair of classes")
    bounds = network.pair_bounds(constants)
    require(claims["classes"] == classes, f"the network has {classes} classes, not {claims['classes']}")
    require(total <= number(claims["lipschitz"]), f"L = {claims['lipschitz']} is stated too low")
    require(error <= number(claims["rounding"]), f"E = {claims['rounding']} is stated too low")
    off = ~np.eye(classes, dtype=bool)
    require((claimed[off] >= bounds[off]).all(), "a pair bound is stated too low")

    count, columns = claims["images"], ("images", "truth", "label", "logits", "radius", "paper_radius")
    images, truth, label, logits, radius, paper = read_rows(folder / "certified.npz", columns)
    fits = images.shape == (count, *in_shape) and logits.shape == (count, classes)
    fits = fits and truth.shape == label.shape == radius.shape == paper.shape == (count,)
    require(fits, "the columns do not fit the claims")
    require(logits.dtype == radius.dtype == paper.dtype == np.float64, "scores and radii are not float64")
    require(truth.dtype.kind in "iu" and label.dtype.kind in "iu", "labels are not integers")
    require(((truth >= 0) & (truth < classes)).all(), "a true label is not one of the classes")
    require(images.dtype in (np.uint8, np.float16, np.float32, np.float64), "images are neither uint8 nor floats")
    byte = images.dtype == np.uint8
    inside = low <= 0 < 1 <= high if byte else ((images >= low) & (images <= high)).all()
    require(inside, f"an image lies outside of [{low}, {high}]")
    require(np.isfinite(logits).all() and (label == logits.argmax(1)).all(), "a label does not have the greatest score")
    slack = up(4 * sqrt_up(Fraction(2)) * error)
    derived = least_ratio(logits, label, bounds, slack, lambda x: np.nextafter(x, -np.inf))
    for i in np.flatnonzero(~(radius <= derived)):
        raise Rejected(f"image {i}: R = {radius[i]} is more than can be derived, {derived[i]}")
    require((paper == least_ratio(logits, label, claimed)).all(), "a radius by the paper's rule is wrong")

    chosen = np.sort(np.random.default_rng(seed).permutation(count)[: count if full else sample])
    for start in range(0, len(chosen), network.chunk):
        part = chosen[start : start + network.chunk]
        scores = network.values(images[part].astype(np.float64) / (255 if byte else 1))[-1]
        scores = np.broadcast_to(scores, (len(part), classes))
        for ours, theirs in zip(scores.tolist(), logits[part].tolist(), strict=True):
            square = sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(ours, theirs, strict=True))
            require(square <= (2 * error) ** 2, "stored scores are not those of this network")
    recomputed = f"the scores of {len(chosen)} of {count} images were recomputed"
    recomputed += " (--full recomputes all)" if len(chosen) < count else ""
    return f"{count} radii follow from their scores; {recomputed}; L = {float(total)!r}, E = {float(error)!r}"


def main(arguments=None):
    """python -m lipflow.check FOLDER [--full]"""
    arguments = sys.argv[1:] if arguments is None else arguments
    folders = [a for a in arguments if not a.startswith("--")]
    if len(folders) != 1 or not set(arguments) <= {*folders, "--full"}:
        print(__doc__)
        return 2
    try:
        summary = check(folders[0], full="--full" in arguments)
        print(f"accepted: {summary}; the true labels, and so the accuracy, are not verified")
    except Rejected as reason:
        print(f"rejected: {reason}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
