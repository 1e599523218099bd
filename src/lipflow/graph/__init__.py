"""Graphs of primitives: how networks are lowered to them, and what constants they have."""

from lipflow.graph.fold import UNIT, Domain, Fold, fold
from lipflow.graph.graph import Builder, Graph, certified
from lipflow.graph.lower import lower
from lipflow.graph.modules import LOWERINGS

__all__ = ["LOWERINGS", "UNIT", "Builder", "Domain", "Fold", "Graph", "certified", "fold", "lower"]
