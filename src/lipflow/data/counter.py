"""Counter-based random bits: a pure function of (purpose, seed, epoch, index), without a generator's state.

Note [counter-based randomness]
    The random bits of image i in epoch e are output number i of SplitMix64 with the key (purpose, seed, e). They do not
    depend on the batch size, the batch order, the number of ranks, the device or the version of torch, and a resumed
    run needs no generator state.

SplitMix64 is Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

from __future__ import annotations

from torch import Tensor

# The purposes: the first word of a key. Two uses of random numbers need two purposes.
ORDER, CROP_ROWS, CROP_COLUMNS, FLIP, ATTACK, CUTOUT_ROWS, CUTOUT_COLUMNS = range(7)

GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def key(*words: int) -> int:
    """A 64-bit key for a tuple of integers (of any size and sign, taken modulo 2⁶⁴)."""
    state = GOLDEN
    for word in words:
        state = _mix(state + (word + 1) * GOLDEN)
    return state


def bits(key: int, index: Tensor) -> Tensor:
    """SplitMix64 seeded with `key`: output number `index` (from 0), as int64 with all 64 bits random.

    The arithmetic is modulo 2⁶⁴ in torch's wrapping int64.
    """
    z = index.long() * _signed(GOLDEN) + _signed(key + GOLDEN)
    z = (z ^ _shift(z, 30)) * _signed(_FIRST)
    z = (z ^ _shift(z, 27)) * _signed(_SECOND)
    return z ^ _shift(z, 31)


def below(bits: Tensor, bound: int) -> Tensor:
    """Integers in [0, bound) from 64 random bits: ⌊(top 32 bits) · bound / 2³²⌋.

    The probabilities of two values differ by at most 2⁻³² (Lemire 2019, "Fast random integer generation in an
    interval"). bound < 2³¹, so that the product does not overflow.
    """
    return (_shift(bits, 32) * bound) >> 32


def _mix(z: int) -> int:
    z &= _MASK
    z = (z ^ (z >> 30)) * _FIRST & _MASK
    z = (z ^ (z >> 27)) * _SECOND & _MASK
    return z ^ (z >> 31)


def _shift(z: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's >> extends the sign bit."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    word &= _MASK
    return word - (1 << 64) if word >> 63 else word
