"""lipflow: neural networks that prove their own robustness.

Names are loaded when first used (PEP 562), so that `import lipflow` is instant and `lipflow.check` needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_ROOMS = {
    "bound": ("Assume", "Bound", "Domain", "Lipschitz", "lipschitz_bound"),
    "operators": ("Conv2d", "Dense", "LinearOperator", "norm_bound", "norm_estimate"),
    "flows": (
        "ConvWeight",
        "ConvexPotential",
        "DenseWeight",
        "ExplicitEuler",
        "Exponential",
        "Flow",
        "ImplicitEuler",
        "LearnedNorm",
        "Midpoint",
        "Monotone",
        "Potential",
        "ReshapedNorm",
        "Skew",
        "SpectralNorm",
        "Split",
        "Sum",
        "cayley",
        "cpl_conv",
        "cpl_dense",
        "proximal",
        "soc",
    ),
    "blocks": (
        "bcop_conv",
        "bjorck_dense",
        "cayley_conv",
        "cayley_dense",
        "reshaped_conv",
        "soc_conv",
        "soc_dense",
        "spectral_conv",
        "spectral_dense",
    ),
    "certificate": ("Certificates",),
    "frozen": ("Frozen", "certify", "freeze"),
    "models": ("MODELS", "Network", "build", "list_models"),
    "pretrained": ("load",),
}
_HOME = {name: room for room, names in _ROOMS.items() for name in names}
_MODULES = ("attack", "blocks", "bound", "data", "flows", "frozen", "losses", "models", "operators", "report", "train")

__all__ = [*_HOME, *_MODULES, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]

if TYPE_CHECKING:
    from lipflow import blocks as blocks
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
    from lipflow.bound import Domain as Domain
    from lipflow.bound import Lipschitz as Lipschitz
    from lipflow.bound import lipschitz_bound as lipschitz_bound
    from lipflow.certificate import Certificates as Certificates
    from lipflow.flows import *  # noqa: F403
    from lipflow.frozen import Frozen as Frozen
    from lipflow.frozen import certify as certify
    from lipflow.frozen import freeze as freeze
    from lipflow.models import *  # noqa: F403
    from lipflow.operators import *  # noqa: F403
    from lipflow.pretrained import load as load


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"lipflow.{_HOME[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"lipflow.{name}")
    raise AttributeError(f"module 'lipflow' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
