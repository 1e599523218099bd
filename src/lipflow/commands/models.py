"""`lipflow models`: list the networks by name."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Models:
    """List the networks for --model, with their parameters, layers and input, and the pretrained networks."""


def models(arguments: Models) -> int:
    """Print a table of the networks, which are built on the meta device."""
    import torch

    from lipflow.blocks import Affine, LastLayerNormalization
    from lipflow.commands.terminal import print_table
    from lipflow.flows import Flow
    from lipflow.models import MODELS, build
    from lipflow.pretrained import NAMES

    rows = []
    for name, model in MODELS.items():
        with torch.device("meta"):
            network = build(name)
        parameters = sum(p.numel() for p in network.parameters())
        layers = sum(isinstance(m, Flow | Affine | LastLayerNormalization) for m in network.modules())
        shape = "×".join(map(str, model.in_shape))
        rows.append((name, f"{parameters:,}", str(layers), shape, model.summary))
    print_table(("model", "parameters", "layers", "input", ""), rows)
    print(f"pretrained, for lipflow.load(NAME) and lipflow certify NAME: {', '.join(NAMES)}")
    return 0
