"""What is wrong with a network that is no longer made of numbers."""

import torch

from lipflow.flows import Weight
from lipflow.models import Network
from lipflow.train.ending import NonFiniteLoss


@torch.no_grad()
def diagnosis(network: Network) -> str:
    """Which parameters are no numbers, and the estimated norm of every weight, a line each."""
    named = [*network.named_parameters(), *network.named_buffers()]
    lost = [name for name, tensor in named if not bool(torch.isfinite(tensor).all())]
    norms = [
        f"  {name}: {float(module.estimate(module.operator(None))):.4g}"
        for name, module in network.named_modules()
        if isinstance(module, Weight)
    ]
    return "\n".join(
        [f"not finite: {', '.join(lost) or 'no parameter'}", "norms of the layers' weights (estimated):", *norms]
    )


def require_finite(network: Network, step: int) -> None:
    """Stop at weights that are no numbers: a finite loss can have a gradient that is none."""
    if not all(bool(torch.isfinite(tensor).all()) for tensor in network.state_dict().values()):
        raise NonFiniteLoss(f"after step {step} there are weights that are no numbers.\n{diagnosis(network)}")
