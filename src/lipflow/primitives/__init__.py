"""Primitive operations, to which networks are lowered. `lipflow.check` has its own implementation of each."""

from lipflow.primitives.activation import GroupSort, Householder, Pointwise
from lipflow.primitives.declared import Declared
from lipflow.primitives.descent import Descent, LiveProximal, Proximal
from lipflow.primitives.linear import Affine, AvgPool, Scale, Sum
from lipflow.primitives.nonlinearity import NONLINEARITIES, Nonlinearity
from lipflow.primitives.primitive import Certify, Norm, Primitive
from lipflow.primitives.rearrange import Constant, Gather, Input, MaxPool
from lipflow.primitives.series import TruncatedExponential

# The primitives that a file may contain, by kind.
KINDS: dict[str, type[Primitive]] = {
    p.kind: p
    for p in (
        Input,
        Constant,
        Gather,
        Sum,
        Scale,
        Affine,
        Descent,
        Proximal,
        TruncatedExponential,
        AvgPool,
        MaxPool,
        Pointwise,
        GroupSort,
        Householder,
    )
}

__all__ = [
    "KINDS",
    "NONLINEARITIES",
    "Affine",
    "AvgPool",
    "Certify",
    "Constant",
    "Declared",
    "Descent",
    "Gather",
    "GroupSort",
    "Householder",
    "Input",
    "LiveProximal",
    "MaxPool",
    "Nonlinearity",
    "Norm",
    "Pointwise",
    "Primitive",
    "Proximal",
    "Scale",
    "Sum",
    "TruncatedExponential",
]
