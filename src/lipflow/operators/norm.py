"""The spectral norm, from below and from above.

`norm_estimate` is the paper's power iteration (Algorithm 1), half a step further: from below, differentiable.
`norm_bound` is certified: never below the true norm, rounding included. An estimate never reaches a certificate.
The proofs are in docs/norms.md.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction

import torch
from torch import Tensor

from lipflow.operators.conv import Axis, ConvOperator
from lipflow.operators.dense import DenseOperator
from lipflow.operators.fourier import CHUNK_BYTES as CHUNK_BYTES
from lipflow.operators.fourier import Side, Torus, symbols
from lipflow.operators.gram import gram_bound, start_vector
from lipflow.operators.multiplier import FourierMultiplier
from lipflow.operators.operator import Adjoint, LinearOperator
from lipflow.operators.strip import exact_columns, strip_bound, strip_shift, strip_work, torus_columns
from lipflow.rounding import TINY, U, gamma, power_of_two, sqrt_up, square_sum_bound, up

EXACT: Side = (0, 0)  # in the place of the side of a torus: this axis is taken as it is
NO_TORUS: Torus = (EXACT, EXACT)
# Errors of the symbol that a norm has room for: one is ours, and with two more any other program, whose own symbol is
# within one of the true one, finds that the norm holds (docs/norms.md, section 11).
STATED = 3
EXACT_WORK, STRIP_WORK = 10**9, 3 * 10**10  # multiplications that two exact axes may cost, and one


# From below


def norm_estimate(op: LinearOperator, u: Tensor | None = None, iterations: int = 100) -> Tensor:
    """‖Wu‖ ≤ ‖W‖ after some power iterations from u: an estimate from below, differentiable in W.

    u is a unit vector of `op.in_shape`, and is not differentiated through: d‖Wu‖ = vᵀ dW u with v = Wu/‖Wu‖,
    which is the derivative of ‖W‖ where u is its top singular vector.
    """
    start = start_vector(op.in_shape, op.weight.real) if u is None else u
    with in_full(start):
        return norm(op(power_iteration(op, start, iterations)[None]))


@torch.no_grad()
def power_iteration(op: LinearOperator, u: Tensor, iterations: int) -> Tensor:
    """u ← WᵀWu/‖WᵀWu‖, some times. Where WᵀWu is 0, or no number, there is nothing to follow, and u stays.

    Nothing is added to a norm to divide by it: that would shrink the estimate.
    """
    if tuple(u.shape) != op.in_shape:
        raise ValueError(f"the start vector has shape {tuple(u.shape)}; {op} takes {op.in_shape}")
    if u.is_meta:
        return u  # shapes only: there are no numbers to iterate on
    with in_full(u):
        for _ in range(iterations):
            v = _unit(op(u[None]))
            w = _unit(op.adjoint(v))[0].detach()  # no_grad does not stop derivatives of forward mode
            u = torch.where((w != 0).any() & w.isfinite().all(), w, u)
    return u


@torch.no_grad()
def top_singular_vector(op: LinearOperator, start: Tensor, steps: int = 100) -> Tensor:
    """A unit vector u with ‖Wu‖ close to ‖W‖, by Lanczos' method on WᵀW; `start` itself where W is 0, or no number.

    It begins with the sum of `start` and a random vector, as `start` may be orthogonal to the one that is sought, and
    ends when WᵀWu is within √eps of a multiple of u, relatively: then an eigenvalue of WᵀW is as near. At least 30
    steps are made, in which the random vector shows a greater eigenvalue, if there is one.
    """
    weight = op.weight.detach()
    greatest = weight.abs().amax()
    if start.is_meta or not bool((greatest > 0) & torch.isfinite(greatest)):
        return start
    op = op.with_weight(weight / greatest)
    basis = start.new_zeros(min(steps, start.numel()), start.numel())
    q = _unit(_unit(start) + _unit(start_vector(op.in_shape, start))).flatten()
    diagonal, beside, ritz, tolerance = [], [], q, math.sqrt(torch.finfo(q.dtype).eps)
    with in_full(start):
        for k in range(len(basis)):
            basis[k] = q
            w = op.adjoint(op(q.reshape(1, *op.in_shape))).flatten()
            diagonal.append(float(q @ w))
            for _ in range(2):  # twice is enough to keep the basis orthogonal
                w = w - basis[: k + 1].T @ (basis[: k + 1] @ w)
            length = float(w.norm())
            ended = k + 1 == len(basis) or length <= torch.finfo(w.dtype).eps * max(diagonal)
            if ended or (k >= 29 and k % 5 == 4):
                values, vectors = torch.linalg.eigh(_tridiagonal(diagonal, beside))
                if ended or length * abs(float(vectors[-1, -1])) <= tolerance * float(values[-1]):
                    ritz = vectors[:, -1].to(basis) @ basis[: k + 1]
                    break
            beside.append(length)
            q = w / length
    return _unit(ritz).reshape(op.in_shape)


def _tridiagonal(diagonal: list[float], beside: list[float]) -> Tensor:
    side = torch.diag(torch.tensor(beside, dtype=torch.float64), 1) if beside else 0
    matrix = torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + side
    return matrix + (side.mT if beside else 0)  # pyright: ignore[reportAttributeAccessIssue]


def in_full(x: Tensor) -> AbstractContextManager[object]:
    """Within this, autocast rounds nothing on x's device: step sizes follow norms to float32's precision."""
    kind = x.device.type
    autocast = not x.is_meta and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if autocast else nullcontext()


def norm(x: Tensor) -> Tensor:
    """‖x‖₂ of all entries, scaled so that squares neither over- nor underflow; 0 has the gradient 0."""
    scale = x.detach().abs().amax()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.linalg.vector_norm(x / scale) * scale


def _unit(x: Tensor) -> Tensor:
    length = norm(x)
    return x / torch.where(length > 0, length, torch.ones_like(length))


# From above


def norm_bound(op: LinearOperator) -> float:
    """At least ‖W‖₂, whatever the rounding: certified in float64 on the CPU.

    Dense: Cholesky proves μI - WWᵀ ⪰ 0 up to a bounded residual. Convolution: the same, cut into strips of rows, with
    its columns as they are or on a twisted torus; or the greatest norm of its symbol on a torus (docs/norms.md).
    """
    return norm_certificate(op)[0]


def norm_certificate(op: LinearOperator) -> tuple[float, Torus]:
    """`norm_bound`, and the torus that proves it, with EXACT for an axis that needs none."""
    if isinstance(op, Adjoint):
        return norm_certificate(op.op)
    if type(op) not in _SCALED:
        known = " or ".join(kind.__name__ for kind in _SCALED)
        raise TypeError(f"norm_bound takes a {known}, not {type(op).__name__}: only of those it knows a proof")
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        weight = real_parts(op.weight.detach()).to("cpu", torch.float64)
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"{op} has NaN or infinite weights, so it has no norm to bound")
        # A weight that is read as 0, and what is lost in the division by a power of two, is below TINY.
        underflow = weight.numel() * TINY * _underflow_amplification(op)
        bits = weight.contiguous().view(torch.int64)
        subnormal = bool((((bits >> 52) & 2047 == 0) & (bits << 1 != 0)).any())  # the processor may take it for 0
        scale = power_of_two(float(weight.abs().max()))
        if scale == 0:
            return up(underflow) if subnormal else 0.0, NO_TORUS
        scaled, torus = _SCALED[type(op)](op, weight / scale)
    bound = up((scaled + underflow) * Fraction(scale) + (underflow if subnormal else 0))
    if math.isinf(bound):
        raise ValueError(f"the norm of {op} is beyond float64: its greatest weight is {float(weight.abs().max()):.3g}")
    return bound, torus


def _underflow_amplification(op: LinearOperator) -> int:
    """One weight of an operator stands for at most so many entries in a row or a column of its matrix."""
    return math.prod(op.in_shape) + math.prod(op.out_shape)


def real_parts(weight: Tensor) -> Tensor:
    """Complex numbers as their real and imaginary parts  # (2, ...); real ones as they are."""
    return torch.stack([weight.real, weight.imag]) if weight.is_complex() else weight


def _fourier_bound(op: LinearOperator, weight: Tensor) -> tuple[Fraction, Torus]:
    """The greatest norm over the frequencies of [[Re M, -Im M], [Im M, Re M]] (docs/soundness-spectral.md)."""
    real, imaginary = weight.flatten(1, 2)
    at_once = max(1, CHUNK_BYTES // (32 * real[0].numel()))
    greatest = Fraction(0)
    for re, im in zip(real.split(at_once), imaginary.split(at_once), strict=True):
        greatest = max(greatest, gram_bound(torch.cat([torch.cat([re, -im], -1), torch.cat([im, re], -1)], -2)))
    return sqrt_up(greatest), NO_TORUS


def _dense_bound(op: LinearOperator, weight: Tensor) -> tuple[Fraction, Torus]:
    return sqrt_up(gram_bound(weight[None])), NO_TORUS


# Convolutions: Note [twisted torus]
#
# A zero-padded convolution is a compression P_out C_N P_in of the circular one on any torus of side N at least
# n + p and (m - 1)s - p + d(k - 1) + 1, as every index that wraps lands on a zero; and wrapped entries, being zero,
# may be multiplied by any phase e^{iθ}. So its norm is at most the greatest norm of the symbol over the N²
# frequencies (2πf + θ)/N, for every such N and θ. The best grid keeps its distance from the peaks of the symbol, so we
# try a few sides and θ ∈ {0, π} on each axis. Stride s: N is a multiple of s, and the s² aliases of a frequency stand
# side by side in one matrix, divided by s. A real kernel needs half of the frequencies.
#
# A torus is above the norm by a part of order 1/n². Where the cost allows it, an axis is EXACT instead (strip.py).


def _conv_bound(op: LinearOperator, kernel: Tensor) -> tuple[Fraction, Torus]:
    assert isinstance(op, ConvOperator)
    groups = list(kernel.reshape(op.groups, -1, *kernel.shape[1:]))
    if op.padding_mode == "zeros":
        out, grouped, rows, columns = len(groups[0]), kernel.shape[1], op.rows, op.columns
        if op.groups * strip_work(rows, out * columns.outputs, grouped * columns.size) <= EXACT_WORK:
            return sqrt_up(strip_bound((exact_columns(k, columns) for k in groups), rows)), (EXACT, EXACT)
        frequencies = op.groups * (columns.size // columns.stride // 2 + 1)
        if frequencies * strip_work(rows, 2 * out, 2 * columns.stride * grouped) <= STRIP_WORK:
            return _strip_norm(op, groups)
    return _torus_norm(op, groups)


def _strip_norm(op: ConvOperator, groups: list[Tensor]) -> tuple[Fraction, Torus]:
    """Exact along the rows, and on the best torus along the columns."""

    def taps(side: Side) -> Iterator[Tensor]:
        return (batch for kernel in groups for batch in torus_columns(kernel, op.columns, side))

    shift, best = math.inf, EXACT
    for side in _sides(op.columns, op.padding_mode):
        shift, best = min((shift, best), (strip_shift(lambda side=side: taps(side), op.rows, shift), side))
    bound = strip_bound(taps(best), op.rows, shift)
    return sqrt_up(bound / op.columns.stride) + STATED * _symbol_error(groups), (EXACT, best)


def _torus_norm(op: ConvOperator, groups: list[Tensor]) -> tuple[Fraction, Torus]:
    """The greatest norm of the symbol on a torus that suits it."""
    axes = (op.rows, op.columns)
    strides, repeats = zip(*(_aliases(axis, op.padding_mode) for axis in axes), strict=True)

    def blocks(torus: Torus) -> Iterator[Tensor]:
        dilation = (op.rows.dilation, op.columns.dilation)
        return (b for group in groups for b in symbols(group, dilation, torus, (strides[0], strides[1])))

    torus = _choose([_sides(axis, op.padding_mode) for axis in axes], lambda t: max(_glance(b) for b in blocks(t)))
    greatest = max(gram_bound(b) for b in blocks(torus))
    norm = sqrt_up(greatest / math.prod(strides)) + STATED * _symbol_error(groups)
    return sqrt_up(Fraction(math.prod(repeats))) * norm, torus


def _symbol_error(groups: list[Tensor]) -> Fraction:
    """Each entry of a symbol is a sum of k² products of K_j with a phase that is within 8u on both parts."""
    taps, numel = groups[0].shape[2] * groups[0].shape[3], sum(group.numel() for group in groups)
    spread = max(square_sum_bound(group.abs().sum((2, 3))) for group in groups) / (1 - gamma(taps)) ** 2
    return 2 * (gamma(taps) + 16 * U) * sqrt_up(spread) + sqrt_up(Fraction(2 * numel)) * taps * TINY


def _choose(sides: list[list[Side]], glance: Callable[[Torus], float]) -> Torus:
    """A torus on which the symbol looks small: the least sides and their best twists, then one axis after the other."""
    first, second = sides
    if len(first) == len(second) == 1:
        return first[0], second[0]
    seen: dict[Torus, float] = {}

    def best(tori: Iterable[Torus]) -> Torus:
        for torus in tori:
            seen.setdefault(torus, glance(torus))
        return min(seen, key=lambda torus: seen[torus])

    row, column = best((r, c) for r in first[:2] for c in second[:2])
    row, column = best((r, column) for r in first)
    return best((row, c) for c in second)


def _sides(axis: Axis, padding_mode: str) -> list[Side]:
    """The (side, twist) that may carry one axis: the least side first."""
    if padding_mode == "circular":
        return [(axis.size, 0)]
    if axis.kernel == 1:
        return [(axis.stride, 0)]  # the symbol is the same at all frequencies: one will do
    least = max(axis.size + axis.before, (axis.outputs - 1) * axis.stride - axis.before + axis.extent)
    coarse = -(-least // axis.stride)
    return [(n * axis.stride, twist) for n in range(coarse, coarse + 1 + coarse // 8) for twist in (0, 1)]


def _aliases(axis: Axis, padding_mode: str) -> tuple[int, int]:
    """(the stride whose aliases add, outputs at one torus position)."""
    if padding_mode == "zeros":
        return axis.stride, 1
    # Circular: output i sits at i·s mod n; a position with several outputs counts as often.
    positions = [i * axis.stride % axis.size for i in range(axis.outputs)]
    return axis.stride if axis.size % axis.stride == 0 else 1, max(map(positions.count, set(positions)))


def _glance(matrices: Tensor, look: int = 24) -> float:
    """The greatest λ(WWᵀ) over the members of a batch that look largest: to choose a torus, never to certify."""
    w = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    g = w @ w.mT
    largest = (g @ g).square().sum((-2, -1)).topk(min(look, len(g))).indices
    return float(torch.linalg.eigvalsh(g[largest]).max())


_SCALED: dict[type, Callable[[LinearOperator, Tensor], tuple[Fraction, Torus]]] = {
    DenseOperator: _dense_bound,
    ConvOperator: _conv_bound,
    FourierMultiplier: _fourier_bound,
}
