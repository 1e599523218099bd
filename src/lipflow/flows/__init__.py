"""Flows: a field, a step, and the layer they make."""

from lipflow.flows.cell import Both, Cell
from lipflow.flows.field import Convex, ConvexPotential, Field, Potential, Skew, Sum
from lipflow.flows.flow import Flow, cayley, cpl_conv, cpl_dense, proximal, soc
from lipflow.flows.scale import LearnedNorm, ReshapedNorm, Scale, SpectralNorm
from lipflow.flows.step import ExplicitEuler, Exponential, ImplicitEuler, Midpoint, Split, Step
from lipflow.flows.weight import ConvWeight, DenseWeight, Weight
from lipflow.primitives import MONOTONE, Monotone

__all__ = [
    "MONOTONE",
    "Both",
    "Cell",
    "ConvWeight",
    "Convex",
    "ConvexPotential",
    "DenseWeight",
    "ExplicitEuler",
    "Exponential",
    "Field",
    "Flow",
    "ImplicitEuler",
    "LearnedNorm",
    "Midpoint",
    "Monotone",
    "Potential",
    "ReshapedNorm",
    "Scale",
    "Skew",
    "SpectralNorm",
    "Split",
    "Step",
    "Sum",
    "Weight",
    "cayley",
    "cpl_conv",
    "cpl_dense",
    "proximal",
    "soc",
]
