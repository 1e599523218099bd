"""Bytes as pixels."""

from fractions import Fraction

import pytest
import torch

from lipflow.pixels import to_unit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_to_unit_is_k_over_255_rounded_to_nearest(dtype):
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    for k, value in enumerate(to_unit(images, dtype).flatten()):
        error = abs(Fraction(value.item()) - Fraction(k, 255))
        for towards in (2.0, -1.0):
            neighbour = value.nextafter(torch.tensor(towards, dtype=dtype))
            assert error <= abs(Fraction(neighbour.item()) - Fraction(k, 255))
    with pytest.raises(ValueError, match=r"takes uint8 images; got torch\.float32"):
        to_unit(torch.rand(1, 1, 2, 2))
