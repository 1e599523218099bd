"""`certify`: labels and radii of images, by a frozen network."""

import torch
from torch import Tensor

from lipflow.certificate.rule import Certificates, from_logits, require_pixels
from lipflow.frozen import Frozen
from lipflow.rounding import require_arithmetic
from lipflow.shapes import format_batch, require_batch
from lipflow.torch_state import as_written

CHUNK_IMAGES = 250


@as_written
@torch.no_grad()
def certify(frozen: Frozen, images: Tensor) -> Certificates:
    """Return a label and a certified radius for each of the images (n, *in_shape), uint8 or floats in the domain."""
    if not isinstance(frozen, Frozen):
        raise TypeError(f"certify takes a frozen network: lipflow.freeze(model), not {type(frozen).__name__}")
    if not frozen.classes:
        raise ValueError(
            "certify takes a classifier of two classes or more, whose output is (batch, classes), not "
            + format_batch(frozen.graph.output.shape)
        )
    require_batch(images, frozen.in_shape)
    require_pixels(images, frozen.domain)
    require_arithmetic()
    logits = torch.cat([frozen(chunk) for chunk in images.split(CHUNK_IMAGES)])
    return from_logits(logits, frozen.pair_bounds, frozen.rounding)
