"""What is measured of a finished run, each kept in its folder and not measured again.

certified    test images certified by the frozen network: clean, certified at every ε of the grid, L and E
attacked     L2-PGD against the frozen network, as the authors run it
live         L2-PGD against the live network in float32: for relaxed steps, whose L certifies next to nothing
effective    how much of L is used: the slope of margins at test images, from below
gradient     the norm of the loss's gradient before each layer, at the first step and at the last
"""

import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lipflow
from experiments.provenance import of_test
from experiments.scale import GRID, Scale
from lipflow.attack import PGD, pgd
from lipflow.commands.attack import Attack, attack
from lipflow.commands.certify import Certify, certify
from lipflow.data import Split, load, to_unit
from lipflow.files import write_atomic
from lipflow.frozen import Frozen, freeze
from lipflow.models import Network
from lipflow.radius import parse_radius
from lipflow.report.consistency import contradictions
from lipflow.report.run_results import read
from lipflow.report.table import accuracy
from lipflow.train.learner import make_network
from lipflow.train.record import Record
from lipflow.train.run import Run

AT_ONCE = 500  # images through a live network


def training(folder: Path) -> dict[str, Any]:
    """What the log says: seconds, the loss at the end, and validation accuracy after every epoch."""
    kept = Record.read(folder)
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    epochs = [line for line in lines if line["kind"] == "epoch"]
    known = {
        "steps": kept.steps,
        "epochs": len(epochs),
        "seconds": epochs[-1]["seconds"],
        "seconds_per_epoch": epochs[-1]["seconds"] / len(epochs),
        "loss": epochs[-1]["loss"],
        "losses": [line["loss"] for line in epochs],
    }
    checked = [(line["epoch"], line["validation"]["clean"]) for line in epochs if "validation" in line]
    if checked:
        held = len(_data(kept.run).validation)
        known |= {"validation": checked[-1][1], "validations": checked, "validation_images": held}
    return known


def certified(folder: Path, scale: Scale) -> dict[str, Any]:
    """Of the test images that the scale asks for, certified unless they were."""
    run = Record.read(folder).run
    wanted = len(_data(run).test.images[: scale.images])
    found = of_test(folder, wanted, lambda: certify(Certify(folder, limit=scale.images)))
    return {
        "images": len(found.truth),
        "clean": accuracy(found.right),
        "certified": {eps: accuracy(found.certified(parse_radius(eps))) for eps in GRID},
        "certified_by_the_papers_rule": {
            eps: accuracy(found.right & (found.paper_radius > float(parse_radius(eps)))) for eps in GRID[:3]
        },
        "lipschitz": found.lipschitz,
        "rounding": found.rounding,
    }


def attacked(folder: Path, scale: Scale) -> dict[str, Any]:
    found = read(folder, folder.name)
    assert found.certificate is not None
    wanted, held = len(found.certificate.truth[: scale.attacked]), found.outcome
    if held is None or not set(scale.attacked_at) <= set(held.robust) or len(held) != wanted:
        attack(Attack(folder, radii=scale.attacked_at, limit=scale.attacked, gallery=0))
        found = read(folder, folder.name)
    assert found.outcome is not None
    return {
        "attacked_images": len(found.outcome),
        "attacked_clean": accuracy(found.outcome.clean),
        "attacked_steps": found.outcome.steps,
        "attacked": {eps: accuracy(robust) for eps, robust in found.outcome.robust.items()},
        "contradictions": contradictions(found),
    }


def live(folder: Path, scale: Scale) -> dict[str, Any]:
    return _kept(folder / "live.json", lambda: _live(folder, scale))


def _live(folder: Path, scale: Scale) -> dict[str, Any]:
    run, network = Record.read(folder).run, lipflow.load(folder)
    test = _data(run).test
    count = len(test) if scale.images is None else scale.images
    with torch.no_grad():
        labels = torch.cat([network(to_unit(part)).argmax(1) for part in test.images[:count].split(AT_ONCE)])
    some = Split(test.images[: scale.attacked], test.labels[: scale.attacked])
    broken = pgd(network, some.images, some.labels, [parse_radius("36/255")], PGD()).success[:, 0]
    try:
        constant = freeze(network).lipschitz
    except (ValueError, ArithmeticError):  # beyond float64
        constant = math.inf
    return {
        "images": count,
        "clean": float((labels == test.labels[:count]).double().mean()),
        "attacked_images": len(some),
        "standing": {"36/255": float((~broken).double().mean())},
        "lipschitz": constant if math.isfinite(constant) else "beyond float64",
    }


def effective(folder: Path, scale: Scale) -> dict[str, Any]:
    return _kept(folder / "effective.json", lambda: _effective(folder, scale))


def _effective(folder: Path, scale: Scale) -> dict[str, Any]:
    """‖∇(f_y - f_j)(x)‖ / d_yj for the label y and every j; d is certified, so that this is at most 1.

    A slope at one point is a Lipschitz constant from below. The greatest one times L is the effective constant seen.
    """
    run, network = Record.read(folder).run, lipflow.load(folder)
    frozen = freeze(network)
    slopes = used(frozen, _data(run).test.images[: scale.probed])
    most = float(slopes.max())
    top = slopes.amax(1)
    return {
        "certified_lipschitz": frozen.lipschitz,
        "effective_lipschitz": most * frozen.lipschitz,
        "used": most,
        "used_mean": float(top.mean()),
        "probed": len(slopes),
    }


def used(frozen: Frozen, images: Tensor) -> Tensor:  # (n, classes)
    """The slope of every margin over its certified bound; 0 for the label itself."""
    x = frozen.receive(images).requires_grad_()
    scores = frozen(x)
    label = scores.argmax(1)
    columns = []
    for j in range(frozen.classes):
        margin = scores.gather(1, label[:, None])[:, 0] - scores[:, j]
        (slope,) = torch.autograd.grad(margin.sum(), x, retain_graph=True)
        bound = frozen.pair_bounds[label, j]
        columns.append(torch.where(label == j, 0.0, slope.flatten(1).norm(dim=1) / bound.where(bound > 0, 1.0)))
    return torch.stack(columns, 1).detach()


def gradient(folder: Path, scale: Scale) -> dict[str, Any]:
    return _kept(folder / "gradient.json", lambda: _gradient(folder, scale))


def _gradient(folder: Path, scale: Scale) -> dict[str, Any]:
    run, network = Record.read(folder).run, lipflow.load(folder)
    data = _data(run)
    images, labels = data.test.images[: scale.probed], data.test.labels[: scale.probed]
    fresh = make_network(run, data).eval()
    found = {"fresh": norms(fresh, images, labels), "trained": norms(network, images, labels)}
    first = {f"first_{state}": of[0] for state, of in found.items()}
    return {"gradient": found, **first, "probed": len(images)}


def _layers(chain: nn.Sequential) -> list[nn.Module]:
    """The layers of chains within chains, in their order."""
    parts = (_layers(m) if isinstance(m, nn.Sequential) else [m] for m in chain)
    return [layer for part in parts for layer in part]


def norms(network: Network, images: Tensor, labels: Tensor) -> list[float]:
    """The mean over images of ‖∂loss/∂x_l‖ before each layer l with weights, over that of the scores: 1 is as large.

    Backwards through a 1-Lipschitz layer a gradient never grows.
    """
    x, inputs = to_unit(images), []
    for layer in _layers(network.stages):
        if any(True for _ in layer.parameters()):
            x = x if inputs else x.detach().requires_grad_()
            inputs.append(x)
        x = layer(x)
    found = torch.autograd.grad(F.cross_entropy(x, labels, reduction="sum"), [*inputs, x])
    sizes = [float(g.flatten(1).norm(dim=1).double().mean()) for g in found]
    return [size / sizes[-1] for size in sizes[:-1]]


MEASURES: Mapping[str, Callable[[Path, Scale], dict[str, Any]]] = {
    "certified": certified,
    "attacked": attacked,
    "live": live,
    "effective": effective,
    "gradient": gradient,
}


def measure(folder: Path, measures: tuple[str, ...], scale: Scale) -> dict[str, Any]:
    """The table of numbers of one run; what was measured before is read."""
    kept = Record.read(folder)
    parameters = sum(p.numel() for p in lipflow.load(folder).parameters())
    known: dict[str, Any] = {"run": folder.name, "seed": kept.run.seed, "parameters": parameters}
    known |= {"recorded": dict(kept.environment), **training(folder)}
    for name in measures:
        known |= MEASURES[name](folder, scale)
    return known


def _data(run: Run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return load(run.data, run.data_dir, image_size=run.image_size, validation=run.validation_images)


def _kept(path: Path, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if not path.is_file():
        text = json.dumps(compute(), indent=1)
        write_atomic(path, lambda temporary: temporary.write_text(text + "\n"))
    return json.loads(path.read_text())
