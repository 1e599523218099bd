"""The independent checker: is a certificate true of the network it came with?

    python -m lipflow.check FOLDER [--full]

It needs Python and NumPy, and imports nothing else of lipflow. From the weights it verifies every norm that is claimed
and derives L, the rounding bound E and the pair bounds; from the stored scores every label and radius; and from the
images the scores themselves: of all with --full, else of a random sample, and the others are on trust, as the verdict
says. True labels, the names of the split and of the network (`which`), `how` and `shape` are the author's word.
Proofs: docs/norms.md and docs/soundness.md.
"""

import hashlib
import json
import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

U, TINY = Fraction(1, 2**53), Fraction(1, 2**1022)


class Rejected(Exception):
    """Why a certificate is not accepted."""


def require(holds, why):
    if not holds:
        raise Rejected(why)


# Exact rationals, rounded outwards at the end


def number(x):
    """A number of a file; words are none, as "1e999999999" would be computed for ever."""
    require(isinstance(x, int | float), f"{x!r} stands where a number should")
    return Fraction(x)


def gamma(n):
    require(n < 2**51, f"{n} roundings are beyond the error model")
    return n * U / (1 - n * U)


def in_range(error):
    """A bound is at least u times every number on the way: below 2⁹⁰⁰, nothing has overflowed."""
    require(error <= 2**900, "numbers on the way may be beyond float64")
    return error


def up(q):
    x = max(float(q), 2.0**-1022) if q > 0 else float(q)  # a processor that flushes would read less as 0
    return x if math.isinf(x) or Fraction(x) >= q else math.nextafter(x, math.inf)


def sqrt_up(q):
    a, b = q.numerator, q.denominator
    k = max(0, 61 - (a * b).bit_length() // 2)
    return Fraction(math.isqrt(a * b << 2 * k) + 1, b << k) if q else Fraction(0)


def square_sum(x):
    """At least Σ x² over the last two axes, the greatest of a batch."""
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


# Norms: the claim B is verified, not computed again (docs/norms.md)


def turned(x):
    return np.swapaxes(x, -1, -2)


def mirror(g):
    return np.tril(g) + turned(np.tril(g, -1))


def verify_gram(w, ceiling, name):
    """Prove λmax(WWᵀ) ≤ ceiling for a batch of matrices."""
    w = w if w.shape[-2] <= w.shape[-1] else turned(w)
    m, n = w.shape[-2:]
    verify_band((w @ turned(w))[:, None], None, gamma(n) * square_sum(w) + m * n * TINY, ceiling, name)


def verify_band(diagonal, below, product, ceiling, name):
    """Prove λmax(G) + product ≤ ceiling for symmetric G with these blocks on the diagonal and below it (batch, strips,
    q, q): Cholesky of μI - G for a μ that leaves room for rounding."""
    strips, q = diagonal.shape[1:3]
    length, band, entries = min(strips, 2) * q, min(strips, 3) * q, np.arange(q)
    least = Fraction(float(np.trace(diagonal, axis1=-2, axis2=-1).sum(-1).min()))
    room = gamma(length) * (strips * q * ceiling - least) + 8 * U * length * sqrt_up(Fraction(strips)) * ceiling
    mu = float(ceiling - product - room)
    require(mu >= 2.0**-900, f"{name}: the claimed norm is below what can be proved")
    shifted = -mirror(diagonal)
    shifted[..., entries, entries] += mu
    residual, weight, last = Fraction(0), Fraction(0), np.empty(0)
    for t in range(strips):
        row = pivot = shifted[:, t]
        try:
            if t:
                row = -turned(np.linalg.solve(last, turned(below[:, t - 1])))
                residual += 2 * square_sum(-below[:, t - 1] - row @ turned(last))
                pivot = pivot - row @ turned(row)
            last = np.tril(np.linalg.cholesky(pivot))
        except np.linalg.LinAlgError:
            raise Rejected(f"{name}: the claimed norm is below the true one") from None
        row = np.concatenate([row, last], -1) if t else last
        residual += square_sum(shifted[:, t] - mirror(row @ turned(row)))
        weight += square_sum(row)
    pivot = Fraction(float(np.abs(shifted[..., entries, entries]).max()))
    proved = Fraction(mu) + sqrt_up(residual) / (1 - U) + gamma(length) * weight + product
    proved += U * pivot / (1 - U) + band * (length + 1) * TINY
    require(proved <= ceiling, f"{name}: the claimed norm could not be proved")


def verify_strips(taps, axis, ceiling, name):
    """Prove λmax(WWᵀ) ≤ ceiling for W with matrices as the taps of its rows (taps, a, b): strips of outputs, so thick
    that only neighbours read a common input, make WWᵀ block tridiagonal."""
    (_, a, b), stride, extent = taps.shape, axis["stride"], axis["extent"]
    thick = max(1, -(-extent // stride) - 1)
    count, step, window = -(-axis["outputs"] // thick), thick * stride, (thick - 1) * stride + extent
    whole, t = toeplitz(taps, thick, stride, axis["dilation"]), np.arange(count)[:, None]
    q, n, shared = thick * a, window * b, max(window - step, 0) * b
    places = t * step + np.arange(window) - axis["before"]
    inside = (places >= 0) & (places < axis["size"])
    exist = np.concatenate([t * thick + np.arange(thick) < axis["outputs"], inside], 1)
    pairs = np.concatenate([np.roll(exist, 1, 0) & (t > 0), exist], 1)
    kinds, kind = np.unique(pairs, axis=0, return_inverse=True)  # away from the border all strips are equal
    diagonal, below, squares = [], [], []
    for pair in kinds.reshape(-1, 2, thick + window):
        last, this = ((whole * e[:thick, None, None, None] * e[thick:, None]).reshape(q, n) for e in pair)
        diagonal.append(this @ this.T)
        below.append(this[:, :shared] @ last[:, n - shared :].T)
        squares.append(square_sum(this[None]))
    kind = kind.reshape(-1)
    product = gamma(n) * sum(squares[k] for k in kind) + min(count, 3) * q * n * TINY
    verify_band(np.stack(diagonal)[None, kind], np.stack(below)[None, kind[1:]], product, ceiling, name)


def toeplitz(taps, outputs, stride, dilation):
    """Some outputs of one axis, each a window of taps: (taps, a, b) to (outputs, a, positions, b)."""
    (k, a, b) = taps.shape
    extent = dilation * (k - 1) + 1
    matrix = np.zeros((outputs, a, (outputs - 1) * stride + extent, b))
    for i in range(outputs):
        matrix[i, :, i * stride : i * stride + extent : dilation] = np.swapaxes(taps, 0, 1)
    return matrix


def verify_norm(w, claim, name):
    """‖W‖ ≤ claim["norm"], for a matrix or a convolution `Conv`."""
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
    whole = all(type(n) is int and n < 2**29 for side in claim["torus"] for n in side)
    require(whole and len(exact) == 2 and exact[0] >= exact[1], f"{name}: no torus has sides {claim['torus']}")
    kernels = weight.reshape(w.groups, -1, *weight.shape[1:])
    if all(exact):
        for kernel in kernels:
            taps = [
                toeplitz(k, columns["outputs"], columns["stride"], columns["dilation"])
                for k in kernel.transpose(2, 3, 0, 1)
            ]
            taps = np.stack(taps)[:, :, :, columns["before"] : columns["before"] + columns["size"]]
            taps = taps.reshape(len(taps), math.prod(taps.shape[1:3]), math.prod(taps.shape[3:]))
            verify_strips(taps, rows, norm**2, name)
        return
    tori = [
        (1, 1, 1) if whole else torus(axis, w.circular, side, name)
        for axis, side, whole in zip(w.axes, claim["torus"], exact, strict=True)
    ]
    twist, taps = [t for _, t in claim["torus"]], math.prod(weight.shape[2:])
    for kernel in kernels:
        magnitude = sqrt_up(square_sum(np.abs(kernel).sum((2, 3)))) / (1 - gamma(taps))
        error = 2 * (gamma(taps) + 16 * U) * magnitude + weight.size * taps * TINY
        room = norm / sqrt_up(Fraction(tori[0][2] * tori[1][2])) - error
        require(room > 0, f"{name}: the claimed norm is below the rounding of its symbol")
        ceiling, (out, grouped, height, width) = room**2 * tori[0][1] * tori[1][1], kernel.shape
        if exact[0]:
            kernel = kernel.transpose(2, 0, 1, 3).reshape(height * out, grouped, width, 1)
            for s in symbols_of(kernel, (columns, rows), tori[::-1], twist[::-1]):
                s = s.reshape(2, height, out, -1).transpose(1, 0, 2, 3).reshape(height, 2 * out, -1)
                verify_strips(s, rows, ceiling, name)
            continue
        for s in symbols_of(kernel, w.axes, tori, twist):
            verify_gram(s, ceiling, name)


def torus(axis, circular, claimed, name):
    """(side, stride that aliases, outputs at one position) of the claimed torus, if it can carry this axis."""
    n, k, s, before = axis["size"], axis["kernel"], axis["stride"], axis["before"]
    side, twist = claimed
    if circular:
        require((side, twist) == (n, 0), f"{name}: circular padding has one torus")
        places = [i * s % n for i in range(axis["outputs"])]
        return n, s if n % s == 0 else 1, max(map(places.count, set(places)))
    least = s if k == 1 else max(n + before, (axis["outputs"] - 1) * s - before + axis["extent"])
    carries = isinstance(side, int) and side >= least and side % s == 0
    require(carries, f"{name}: the torus is too small, or no multiple")
    require(twist in (0, 1), f"{name}: a twist is 0 or 1")
    return side, s, 1


def symbols_of(kernel, axes, tori, twist):
    """Σ_j K_j e^{iω·dj} at half of the frequencies, aliases side by side, as [[Re, -Im], [Im, Re]]."""
    out, grouped, height, width = kernel.shape
    (n1, s1, _), (n2, s2, _) = tori
    c1, c2 = n1 // s1, n2 // s2
    sizes = zip(axes, (height, width), (2 * n1, 2 * n2), strict=True)  # reduced here, no integer is above 2⁶²
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
    """cos and sin of 2π·t/turn for integers 0 ≤ t < turn, reduced to an eighth of a turn: within 8u."""
    octant, rest = t * 8 // turn, t * 8 % turn
    angle = np.where(octant % 2 == 1, turn - rest, rest) * (math.pi / 4) / turn
    swap = (octant + 1) // 2 % 2 == 1
    x, y = np.where(swap, np.sin(angle), np.cos(angle)), np.where(swap, np.cos(angle), np.sin(angle))
    return np.where((octant >= 2) & (octant < 6), -x, x), np.where(octant >= 4, -y, y)


# Linear maps, and how they round


class Linear:
    """A matrix, or a convolution with its geometry."""

    def __init__(self, weight, geometry):
        self.axes: Any = None
        self.weight, self.groups, self.circular, self.repeats = weight, 1, False, 1
        if geometry is None:
            require(weight.ndim == 2, "a matrix has two axes")
            self.dots, self.entries = (weight.shape[1], weight.shape[0]), sum(weight.shape)
            self.in_shape, self.out_channels = (weight.shape[1],), weight.shape[0]
            self.out_entries, sums = weight.shape[0], (np.abs(weight).sum(1), np.abs(weight).sum(0))
        else:
            sums = self._convolution(geometry)
        terms = max(weight.shape) if geometry is None else weight.size
        product = Fraction(float(sums[0].max())) * Fraction(float(sums[1].max())) * self.repeats
        self.spread = sqrt_up(product / (1 - gamma(terms)) ** 2) + terms * TINY

    def _convolution(self, geometry):
        out, grouped, height, width = self.weight.shape
        self.groups, self.circular = geometry["groups"], geometry["padding_mode"] == "circular"
        require(geometry["padding_mode"] in ("zeros", "circular"), "padding is zeros or circular")
        require(self.groups >= 1 and out % self.groups == 0, "groups divide the channels")
        self.axes = []
        for i, k in enumerate((height, width)):
            n, (before, after) = geometry["in_size"][i], geometry["padding"][i]
            s, d = geometry["stride"][i], geometry["dilation"][i]
            require(min(n, s, d) >= 1 and min(before, after) >= 0, "a size of the geometry is not positive")
            extent = d * (k - 1) + 1
            outputs = (n + before + after - extent) // s + 1
            require(outputs >= 1, "the kernel does not fit its input")
            self.axes.append(
                dict(size=n, kernel=k, before=before, after=after, stride=s, dilation=d, extent=extent, outputs=outputs)
            )
        self.in_shape, self.out_channels = (self.groups * grouped, *(a["size"] for a in self.axes)), out
        positions = math.prod(a["outputs"] for a in self.axes)
        self.out_entries = out * positions
        self.entries = self.groups * grouped * math.prod(a["size"] for a in self.axes) + self.out_entries
        if self.circular:
            self.repeats = math.prod(-(-(a["size"] + a["before"] + a["after"]) // a["size"]) for a in self.axes)
        self.dots = grouped * height * width + 1, out // self.groups * height * width + 1 + self.repeats
        magnitude = np.abs(self.weight)
        return magnitude.sum((1, 2, 3)), magnitude.reshape(self.groups, -1, *self.weight.shape[1:]).sum((1, 3, 4))

    def error(self, dot, reach):
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
        """Whether the weights are skew-symmetric to the last bit."""
        w = self.weight
        if self.axes is None:
            return w.shape[0] == w.shape[1] and np.array_equal(w, -w.T)
        even = all(a["stride"] == 1 and 2 * a["before"] == 2 * a["after"] == a["extent"] - 1 for a in self.axes)
        if not even or w.shape[0] != w.shape[1] * self.groups:
            return False
        blocks = w.reshape(self.groups, w.shape[1], *w.shape[1:])
        return np.array_equal(blocks, -np.swapaxes(blocks, 1, 2)[..., ::-1, ::-1])


# The primitives: run(x), the Lipschitz constant, and the rounding error on inputs of norm at most X


SIGMA = {"relu": lambda y: np.maximum(y, 0.0), "hardtanh": lambda y: np.clip(y, -1.0, 1.0)}
POINTWISE = {"relu": SIGMA["relu"], "abs": np.abs}


class Primitive:
    """What every kind shares; `p` is its description, `t` its tensors, `norm` its verified claim (or None)."""

    def __init__(self, p, t, norm):
        self.p, self.t, self.norm = p, t, norm
        self.map: Any = Linear(t["weight"], p["map"]["geometry"]) if "map" in p else None
        self.setup()

    def setup(self):
        pass

    def verify(self, claim, name):
        if self.map is not None:
            verify_norm(self.map, claim, name)

    def fits(self, shape):
        """Whether inputs of a shape are what the constants are about; nothing is broadcast against them."""
        bias = self.t.get("bias")
        return shape == self.map.in_shape and (bias is None or bias.shape == (self.map.out_channels,))

    def lipschitz(self):
        return Fraction(1)

    def error(self, reach, entries):
        return Fraction(0)

    def column(self, name, x):
        return self.t[name].reshape(-1, *[1] * (x.ndim - 2))


class Affine(Primitive):
    def run(self, x):
        y = self.map.apply(x)
        return y + self.column("bias", y)

    def lipschitz(self):
        return self.norm

    def bias_norm(self):
        return norm_up(self.t["bias"]) * sqrt_up(Fraction(self.map.out_entries // self.t["bias"].size))

    def error(self, reach, entries):
        dot = self.map.dots[0] + 1
        return in_range(gamma(dot) * (self.map.spread * reach + self.bias_norm()) + dot * self.map.entries * TINY)


class Descent(Affine):
    def setup(self):
        self.h = Fraction(float(self.p["h"]))  # an integer, too, is run as a float
        require((self.h == 0 or self.h >= TINY) and self.p["name"] in SIGMA, "a descent needs h ≥ 0 and a known σ")

    def gradient(self, x):
        return self.map.adjoint(SIGMA[self.p["name"]](Affine.run(self, x)))

    def run(self, x):
        return x - self.p["h"] * self.gradient(x)

    def lipschitz(self):
        return max(Fraction(1), self.h * self.norm**2 - 1)

    def gradient_error(self, reach):
        """(error of the computed gradient, its norm)."""
        e = Affine.error(self, reach, 0)
        inner = self.norm * reach + self.bias_norm() + e
        wrong = self.map.error(self.map.dots[1], inner)
        return self.norm * e + wrong, self.norm * inner + wrong

    def error(self, reach, entries):
        wrong, size = self.gradient_error(reach)
        return self.h * wrong + 3 * U * (reach + self.h * size) + 2 * self.map.entries * TINY


class Proximal(Descent):
    def setup(self):
        super().setup()
        self.tau, self.n = Fraction(float(self.p["tau"])), self.p["iterations"]
        require(TINY <= self.tau <= 1 and 1 <= self.n <= 10**4, "a proximal layer needs 0 < τ ≤ 1 and iterations")

    def run(self, x):
        z = x
        for _ in range(self.n):
            z = z - self.p["tau"] * ((z - x) + self.p["h"] * self.gradient(z))
        return 2 * z - x if self.p["reflect"] else z

    def lipschitz(self):
        require(self.tau * (2 + self.h * self.norm**2) <= 2, "a proximal layer's τ is too large for its norm")
        return Fraction(1)

    def error(self, reach, entries):
        within = 2 * (reach + 2 * self.h * self.norm * self.bias_norm())
        wrong, size = self.gradient_error(within)
        step = self.tau * self.h * wrong + gamma(6) * (3 * within + self.h * size)
        total = (step + 8 * self.map.entries * TINY * (1 + self.h)) / self.tau
        require(total <= within / 2, "the rounding of a proximal layer outgrows what it computes")
        if not self.p["reflect"]:
            return total
        left = Fraction(up((1 - self.tau) ** self.n)) * self.h * self.norm * (self.norm * reach + self.bias_norm())
        return 2 * total + 2 * left + 2 * U * (2 * within + reach)


class Series(Primitive):
    def setup(self):
        self.h, self.terms = Fraction(float(self.p["h"])), self.p["terms"]
        some = self.h >= 1000 * TINY and 1 <= self.terms <= 1000
        require(some and self.map.skew(), "a series needs h > 0, terms, and a skew map")

    def run(self, x):
        total = term = x
        for j in range(1, self.terms):
            term = self.map.apply(term) * (self.p["h"] / j)
            total = total + term
        return total

    def lipschitz(self):
        return 1 + (self.h * self.norm) ** self.terms / math.factorial(self.terms)

    def error(self, reach, entries):
        size, wrong, total, sums = reach, Fraction(0), Fraction(0), reach
        for j in range(1, self.terms):
            scale = self.h / j
            wrong = scale * (self.norm * wrong + self.map.error(self.map.dots[0], size + wrong))
            size = scale * self.norm * size
            wrong += 4 * U * (size + wrong) + self.map.entries * TINY
            sums += size + wrong
            total += wrong + U * sums * (1 + 2 * U) ** self.terms
        return total


class Spectral(Primitive):
    """A matrix at each frequency, between real Fourier transforms of rows and columns (docs/soundness-spectral.md)."""

    def setup(self):
        self.re, self.im, w = self.t["real"], self.t["imaginary"], self.p["width"]
        fits = self.re.ndim == 4 and self.re.shape == self.im.shape and self.re.size and type(w) is int and w >= 1
        require(fits and self.re.shape[1] == w // 2 + 1, "a spectral map has matrices at w // 2 + 1 columns")
        h, m = self.re.shape[:2]
        own = np.array([1.0 if 2 * f % w == 0 else 2.0 for f in range(m)])
        cosine, sine = (np.sqrt(own / w)[:, None] * t for t in unit_circle(np.outer(np.arange(m), np.arange(w)) % w, w))
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
        room = self.norm / Fraction(scale) - 4 * self.re[0, 0].size * TINY
        require(room > 0, f"{name}: the claimed norm is not above the rounding of its proof")
        for re, im in zip(self.re / scale, self.im / scale, strict=True):
            verify_gram(np.block([[re, -im], [im, re]]), room**2, name)

    def fits(self, shape):
        return shape == (self.re.shape[3], self.re.shape[0], self.p["width"])

    def run(self, x):
        (n, into), (h, m, out, _) = x.shape[:2], self.re.shape
        z = (x @ self.rows.T).reshape(n, into, h, 2, m).transpose(0, 1, 4, 3, 2).reshape(n, into, m, 2 * h)
        a, b = (z @ self.columns.T).reshape(n, into, m, 2, h).transpose(3, 4, 2, 1, 0)
        y = np.stack([self.re @ a - self.im @ b, self.im @ a + self.re @ b]).transpose(4, 3, 2, 0, 1)
        y = (y.reshape(n, out, m, 2 * h) @ self.columns).reshape(n, out, m, 2, h).transpose(0, 1, 4, 3, 2)
        return y.reshape(n, out, h, 2 * m) @ self.rows

    def lipschitz(self):
        return self.norm

    def error(self, reach, entries):
        (h, m, out, into), w, wrong = self.re.shape, self.p["width"], Fraction(0)
        row = 1, sqrt_up(Fraction(w)), 12 * U * sqrt_up(Fraction(2 * w))
        column = 1, sqrt_up(Fraction(2 * h)), 24 * U * sqrt_up(Fraction(h))
        products = (w, row), (2 * h, column), (2 * into, (self.norm, self.spread, 0)), (2 * h, column), (2 * m, row)
        for n, (norm, spread, off) in products:
            local = (gamma(n) * (spread + off) + off) * (reach + wrong) + n * 2 * h * m * max(out, into) * TINY
            wrong, reach = norm * wrong + local, norm * reach
        return wrong


class Center(Primitive):
    def fits(self, shape):
        return self.t["mean"].shape == self.t["scale"].shape == shape[:1]

    def run(self, x):
        return (x - self.column("mean", x)) * self.column("scale", x)

    def lipschitz(self):
        return Fraction(float(np.abs(self.t["scale"]).max()))

    def error(self, reach, entries):
        away = reach + norm_up(self.t["mean"]) * sqrt_up(Fraction(entries // self.t["mean"].size))
        return gamma(2) * self.lipschitz() * away + 2 * entries * TINY * (1 + self.lipschitz())


class Pointwise(Primitive):
    def fits(self, shape):
        return True

    def run(self, x):
        return POINTWISE[self.p["name"]](x)


class GroupSort(Primitive):
    def fits(self, shape):
        return self.p["group"] >= 1 and shape[0] % self.p["group"] == 0

    def run(self, x):
        groups = x.reshape(len(x), self.p["group"], -1, *x.shape[2:])
        return -np.sort(-groups, 1).reshape(x.shape)


class Householder(Primitive):
    def setup(self):
        pairs = zip(self.t["sine"].tolist(), self.t["cosine"].tolist(), strict=True)
        self.square = max(Fraction(s) ** 2 + Fraction(c) ** 2 for s, c in pairs)

    def fits(self, shape):
        return self.t["sine"].shape == self.t["cosine"].shape == (shape[0] / 2,)

    def run(self, x):
        first, second = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
        sine, cosine = self.column("sine", x), self.column("cosine", x)
        across = np.maximum(cosine * second - sine * first, 0.0)
        return np.concatenate([first + 2 * sine * across, second - 2 * cosine * across], 1)

    def lipschitz(self):
        return max(Fraction(1), 2 * self.square - 1)

    def error(self, reach, entries):
        size = (1 + 2 * self.square) * reach
        return (gamma(2) * 2 * self.square + gamma(4)) * size + 8 * entries * TINY * (1 + 2 * self.square)


class PadChannels(Primitive):
    def fits(self, shape):
        return self.p["channels"] >= shape[0]

    def run(self, x):
        return np.pad(x, [(0, 0), (0, self.p["channels"] - x.shape[1])] + [(0, 0)] * (x.ndim - 2))


class AvgPool(Primitive):
    def fits(self, shape):
        return len(shape) == 3 and 1 <= self.p["size"] <= min(shape[1:])

    def run(self, x):
        k, h, w = self.p["size"], x.shape[2] // self.p["size"], x.shape[3] // self.p["size"]
        return x[:, :, : h * k, : w * k].reshape(*x.shape[:2], h, k, w, k).sum((3, 5)) / k

    def error(self, reach, entries):
        return gamma(self.p["size"] ** 2) * reach + entries * TINY


class MaxPool(Primitive):
    def fits(self, shape):
        return len(shape) == 3 and min(self.p["kernel"] + self.p["stride"] + self.p["dilation"]) >= 1

    def run(self, x):
        (kh, kw), (sh, sw), (ph, pw), (dh, dw) = (self.p[k] for k in ("kernel", "stride", "padding", "dilation"))
        x = np.pad(x, [(0, 0), (0, 0), (ph, ph), (pw, pw)], constant_values=-np.inf)
        h, w = (x.shape[2] - dh * (kh - 1) - 1) // sh + 1, (x.shape[3] - dw * (kw - 1) - 1) // sw + 1
        taps = [(a * dh, b * dw) for a in range(kh) for b in range(kw)]
        windows = [x[:, :, a : a + (h - 1) * sh + 1 : sh, b : b + (w - 1) * sw + 1 : sw] for a, b in taps]
        return np.max(windows, 0)

    def lipschitz(self):
        axes = zip(self.p["kernel"], self.p["stride"], self.p["dilation"], strict=True)
        counts = [-(-k * math.gcd(d, s) // s) for k, s, d in axes]
        return sqrt_up(Fraction(math.prod(counts))) if math.prod(counts) > 1 else Fraction(1)


class SpaceToDepth(Primitive):
    def fits(self, shape):
        return len(shape) == 3 and shape[1] % self.p["block"] == 0 == shape[2] % self.p["block"]

    def run(self, x):
        b, (n, c, h, w) = self.p["block"], x.shape
        return x.reshape(n, c, h // b, b, w // b, b).transpose(0, 1, 3, 5, 2, 4).reshape(n, c * b * b, h // b, w // b)


class Flatten(Primitive):
    def fits(self, shape):
        return True

    def run(self, x):
        return x.reshape(len(x), -1)


class Truncate(Primitive):
    def fits(self, shape):
        return 1 <= self.p["classes"] <= shape[0]

    def run(self, x):
        return x[:, : self.p["classes"]]


class Mirror(Primitive):
    """From here to a Mean, an image is the rows 2i and 2i + 1, and their norm is that of the greater one."""

    def fits(self, shape):
        return len(shape) == 3

    def run(self, x):
        return np.stack([x, x[..., ::-1]], 1).reshape(-1, *x.shape[1:])


class Mean(Primitive):
    def fits(self, shape):
        return True

    def run(self, x):
        return (x[::2] + x[1::2]) / 2

    def error(self, reach, entries):
        return gamma(1) * reach + 2 * entries * TINY


WEIGHTED = dict(affine=Affine, descent=Descent, proximal=Proximal, series=Series, spectral=Spectral)
ON_ENTRIES = dict(center=Center, pointwise=Pointwise, group_sort=GroupSort, householder=Householder, truncate=Truncate)
ON_PIXELS = dict(pad=PadChannels, avg_pool=AvgPool, max_pool=MaxPool, space_to_depth=SpaceToDepth, flatten=Flatten)
ON_ROWS = dict(mirror=Mirror, mean=Mean)
KINDS: dict[str, type[Primitive]] = {**WEIGHTED, **ON_ENTRIES, **ON_PIXELS, **ON_ROWS}


# The certificate


def read_safetensors(path):
    """(metadata, tensors) of a file of float64 tensors: a length, a JSON header, and the numbers."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    metadata, tensors = header.pop("__metadata__", {}), {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        require(entry["dtype"] == "F64", f"{name} is not float64")
        tensor = np.frombuffer(raw[8 + length + first : 8 + length + last], "<f8").reshape(entry["shape"])
        bits = tensor.view("<i8")  # a processor may read a subnormal number as 0
        fit = (((bits & 2047 << 52) != 0) | (bits << 1 == 0)) & (np.abs(tensor) <= 2.0**900)
        require(bool(fit.all()), f"{name} is not finite, or out of range")
        tensors[name] = tensor
    return json.loads(metadata["lipflow"]), tensors


def derive(primitives, in_shape, stated):
    """Fold L and E over the box [0, 1]ᵈ through its centre; (L, L before the last primitive, E, number of classes)."""
    radius = sqrt_up(Fraction(math.prod(in_shape))) / 2
    x: Any = np.full((1, *in_shape), 0.5)
    total, before, error, reach = Fraction(1), Fraction(1), Fraction(x.size, 2**126), norm_up(x) + radius
    for i, p in enumerate(primitives):
        require(p.fits(x.shape[1:]), f"primitive {i} does not take an input of shape {x.shape[1:]}")
        y = p.run(x)
        require(len(y) > 0, f"primitive {i}: a mean has no mirror before it")
        local = in_range(p.error(in_range(reach), max(x[0].size, y[0].size)))
        claim, constant = stated[i], p.lipschitz()
        require(constant <= number(claim["lipschitz"]), f"primitive {i}: L = {claim['lipschitz']} is stated too low")
        require(local <= number(claim["rounding"]), f"primitive {i}: its rounding is stated too low")
        require(reach <= number(claim["reach"]), f"primitive {i}: the norm of its input is stated too low")
        before, total = total, Fraction(up(total * constant))
        error = Fraction(up(constant * error + local))
        x = y
        reach = Fraction(up(max(map(norm_up, x)) + total * radius + 2 * error))
    require(x.ndim == 2 and len(x) == 1 and x.shape[1] >= 2, "the network does not end in at least two scores")
    return total, before, error, x.shape[1]


def pair_bounds(primitives, total, before, classes):
    """Lipschitz constants of fᵢ - fⱼ, from above, as float64."""
    last = primitives[-1] if primitives else None
    if type(last) is not Affine or last.map.axes is not None:
        return np.full((classes, classes), up(sqrt_up(Fraction(2)) * total))
    scale = power_of_two(last.map.weight) or 1.0
    w = last.map.weight / scale
    squares = [((w - row) ** 2).sum(1) for row in w]
    roots = np.sqrt(squares) * up(1 + gamma(w.shape[1] + 8)) + up(Fraction(w.shape[1] + 2, 2**511))
    distances = np.maximum(np.nextafter(np.nextafter(roots, np.inf) * scale, np.inf), 2.0**-1022)
    return np.maximum(np.nextafter(distances * up(before), np.inf), 2.0**-1022)


def least_ratio(logits, label, bounds, slack=0.0, below=lambda x: x):
    """min over rivals j of (f_y - f_j - slack)/d_yj, at least 0; `below` follows every operation."""
    rows = np.arange(len(logits))
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratios = below(below(below(logits[rows, label][:, None] - logits) - slack) / bounds[label])
    ratios[rows, label] = np.inf
    return np.maximum(ratios.min(1), 0.0)


def check(folder, full=False, sample=32, seed=None):
    """Accept the certificate in a folder and say what was verified, or raise `Rejected` with the reason.

    Without `full`, the scores of so many images, drawn at random, are recomputed, and those of the others are not.
    """
    folder = Path(folder)
    try:
        claims = json.loads((folder / "certificate.json").read_text())
        stated = {k: v for k, v in claims.items() if k != "digest"}
        canonical = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
        require(claims["digest"] == canonical, "certificate.json was changed: its digest does not match")
        require(set(claims["files"]) == {"frozen.safetensors", "certified.npz"}, "other files have digests")
        for name, digest in claims["files"].items():
            found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
            require(found == digest, f"{name} was changed: its digest does not match")
        return _check(folder, claims, full, sample, seed)
    except Rejected:
        raise
    except FileNotFoundError as error:
        raise Rejected(f"{error.filename} is missing") from None
    except Exception as error:  # whatever a file makes of us, it is not accepted
        raise Rejected(" ".join(f"the certificate cannot be read: {type(error).__name__}: {error}".split())) from error


def _check(folder, claims, full, sample, seed):
    require(claims["schema"] == 1 and claims["dtype"] == "float64", "this checker reads schema 1 in float64")
    require(claims["domain"] == [0, 1], "this checker knows the pixels of [0, 1]")
    require(claims["norm"] == "L2 on the values handed to the network", "this checker knows the L2 norm")
    description, tensors = read_safetensors(folder / "frozen.safetensors")
    require(description["schema"] == 1 and description["in_shape"] == claims["in_shape"], "the shapes do not agree")
    require(len(claims["in_shape"]) >= 1, "an image has at least one axis")
    stated, primitives = claims["primitives"], []
    require(len(stated) == len(description["primitives"]), "the ledger does not list every primitive")
    for i, p in enumerate(description["primitives"]):
        require(p["kind"] == stated[i]["kind"] and p["kind"] in KINDS, f"primitive {i} is of no known kind")
        own = {name.split(".", 1)[1]: t for name, t in tensors.items() if name.split(".", 1)[0] == str(i)}
        norm = number(stated[i]["norm"]) if "norm" in stated[i] else None
        require(norm is None or norm >= 0, f"primitive {i}: a norm is not negative")
        primitives.append(KINDS[p["kind"]](p, own, norm))
        primitives[-1].verify(stated[i], f"primitive {i} ({p['kind']})")
    total, before, error, classes = derive(primitives, description["in_shape"], stated)
    bounds = pair_bounds(primitives, total, before, classes)
    require(claims["classes"] == classes, f"the network has {classes} classes")
    require(total <= number(claims["lipschitz"]), f"L = {claims['lipschitz']} is stated too low")
    require(error <= number(claims["rounding"]), f"E = {claims['rounding']} is stated too low")
    claimed = np.asarray(claims["pair_bounds"], dtype=np.float64)
    off = ~np.eye(classes, dtype=bool)
    require(claimed.shape == bounds.shape and (claimed[off] >= bounds[off]).all(), "a pair bound is stated too low")

    count, columns = claims["images"], ("images", "truth", "label", "logits", "radius", "paper_radius")
    with np.load(folder / "certified.npz", allow_pickle=False) as rows:
        images, truth, label, logits, radius, paper = (rows[k] for k in columns)
    require(images.shape == (count, *claims["in_shape"]), "the images do not fit the claims")
    require(truth.shape == label.shape == radius.shape == paper.shape == (count,), "the rows do not fit the claims")
    require(logits.shape == (count, classes), "the scores do not fit the claims")
    require(logits.dtype == radius.dtype == paper.dtype == np.float64, "scores and radii are float64")
    require(truth.dtype.kind in "iu" and label.dtype.kind in "iu", "labels are integers")
    require(((truth >= 0) & (truth < classes)).all(), "a true label is none of the classes")
    require(images.dtype in (np.uint8, np.float16, np.float32, np.float64), "images are bytes or floats")
    byte = images.dtype == np.uint8
    require(byte or ((images >= 0) & (images <= 1)).all(), "an image lies outside of [0, 1]")
    require(np.isfinite(logits).all() and (label == logits.argmax(1)).all(), "a label has not the greatest score")
    slack = up(4 * sqrt_up(Fraction(2)) * error)
    derived = least_ratio(logits, label, bounds, slack, lambda x: np.nextafter(x, -np.inf))
    for i in np.flatnonzero(~(radius <= derived)):
        raise Rejected(f"image {i}: R = {radius[i]} is more than can be derived")
    require((paper == least_ratio(logits, label, claimed)).all(), "a radius by the paper's rule is not what it gives")

    chosen = np.sort(np.random.default_rng(seed).permutation(count)[: count if full else sample])
    for start in range(0, len(chosen), 50):
        part = chosen[start : start + 50]
        x = images[part].astype(np.float64) / (255 if byte else 1)
        for p in primitives:
            x = p.run(x)
        for ours, theirs in zip(x.tolist(), logits[part].tolist(), strict=True):
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
        print(f"accepted: {check(folders[0], full='--full' in arguments)}")
    except Rejected as reason:
        print(f"rejected: {reason}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
