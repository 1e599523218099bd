import math
import subprocess
import sys
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipflow.data import SOURCES, DataError, Split, load, to_unit
from lipflow.data.dataset import assemble, carve, moments


def split(labels: list[int], side: int = 2) -> Split:
    """Images whose pixels are the image's number, so that a subset shows where it came from."""
    images = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None].expand(-1, 1, side, side)
    return Split(images.contiguous(), torch.tensor(labels, dtype=torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_to_unit_is_k_over_255_rounded_to_nearest(dtype):
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    for k, value in enumerate(to_unit(images, dtype).flatten()):
        exact = Fraction(k, 255)
        error = abs(Fraction(value.item()) - exact)
        for neighbour in (
            value.nextafter(torch.tensor(2.0, dtype=dtype)),
            value.nextafter(-torch.ones((), dtype=dtype)),
        ):
            assert error <= abs(Fraction(neighbour.item()) - exact)


def test_to_unit_refuses_what_may_be_scaled_already():
    with pytest.raises(ValueError, match=r"takes uint8 images; got torch\.float32"):
        to_unit(torch.rand(1, 1, 2, 2))


def test_moments_are_exact():
    images = torch.randint(0, 256, (7, 2, 3, 5), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for channel, mean, std in zip(images.unbind(1), *moments(images), strict=True):
        values = [Fraction(int(k), 255) for k in channel.flatten()]
        exact = sum(values) / len(values)
        variance = sum((value - exact) ** 2 for value in values) / len(values)
        assert mean == float(exact)
        assert std == pytest.approx(math.sqrt(variance), rel=1e-15)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=2, max_size=200), st.data())
def test_a_held_out_part_is_a_stratified_subset(labels, data):
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
    again = carve("x", whole, size)[1]
    assert torch.equal(again.images, held.images)


def test_a_held_out_part_is_drawn_from_all_over_its_class():
    _, held = carve("x", split([0] * 200), 50)
    numbers = held.images[:, 0, 0, 0].tolist()
    assert min(numbers) < 20
    assert max(numbers) > 180
    assert numbers != list(range(0, 200, 4))


@pytest.mark.parametrize("size", [-1, 3, 4])
def test_holding_out_everything_is_refused(size):
    with pytest.raises(DataError, match=rf"cannot hold out {size} of 3 training images"):
        carve("x", split([0, 1, 2]), size)


def test_splits_check_their_tensors():
    images, labels = torch.zeros(2, 1, 2, 2, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(DataError, match=r"images must be uint8 .* got torch\.float32"):
        Split(images.float(), labels)
    with pytest.raises(DataError, match=r"labels must be int64 of shape \(2,\); got torch\.int64 of shape \(1,\)"):
        Split(images, labels[:1])
    with pytest.raises(AttributeError):
        Split(images, labels).labels = labels


def test_assembling_checks_labels_and_shapes():
    good = split([0, 1])
    with pytest.raises(DataError, match="test labels run from 0 to 2, but there are 2 classes"):
        assemble("x", good, good, split([0, 2]), ["a", "b"])
    with pytest.raises(DataError, match=r"validation images have the shape \(1, 3, 3\)"):
        assemble("x", good, split([0], side=3), good, ["a", "b"])
    with pytest.raises(DataError, match="training split is empty"):
        assemble("x", good.take(torch.arange(0)), good, good, ["a", "b"])


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(DataError, match="no dataset is called 'mnist'; there are digits, cifar10, cifar100, folder"):
        load("mnist")


@pytest.mark.parametrize("name", SOURCES)
def test_a_data_dir_that_is_no_folder_is_refused(name, tmp_path):
    with pytest.raises(DataError, match="does not exist; check --data-dir"):
        load(name, tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="is a file; check --data-dir"):
        load(name, tmp_path / "file")


def test_importing_and_loading_digits_needs_neither_pooch_nor_pillow_nor_rich():
    program = """
import sys
for name in ("pooch", "requests", "PIL", "rich", "sklearn", "pickle5"):
    sys.modules[name] = None
from lipflow.data import load
assert load("digits").classes == 10
"""
    subprocess.run([sys.executable, "-c", program], check=True)
