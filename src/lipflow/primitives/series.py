"""The truncated exponential series of a skew-symmetric operator as a primitive: SOC."""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from lipflow.operators import ConvOperator, DenseOperator, LinearOperator
from lipflow.operators.certified import CertifiedOperator
from lipflow.primitives.primitive import Norm, Primitive, require, require_shape
from lipflow.rounding import TINY, U, shortened, sqrt_up
from lipflow.shapes import Shape

MAX_TERMS = 1000


@dataclass(frozen=True, eq=False)
class TruncatedExponential(Primitive):
    """Σ_{j<k} (hA)ʲ/j! · x with A skew-symmetric to the last bit. L = 1 + (ha)ᵏ/k!, with a ≥ ‖A‖.

    e^{hA} is orthogonal, and e^{iθ} minus k terms of its series is at most |θ|ᵏ/k!. Two terms are explicit Euler,
    I + hA, of norm exactly √(1 + h²a²); one term is I.
    """

    kind = "series"
    op: LinearOperator
    h: float
    terms: int

    def __post_init__(self) -> None:
        fine = type(self.terms) is int and 1 <= self.terms <= MAX_TERMS
        require(fine and 1000 * TINY <= self.h < math.inf and is_skew(self.op), self)

    def out_shape(self, *shapes: Shape) -> Shape:
        require_shape(shapes == (self.op.in_shape,), self, *shapes)
        return shapes[0]

    def run(self, *xs: Tensor) -> Tensor:
        total = term = xs[0]
        for j in range(1, self.terms):
            term = self.op(term).mul_(self.h / j)
            total = total + term
        return total

    def lipschitz(self, norm: Norm, *distances: Fraction) -> Fraction:
        angle = Fraction(self.h) * Fraction(norm(self.op))
        if self.terms <= 2:
            return (sqrt_up(1 + angle**2) if self.terms == 2 else 1) * distances[0]
        return (1 + angle**self.terms / math.factorial(self.terms)) * distances[0]

    def rounding(self, entries: int, *reaches: Fraction) -> Fraction:
        """A term with the error e gives the next one (h/j)(ae + the error of the product), and the scaling rounds."""
        assert isinstance(self.op, CertifiedOperator)
        a, h, (reach,) = Fraction(self.op.norm), Fraction(self.h), reaches
        size, error, total, sums = reach, Fraction(0), Fraction(0), reach
        growth = shortened((1 + 2 * U) ** self.terms)
        for j in range(1, self.terms):
            scale = h / j
            error = scale * (a * error + self.op.apply_error(size + error))
            size = shortened(scale * a * size)
            error = shortened(error + 4 * U * (size + error) + self.op.entries * TINY)
            sums = shortened(sums + size + error)
            total = shortened(total + error + U * sums * growth)
        return total

    @property
    def how(self) -> str:
        angle = f", h‖A‖ = {self.h * self.op.norm:.6g}" if isinstance(self.op, CertifiedOperator) else ""
        return f"{self.terms} terms{angle}"


def is_skew(op: LinearOperator) -> bool:
    """Whether the stored weights are skew-symmetric to the last bit."""
    if isinstance(op, CertifiedOperator):
        op = op.op
    if isinstance(op, DenseOperator):
        return op.weight.shape[0] == op.weight.shape[1] and torch.equal(op.weight, -op.weight.T)
    if not isinstance(op, ConvOperator):
        return False
    out, grouped, height, width = op.kernel.shape
    blocks = op.kernel.reshape(op.groups, out // op.groups, grouped, height, width)
    centred = op.rows.is_centred and op.columns.is_centred
    return centred and out == grouped * op.groups and torch.equal(blocks, -blocks.transpose(1, 2).flip(3, 4))
