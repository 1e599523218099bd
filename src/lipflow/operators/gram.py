"""λmax(WWᵀ) from above: the Cholesky certificate, for matrices and for matrices cut into strips (docs/norms.md)."""

from fractions import Fraction

import torch
from torch import Tensor

from lipflow.rounding import TINY, U, gamma, sqrt_up, square_sum_max

MIN_SHIFT = 2.0**-400  # far below any λmax that matters, far above the error of underflow


def gram_bound(matrices: Tensor) -> Fraction:
    """At least the greatest λmax(WWᵀ) over float64 matrices W whose products do not overflow  # (batch, m, n)."""
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
    """At least the greatest λmax(WWᵀ) over a batch, and the shift μ of the proof, which is a good next `guess`.

    WWᵀ is within `product_error` of the symmetric G with the blocks `diagonal` (of which only the lower triangles are
    read), the blocks `below` directly below them, and 0 elsewhere. A matrix that is not cut is one strip.

    Note [Cholesky certificate]. Let μ be a guess, M = fl(μI - G), R the Cholesky factor of M computed by LAPACK,
    whose block row t is [C_t, L_t] below [.., L_{t-1}], and P = fl(RRᵀ). RRᵀ ⪰ 0 for every real R, hence
    λmax(WWᵀ) ≤ μ + ‖M - P‖_F + γ_l‖R‖_F² + u·max|M_ii| + product_error + underflow, with l the length of a block row.
    Only the error model of a matrix product is trusted, and not LAPACK.
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
    """The guess if it works, or a μ just above the greatest eigenvalue of a batch; and the Cholesky factor of μI - G.

    The proof does not rely on this function: a wrong μ or a wrong factor only loosens the bound.
    """
    factor = cholesky(diagonal, below, guess) if guess else None
    if factor is not None:
        return guess, factor
    mu, margin = max(guess, _greatest_ritz_value(diagonal, below)), 2.0**-34
    while True:
        mu = max(mu, MIN_SHIFT) * (1 + margin)
        factor = cholesky(diagonal, below, mu)
        if factor is not None:
            return mu, factor
        if diagonal.shape[1] == 1 and diagonal.shape[-1] <= 256 and margin < 2.0**-33:  # a small matrix, tried once
            mu = max(mu, float(torch.linalg.eigvalsh(diagonal).max()))
        margin *= 8


def cholesky(diagonal: Tensor, below: Tensor, mu: float) -> list[Tensor] | None:
    """The block rows [C_t, L_t] of the Cholesky factor of μI - G, or None if it is not positive definite."""
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


def _greatest_ritz_value(diagonal: Tensor, below: Tensor, steps: int = 64) -> float:
    """The greatest Ritz value of a batch after some steps of Lanczos' method from a fixed start, from below."""
    batch, strips, q = diagonal.shape[:3]
    steps = min(steps, strips * q)
    # G is positive semidefinite, so its largest entry is on the diagonal. A residual below `noise` is rounding error.
    noise = 2.0**-40 * diagonal.diagonal(dim1=-2, dim2=-1).amax((-2, -1))
    basis, alphas, betas = diagonal.new_zeros(batch, steps + 1, strips * q), [], []
    basis[:, 0] = start_vector((strips * q,), diagonal)
    for step in range(steps):
        x = basis[:, step].reshape(*diagonal.shape[:-1], 1)
        y = diagonal @ x
        y[:, 1:] += below @ x[:, :-1]
        y[:, :-1] += below.mT @ x[:, 1:]
        w = y.flatten(1)
        alphas.append((w * basis[:, step]).sum(-1))
        previous = basis[:, : step + 1]
        for _ in range(2):  # full reorthogonalisation, twice is enough
            w = w - ((previous @ w.unsqueeze(-1)).mT @ previous).squeeze(-2)
        beta = w.norm(dim=-1)
        beta = torch.where(beta > noise, beta, 0.0)
        betas.append(beta)
        if float(beta.max()) == 0:  # an invariant subspace
            break
        basis[:, step + 1] = torch.where((beta > 0).unsqueeze(-1), w / beta.unsqueeze(-1), 0.0)
    t = tridiagonal(torch.stack(alphas, -1), torch.stack(betas, -1)[..., : len(alphas) - 1])
    return float(torch.linalg.eigvalsh(t).max())


def tridiagonal(diagonal: Tensor, off_diagonal: Tensor) -> Tensor:
    """The symmetric tridiagonal matrices with these diagonals  # (..., n), (..., n - 1)."""
    return torch.diag_embed(diagonal) + torch.diag_embed(off_diagonal, 1) + torch.diag_embed(off_diagonal, -1)


def start_vector(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """A fixed pseudo-random unit vector, the same on every machine and every rank."""
    generator = torch.Generator("cpu").manual_seed(0)
    u = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return (u / u.norm()).to(like.device, like.dtype)
