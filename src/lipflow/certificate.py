"""Certificates: for each image, a label and a radius inside which the program gives no other.

For ‖x' - x‖ ≤ r < R, both in [0, 1]ᵈ, the program f̂ at x' still ranks class y above every rival j, as

    f̂_y(x') - f̂_j(x') ≥ f̂_y(x) - f̂_j(x) - 2√2·E - d_yj·‖x' - x‖ > 0,

where E bounds ‖f̂ - f‖ over the box and d_yj the Lipschitz constant of f_y - f_j. The scores at x may come from a file,
and be those of another machine: within 2E of ours. With as much again for that,

    R(x) = min over j of (f̂_y(x) - f̂_j(x) - 4√2·E)/d_yj,  rounded down at each operation.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import SupportsFloat

import torch
from torch import Tensor

from lipflow.rounding import down, exactly, sqrt_up, up


@dataclass(frozen=True)
class Certificates:
    """One row an image: a label, and the radius below which it is certified (0 says nothing).

    Beside them stand the radius by the paper's rule, which leaves no room for rounding, and the scores themselves.
    """

    label: Tensor  # (n,) int64
    radius: Tensor  # (n,) float64
    paper_radius: Tensor  # (n,) float64
    logits: Tensor  # (n, classes) float64

    def __len__(self) -> int:
        return len(self.label)

    @staticmethod
    def cat(parts: Iterable["Certificates"]) -> "Certificates":
        """The rows of several, one after the other: of the batches of a DataLoader, say."""
        parts = list(parts)
        if not parts:
            raise ValueError("there are no certificates to join: give those of one batch at least")
        columns = (field.name for field in fields(Certificates))
        return Certificates(*(torch.cat([getattr(part, name) for part in parts]) for name in columns))

    def certified(self, eps: SupportsFloat | str) -> Tensor:
        """Whether R > eps, exactly; eps may be "36/255".

        Then no perturbation of norm at most eps changes the label, as long as the image stays in [0, 1].
        """
        exact = exactly(eps)
        if exact < 0:
            raise ValueError(f"a radius is at least 0, not {eps}")
        # A float above the greatest float that is at most eps is above eps.
        return self.radius > down(exact)

    def accuracy(self, labels: Tensor, eps: SupportsFloat | str | None = None) -> float:
        """The fraction of images whose label is the true one of `labels`; with eps, and is certified at eps."""
        if labels.shape != self.label.shape:
            raise ValueError(f"labels are one an image, ({len(self)},), not {tuple(labels.shape)}")
        right = self.label == labels.to(self.label.device)
        return float((right if eps is None else right & self.certified(eps)).double().mean())


def require_pixels(images: Tensor, domain: tuple[float, float] = (0.0, 1.0)) -> None:
    """Refuse what the certificate says nothing of: NaN, infinities, values outside of the domain."""
    low, high = domain
    if images.dtype == torch.uint8 and not low <= 0 < 1 <= high:
        raise ValueError(f"bytes k are read as k/255, and this network was frozen for values in [{low:g}, {high:g}]")
    if images.dtype == torch.uint8 or not images.is_floating_point() or not images.numel():
        return
    inside = (images >= low) & (images <= high)  # false for NaN
    if not bool(inside.all()):
        bad, hint = images[~inside][0].item(), _hint(images) if domain == (0.0, 1.0) else ""
        bytes_too = " (or uint8)" if low <= 0 < 1 <= high else ""
        raise ValueError(
            f"certificates are for pixels in [{low:g}, {high:g}]{bytes_too}; these images contain {bad}{hint}"
        )


def _hint(images: Tensor) -> str:
    """How images that leave [0, 1] may come back to it."""
    least, greatest = float(images.min()), float(images.max())
    if not (math.isfinite(least) and math.isfinite(greatest)):
        return ""
    if least < -0.01:
        return " (to subtract a mean is the network's part: lipflow.blocks.Normalize)"
    return " (divide them by 255, or give them as uint8)" if greatest > 2 else " (clamp them: x.clamp(0, 1))"


def from_logits(logits: Tensor, pair_bounds: Tensor, rounding: float) -> Certificates:
    """Radii from the scores of the program  # (n, classes), the pair bounds, and E."""
    finite = torch.isfinite(logits).all(1)
    label = torch.where(finite, logits.nan_to_num(0.0).argmax(1), torch.zeros(1, dtype=torch.int64))
    slack = up(4 * sqrt_up(Fraction(2)) * Fraction(rounding))
    distances = pair_bounds[label]  # (n, classes)
    rivals = torch.arange(logits.shape[1]) != label[:, None]
    margins = logits.gather(1, label[:, None]) - logits
    room = _below(_below(margins) - slack)
    # Two classes whose difference is constant cannot change places: any positive room is enough for ever.
    radii = torch.where(distances > 0, _below(room / distances), torch.where(room > 0, torch.inf, 0.0))
    radius = torch.where(rivals, radii, torch.inf).amin(1).clamp_min(0.0)
    paper = torch.where(rivals, margins / distances, torch.inf).amin(1).clamp_min(0.0)
    none = torch.zeros_like(radius)
    # An infinite radius could only come from rows that are equal: stay with what a file can hold and a reader believe.
    largest = torch.finfo(torch.float64).max
    certified = torch.where(finite, radius.clamp_max(largest), none)
    return Certificates(label, certified, torch.where(finite, paper, none), logits)


def _below(x: Tensor) -> Tensor:
    """The next float64 below: under any correctly rounded result lies the true one."""
    return torch.nextafter(x, torch.full_like(x, -torch.inf))
