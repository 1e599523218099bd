"""Networks by name: the table `MODELS`, and `build`."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from lipflow.models.cpl import SIZES, cpl
from lipflow.models.fast import cpl_fast
from lipflow.models.kwlarge import VARIANTS as KW
from lipflow.models.kwlarge import kwlarge
from lipflow.models.lipconvnet import VARIANTS as SOC
from lipflow.models.lipconvnet import lipconvnet
from lipflow.models.network import Network
from lipflow.shapes import Shape, shape_of


class Model(NamedTuple):
    """A row of the table: the function that builds the network, its arguments, the input shape, and a description."""

    builder: Callable[..., Network]
    model_args: dict[str, Any]
    in_shape: tuple[int, int, int]
    summary: str


_CIFAR = (3, 32, 32)

MODELS: dict[str, Model] = {
    "cpl": Model(cpl, {}, _CIFAR, "Convex Potential Layers, every size an argument"),
    "cpl-s": Model(cpl, SIZES["cpl-s"], _CIFAR, "the paper's CPL-S"),
    "cpl-m": Model(cpl, SIZES["cpl-m"], _CIFAR, "the paper's CPL-M"),
    "cpl-l": Model(cpl, SIZES["cpl-l"], _CIFAR, "the paper's CPL-L"),
    "cpl-xl": Model(cpl, SIZES["cpl-xl"], _CIFAR, "the paper's CPL-XL"),
    "cpl-fast": Model(cpl_fast, {}, _CIFAR, "a small CPL network, for certified accuracy per minute"),
    "cpl-digits": Model(cpl, SIZES["cpl-digits"], (1, 8, 8), "a small CPL network for 8×8 grey images"),
    "cayley-kw3": Model(kwlarge, KW["cayley-kw3"], _CIFAR, "Cayley: KW-Large of width 3 (Trockman and Kolter 2021)"),
    "bcop-large": Model(kwlarge, KW["bcop-large"], _CIFAR, "BCOP: the large LConvNet (Li et al. 2019)"),
    "soc-10": Model(lipconvnet, SOC["soc-10"], _CIFAR, "SOC: LipConvnet of 10 layers (Singla and Feizi 2021)"),
    "soc-20": Model(lipconvnet, SOC["soc-20"], _CIFAR, "SOC: LipConvnet of 20 layers"),
    "soc+-10": Model(lipconvnet, SOC["soc+-10"], _CIFAR, "SOC-10 with Householder and LLN (Singla et al. 2022)"),
    "soc+-20": Model(lipconvnet, SOC["soc+-20"], _CIFAR, "SOC-20 with Householder and LLN"),
}


def list_models() -> list[str]:
    """Return the names that `build` takes."""
    return list(MODELS)


def build(name: str, classes: int = 10, in_shape: Shape | None = None, **model_args: Any) -> Network:
    """Build a network by name for images of `in_shape`, by default that of its dataset.

    `model_args` are arguments of the builder: `build("cpl-s", depth=10, lln=True)`. With `mirror=True`, scores are the
    mean over an image and its mirror image (`Network.with_flips`).
    """
    if name not in MODELS:
        raise ValueError(f"there is no model {name!r}; there are {', '.join(MODELS)}")
    model = MODELS[name]
    known = [p.name for p in inspect.signature(model.builder).parameters.values() if p.kind is p.KEYWORD_ONLY]
    known.append("mirror")
    unknown = [argument for argument in model_args if argument not in known]
    if unknown:
        raise TypeError(f"{name} has no argument {', '.join(map(repr, unknown))}; it has {', '.join(known)}")
    shape = model.in_shape if in_shape is None else shape_of(in_shape)
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(f"in_shape is (channels, height, width), each at least 1, not {in_shape!r}")
    if not isinstance(classes, int) or classes < 2:
        raise ValueError(f"a classifier has at least 2 classes, not {classes!r}")
    arguments = {**model.model_args, **model_args}
    if not isinstance(mirror := arguments.pop("mirror", False), bool):
        raise ValueError(f"mirror is True or False, not {mirror!r}")
    network = model.builder(classes, shape, **arguments)
    network = network.with_flips() if mirror else network
    network.name, network.model_args = name, model_args
    return network
