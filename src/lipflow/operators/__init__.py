"""Linear operators, and their norms from below and from above."""

from lipflow.operators.conv import ConvOperator
from lipflow.operators.dense import DenseOperator
from lipflow.operators.multiplier import FourierMultiplier
from lipflow.operators.norm import norm_bound, norm_estimate
from lipflow.operators.operator import Adjoint, LinearOperator

__all__ = [
    "Adjoint",
    "ConvOperator",
    "DenseOperator",
    "FourierMultiplier",
    "LinearOperator",
    "norm_bound",
    "norm_estimate",
]
