"""Blocks: everything in a network that is not a flow. Each declares its (L, ε); heads declare pair bounds too."""

from lipflow.blocks.activation import Abs, GroupSort, Householder, MaxMin
from lipflow.blocks.affine import Affine, Parameterisation, Scaled, reshaped_conv, spectral_conv, spectral_dense
from lipflow.blocks.bcop import BlockConvolution, Orthonormal, bcop_conv, bjorck_dense
from lipflow.blocks.bias import Bias
from lipflow.blocks.cayley import CayleyMatrix, CayleySymbols, cayley_conv, cayley_dense
from lipflow.blocks.flip import FlipAverage
from lipflow.blocks.head import Head, LastLayerNormalization, Truncate
from lipflow.blocks.normalize import Normalize
from lipflow.blocks.resize import AvgPool, Flatten, MaxPool, PadChannels, SpaceToDepth, TakeChannels
from lipflow.blocks.soc import soc_conv, soc_dense

__all__ = [
    "Abs",
    "Affine",
    "AvgPool",
    "Bias",
    "BlockConvolution",
    "CayleyMatrix",
    "CayleySymbols",
    "Flatten",
    "FlipAverage",
    "GroupSort",
    "Head",
    "Householder",
    "LastLayerNormalization",
    "MaxMin",
    "MaxPool",
    "Normalize",
    "Orthonormal",
    "PadChannels",
    "Parameterisation",
    "Scaled",
    "SpaceToDepth",
    "TakeChannels",
    "Truncate",
    "bcop_conv",
    "bjorck_dense",
    "cayley_conv",
    "cayley_dense",
    "reshaped_conv",
    "soc_conv",
    "soc_dense",
    "spectral_conv",
    "spectral_dense",
]
