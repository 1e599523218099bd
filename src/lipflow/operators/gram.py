"""λmax(WWᵀ) from above: the Cholesky certificate, for matrices and for matrices cut into strips (docs/norms.md)."""

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from lipflow.rounding import TINY, U, gamma, sqrt_up, square_sum_max

LEAST_SHIFT = 2.0**-400  # far below any λmax that matters, far above what underflow costs


def gram_bound(matrices: Tensor) -> Fraction:
    """At least the greatest λmax(WWᵀ) over a batch of float64 matrices W, of entries at most 8  # (batch, m, n)."""
    w = matrices if matrices.shape[-2] <= matrices.shape[-1] else matrices.mT
    m, n = w.shape[-2:]
    gram = (w @ w.mT)[:, None]
    product_error = gamma(n) * square_sum_max(w) + m * n * TINY
    return band_bound(gram, gram[:, 1:], product_error)[0]


def band_bound(
    diagonal: Tensor,  # (batch, strips, q, q)
    below: Tensor,  # (batch, strips - 1, q, q)
    product_error: Fraction,
    guess: float = 0.0,
) -> tuple[Fraction, float]:
    """At least the greatest λmax(WWᵀ) over a batch, and the shift μ that proved it (try it as the next `guess`).

    WWᵀ is within `product_error` of the symmetric G with the blocks `diagonal` (their lower triangles count) and
    `below` right below them, and 0 elsewhere. A matrix without strips is one strip.

    Note [Cholesky certificate]. Let μ be a guess, M = fl(μI - G), R the Cholesky factor of M as LAPACK gave it, whose
    block row t is [C_t, L_t] below [.., L_{t-1}], and P = fl(RRᵀ). Whatever LAPACK did, RRᵀ ⪰ 0, hence
    λmax(WWᵀ) ≤ μ + ‖M - P‖_F + γ_l‖R‖_F² + u·max|M_ii| + product_error + underflow, with l the length of a block row.
    Only the error model of a matrix product is trusted.
    """
    diagonal = _mirror(diagonal)
    mu, factor = band_shift(diagonal, below, guess)
    strips, q = diagonal.shape[1:3]
    residual = weight = pivot = Fraction(0)
    for t, row in enumerate(factor):
        shifted = -diagonal[:, t]
        shifted.diagonal(dim1=-2, dim2=-1).add_(mu)
        pivot = max(pivot, Fraction(float(shifted.diagonal(dim1=-2, dim2=-1).abs().max())))
        residual += square_sum_max(shifted - _mirror(row @ row.mT))
        weight += square_sum_max(row)
        if t:
            residual += 2 * square_sum_max(-below[:, t - 1] - row[..., :q] @ factor[t - 1][..., -q:].mT)
    length, band = min(strips, 2) * q, min(strips, 3) * q
    rounding = sqrt_up(residual) / (1 - U) + gamma(length) * weight + U * pivot / (1 - U) + band * (length + 1) * TINY
    return Fraction(mu) + rounding + product_error, mu


def _mirror(g: Tensor) -> Tensor:
    """The symmetric matrix with this lower triangle."""
    return g.tril() + g.tril(-1).mT


def band_shift(diagonal: Tensor, below: Tensor, guess: float = 0.0) -> tuple[float, list[Tensor]]:
    """A number μ just above the greatest eigenvalue of a batch, or the guess, and the Cholesky factor of μI - G.

    Nothing here needs to be right: a bad μ or a bad factor only loosens the bound.
    """
    factor = _cholesky(diagonal, below, guess) if guess else None
    if factor is not None:
        return guess, factor
    mu, hair = max(guess, _greatest_ritz_value(diagonal, below)), 2.0**-34
    while True:
        mu = max(mu, LEAST_SHIFT) * (1 + hair)
        factor = _cholesky(diagonal, below, mu)
        if factor is not None:
            return mu, factor
        if diagonal.shape[1] == 1 and diagonal.shape[-1] <= 256 and hair < 2.0**-33:
            mu = max(mu, float(torch.linalg.eigvalsh(diagonal).max()))
        hair *= 8


def is_above(mu: float, diagonal: Tensor, below: Tensor) -> bool:
    """Whether μ seems to be above all eigenvalues of a batch."""
    return math.isinf(mu) or _cholesky(diagonal, below, mu) is not None


def _cholesky(diagonal: Tensor, below: Tensor, mu: float) -> list[Tensor] | None:
    """The block rows [C_t, L_t] of the Cholesky factor of μI - G, or None where there is none."""
    identity = torch.eye(diagonal.shape[-1], dtype=diagonal.dtype)
    rows: list[Tensor] = []
    for t in range(diagonal.shape[1]):
        pivot = mu * identity - diagonal[:, t]
        c = pivot[..., :0]
        if t:
            last = rows[-1][..., -len(identity) :]
            c = -torch.linalg.solve_triangular(last, below[:, t - 1].mT, upper=False).mT
            pivot = pivot - c @ c.mT
        factor, info = torch.linalg.cholesky_ex(pivot)
        if bool((info != 0).any()) or not bool(torch.isfinite(factor).all()):
            return None
        rows.append(torch.cat([c, factor.tril()], -1))
    return rows


def _greatest_ritz_value(diagonal: Tensor, below: Tensor) -> float:
    """The greatest Ritz value of a batch, by Lanczos from one fixed start: from below."""

    def apply(x: Tensor) -> Tensor:  # (batch, strips·q)
        x = x.reshape(*diagonal.shape[:-1], 1)
        y = diagonal @ x
        y[:, 1:] += below @ x[:, :-1]
        y[:, :-1] += below.mT @ x[:, 1:]
        return y.flatten(1)

    batch, strips, q = diagonal.shape[:3]
    start = start_vector((strips * q,), diagonal).expand(batch, -1)
    # G is positive: its largest entry is on the diagonal.
    return lanczos(apply, start, 2.0**-40 * diagonal.diagonal(dim1=-2, dim2=-1).amax((-2, -1)))


def lanczos(apply: Callable[[Tensor], Tensor], start: Tensor, noise: Tensor, steps: int = 64) -> float:
    """The greatest Ritz value of a batch of symmetric maps after some steps; what is below the noise is no direction.

    `start` holds a unit vector for each of them  # (batch, size).
    """
    steps = min(steps, start.shape[-1])
    basis, alphas, betas = start.new_zeros(len(start), steps + 1, start.shape[-1]), [], []
    basis[:, 0] = start
    for step in range(steps):
        w = apply(basis[:, step])
        alphas.append((w * basis[:, step]).sum(-1))
        previous = basis[:, : step + 1]
        for _ in range(2):  # full reorthogonalisation, twice is enough
            w = w - ((previous @ w.unsqueeze(-1)).mT @ previous).squeeze(-2)
        beta = w.norm(dim=-1)
        # An invariant subspace is found: what is left is rounding, and must not be taken for a direction.
        beta = torch.where(beta > noise, beta, 0.0)
        betas.append(beta)
        if float(beta.max()) == 0:
            break
        basis[:, step + 1] = torch.where((beta > 0).unsqueeze(-1), w / beta.unsqueeze(-1), 0.0)
    t = torch.diag_embed(torch.stack(alphas, -1))
    off = torch.stack(betas, -1)[..., : t.shape[-1] - 1]
    t = t + torch.diag_embed(off, 1) + torch.diag_embed(off, -1)
    return float(torch.linalg.eigvalsh(t).max())


def start_vector(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A fixed pseudo-random unit vector: the same on every machine, so on every rank too."""
    generator = torch.Generator("cpu").manual_seed(0)
    u = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return (u / u.norm()).to(like.device, like.dtype)
