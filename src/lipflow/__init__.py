"""lipflow: neural networks that prove their own robustness.

Names are imported on first use (PEP 562), so that `lipflow --help` answers at once and `lipflow.check` needs no torch.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "blocks": ("bcop_conv", "bjorck_dense", "cayley_conv", "cayley_dense", "soc_conv", "soc_dense"),
    "blocks.affine": ("reshaped_conv", "spectral_conv", "spectral_dense"),
    "bound": ("Assume", "Bound", "lipschitz_bound"),
    "certificate": ("Certificates", "certify"),
    "flows.field": ("ConvexPlusSkew", "ConvexPotential", "Potential", "Skew"),
    "flows.flow": ("Flow", "cayley", "cpl_conv", "cpl_dense", "proximal", "soc"),
    "flows.scale": ("LearnedScale", "ReshapedScale", "SpectralScale"),
    "flows.sequential": ("Sequential", "fuse"),
    "flows.step": ("ExplicitEuler", "Exponential", "ImplicitEuler", "Midpoint", "Split"),
    "flows.weight": ("ConvWeight", "DenseWeight"),
    "frozen": ("Frozen", "freeze"),
    "models": ("MODELS", "Network", "build", "list_models", "save"),
    "node": ("LoweringError", "Node"),
    "operators": ("ConvOperator", "DenseOperator", "LinearOperator", "norm_bound", "norm_estimate"),
    "pretrained": ("load",),
    "primitives": ("Nonlinearity",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
_MODULES = {module.name for module in pkgutil.iter_modules(__path__)}

__all__ = [*_MODULE_OF, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:  # the same names for type checkers
    from lipflow import attack as attack
    from lipflow import blocks as blocks
    from lipflow import bound as bound
    from lipflow import certificate as certificate
    from lipflow import check as check
    from lipflow import data as data
    from lipflow import fast as fast
    from lipflow import flows as flows
    from lipflow import frozen as frozen
    from lipflow import graph as graph
    from lipflow import losses as losses
    from lipflow import machine as machine
    from lipflow import models as models
    from lipflow import node as node
    from lipflow import operators as operators
    from lipflow import pixels as pixels
    from lipflow import pretrained as pretrained
    from lipflow import primitives as primitives
    from lipflow import radius as radius
    from lipflow import report as report
    from lipflow import rounding as rounding
    from lipflow import shapes as shapes
    from lipflow import testing as testing
    from lipflow import torch_state as torch_state
    from lipflow import train as train
    from lipflow import untrusted as untrusted
    from lipflow.blocks import bcop_conv as bcop_conv
    from lipflow.blocks import bjorck_dense as bjorck_dense
    from lipflow.blocks import cayley_conv as cayley_conv
    from lipflow.blocks import cayley_dense as cayley_dense
    from lipflow.blocks import reshaped_conv as reshaped_conv
    from lipflow.blocks import soc_conv as soc_conv
    from lipflow.blocks import soc_dense as soc_dense
    from lipflow.blocks import spectral_conv as spectral_conv
    from lipflow.blocks import spectral_dense as spectral_dense
    from lipflow.bound import Assume as Assume
    from lipflow.bound import Bound as Bound
    from lipflow.bound import lipschitz_bound as lipschitz_bound
    from lipflow.certificate import Certificates as Certificates
    from lipflow.certificate import certify as certify
    from lipflow.flows import ConvexPlusSkew as ConvexPlusSkew
    from lipflow.flows import ConvexPotential as ConvexPotential
    from lipflow.flows import ConvWeight as ConvWeight
    from lipflow.flows import DenseWeight as DenseWeight
    from lipflow.flows import ExplicitEuler as ExplicitEuler
    from lipflow.flows import Exponential as Exponential
    from lipflow.flows import Flow as Flow
    from lipflow.flows import ImplicitEuler as ImplicitEuler
    from lipflow.flows import LearnedScale as LearnedScale
    from lipflow.flows import Midpoint as Midpoint
    from lipflow.flows import Nonlinearity as Nonlinearity
    from lipflow.flows import Potential as Potential
    from lipflow.flows import ReshapedScale as ReshapedScale
    from lipflow.flows import Sequential as Sequential
    from lipflow.flows import Skew as Skew
    from lipflow.flows import SpectralScale as SpectralScale
    from lipflow.flows import Split as Split
    from lipflow.flows import cayley as cayley
    from lipflow.flows import cpl_conv as cpl_conv
    from lipflow.flows import cpl_dense as cpl_dense
    from lipflow.flows import fuse as fuse
    from lipflow.flows import proximal as proximal
    from lipflow.flows import soc as soc
    from lipflow.frozen import Frozen as Frozen
    from lipflow.frozen import freeze as freeze
    from lipflow.models import MODELS as MODELS
    from lipflow.models import Network as Network
    from lipflow.models import build as build
    from lipflow.models import list_models as list_models
    from lipflow.models import save as save
    from lipflow.node import LoweringError as LoweringError
    from lipflow.node import Node as Node
    from lipflow.operators import ConvOperator as ConvOperator
    from lipflow.operators import DenseOperator as DenseOperator
    from lipflow.operators import LinearOperator as LinearOperator
    from lipflow.operators import norm_bound as norm_bound
    from lipflow.operators import norm_estimate as norm_estimate
    from lipflow.pretrained import load as load
else:

    def __getattr__(name: str) -> Any:
        if name in _MODULE_OF:
            return getattr(importlib.import_module(f"lipflow.{_MODULE_OF[name]}"), name)
        if name in _MODULES:
            return importlib.import_module(f"lipflow.{name}")
        raise AttributeError(f"module 'lipflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
