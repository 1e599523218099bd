"""`lipflow certify RUN`: freeze a network, certify the test images, and write what another program can check."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lipflow.commands.kept import Kept

if TYPE_CHECKING:
    from torch import Tensor

    from lipflow.certificate import Certificates
    from lipflow.frozen import Frozen
    from lipflow.train.distributed import Ranks


@dataclass(frozen=True)
class Certify:
    """Freeze a trained network, certify images with it, and write the certificate into the folder of the run."""

    run: Path
    """The folder of a finished run, or its name in runs/; or a pretrained network by name: cpl-fast-cifar10."""
    split: Literal["test", "validation"] = "test"
    """Which images."""
    images: int | None = None
    """Only the first so many images (None: all)."""
    radii: tuple[str, ...] = ()
    """Radii of the table, such as 36/255 0.5 (default: those of the run's recipe)."""
    which: Literal["final", "best"] = "final"
    """The network at the end of its schedule, or the one with the most certified validation images."""
    data_dir: Path | None = None
    """Where the data is, if not where it was when the network was trained."""

    def __post_init__(self) -> None:
        if self.images is not None and self.images < 1:
            raise ValueError(f"--images must be at least 1, not {self.images}")


def certify(arguments: Certify) -> int:
    """Certify, write, and print the table."""
    from lipflow import data, record
    from lipflow.frozen import freeze
    from lipflow.pretrained import folder_of
    from lipflow.rounding import digits_up
    from lipflow.train.distributed import join, threads
    from lipflow.train.recipe import radius
    from lipflow.train.record import Record, load_run

    folder = folder_of(arguments.run)
    run, network = load_run(folder, arguments.which)
    data_dir = arguments.data_dir or run.data_dir
    radii = {text: radius(text) for text in arguments.radii or run.recipe.radii}
    with join("cpu") as ranks, threads(run.recipe.threads):
        dataset = ranks.in_turn(
            lambda: data.load(run.data, data_dir, image_size=run.image_size, validation=run.validation_images)
        )
        split = dataset.test if arguments.split == "test" else dataset.validation
        images, truth = split.images[: arguments.images], split.labels[: arguments.images]
        if not len(truth):
            raise ValueError(f"there are no {arguments.split} images of {run.data}: the run held none out")
        known, of = Record.read(folder), arguments.split
        if known.class_names and known.class_names != dataset.class_names:
            theirs, ours = (", ".join(names[:9]) for names in (dataset.class_names, known.class_names))
            raise ValueError(f"{folder} was trained on the classes {ours}, and these images are of {theirs}")
        if known.other_images(dataset, arguments.split):
            of = "other"
            others = f"the {arguments.split} images are not those that were there when {folder} was trained"
            if arguments.data_dir is None:
                raise ValueError(
                    f"{others}: files were added, removed, changed or are decoded differently, and some of these may "
                    "have been trained on; to certify other images on purpose, give their --data-dir"
                )
            if ranks.first:
                print(others)
        start = time.perf_counter()
        frozen = freeze(network)
        if ranks.first:
            seconds = time.perf_counter() - start
            print(f"froze {run.model}: {len(frozen.graph.vertices)} operations, every norm bounded, in {seconds:.1f} s")
            bound, error = digits_up(frozen.lipschitz, 12), digits_up(frozen.rounding, 3)
            print(f"L = {bound:.12g}, rounding at most E = {error:.2e} over all images")
        kept = Kept(f"the scores of {frozen.digest}")
        certificates = over_ranks(frozen, images, ranks, kept)
        if certificates is None:
            return 0
        record.write(folder, frozen, certificates, images, truth, of, arguments.which)
        kept.forget()
        show(certificates, truth, radii, f"{folder}: {len(truth)} {of} images of {run.data}")
        print(f"wrote {folder / record.CLAIMS}; check it with: lipflow check {folder}")
    return 0


def over_ranks(frozen: "Frozen", images: "Tensor", ranks: "Ranks", kept: Kept) -> "Certificates | None":
    """Certify each rank's part; all rows on the first rank, None on the others.

    Scores may come from before an interruption; the radii that are written are derived from them here and now.
    """
    import torch

    from lipflow.certificate import from_logits, require_pixels
    from lipflow.frozen import CHUNK

    require_pixels(images, frozen.domain)
    mine = ranks.share(images)

    @torch.no_grad()
    def scores(x: "Tensor") -> "dict[str, Tensor]":
        return {"logits": frozen(x)}

    parts = ranks.gather(kept.through(scores, [mine], CHUNK, "certifying", ranks.first))
    if not ranks.first:
        return None
    return from_logits(torch.cat([part["logits"] for part in parts]), frozen.pair_bounds, frozen.rounding)


def show(certificates: "Certificates", truth: "Tensor", radii: dict, title: str) -> None:
    """Print clean and certified accuracy and the average radius (0 where wrong), by our rule and by the paper's."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from lipflow.report.table import percent

    right = certificates.label == truth
    table = Table("radius", "certified", "by the paper's rule", title=Text(title))
    table.add_row("0 (clean)", *[percent(certificates.accuracy(truth))] * 2)
    for name, eps in radii.items():
        paper = _mean(right & (certificates.paper_radius > float(eps)))
        table.add_row(name, percent(certificates.accuracy(truth, eps)), percent(paper))
    both = certificates.radius, certificates.paper_radius
    table.add_row("average radius", *(f"{_mean(radius * right):.4f}" for radius in both))
    Console().print(table)


def _mean(values: "Tensor") -> float:
    return float(values.double().mean())
