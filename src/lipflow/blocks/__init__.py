"""Blocks: everything in a network that is not a flow. Each declares its (L, ε); heads declare pair bounds too."""

from lipflow.blocks.activation import Abs, GroupSort, Householder, MaxMin
from lipflow.blocks.head import Head, LastLayerNormalization, Truncate
from lipflow.blocks.normalize import Center
from lipflow.blocks.resize import AvgPool, Flatten, MaxPool, PadChannels, SpaceToDepth

__all__ = [
    "Abs",
    "AvgPool",
    "Center",
    "Flatten",
    "GroupSort",
    "Head",
    "Householder",
    "LastLayerNormalization",
    "MaxMin",
    "MaxPool",
    "PadChannels",
    "SpaceToDepth",
    "Truncate",
]
