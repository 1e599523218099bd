import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipflow.data import batches, permutation, share, steps_per_epoch


@given(st.integers(1, 300), st.integers(1, 64), st.integers(), st.integers(0, 1000), st.data())
def test_batches_visit_every_image_once_and_resume(n, batch_size, seed, epoch, data):
    parts = list(batches(n, batch_size, seed, epoch))
    assert len(parts) == steps_per_epoch(n, batch_size)
    assert {len(part) for part in parts[:-1]} <= {batch_size}
    assert torch.equal(torch.cat(parts), permutation(n, seed, epoch))
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(n))
    start = data.draw(st.integers(0, len(parts)))
    rest = list(batches(n, batch_size, seed, epoch, start=start))
    assert all(torch.equal(a, b) for a, b in zip(rest, parts[start:], strict=True))


@given(st.integers(0, 200), st.integers(1, 17))
def test_shares_of_all_ranks_are_the_batch(n, world):
    items = torch.arange(n)
    parts = [share(items, rank, world) for rank in range(world)]
    assert torch.equal(torch.cat(parts), items)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for rank in (-1, world):
        with pytest.raises(ValueError, match="rank must be in"):
            share(items, rank, world)


@pytest.mark.parametrize(("n", "batch_size"), [(0, 4), (3, 0)])
def test_batches_reject_impossible_arguments_at_once(n, batch_size):
    with pytest.raises(ValueError, match="no batch of"):
        batches(n, batch_size, 0, 0)


def test_permutation_is_the_same_in_every_release():
    """A change here would change every run that is resumed or repeated."""
    assert permutation(10, 0, 0).tolist() == [3, 4, 9, 1, 0, 2, 8, 5, 7, 6]
    assert permutation(10, 1, 2).tolist() == [8, 3, 5, 6, 7, 2, 4, 1, 9, 0]
