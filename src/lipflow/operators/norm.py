"""The spectral norm: an estimate from below, and a bound from above.

`norm_estimate` is the paper's power iteration (Algorithm 1), and one more product with W. It is differentiable.
`norm_bound` is certified: never below the true norm, rounding included. Certificates use bounds only.
The proofs are in docs/norms.md.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction

import torch
from torch import Tensor

from lipflow.operators.conv import Axis, ConvOperator
from lipflow.operators.dense import DenseOperator
from lipflow.operators.fourier import CHUNK_BYTES, Side, Torus, real_matrix, symbols
from lipflow.operators.gram import gram_bound, start_vector, tridiagonal
from lipflow.operators.multiplier import FourierMultiplier
from lipflow.operators.operator import Adjoint, LinearOperator
from lipflow.operators.strip import exact_columns, strip_bound, strip_shift, strip_work, torus_columns
from lipflow.rounding import TINY, U, gamma, power_of_two, sqrt_up, square_sum_bound, subnormal, up
from lipflow.torch_state import as_written, without_autocast

EXACT_SIDE: Side = (0, 0)  # in place of the side of a torus, for an axis that is bounded without one
NO_TORUS: Torus = (EXACT_SIDE, EXACT_SIDE)
# The multiple of the symbol's error that a bound includes: one is needed, and with two more another program, whose own
# symbol is within one error of the true one, can verify the bound (docs/norms.md, section 11).
SYMBOL_ERRORS = 3
EXACT_WORK, STRIP_WORK = 10**9, 3 * 10**10  # the most multiplications for two exact axes, and for exact rows


def norm_estimate(op: LinearOperator, u: Tensor | None = None, iterations: int = 100) -> Tensor:
    """‖Wu‖ ≤ ‖W‖ after power iteration from u: an estimate from below, differentiable in W.

    u is a unit vector of `op.in_shape`, and no gradient flows through it: d‖Wu‖ = vᵀ dW u with v = Wu/‖Wu‖,
    which is the derivative of ‖W‖ if u is the top singular vector.
    """
    start = start_vector(op.in_shape, op.weight.real) if u is None else u
    with without_autocast(start):
        return norm(op(power_iteration(op, start, iterations)[None]))


@torch.no_grad()
def power_iteration(op: LinearOperator, u: Tensor, iterations: int) -> Tensor:
    """Repeat u ← WᵀWu/‖WᵀWu‖. Where WᵀWu is 0, NaN or infinite, u does not change.

    No ε is added to the norm in the denominator: that would shrink the estimate.
    """
    if tuple(u.shape) != op.in_shape:
        raise ValueError(f"the start vector has shape {tuple(u.shape)}; {op} takes {op.in_shape}")
    if u.is_meta:
        return u
    with without_autocast(u):
        for _ in range(iterations):
            v = _unit(op(u[None]))
            w = _unit(op.adjoint(v))[0].detach()  # no_grad does not stop derivatives of forward mode
            u = torch.where((w != 0).any() & w.isfinite().all(), w, u)
    return u


@torch.no_grad()
def top_singular_vector(op: LinearOperator, start: Tensor, steps: int = 100) -> Tensor:
    """A unit vector u with ‖Wu‖ close to ‖W‖, by Lanczos' method on WᵀW; `start` itself if W is 0, NaN or infinite.

    The first vector is the sum of `start` and a random vector, as `start` may be orthogonal to the top singular vector.
    The method stops when WᵀWu is within a relative √eps of a multiple of u: then that multiple is as close to an
    eigenvalue of WᵀW. It makes at least 30 steps, so that the random vector finds a greater eigenvalue if there is one.
    """
    weight = op.weight.detach()
    greatest = weight.abs().amax()
    if start.is_meta or not bool((greatest > 0) & torch.isfinite(greatest)):
        return start
    op = op.with_weight(weight / greatest)
    basis = start.new_zeros(min(steps, start.numel()), start.numel())
    q = _unit(_unit(start) + _unit(start_vector(op.in_shape, start))).flatten()
    diagonal, off_diagonal, ritz, eps = [], [], q, torch.finfo(q.dtype).eps
    with without_autocast(start):
        for k in range(len(basis)):
            basis[k] = q
            w = op.adjoint(op(q.reshape(1, *op.in_shape))).flatten()
            diagonal.append(float(q @ w))
            for _ in range(2):  # full reorthogonalisation, twice is enough
                w = w - basis[: k + 1].T @ (basis[: k + 1] @ w)
            length = float(w.norm())
            is_last = k + 1 == len(basis) or length <= eps * max(diagonal)
            if is_last or (k >= 29 and k % 5 == 4):
                t = tridiagonal(*(torch.tensor(entries, dtype=torch.float64) for entries in (diagonal, off_diagonal)))
                values, vectors = torch.linalg.eigh(t)
                if is_last or length * abs(float(vectors[-1, -1])) <= math.sqrt(eps) * float(values[-1]):
                    ritz = vectors[:, -1].to(basis) @ basis[: k + 1]
                    break
            off_diagonal.append(length)
            q = w / length
    return _unit(ritz).reshape(op.in_shape)


def norm(x: Tensor) -> Tensor:
    """‖x‖₂ of all entries, scaled so that squares neither over- nor underflow; the gradient at 0 is 0."""
    scale = x.detach().abs().amax()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.linalg.vector_norm(x / scale) * scale


def two_over(smoothness: Tensor) -> Tensor:
    """2/ℓ, or 0 if ℓ = 0: the potential is flat, and any h gives the same step."""
    flat = smoothness <= 2 * torch.finfo(smoothness.dtype).tiny
    return torch.where(flat, 0.0, 2 / torch.where(flat, 1.0, smoothness))


def _unit(x: Tensor) -> Tensor:
    length = norm(x)
    return x / torch.where(length > 0, length, torch.ones_like(length))


def norm_bound(op: LinearOperator) -> float:
    """At least ‖W‖₂, rounding included: certified in float64 on the CPU.

    Dense: Cholesky proves μI - WWᵀ ⪰ 0 up to a bounded residual. Convolution: the same, cut into strips of rows, with
    the columns exact or on a twisted torus; or the greatest norm of its symbol on a torus (docs/norms.md).
    """
    return norm_certificate(op)[0]


@as_written
def norm_certificate(op: LinearOperator) -> tuple[float, Torus]:
    """`norm_bound`, and the torus of its proof, with EXACT_SIDE for an axis that is bounded without one."""
    if isinstance(op, Adjoint):
        return norm_certificate(op.op)
    if type(op) not in _BOUND_OF:
        known = " or ".join(kind.__name__ for kind in _BOUND_OF)
        raise TypeError(f"norm_bound takes a {known}, not {type(op).__name__}: it has a proof for those only")
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        weight = op.weight.detach()
        weight = torch.stack([weight.real, weight.imag]) if weight.is_complex() else weight
        weight = weight.to("cpu", torch.float64)
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"{op} has NaN or infinite weights, so it has no norm to bound")
        # A weight that the processor flushes to 0, and an underflow in the division by a power of two, are below TINY.
        # One weight has at most Π in_shape entries in a row of the matrix, and Π out_shape in a column.
        underflow = weight.numel() * TINY * (math.prod(op.in_shape) + math.prod(op.out_shape))
        flushed = underflow if bool(subnormal(weight).any()) else Fraction(0)
        scale = power_of_two(float(weight.abs().max()))
        if scale == 0:
            return up(flushed), NO_TORUS
        scaled, torus = _BOUND_OF[type(op)](op, weight / scale)
    bound = up((scaled + underflow) * Fraction(scale) + flushed)
    if math.isinf(bound):
        raise ValueError(f"the norm of {op} is beyond float64: its greatest weight is {float(weight.abs().max()):.3g}")
    return bound, torus


def _fourier_bound(op: LinearOperator, weight: Tensor) -> tuple[Fraction, Torus]:
    """The greatest norm over the frequencies of [[Re M, -Im M], [Im M, Re M]] (docs/soundness-spectral.md)."""
    real, imaginary = weight.flatten(1, 2)
    chunk = max(1, CHUNK_BYTES // (32 * real[0].numel()))
    chunks = zip(real.split(chunk), imaginary.split(chunk), strict=True)
    return sqrt_up(max(gram_bound(real_matrix(*parts)) for parts in chunks)), NO_TORUS


# Convolutions: Note [twisted torus]
#
# A zero-padded convolution is a compression P_out C_N P_in of the circular one on any torus of side N at least
# n + p and (m - 1)s - p + d(k - 1) + 1, as every index that wraps lands on a zero; and wrapped entries, being zero,
# may be multiplied by any phase e^{iθ}. So its norm is at most the greatest norm of the symbol over the N²
# frequencies (2πf + θ)/N, for every such N and θ. The best grid avoids the peaks of the symbol, so we try a few sides
# and θ ∈ {0, π} on each axis. Stride s: N is a multiple of s, and the s² aliases of a frequency stand side by side in
# one matrix, divided by s. A real kernel needs half of the frequencies.
#
# The bound on a torus exceeds the norm by a relative O(1/n²). If the cost allows it, an axis has no torus (strip.py).


def _conv_bound(op: LinearOperator, kernel: Tensor) -> tuple[Fraction, Torus]:
    assert isinstance(op, ConvOperator)
    groups = list(kernel.reshape(op.groups, -1, *kernel.shape[1:]))
    if op.padding_mode == "zeros":
        out, grouped, rows, columns = len(groups[0]), kernel.shape[1], op.rows, op.columns
        if op.groups * strip_work(rows, out * columns.outputs, grouped * columns.size) <= EXACT_WORK:
            return sqrt_up(strip_bound((exact_columns(k, columns) for k in groups), rows)), NO_TORUS
        frequencies = op.groups * (columns.size // columns.stride // 2 + 1)
        if frequencies * strip_work(rows, 2 * out, 2 * columns.stride * grouped) <= STRIP_WORK:
            return _strip_norm(op, groups)
    return _torus_norm(op, groups)


def _strip_norm(op: ConvOperator, groups: list[Tensor]) -> tuple[Fraction, Torus]:
    """Exact along the rows, and on the best of some tori along the columns."""

    def taps(side: Side) -> Iterator[Tensor]:
        return (batch for kernel in groups for batch in torus_columns(kernel, op.columns, side))

    shift, best = math.inf, EXACT_SIDE
    for side in _sides(op.columns, op.padding_mode):
        shift, best = min((shift, best), (strip_shift(lambda side=side: taps(side), op.rows, shift), side))
    bound = strip_bound(taps(best), op.rows, shift)
    return sqrt_up(bound / op.columns.stride) + SYMBOL_ERRORS * _symbol_error(groups), (EXACT_SIDE, best)


def _torus_norm(op: ConvOperator, groups: list[Tensor]) -> tuple[Fraction, Torus]:
    """The greatest norm of the symbol on the best of some tori."""
    axes = (op.rows, op.columns)
    strides, repeats = zip(*(_aliases(axis, op.padding_mode) for axis in axes), strict=True)

    def blocks(torus: Torus) -> Iterator[Tensor]:
        dilation = (op.rows.dilation, op.columns.dilation)
        return (b for group in groups for b in symbols(group, dilation, torus, (strides[0], strides[1])))

    torus = _choose([_sides(axis, op.padding_mode) for axis in axes], lambda t: max(_estimate(b) for b in blocks(t)))
    greatest = max(gram_bound(b) for b in blocks(torus))
    norm = sqrt_up(greatest / math.prod(strides)) + SYMBOL_ERRORS * _symbol_error(groups)
    return sqrt_up(Fraction(math.prod(repeats))) * norm, torus


def _symbol_error(groups: list[Tensor]) -> Fraction:
    """A bound on the error of a symbol: an entry is a sum of k² products of K_j with cosines and sines within 8u."""
    taps, numel = groups[0].shape[2] * groups[0].shape[3], sum(group.numel() for group in groups)
    spread = max(square_sum_bound(group.abs().sum((2, 3))) for group in groups) / (1 - gamma(taps)) ** 2
    return 2 * (gamma(taps) + 16 * U) * sqrt_up(spread) + sqrt_up(Fraction(2 * numel)) * taps * TINY


def _choose(sides: list[list[Side]], estimate: Callable[[Torus], float]) -> Torus:
    """A torus with a small estimate: first the least sides with both twists, then one axis after the other."""
    first, second = sides
    if len(first) == len(second) == 1:
        return first[0], second[0]
    seen: dict[Torus, float] = {}

    def best(tori: Iterable[Torus]) -> Torus:
        for torus in tori:
            seen.setdefault(torus, estimate(torus))
        return min(seen, key=lambda torus: seen[torus])

    row, column = best((r, c) for r in first[:2] for c in second[:2])
    row, column = best((r, column) for r in first)
    return best((row, c) for c in second)


def _sides(axis: Axis, padding_mode: str) -> list[Side]:
    """The (side, twist) of the tori to try along one axis: the least side first."""
    if padding_mode == "circular":
        return [(axis.size, 0)]
    if axis.kernel == 1:
        return [(axis.stride, 0)]  # the symbol is the same at all frequencies
    least = max(axis.size + axis.before, (axis.outputs - 1) * axis.stride - axis.before + axis.extent)
    coarse = -(-least // axis.stride)
    return [(n * axis.stride, twist) for n in range(coarse, coarse + 1 + coarse // 8) for twist in (0, 1)]


def _aliases(axis: Axis, padding_mode: str) -> tuple[int, int]:
    """The stride whose aliases add, and the greatest number of outputs at one torus position."""
    if padding_mode == "zeros":
        return axis.stride, 1
    # Circular: output i is at position i·s mod n, one of n/gcd(n, s), which follow each other again and again.
    positions = axis.size // math.gcd(axis.size, axis.stride)
    return axis.stride if axis.size % axis.stride == 0 else 1, -(-axis.outputs // positions)


def _estimate(matrices: Tensor, candidates: int = 24) -> float:
    """The greatest λ(WWᵀ) over the members of largest ‖(WWᵀ)²‖_F in a batch: to choose a torus, never to certify."""
    w = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    g = w @ w.mT
    largest = (g @ g).square().sum((-2, -1)).topk(min(candidates, len(g))).indices
    return float(torch.linalg.eigvalsh(g[largest]).max())


_BOUND_OF: dict[type, Callable[[LinearOperator, Tensor], tuple[Fraction, Torus]]] = {
    DenseOperator: lambda op, weight: (sqrt_up(gram_bound(weight[None])), NO_TORUS),
    ConvOperator: _conv_bound,
    FourierMultiplier: _fourier_bound,
}
