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


def unsigned(bits: torch.Tensor) -> list[int]:
    return [int(word) & MASK for word in bits]


def test_bits_are_the_published_outputs_of_splitmix64():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert unsigned(bits(1234567, torch.arange(4))) == published


@given(st.integers(0, MASK))
def test_bits_wrap_as_unsigned_integers_do(seed):
    assert unsigned(bits(seed, torch.arange(20))) == splitmix64(seed, 20)


def test_bits_of_an_index_do_not_depend_on_its_neighbours():
    whole = bits(7, torch.arange(1000))
    picked = torch.tensor([999, 0, 500, 500])
    assert torch.equal(bits(7, picked), whole[picked])
    assert torch.equal(bits(7, picked.int()), whole[picked])


@given(st.integers(0, MASK), st.integers(1, (1 << 31) - 1))
def test_below_scales_the_top_half(word, bound):
    signed = word - (1 << 64) if word >> 63 else word
    value = int(below(torch.tensor([signed]), bound))
    assert value == (word >> 32) * bound >> 32
    assert 0 <= value < bound


def test_keys_tell_words_positions_and_lengths_apart():
    tuples = [(), (0,), (0, 0), (0, 1), (1, 0), (1,), (-1,), (2**64 - 2,), (0, -1), (3, 0, 0), (0, 3, 0), (0, 0, 3)]
    assert len({key(*words) for words in tuples}) == len(tuples)
    assert all(0 <= key(*words) <= MASK for words in tuples)
