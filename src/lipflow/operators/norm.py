"""The spectral norm, from below and from above.

`norm_estimate` is the paper's power iteration (Algorithm 1): from below, differentiable, for training.
`norm_bound` is certified: never below the true norm, rounding included. An estimate never reaches a certificate.
The proofs are in docs/norms.md.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction

import torch
from torch import Tensor

from lipflow.operators.conv import Axis, Conv2d
from lipflow.operators.dense import Dense
from lipflow.operators.fourier import phases, symbol
from lipflow.operators.operator import LinearOperator
from lipflow.rounding import TINY, U, gamma, power_of_two, sqrt_up, square_sum_bound, square_sum_max, up

Side = tuple[int, int]  # one axis of a torus: its side N, and its twist θ/π, 0 or 1
Torus = tuple[Side, Side]
NO_TORUS: Torus = ((0, 0), (0, 0))
CHUNK_BYTES = 256 * 2**20  # frequencies are taken in chunks of about this size


# From below


def norm_estimate(op: LinearOperator, u: Tensor | None = None, iterations: int = 100) -> Tensor:
    """‖Wu‖ ≤ ‖W‖ after some power iterations from u: an estimate from below, differentiable in W.

    u is a unit vector of `op.in_shape`, and is not differentiated through: d‖Wu‖ = vᵀ dW u with v = Wu/‖Wu‖,
    which is the derivative of ‖W‖ where u is its top singular vector.
    """
    start = start_vector(op.in_shape, op.weight) if u is None else u
    return norm(op(power_iteration(op, start, iterations)[None]))


@torch.no_grad()
def power_iteration(op: LinearOperator, u: Tensor, iterations: int) -> Tensor:
    """u ← WᵀWu/‖WᵀWu‖, some times. Where WᵀWu = 0 there is nothing to follow, and u stays.

    Nothing is added to a norm to divide by it: that would shrink the estimate.
    """
    if tuple(u.shape) != op.in_shape:
        raise ValueError(f"the start vector has shape {tuple(u.shape)}; {op} takes {op.in_shape}")
    if u.is_meta:
        return u  # shapes only: there are no numbers to iterate on
    for _ in range(iterations):
        v = _unit(op(u[None]))
        w = _unit(op.adjoint(v))[0]
        u = torch.where((w != 0).any(), w, u)
    return u


def start_vector(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A fixed pseudo-random unit vector: the same on every machine, so on every rank too."""
    generator = torch.Generator("cpu").manual_seed(0)
    u = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return (u / u.norm()).to(like.device, like.dtype)


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

    Dense: Cholesky proves μI - WWᵀ ⪰ 0 up to a bounded residual. Convolution: the greatest norm of its symbol over
    the frequencies of a twisted torus (docs/norms.md), each certified in the same way.
    """
    return norm_certificate(op)[0]


def norm_certificate(op: LinearOperator) -> tuple[float, Torus]:
    """`norm_bound`, and the torus that proves it."""
    if type(op) not in _SCALED:
        raise TypeError(
            f"norm_bound takes a Dense or a Conv2d, not {type(op).__name__}: only of those it knows a proof"
        )
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
        weight = op.weight.detach().to("cpu", torch.float64)
        if not bool(torch.isfinite(weight).all()):
            raise ValueError(f"{op} has NaN or infinite weights, so it has no norm to bound")
        # A weight that is read as 0, or lost in the division by a power of two, is below TINY.
        underflow = weight.numel() * TINY * _underflow_amplification(op)
        scale = power_of_two(float(weight.abs().max()))
        if scale == 0:
            flushed = bool((weight.view(torch.int64) << 1).any())  # not zero, but the processor takes it for zero
            return up(underflow) if flushed else 0.0, NO_TORUS
        scaled, torus = _SCALED[type(op)](op, weight / scale)
    bound = up((scaled + underflow) * Fraction(scale))
    if math.isinf(bound):
        raise ValueError(f"the norm of {op} is beyond float64: its greatest weight is {float(weight.abs().max()):.3g}")
    return bound, torus


def _underflow_amplification(op: LinearOperator) -> int:
    """One weight of an operator stands for at most so many entries in a row or a column of its matrix."""
    return math.prod(op.in_shape) + math.prod(op.out_shape)


def _dense_bound(op: LinearOperator, weight: Tensor) -> tuple[Fraction, Torus]:
    return sqrt_up(gram_bound(weight[None])), NO_TORUS


def gram_bound(matrices: Tensor) -> Fraction:
    """At least the greatest λmax(WWᵀ) over a batch of float64 matrices W, of entries at most 8  # (batch, m, n).

    Note [Cholesky certificate]. On the short side let G = fl(WWᵀ), μ a guess, M = fl(μI - G), R = the Cholesky
    factor of M as LAPACK gave it, and P = fl(RRᵀ). Whatever LAPACK did, RRᵀ ⪰ 0, hence
    λmax(WWᵀ) ≤ μ + ‖M - P‖_F + γ_m‖R‖_F² + γ_n‖W‖_F² + u·max|M_ii| + underflow,
    and only the error model of a matrix product is trusted.
    """
    w = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    m, n = w.shape[-2:]
    product_error = gamma(n) * square_sum_max(w) + m * n * TINY
    g = w @ w.mT
    g = g.tril() + g.tril(-1).mT
    mu, r = _shift(g)
    shifted = -g
    shifted.diagonal(dim1=-2, dim2=-1).add_(mu)
    del g
    p = r @ r.mT
    residual = shifted - (p.tril() + p.tril(-1).mT)
    return (
        Fraction(mu)
        + sqrt_up(square_sum_max(residual)) / (1 - U)
        + gamma(m) * square_sum_max(r)
        + product_error
        + U * Fraction(float(shifted.diagonal(dim1=-2, dim2=-1).abs().max())) / (1 - U)
        + 2 * m * m * TINY
    )


def _shift(g: Tensor) -> tuple[float, Tensor]:
    """A number μ just above the greatest eigenvalue of a batch of symmetric g, and the Cholesky factors of μI - g.

    Nothing here needs to be right: a bad μ or a bad factor only loosens the bound.
    """
    mu, hair = _lanczos(g), 2.0**-34
    identity = torch.eye(g.shape[-1], dtype=g.dtype)
    while True:
        mu = max(mu, 2.0**-900) * (1 + hair)
        factor, info = torch.linalg.cholesky_ex(mu * identity - g)
        failed = info != 0
        if not bool(failed.any()) and bool(torch.isfinite(factor).all()):
            return mu, factor.tril()
        if g.shape[-1] <= 256:
            mu = max(mu, float(torch.linalg.eigvalsh(g[failed]).max()))
        hair *= 8


def _lanczos(g: Tensor, steps: int = 64) -> float:
    """The greatest Ritz value over a batch of symmetric matrices, from one fixed start: from below."""
    size = g.shape[-1]
    q = start_vector((size,), g).expand(g.shape[0], size)
    basis, alphas, betas = [q], [], []
    noise = 2.0**-40 * g.diagonal(dim1=-2, dim2=-1).amax(-1)  # g is positive: its largest entry is on the diagonal
    for _ in range(min(steps, size)):
        w = (g @ basis[-1].unsqueeze(-1)).squeeze(-1)
        alphas.append((w * basis[-1]).sum(-1))
        previous = torch.stack(basis, -1)
        for _ in range(2):  # full reorthogonalisation, twice is enough
            w = w - (previous @ (previous.mT @ w.unsqueeze(-1))).squeeze(-1)
        beta = w.norm(dim=-1)
        # An invariant subspace is found: what is left is rounding, and must not be taken for a direction.
        beta = torch.where(beta > noise, beta, 0.0)
        betas.append(beta)
        if float(beta.max()) == 0:
            break
        basis.append(torch.where((beta > 0).unsqueeze(-1), w / beta.unsqueeze(-1), 0.0))
    t = torch.diag_embed(torch.stack(alphas, -1))
    off = torch.stack(betas, -1)[..., : t.shape[-1] - 1]
    t = t + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    return float(torch.linalg.eigvalsh(t).max())


# Convolutions: Note [twisted torus]
#
# A zero-padded convolution is a compression P_out C_N P_in of the circular one on any torus of side N at least
# n + p and (m - 1)s - p + d(k - 1) + 1, as every index that wraps lands on a zero; and wrapped entries, being zero,
# may be multiplied by any phase e^{iθ}. So its norm is at most the greatest norm of the symbol over the N²
# frequencies (2πf + θ)/N, for every such N and θ. The best grid keeps its distance from the peaks of the symbol, so we
# try a few sides and θ ∈ {0, π} on each axis. Stride s: N is a multiple of s, and the s² aliases of a frequency stand
# side by side in one matrix, divided by s. A real kernel needs half of the frequencies.


def _conv_bound(op: LinearOperator, kernel: Tensor) -> tuple[Fraction, Torus]:
    assert isinstance(op, Conv2d)
    axes = (op.rows, op.columns)
    strides, repeats = zip(*(_aliases(axis, op.padding_mode) for axis in axes), strict=True)
    dilation = (op.rows.dilation, op.columns.dilation)
    groups = kernel.reshape(op.groups, -1, *kernel.shape[1:])

    def blocks(torus: Torus) -> Iterator[Tensor]:
        sides, twist = (torus[0][0], torus[1][0]), (torus[0][1], torus[1][1])
        return (b for group in groups for b in _symbols(group, dilation, sides, (strides[0], strides[1]), twist))

    torus = _choose([_sides(axis, op.padding_mode) for axis in axes], lambda t: max(_glance(b) for b in blocks(t)))
    greatest = max(gram_bound(b) for b in blocks(torus))
    # Each entry of a symbol is a sum of k² products of K_j with a phase that is within 8u on both parts.
    taps = kernel.shape[2] * kernel.shape[3]
    spread = max(square_sum_bound(group.abs().sum((2, 3))) for group in groups) / (1 - gamma(taps)) ** 2
    symbol_error = 2 * (gamma(taps) + 16 * U) * sqrt_up(spread) + sqrt_up(Fraction(2 * kernel.numel())) * taps * TINY
    norm = sqrt_up(greatest / math.prod(strides)) + symbol_error
    return sqrt_up(Fraction(math.prod(repeats))) * norm, torus


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


def _symbols(
    kernel: Tensor,
    dilation: tuple[int, int],
    sides: tuple[int, int],
    strides: tuple[int, int],
    twist: tuple[int, int],
) -> Iterator[Tensor]:
    """The symbols at half of the coarse frequencies, aliases side by side, as real matrices [[Re, -Im], [Im, Re]]."""
    out, grouped, height, width = kernel.shape
    coarse = [n // s for n, s in zip(sides, strides, strict=True)]
    aliases = strides[0] * strides[1]
    # f and -f (with a half twist: -f - 1) are conjugate, so the first axis needs half of its frequencies.
    half = (coarse[0] + 1) // 2 if twist[0] else coarse[0] // 2 + 1
    rows_at_once = max(1, CHUNK_BYTES // (32 * out * grouped * aliases * coarse[1]))
    for first in range(0, half, rows_at_once):
        f = torch.arange(first, min(first + rows_at_once, half))
        rows = (f[:, None] + coarse[0] * torch.arange(strides[0])).flatten()
        columns = (torch.arange(coarse[1])[:, None] + coarse[1] * torch.arange(strides[1])).flatten()
        cosine, sine = phases((height, width), dilation, sides, (rows, columns), twist)

        def side_by_side(part: Tensor, count: int = len(f)) -> Tensor:
            part = part.reshape(count, strides[0], coarse[1], strides[1], out, grouped)
            return part.permute(0, 2, 4, 1, 3, 5).reshape(count * coarse[1], out, aliases * grouped)

        real, imaginary = (side_by_side(part) for part in symbol(kernel, cosine, sine))
        yield torch.cat([torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)], -2)


def _glance(matrices: Tensor, look: int = 24) -> float:
    """The greatest λ(WWᵀ) over the members of a batch that look largest: to choose a torus, never to certify."""
    w = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    g = w @ w.mT
    largest = (g @ g).square().sum((-2, -1)).topk(min(look, len(g))).indices
    return float(torch.linalg.eigvalsh(g[largest]).max())


_SCALED: dict[type, Callable[[LinearOperator, Tensor], tuple[Fraction, Torus]]] = {
    Dense: _dense_bound,
    Conv2d: _conv_bound,
}
