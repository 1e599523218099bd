"""Layers that lipflow certifies."""

from lipflow_layers.branches import TwoBranches
from lipflow_layers.sdp import LoweredSDPLayer, SDPLayer
from lipflow_layers.wrong import WrongLayer

__all__ = ["LoweredSDPLayer", "SDPLayer", "TwoBranches", "WrongLayer"]
