"""Layers of one's own, certified by lipflow."""

from lipflow_layers.branches import TwoBranches
from lipflow_layers.sdp import LoweredSDPLayer, SDPLayer
from lipflow_layers.wrong import WrongLayer

__all__ = ["LoweredSDPLayer", "SDPLayer", "TwoBranches", "WrongLayer"]
