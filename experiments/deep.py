"""How a very deep network begins to learn: its accuracy, and the gradients of its layers, over the steps of training.

A deep network learns nothing until the gradient reaches its first layers, so the gradients show when a depth starts.
"""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from lipflow.models import Network

GRADIENTS, EVERY_STEPS = "gradients.jsonl", 25
PROFILES, MAX_LAYERS = 8, 100  # of the gradients by layer, in a result


def record_gradients(folder: Path) -> Callable[[int, Network], None]:
    """A `watch` of `train` that writes the norm of the gradient of the weights of each layer, every 25 steps."""

    def watch(step: int, network: Network) -> None:
        if step == 1 or step % EVERY_STEPS == 0:
            gradients = [p.grad for p in network.parameters() if p.ndim > 1 and p.grad is not None]
            norms = [float(f"{float(g.norm(dtype=torch.float64)):.4g}") for g in gradients]
            with (folder / GRADIENTS).open("a") as file:
                file.write(json.dumps({"step": step, "norms": norms}) + "\n")

    return watch


def course(folder: Path) -> dict[str, Any]:
    """Over the steps: accuracy on training batches, gradients of the first layer, and of all layers at some steps."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    right = [line["accuracy"] for line in lines if line["kind"] == "step"]
    parts = [right[i : i + EVERY_STEPS] for i in range(0, len(right), EVERY_STEPS)]
    ends = [min((i + 1) * EVERY_STEPS, len(right)) for i in range(len(parts))]
    recorded = [json.loads(line) for line in (folder / GRADIENTS).read_text().splitlines()]
    norms = {line["step"]: line["norms"] for line in recorded}  # a resumed run repeats some steps
    steps = sorted(norms)
    chosen = sorted({steps[round(i * (len(steps) - 1) / (PROFILES - 1))] for i in range(PROFILES)})
    return {
        "accuracies": [[end, fmean(part)] for end, part in zip(ends, parts, strict=True)],
        "first_gradients": [[step, norms[step][0]] for step in steps],
        "gradients_by_layer": {str(step): _thinned(norms[step]) for step in chosen},
    }


def _thinned(values: list[float]) -> list[list[float]]:
    """At most 100 pairs (number of the layer, value)."""
    stride = -(-len(values) // MAX_LAYERS)
    return [[i + 1, value] for i, value in enumerate(values) if i % stride == 0 or i == len(values) - 1]
