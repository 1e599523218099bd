import torch
from hypothesis import given
from hypothesis import strategies as st

from lipflow.data.counter import GOLDEN, below, bits, key

MASK = (1 << 64) - 1


def splitmix64(seed: int, count: int) -> list[int]:
    """The published algorithm, in Python's integers."""
    outputs = []
    for _ in range(count):
        seed = (seed + GOLDEN) & MASK
        z = seed
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        outputs.append(z ^ (z >> 31))
    return outputs


@given(st.integers(0, MASK))
def test_bits_are_the_outputs_of_splitmix64(seed):
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert splitmix64(1234567, 4) == published
    whole = bits(seed, torch.arange(20))
    assert [int(word) & MASK for word in whole] == splitmix64(seed, 20)
    picked = torch.tensor([19, 0, 5, 5])
    assert torch.equal(bits(seed, picked.int()), whole[picked])


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, (1 << 31) - 1))
def test_below_scales_the_top_half(word, bound):
    assert 0 <= int(below(torch.tensor([word]), bound)) == ((word & MASK) >> 32) * bound >> 32 < bound


def test_key_differs_for_other_words_positions_and_lengths():
    tuples = [(), (0,), (0, 0), (0, 1), (1, 0), (1,), (-1,), (2**64 - 2,), (0, -1), (3, 0, 0), (0, 3, 0), (0, 0, 3)]
    assert len({key(*words) for words in tuples}) == len(tuples)
    assert all(0 <= key(*words) <= MASK for words in tuples)
