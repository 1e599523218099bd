import math
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lipflow.data import SOURCES, DataError, Split, load
from lipflow.data.dataset import carve, moments


def split(labels: list[int]) -> Split:
    """Images whose pixels are the number of the image."""
    images = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None].expand(-1, 1, 2, 2)
    return Split(images.contiguous(), torch.tensor(labels, dtype=torch.int64))


def test_moments_are_exact():
    images = torch.randint(0, 256, (7, 2, 3, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for channel, mean, std in zip(images.unbind(1), *moments(images), strict=True):
        values = [Fraction(int(k), 255) for k in channel.flatten()]
        exact = sum(values) / len(values)
        variance = sum((value - exact) ** 2 for value in values) / len(values)
        assert mean == float(exact)
        assert std == pytest.approx(math.sqrt(variance), rel=1e-15)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=200), st.data())
def test_carve_holds_out_a_stratified_subset(labels, data):
    whole = split(labels)
    size = data.draw(st.integers(0, len(labels) - 1))
    rest, held = carve("x", whole, size)
    assert len(held) == size
    numbers = [part.images[:, 0, 0, 0].tolist() for part in (rest, held)]
    assert sorted(numbers[0] + numbers[1]) == list(range(len(labels)))
    assert numbers == [sorted(part) for part in numbers]
    for part, own in zip((rest, held), numbers, strict=True):
        assert part.labels.tolist() == [labels[i] for i in own]
    for label in set(labels):
        share = Fraction(labels.count(label) * size, len(labels))
        assert math.floor(share) <= held.labels.tolist().count(label) <= math.ceil(share)
    assert torch.equal(carve("x", whole, size)[1].images, held.images)
    for wrong in (-1, len(labels), len(labels) + 1):
        with pytest.raises(DataError, match=rf"cannot hold out {wrong} of {len(labels)} training images"):
            carve("x", whole, wrong)


def test_split_checks_its_tensors():
    images, labels = torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(DataError, match=r"images must be uint8 .* got torch\.float32"):
        Split(images.float(), labels)
    with pytest.raises(DataError, match=r"labels must be int64 of shape \(2,\); got torch\.int64 of shape \(1,\)"):
        Split(images, labels[:1])


@pytest.mark.parametrize("name", SOURCES)
def test_load_rejects_paths_that_are_not_folders(name, tmp_path):
    with pytest.raises(DataError, match="does not exist; check --data-dir"):
        load(name, tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is a file; check --data-dir"):
        load(name, tmp_path / "file")


def test_load_of_digits_imports_neither_pooch_nor_pillow_nor_rich():
    program = """
import sys
for name in ("pooch", "requests", "PIL", "rich", "sklearn", "pickle5"):
    sys.modules[name] = None
from lipflow.data import load
assert load("digits").classes == 10
"""
    subprocess.run([sys.executable, "-c", program], check=True)
