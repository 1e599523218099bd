"""Frozen networks: what certificates are about."""

from lipflow.frozen.network import Frozen, Row, certify, freeze
from lipflow.frozen.primitive import PRIMITIVES, Primitive

__all__ = ["PRIMITIVES", "Frozen", "Primitive", "Row", "certify", "freeze"]
