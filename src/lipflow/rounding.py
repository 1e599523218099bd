"""Directed rounding in float64, by exact rationals.

Every constant of a certificate is computed as a `Fraction` from floats. The only roundings left are those of the
tensor operations, which the error model below covers, and the last one, which is directed.

Note [error model]. A float64 sum of n products, in any order, with or without fused multiply-add, satisfies
|fl(a·b) - a·b| ≤ γ_n |a|·|b| + n·TINY, with u = 2⁻⁵³ and γ_n = nu/(1 - nu) (Higham 2002, section 3.1). TINY
covers every underflow, flush-to-zero included.
"""

import math
from decimal import ROUND_CEILING, Context
from fractions import Fraction

import torch
from torch import Tensor

U = Fraction(1, 2**53)
TINY = Fraction(1, 2**1022)
NORMAL = 2.0**-1022  # the least positive float64 that no processor flushes to 0
RANGE = Fraction(2**900)  # the most that a stored number, the norm of a value and a bound on errors may be
# Stated constants exceed the derived ones by this relative amount, so that a program that rounds differently derives
# constants that are at most the stated ones.
SLACK = Fraction(1, 2**32)

PARALLEL = 2**16  # entries for each thread: torch divides an operation by entry in chunks of at least 2¹⁵


def gamma(n: int) -> Fraction:
    """γ_n = nu/(1 - nu), the relative error of n roundings."""
    if n * U >= Fraction(1, 2):
        raise ValueError(f"an operation of {n} roundings is beyond the float64 error model")
    return n * U / (1 - n * U)


def up(q: Fraction | int) -> float:
    """The least float64 that is at least q; not a subnormal one for q > 0, as processors may flush those to 0."""
    try:
        x = max(float(q), NORMAL) if q > 0 else float(q)
    except OverflowError:
        return math.inf if q > 0 else -math.nextafter(math.inf, 0)
    return x if math.isinf(x) or Fraction(x) >= q else math.nextafter(x, math.inf)


def down(q: Fraction | int) -> float:
    """The greatest float64 that is at most q; not a subnormal one for q < 0."""
    return -up(-q)


def digits_up(bound: float, digits: int) -> float:
    """A bound rounded up to a number of significant digits, to print it."""
    return float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal_from_float(bound))


def shortened(q: Fraction) -> Fraction:
    """A number of at least 0, rounded up to 64 bits: exact sums and products of many terms are long."""
    power = Fraction(2) ** (64 + q.denominator.bit_length() - q.numerator.bit_length())
    return math.ceil(q * power) / power


def sqrt_up(q: Fraction) -> Fraction:
    """A rational that is at least √q and within a relative 2⁻⁶⁰ of it, or √q itself if that is rational."""
    if q < 0:
        raise ValueError(f"a square root needs a number of at least 0, not {float(q)}")
    if q == 0:
        return Fraction(0)
    # √(a/b) = √(a·b·4ᵏ)/(b·2ᵏ), with k such that the integer root has at least 61 bits.
    a, b = q.numerator, q.denominator
    k = max(0, 61 - (a * b).bit_length() // 2)
    square = a * b << 2 * k
    root = math.isqrt(square)
    return Fraction(root + (root * root < square), b << k)


def in_range(error: Fraction) -> Fraction:
    """Return an error bound, or raise if it is so large that intermediate values may overflow.

    A bound is at least u = 2⁻⁵³ times every intermediate value, so those stay below 2⁹⁵³. Only for stored numbers and
    for the sums of an average, this follows from other bounds (docs/soundness.md, "Overflow").
    """
    if error > RANGE:
        raise ValueError("intermediate values of this network may be beyond float64; use smaller weights and biases")
    return error


def add_up(a: float, b: float) -> float:
    """a + b rounded up, for non-negative a and b, either of which may be infinite."""
    return math.inf if math.isinf(a) or math.isinf(b) else up(Fraction(a) + Fraction(b))


def mul_up(a: float, b: float) -> float:
    """a·b rounded up, for non-negative a and b; 0·∞ = 0, as a zero map sends everything to 0."""
    if a == 0 or b == 0:
        return 0.0
    return math.inf if math.isinf(a) or math.isinf(b) else up(Fraction(a) * Fraction(b))


def subnormal(x: Tensor) -> Tensor:
    """Which numbers of a float64 tensor are subnormal: by their bits, as the processor may read such a number as 0."""
    bits = x.contiguous().view(torch.int64)
    return ((bits >> 52) & 2047 == 0) & (bits << 1 != 0)


def above(x: Tensor) -> Tensor:
    """A bound from above on positive numbers that were rounded to x: the float64 after it, and at least NORMAL."""
    return torch.nextafter(x, torch.full_like(x, math.inf)).clamp_min(NORMAL)


def below(x: Tensor) -> Tensor:
    """A bound from below on numbers that were rounded to x: the float64 before it."""
    return torch.nextafter(x, torch.full_like(x, -math.inf))


def square_sum_bound(x: Tensor) -> Fraction:
    """At least Σ x², the sum over all entries of a float64 tensor."""
    return square_sum_max(x.reshape(1, 1, -1))


def square_sum_max(x: Tensor) -> Fraction:
    """At least the greatest Σ x² over the matrices of a float64 batch  # (..., rows, columns)."""
    terms = x.shape[-1] * x.shape[-2]
    if x.numel() == 0:
        return Fraction(0)
    computed = float((x * x).sum((-2, -1)).max())
    return (Fraction(computed) + terms * TINY) / (1 - gamma(terms))


def norm_up(x: Tensor) -> float:
    """At least ‖x‖₂ of all entries of a tensor, scaled first, so that squares neither over- nor underflow."""
    x = x.detach().to("cpu", torch.float64)
    if x.numel() == 0:
        return 0.0
    if not bool(torch.isfinite(x).all()):
        return math.inf
    scale = power_of_two(float(x.abs().max()))
    if scale == 0:
        return 0.0
    # Scaling by a power of two is exact, or underflows by at most TINY an entry.
    underflow = sqrt_up(Fraction(x.numel())) * TINY
    return up((sqrt_up(square_sum_bound(x / scale)) + underflow) * Fraction(scale))


def is_power_of_two(c: float) -> bool:
    """Whether c is 0 or ± a power of two, so that products with c are exact."""
    return abs(math.frexp(c)[0]) in (0.0, 0.5)


def power_of_two(x: float) -> float:
    """The power of two 2ᵉ with 2ᵉ ≤ x < 2ᵉ⁺¹, clamped so that it and its inverse are normal numbers; 0 for x = 0."""
    return math.ldexp(1.0, min(max(math.frexp(x)[1] - 1, -1021), 1021)) if x else 0.0


def require_arithmetic() -> None:
    """Raise if float64 arithmetic does not round to nearest, as far as a quick test can tell.

    Each thread has its own modes. A tensor of this size is divided among all threads of torch, which take the modes of
    the thread that starts them and keep these.
    """
    one, numbers = torch.ones(PARALLEL * torch.get_num_threads(), dtype=torch.float64), torch.arange(1, 10001)
    numbers, half = numbers.double(), one * 2.0**-53
    results = [
        one + half == one,  # ties go to even
        one + half * 1.5 > one,
        one - half < one,
        one / 3 * 3 == one,
        (one * 2.0**27 + 1).square() - 2.0**54 == 2.0**28,
        numbers @ numbers == 10000 * 10001 * 20001 // 6,
    ]
    if not all(bool(result.all()) for result in results):
        raise RuntimeError(
            "float64 arithmetic of this process does not round to nearest, so nothing can be certified; do not change "
            "the rounding mode (fesetround), also not where torch starts its threads"
        )
