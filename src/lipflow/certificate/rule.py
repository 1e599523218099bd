"""From scores to certified radii.

For ‖x' - x‖ ≤ r < R, with x and x' in the box [low, high]ᵈ, the program f̂ gives class y the greatest score at x' too:

    f̂_y(x') - f̂_j(x') ≥ f̂_y(x) - f̂_j(x) - 2√2·E - d_yj·‖x' - x‖ > 0,

where E bounds ‖f̂ - f‖ over the box and d_yj is a Lipschitz constant of f_y - f_j. The scores at x may be computed by
another machine, within 2E, so the same amount is subtracted again:

    R(x) = min over j of (f̂_y(x) - f̂_j(x) - 4√2·E)/d_yj,  rounded down at each operation.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import SupportsFloat

import numpy as np
import torch
from torch import Tensor

from lipflow.graph import UNIT, Domain
from lipflow.radius import parse_radius
from lipflow.rounding import below, down, sqrt_up, up
from lipflow.torch_state import as_written

Labels = Tensor | np.ndarray | Sequence[int]


def as_labels(labels: Labels, images: int, classes: int) -> Tensor:
    """True labels as an int64 tensor; raise unless there is one class for each image."""
    given = torch.as_tensor(labels, device="cpu")
    if given.shape != (images,) or given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(f"give one integer label for each of {images} images, not {given.dtype} {tuple(given.shape)}")
    integers = given.long()
    wrong = integers[(integers < 0) | (integers >= classes)]
    if len(wrong):
        raise ValueError(f"labels are from 0 to {classes - 1}; one is {wrong[0]}")
    return integers


@dataclass(frozen=True)
class Certificates:
    """Of each image: label, certified radius (0: not certified), radius by the paper's rule, and scores.

    The paper's rule does not subtract rounding errors. Its radius is for comparison and is not certified.
    """

    label: Tensor  # (n,) int64
    radius: Tensor  # (n,) float64
    paper_radius: Tensor  # (n,) float64
    logits: Tensor  # (n, classes) float64

    def __len__(self) -> int:
        return len(self.label)

    @staticmethod
    def cat(parts: Iterable["Certificates"]) -> "Certificates":
        """Concatenate certificates, for example of the batches of a DataLoader."""
        parts = list(parts)
        if not parts:
            raise ValueError("Certificates.cat needs the certificates of at least one batch")
        columns = (field.name for field in fields(Certificates))
        return Certificates(*(torch.cat([getattr(part, name) for part in parts]) for name in columns))

    @as_written
    def certified(self, eps: SupportsFloat | str) -> Tensor:
        """Return whether R > eps, compared exactly; eps may be a string such as "36/255".

        If so, no perturbation of L2 norm at most eps that stays in the box changes the label.
        """
        return self.radius > down(parse_radius(eps))  # for a float64 R the same as R > eps

    def accuracy(self, labels: Labels, eps: SupportsFloat | str | None = None) -> float:
        """Return the fraction of images with the right label; with eps, of those that are also certified at eps."""
        right = self.label == as_labels(labels, *self.logits.shape)
        return float((right if eps is None else right & self.certified(eps)).double().mean())


def require_pixels(images: Tensor, domain: Domain = UNIT) -> None:
    """Raise if images have values outside of the domain, which certificates do not cover."""
    low, high = domain
    if images.dtype == torch.uint8 and not low <= 0 < 1 <= high:
        given = "images are uint8, and a byte k is read as k/255"
        raise ValueError(f"{given}; this network was frozen for values in [{low:g}, {high:g}], so give floats")
    if not images.is_floating_point():
        return
    inside = (images >= low) & (images <= high)  # false for NaN
    if not bool(inside.all()):
        bad, hint = images[~inside][0].item(), _hint(images) if domain == UNIT else ""
        bytes_too = " (or uint8)" if low <= 0 < 1 <= high else ""
        raise ValueError(
            f"certificates are for pixels in [{low:g}, {high:g}]{bytes_too}; these images contain {bad}{hint}"
        )


def _hint(images: Tensor) -> str:
    """Advice on how to bring images back into [0, 1]."""
    least, greatest = float(images.min()), float(images.max())
    if not (math.isfinite(least) and math.isfinite(greatest)):
        return ""
    if least < -0.01:
        return " (normalize inside of the network instead: lipflow.blocks.Normalize)"
    return " (divide them by 255, or give them as uint8)" if greatest > 2 else " (clamp them: x.clamp(0, 1))"


@as_written
def from_logits(logits: Tensor, pair_bounds: Tensor, rounding: float) -> Certificates:
    """Compute labels and radii from the scores (n, classes) of the program, the constants d_ij > 0 for i ≠ j, and E."""
    finite = torch.isfinite(logits).all(1)
    label = torch.where(finite, logits.argmax(1), 0)
    slack = up(4 * sqrt_up(Fraction(2)) * Fraction(rounding))
    distances = pair_bounds[label]  # (n, classes)
    rivals = torch.arange(logits.shape[1]) != label[:, None]
    margins = logits.gather(1, label[:, None]) - logits
    certain = below(below(margins) - slack)
    radius = torch.where(rivals, below(certain / distances), torch.inf).amin(1).clamp_min(0.0)
    paper = torch.where(rivals, margins / distances, torch.inf).amin(1).clamp_min(0.0)
    return Certificates(label, torch.where(finite, radius, 0.0), torch.where(finite, paper, 0.0), logits)
