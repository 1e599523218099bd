"""A network as a safetensors file: its tensors, and the arguments of `lipflow.build` as metadata."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_parameter_registration_hook

from lipflow.files import read_tensors, save_tensors
from lipflow.models.by_name import build
from lipflow.models.network import Network
from lipflow.untrusted import MAX_NUMBERS, RUBBISH

FORMAT = 1
_FIELDS: dict[str, type] = {"format": int, "model": str, "classes": int, "in_shape": list, "model_args": dict}


def save(network: Network, path: Path | str) -> None:
    """Write a network made by `lipflow.build` to a .safetensors file, which `lipflow.load` reads."""
    if not isinstance(network, Network) or network.name is None:
        raise ValueError(
            "only a network made by lipflow.build(name, ...) can be saved, as loading builds it by that name; of "
            "another module, save the state dict, or lipflow.freeze(module, in_shape).save(path)"
        )
    spec = {
        "format": FORMAT,
        "model": network.name,
        "classes": network.classes,
        "in_shape": list(network.in_shape),
        "model_args": network.model_args,
    }
    save_tensors(network.state_dict(), Path(path), {"lipflow": json.dumps(spec, sort_keys=True)})


def read(path: Path | str) -> Network:
    """Read a network that `save` wrote, in evaluation mode. The metadata is checked, and no code in it is executed."""
    tensors, metadata = read_tensors(Path(path))
    try:
        spec = json.loads(metadata.get("lipflow", "null"))
        if isinstance(spec, dict) and "primitives" in spec:
            raise ValueError("it is a frozen network: use lipflow.Frozen.load(path)")
        if not isinstance(spec, dict) or {k: type(v) for k, v in spec.items()} != _FIELDS:
            raise ValueError(f"its metadata is not that of a lipflow network: {str(spec)[:200]}")
        if spec["format"] != FORMAT:
            raise ValueError(f"it has format {spec['format']}; this version of lipflow reads format {FORMAT}")
        given = spec["model"], spec["classes"], tuple(spec["in_shape"])
        require_fits(lambda: build(*given, **spec["model_args"]), tensors)
        with torch.random.fork_rng(devices=[]):  # building draws random weights
            network = build(*given, **spec["model_args"])
        network.load_state_dict(tensors)
    except RUBBISH as error:
        raise ValueError(f"{path} cannot be loaded: {' '.join(str(error).split())}") from error
    return network.eval()


def require_fits(make: Callable[[], object], tensors: Mapping[str, Tensor]) -> None:
    """Raise if a network has more parameters than there are tensors, or larger values than MAX_NUMBERS.

    It is made on the meta device, without memory, and only until it is too large.
    """
    stored, found = (len(tensors), sum(t.numel() for t in tensors.values())), {}

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            found[module, name] = parameter.numel()  # which may be set again
        if len(found) > 2 * stored[0] or sum(found.values()) > 2 * stored[1]:  # a parametrized weight is set twice
            raise ValueError(f"the file has {stored[0]} tensors of {stored[1]} numbers, and its network needs more")

    def measure(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.numel() > MAX_NUMBERS:
            raise ValueError(f"its network has a value of {output.numel()} numbers, above the limit, {MAX_NUMBERS}")

    handles = register_module_parameter_registration_hook(count), register_module_forward_hook(measure)
    try:
        with torch.device("meta"):
            make()
    finally:
        for handle in handles:
            handle.remove()
