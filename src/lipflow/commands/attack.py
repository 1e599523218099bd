"""`lipflow attack RUN`: attack a certified network with L2-PGD, and compare the result with its certificate."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from lipflow.commands.parts import PartCache
from lipflow.commands.terminal import print_contradictions, print_table, with_progress_bar

if TYPE_CHECKING:
    from torch import Tensor

    from lipflow.attack import PGD, Examples, Outcome
    from lipflow.certificate import CertificateFile
    from lipflow.frozen import Frozen

CHUNK_IMAGES = 100
GALLERY_CHUNK_IMAGES = 4  # less, because each image takes many attacks


@dataclass(frozen=True)
class Attack:
    """Attack a certified network with L2-PGD, as the authors of the paper do, and print the accuracy under attack."""

    run: Path
    """The folder of a run, or its name in runs/, after `lipflow certify`; or a pretrained network by name."""
    radii: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: those of the run's recipe)")] = ()
    """Radii of the attack, such as 36/255 0.5."""
    steps: int = 10
    """Steps of an attack, each of length ε/5."""
    restarts: int = 1
    """Attacks per image, each from another random point of the ball."""
    limit: int | None = None
    """Attack only the first images of the certificate, this number of them (None: all)."""
    seed: int = 0
    """Seed of the random starts."""
    gallery: int = 24
    """Attack this number of images inside of their balls and beyond, for the gallery of `lipflow report` (0: none)."""

    def __post_init__(self) -> None:
        for name, least in (("limit", 1), ("steps", 0), ("restarts", 1), ("gallery", 0)):
            given = getattr(self, name)
            if given is not None and given < least:
                raise ValueError(f"--{name} must be at least {least}, not {given}")


def attack(arguments: Attack) -> int:
    """Attack, write the outcome and print the table, with the number of threads of the run's recipe.

    Return 1 if an attack changed the label of an image inside of its certified ball.
    """
    import torch

    from lipflow.attack import PGD, Outcome, pgd, save
    from lipflow.frozen import Frozen
    from lipflow.pretrained import folder_of
    from lipflow.radius import parse_radius
    from lipflow.report.consistency import refuted
    from lipflow.train.distributed import join, threads
    from lipflow.train.recipe import Recipe
    from lipflow.train.record import Record

    folder = folder_of(arguments.run)
    trained = (folder / "run.json").is_file()  # false for the certificate of a network trained without lipflow
    recipe = Record.read(folder).run.recipe if trained else Recipe()
    names = sorted(arguments.radii or recipe.radii, key=parse_radius)
    eps = [parse_radius(name) for name in names]
    weights, certificate = certified(folder)
    given = certificate if arguments.limit is None else certificate.first(arguments.limit)
    images, truth = torch.from_numpy(given.images), torch.from_numpy(given.truth).long()
    settings = PGD(steps=arguments.steps, restarts=arguments.restarts, seed=arguments.seed)
    with join("cpu") as ranks, threads(recipe.threads):
        frozen = Frozen.load(weights)
        cache = PartCache(f"attack {frozen.digest} {settings} {eps}")

        def attacked(images: "Tensor", truth: "Tensor", index: "Tensor") -> dict[str, "Tensor"]:
            return {"success": pgd(frozen, images, truth, eps, settings, index).success}

        rows = [ranks.share(part) for part in (images, truth, torch.arange(len(truth)))]
        parts = ranks.gather(cache.run(attacked, rows, CHUNK_IMAGES, "attacking", ranks.first))
        if not ranks.first:
            return 0
        broken = torch.cat([part["success"] for part in parts]).numpy()  # (images, radii): the label is wrong
        robust = {name: ~broken[:, column] for column, name in enumerate(names)}
        outcome = Outcome(settings.steps, settings.restarts, given.right, robust, None)
        print(f"wrote {save(folder, outcome, settings, certificate)}")  # before the gallery, which takes long
        found = refuted(certificate, outcome)
        print_contradictions(found)
        show(given, outcome, f"{folder}: {len(truth)} images under L2-PGD")
        if arguments.gallery > 0:
            outcome = replace(outcome, examples=examples(frozen, given, settings, arguments.gallery))
            in_gallery = refuted(certificate, replace(outcome, robust={}))
            print_contradictions(in_gallery)
            found += in_gallery
            print(f"wrote {save(folder, outcome, settings, certificate)}")
        cache.clear()
        return 1 if found else 0


def certified(folder: Path) -> "tuple[Path, CertificateFile]":
    """Return the frozen network in a folder and its certificate; raise if there is none that can be attacked."""
    from lipflow import certificate
    from lipflow.attack.file import EXAMPLES, OUTCOME
    from lipflow.files import require_file, sha256

    weights, rows, claims = (folder / name for name in (certificate.WEIGHTS, certificate.ROWS, certificate.CLAIMS))
    if not (weights.is_file() and rows.is_file() and claims.is_file()):
        raise ValueError(f"{folder} holds no certificate; run `lipflow certify {folder}` first")
    for path in (folder / OUTCOME, folder / EXAMPLES):  # written below; a pipe would be waited for
        if path.exists():
            require_file(path)
    found = certificate.load(folder)
    if sha256(weights) != json.loads(claims.read_text())["files"].get(certificate.WEIGHTS):
        raise ValueError(f"{weights} is not the network of {claims}; run `lipflow certify {folder}` again")
    if not len(found.truth):
        raise ValueError(f"{rows} holds no images to attack; run `lipflow certify {folder}` again")
    if found.domain != (0.0, 1.0):
        raise ValueError(f"attacks are on pixels in [0, 1], and {claims} is for values in {list(found.domain)}")
    return weights, found


def show(certificate: "CertificateFile", outcome: "Outcome", title: str) -> None:
    """Print certified accuracy beside accuracy under attack."""
    from lipflow.radius import parse_radius
    from lipflow.report.table import accuracy, percent

    rows = [("0 (clean)", certificate.right, certificate.right)]
    rows += [(name, certificate.certified(parse_radius(name)), robust) for name, robust in outcome.robust.items()]
    cells = [(name, percent(accuracy(proved)), percent(accuracy(robust))) for name, proved, robust in rows]
    print_table(("radius", "certified", "under attack"), cells, title)


def examples(frozen: "Frozen", certificate: "CertificateFile", settings: "PGD", count: int) -> "Examples":
    """Attack some images, evenly spread by rank of radius, inside of their certified ball and beyond it.

    The attack is on the label that the network gave, right or wrong, because that label is certified. `inside` is the
    strongest image in the largest ball below the radius, `nearest` the nearest one found that has another label.
    """
    import torch

    from lipflow.attack import Examples

    order = torch.from_numpy(certificate.radius).argsort(stable=True)
    index = order[torch.linspace(0, len(order) - 1, min(count, len(order))).round().long()]
    chunks = with_progress_bar(index.split(GALLERY_CHUNK_IMAGES), "attacking for the gallery:")
    parts = [_examples(frozen, certificate, settings, chunk) for chunk in chunks]
    return Examples(**{name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]})


def _examples(
    frozen: "Frozen", certificate: "CertificateFile", settings: "PGD", index: "Tensor"
) -> dict[str, "Tensor"]:
    import torch

    from lipflow.attack import nearest, pgd

    columns = certificate.images, certificate.label, certificate.radius
    images, label, radius = (torch.from_numpy(column)[index] for column in columns)
    label, ball = label.long(), torch.nextafter(radius, torch.zeros(1, dtype=torch.float64))
    inside = pgd(frozen, images, label, [ball], settings, index)
    outside = nearest(frozen, images, label, attack=settings, indices=index)
    scores = frozen(inside.images[:, 0]).detach()
    rivals = scores.scatter(1, label[:, None], -torch.inf).amax(1)
    return {
        "index": index,
        "inside": inside.images[:, 0],
        "inside_label": inside.label[:, 0],
        "inside_distance": inside.distance[:, 0],
        "inside_margin": scores.gather(1, label[:, None])[:, 0] - rivals,
        "found": outside.found,
        "nearest": outside.images,
        "nearest_label": outside.label,
        "nearest_distance": outside.distance,
    }
