import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipflow.data import augment, permutation
from lipflow.data.counter import below, bits, key

SHAPES = [(3, 32, 32), (1, 8, 8), (2, 5, 11), (4, 9, 6)]


def noise(n: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, 256, (n, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def draws(n: int, seed: int, epoch: int, pad: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The top and left offsets and the flips that the augmentation should draw."""
    top, left = (below(bits(key(purpose, seed, epoch), torch.arange(n)), 2 * pad + 1) for purpose in (1, 2))
    return top, left, below(bits(key(3, seed, epoch), torch.arange(n)), 2)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("mode", "numpy_mode"), [("reflect", "reflect"), ("zeros", "constant")])
@pytest.mark.parametrize("pad", [0, 1, 4])
@pytest.mark.parametrize("flip", [True, False])
def test_augment_is_the_naive_crop_and_flip(shape, mode, numpy_mode, pad, flip):
    n, (_, height, width) = 40, shape
    images = noise(n, *shape)
    crops = augment(images, torch.arange(n), seed=3, epoch=2, crop_padding=pad, padding_mode=mode, flip=flip)
    for i, (top, left, mirrored) in enumerate(zip(*draws(n, 3, 2, pad), strict=True)):
        padded = np.pad(images[i].numpy(), ((0, 0), (pad, pad), (pad, pad)), mode=numpy_mode)
        expected = padded[:, top : top + height, left : left + width]
        expected = expected[:, :, ::-1] if flip and mirrored else expected
        assert np.array_equal(crops[i].numpy(), expected)


@pytest.mark.parametrize("erase", [1, 4, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_augment_erases_a_square_with_the_mean_colour(shape, erase):
    n, (_, height, width) = 40, shape
    images, indices = noise(n, *shape), torch.arange(n)
    crops = augment(images, indices, 3, 2, crop_padding=1)
    erased = augment(images, indices, 3, 2, crop_padding=1, cutout=erase)
    tops, lefts = (below(bits(key(p, 3, 2), indices), side) - erase // 2 for p, side in ((5, height), (6, width)))
    for i, (top, left) in enumerate(zip(tops.tolist(), lefts.tolist(), strict=True)):
        expected = crops[i].clone()
        rows, columns = slice(max(top, 0), max(top + erase, 0)), slice(max(left, 0), max(left + erase, 0))
        expected[:, rows, columns] = crops[i].double().mean((1, 2)).to(torch.uint8)[:, None, None]
        assert torch.equal(erased[i], expected)
    assert augment(images[:0], indices[:0], 3, 2, cutout=erase).shape == (0, *shape)


@pytest.mark.parametrize("mode", ["reflect", "zeros"])
@settings(max_examples=30)
@given(st.integers(-(2**70), 2**70), st.integers(0, 10**6), st.integers(0, 60), st.integers(0, 99))
def test_augment_does_not_depend_on_batch_order_and_rank(mode, seed, epoch, cut, shuffle):
    images, indices = noise(60, 2, 6, 7), torch.arange(60)
    whole = augment(images, indices, seed, epoch, crop_padding=3, padding_mode=mode)
    order = permutation(60, shuffle, 0)
    for part in (order[:cut], order[cut:], indices[cut:], indices[:cut]):
        assert torch.equal(augment(images[part], part, seed, epoch, crop_padding=3, padding_mode=mode), whole[part])


def test_augment_takes_floats_and_channels_last_and_keeps_its_input():
    images, indices = noise(16, 3, 8, 8), torch.arange(16)
    before, expected = images.clone(), augment(images, indices, 1, 1)
    assert torch.equal(augment(images.double(), indices, 1, 1), expected.double())
    assert torch.equal(augment(images.contiguous(memory_format=torch.channels_last), indices, 1, 1), expected)
    assert torch.equal(augment(images, indices, 0, 0, crop_padding=0, flip=False), images)
    assert torch.equal(images, before)
    assert augment(images[:0], indices[:0], 1, 1).shape == (0, 3, 8, 8)


def test_augment_is_the_same_in_every_release():
    """A change here would change every run that is resumed or repeated."""
    images = torch.arange(64, dtype=torch.uint8).view(1, 1, 8, 8).repeat(3, 1, 1, 1)
    assert augment(images, torch.arange(3), 0, 0, crop_padding=2)[:, 0, 0, 0].tolist() == [17, 23, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"images": noise(4, 3, 8)}, "batch, channels, height, width"),
        ({"indices": torch.arange(3)}, r"shape \(4,\); got \(3,\)"),
        ({"padding_mode": "wrap"}, "'reflect', 'zeros'; got 'wrap'"),
        ({"crop_padding": 8}, "cannot reflect-pad 8×8 images by 8"),
        ({"crop_padding": -1, "padding_mode": "zeros"}, "by -1"),
        ({"crop_padding": 9, "padding_mode": "zeros"}, "cannot zeros-pad 8×8 images by 9"),
        ({"cutout": -1}, "side -1"),
        ({"cutout": 9}, "side 9 from 8×8 images"),
    ],
)
def test_augment_rejects_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        augment(**{"images": noise(4, 3, 8, 8), "indices": torch.arange(4), "seed": 0, "epoch": 0, **arguments})
