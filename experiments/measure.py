"""The measures of a finished run. Results are stored in the folder of the run and are not computed again.

certified    test images certified by the frozen network: clean, certified at every ε of the grid, L and E
attacked     L2-PGD against the frozen network, with the steps of the authors
live         L2-PGD against the live network in float32, for relaxed steps, whose L certifies almost nothing
effective    the part of L that is used: the slopes of margins at test images
gradient     the norm of the gradient of the loss before each layer, before and after training
course       accuracy, and the gradients of the weights, over the steps of a very deep network
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
from experiments.deep import course
from experiments.parallel import agree, is_first
from experiments.provenance import certificate_of_test_images, write_json
from experiments.scale import CERTIFIED_RADII, Scale
from lipflow.attack import PGD, pgd
from lipflow.certificate import CertificateFile
from lipflow.commands.attack import Attack, attack
from lipflow.commands.certify import Certify, certify
from lipflow.data import Split, load, to_unit
from lipflow.frozen import Frozen, freeze
from lipflow.models import Network
from lipflow.radius import parse_radius
from lipflow.report.consistency import contradictions
from lipflow.report.run_results import read
from lipflow.report.table import accuracy
from lipflow.train.learner import make_network
from lipflow.train.record import Record
from lipflow.train.run import Run

CHUNK_IMAGES = 500  # in one forward pass of a live network


def epochs_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of the log at the ends of epochs."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "epoch"]


def training(folder: Path) -> dict[str, Any]:
    """From the log: seconds, the loss at the end, and validation accuracy after every epoch."""
    record, epochs = Record.read(folder), epochs_of(folder)
    known = {
        "steps": record.steps,
        "epochs": len(epochs),
        "seconds": epochs[-1]["seconds"],
        "seconds_per_epoch": epochs[-1]["seconds"] / len(epochs),
        "loss": epochs[-1]["loss"],
        "losses": [line["loss"] for line in epochs],
    }
    checked = [(line["epoch"], line["validation"]["clean"]) for line in epochs if "validation" in line]
    if checked:
        held_out = len(_data(record.run).validation)
        known |= {"validation": checked[-1][1], "validations": checked, "validation_images": held_out}
    return known


def certified(folder: Path, scale: Scale) -> dict[str, Any]:
    """From the certificate of the test images of the scale; it is made if there is none."""
    run = Record.read(folder).run
    wanted = len(_data(run).test.images[: scale.images])

    def work() -> None:
        certify(Certify(folder, limit=scale.images))
        agree(0)  # the first process has written the files

    return summary(certificate_of_test_images(folder, wanted, work))


def summary(found: CertificateFile) -> dict[str, Any]:
    """The numbers of a certificate of test images."""
    return {
        "images": len(found.truth),
        "clean": accuracy(found.right),
        "certified": {eps: accuracy(found.certified(parse_radius(eps))) for eps in CERTIFIED_RADII},
        "average_radius": accuracy(found.radius * found.right),
        "lipschitz": found.lipschitz,
        "rounding": found.rounding,
    }


def attacked(folder: Path, scale: Scale) -> dict[str, Any]:
    """From the attack on the first certified images; it is made if there is none, or one of other radii or images."""
    found = read(folder, folder.name)
    assert found.certificate is not None
    wanted, stored = len(found.certificate.truth[: scale.attacked]), found.outcome
    if stored is None or not set(scale.attacked_at) <= set(stored.robust) or len(stored) != wanted:
        attack(Attack(folder, radii=scale.attacked_at, limit=scale.attacked, gallery=0))
        agree(0)  # the first process has written the files
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
    """The accuracy of the live network, clean and under attack, and its certified L."""
    run, network = Record.read(folder).run, lipflow.load(folder)
    test = _data(run).test
    count = len(test) if scale.images is None else scale.images
    with torch.no_grad():
        labels = torch.cat([network(to_unit(part)).argmax(1) for part in test.images[:count].split(CHUNK_IMAGES)])
    some = Split(test.images[: scale.attacked], test.labels[: scale.attacked])
    broken = pgd(network, some.images, some.labels, [parse_radius("36/255")], PGD()).success[:, 0]
    try:
        constant = freeze(network).lipschitz
    except (ValueError, ArithmeticError):  # it overflows float64
        constant = math.inf
    return {
        "images": count,
        "clean": float((labels == test.labels[:count]).double().mean()),
        "attacked_images": len(some),
        "attacked": {"36/255": float((~broken).double().mean())},
        "lipschitz": constant if math.isfinite(constant) else "beyond float64",
    }


def effective(folder: Path, scale: Scale) -> dict[str, Any]:
    """‖∇(f_y - f_j)(x)‖ / d_yj for the label y and every j, at most 1 as d is certified.

    A slope at one point is a lower bound of the Lipschitz constant. The greatest slope times L estimates the effective
    constant from below.
    """
    run, network = Record.read(folder).run, lipflow.load(folder)
    frozen = freeze(network)
    slopes = used(frozen, _data(run).test.images[: scale.probed])
    most = float(slopes.max())
    return {
        "certified_lipschitz": frozen.lipschitz,
        "effective_lipschitz": most * frozen.lipschitz,
        "used": most,
        "used_mean": float(slopes.amax(1).mean()),
        "probed": len(slopes),
    }


def used(frozen: Frozen, images: Tensor) -> Tensor:  # (n, classes)
    """The slope of every margin divided by its certified bound; 0 for the label itself."""
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
    """The `norms` of the trained network and of a fresh one."""
    run, network = Record.read(folder).run, lipflow.load(folder)
    data = _data(run)
    images, labels = data.test.images[: scale.probed], data.test.labels[: scale.probed]
    fresh = make_network(run, data).eval()
    found = {"fresh": norms(fresh, images, labels), "trained": norms(network, images, labels)}
    first = {f"first_{state}": of[0] for state, of in found.items()}
    return {"gradient": found, **first, "probed": len(images)}


def _layers(chain: nn.Sequential) -> list[nn.Module]:
    """The layers of nested chains, in order."""
    parts = (_layers(m) if isinstance(m, nn.Sequential) else [m] for m in chain)
    return [layer for part in parts for layer in part]


def norms(network: Network, images: Tensor, labels: Tensor) -> list[float]:
    """The mean over images of ‖∂loss/∂x_l‖ before each layer l with weights, divided by that at the scores."""
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
    "course": lambda folder, scale: course(folder),
}
STORED_HERE = ("live", "effective", "gradient")  # the commands of the other measures store their results


def measure(folder: Path, measures: tuple[str, ...], scale: Scale) -> dict[str, Any]:
    """All numbers of one run, by name."""
    record = Record.read(folder)
    parameters = sum(p.numel() for p in lipflow.load(folder).parameters())
    known: dict[str, Any] = {"run": folder.name, "seed": record.run.seed, "parameters": parameters}
    known |= {"recorded": dict(record.environment), **training(folder)}
    for name in measures:
        path = folder / f"{name}.json"
        if name in STORED_HERE:
            if is_first() and not path.is_file():
                write_json(path, MEASURES[name](folder, scale))
            agree(0)  # the others wait for the file
            known |= json.loads(path.read_text())
        else:
            known |= MEASURES[name](folder, scale)
    return known


def _data(run: Run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return load(run.data, run.data_dir, image_size=run.image_size, validation=run.validation_images)
