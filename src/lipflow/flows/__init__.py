"""Flows: a field, a step, and the layer they make."""

from lipflow.flows.field import Convex, ConvexPlusSkew, ConvexPotential, Field, Potential, Skew
from lipflow.flows.flow import Flow, cayley, cpl_conv, cpl_dense, proximal, soc
from lipflow.flows.scale import LearnedScale, ReshapedScale, Scale, SpectralScale
from lipflow.flows.sequential import Sequential, fuse
from lipflow.flows.step import ExplicitEuler, Exponential, ImplicitEuler, Midpoint, Split, Step
from lipflow.flows.weight import ConvWeight, DenseWeight, Weight
from lipflow.primitives import NONLINEARITIES, Nonlinearity

__all__ = [
    "NONLINEARITIES",
    "ConvWeight",
    "Convex",
    "ConvexPlusSkew",
    "ConvexPotential",
    "DenseWeight",
    "ExplicitEuler",
    "Exponential",
    "Field",
    "Flow",
    "ImplicitEuler",
    "LearnedScale",
    "Midpoint",
    "Nonlinearity",
    "Potential",
    "ReshapedScale",
    "Scale",
    "Sequential",
    "Skew",
    "SpectralScale",
    "Split",
    "Step",
    "Weight",
    "cayley",
    "cpl_conv",
    "cpl_dense",
    "fuse",
    "proximal",
    "soc",
]
