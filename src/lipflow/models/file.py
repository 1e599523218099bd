"""A network as a safetensors file: its tensors, and the arguments of `lipflow.build` as metadata."""

import json
from pathlib import Path

import torch

from lipflow.files import read_tensors, save_tensors
from lipflow.models.by_name import build
from lipflow.models.network import Network

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
        with torch.random.fork_rng(devices=[]):  # building draws random weights
            network = build(spec["model"], spec["classes"], tuple(spec["in_shape"]), **spec["model_args"])
        network.load_state_dict(tensors)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be loaded: {' '.join(str(error).split())}") from error
    return network.eval()
