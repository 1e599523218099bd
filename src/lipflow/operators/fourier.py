"""Convolutions in the frequency domain: well-computed phases, and the symbol of a kernel.

On a torus, a convolution is block-diagonal: at the frequency ω it multiplies by its symbol, the matrix
K̂(ω) = Σ_j K_j e^{iω·dj} of out × in channels.
"""

import math
from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

Side = tuple[int, int]  # one axis of a torus: its side N, and its twist θ/π, 0 or 1
Torus = tuple[Side, Side]
CHUNK_BYTES = 256 * 2**20  # of the frequencies computed at once
MAX_SIDE = 2**29  # of a torus: phases are computed in integers of 64 bits
MAX_BYTES = 2 * 2**30  # of one frequency with all its aliases


def unit_circle(numerators: Tensor, denominator: int) -> tuple[Tensor, Tensor]:
    """cos and sin of 2π·t/denominator for integers t, each within 8u of the true value.

    The angle is reduced in integers, first to a turn and then to an eighth of one, so that cos and sin are computed
    for angles in [0, π/4] only; a naive exp(iωj) errs by hundreds of u. There the angle has a relative error of at
    most 4.4u, which moves cos and sin by at most 3.5u, and the library adds at most 4u: docs/norms.md.
    """
    eighths = torch.remainder(numerators, denominator) * 8  # one turn is 8·denominator
    octant = eighths // denominator
    rest = eighths - octant * denominator  # in [0, denominator): the angle past the octant's start, in eighths
    odd = octant % 2 == 1
    angle = torch.where(odd, denominator - rest, rest).to(torch.float64) * (math.pi / 4) / denominator
    cosine, sine = angle.cos(), angle.sin()
    swap = (octant + 1) // 2 % 2 == 1  # octants 1, 2, 5, 6
    x, y = torch.where(swap, sine, cosine), torch.where(swap, cosine, sine)
    x = torch.where((octant >= 2) & (octant < 6), -x, x)
    y = torch.where(octant >= 4, -y, y)
    return x, y


def phases(
    kernel_size: tuple[int, int],
    dilation: tuple[int, int],
    sides: tuple[int, int],
    frequencies: tuple[Tensor, Tensor],
    twist: tuple[int, int] = (0, 0),
) -> tuple[Tensor, Tensor]:
    """cos and sin of ω·(dj) for all frequencies f and taps j  # (taps, rows of f, columns of f).

    On the torus of sides N, with a twist of π·t on an axis, ω = (2πf + πt)/N: an angle of
    (2f + t)·d·j / (2N) turns on each axis, added over the common denominator 2·N₁·N₂.
    """
    rows, columns = (  # the numerators stay below 2⁶², as d·j is reduced first
        (2 * f[None, :] + t) * torch.tensor([[d * j % (2 * n)] for j in range(k)]) % (2 * n)
        for k, d, n, f, t in zip(kernel_size, dilation, sides, frequencies, twist, strict=True)
    )
    numerators = rows[:, None, :, None] * sides[1] + columns[None, :, None, :] * sides[0]
    cosine, sine = unit_circle(numerators, 2 * sides[0] * sides[1])
    return cosine.flatten(0, 1), sine.flatten(0, 1)


def symbol(kernel: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    """Real and imaginary part of K̂(ω) = Σ_j K_j e^{iω·dj}  # (frequencies, out, in), by real matrix products."""
    out, grouped = kernel.shape[:2]
    taps = kernel.reshape(out * grouped, -1)

    def part(wave: Tensor) -> Tensor:
        wave = wave.flatten(1).to(kernel.device, kernel.dtype)
        return (wave.T @ taps.T).reshape(-1, out, grouped)

    return part(cosine), part(sine)


def symbols(kernel: Tensor, dilation: tuple[int, int], torus: Torus, strides: tuple[int, int]) -> Iterator[Tensor]:
    """The symbols at half of the coarse frequencies, with all aliases of a frequency side by side, as real matrices.

    The coarse frequencies of an axis are the first N/s; the others are their aliases for the stride s.
    """
    out, grouped, height, width = kernel.shape
    sides, twist = (torus[0][0], torus[1][0]), (torus[0][1], torus[1][1])
    if max(sides) >= MAX_SIDE:
        raise ValueError(f"a torus of sides {sides} is too large: phases are exact below a side of {MAX_SIDE}")
    coarse = [n // s for n, s in zip(sides, strides, strict=True)]
    aliases = strides[0] * strides[1]
    # f and -f (with a half twist: -f - 1) are conjugate, so the first axis needs half of its frequencies.
    half = (coarse[0] + 1) // 2 if twist[0] else coarse[0] // 2 + 1
    frequency_bytes = 32 * out * grouped * aliases
    if frequency_bytes > MAX_BYTES:
        raise ValueError(
            f"strides {strides} put {aliases} symbols of {out} × {grouped} side by side, {frequency_bytes / 2**30:.1f} "
            f"GiB for one frequency, more than {MAX_BYTES / 2**30:g}; use a smaller stride"
        )
    chunk = max(1, CHUNK_BYTES // frequency_bytes)
    chunks = product(torch.arange(half).split(max(1, chunk // coarse[1])), torch.arange(coarse[1]).split(chunk))
    for first, second in chunks:
        rows = (first[:, None] + coarse[0] * torch.arange(strides[0])).flatten()
        columns = (second[:, None] + coarse[1] * torch.arange(strides[1])).flatten()
        cosine, sine = phases((height, width), dilation, sides, (rows, columns), twist)

        def side_by_side(part: Tensor, counts: tuple[int, int] = (len(first), len(second))) -> Tensor:
            part = part.reshape(counts[0], strides[0], counts[1], strides[1], out, grouped)
            return part.permute(0, 2, 4, 1, 3, 5).reshape(counts[0] * counts[1], out, aliases * grouped)

        yield real_matrix(*(side_by_side(part) for part in symbol(kernel, cosine, sine)))


def real_matrix(real: Tensor, imaginary: Tensor) -> Tensor:
    """Complex matrices as the real matrices [[Re, -Im], [Im, Re]], of the same norm."""
    return torch.cat([torch.cat([real, -imaginary], -1), torch.cat([imaginary, real], -1)], -2)
