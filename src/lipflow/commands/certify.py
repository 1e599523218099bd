"""`lipflow certify RUN`: freeze a network, certify images, and write a certificate that `lipflow check` reads."""

import time
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from lipflow.commands.parts import PartCache
from lipflow.commands.terminal import print_table

if TYPE_CHECKING:
    from torch import Tensor

    from lipflow.certificate import Certificates
    from lipflow.data import Dataset
    from lipflow.train.record import Record


@dataclass(frozen=True)
class Certify:
    """Freeze a trained network, certify images with it, and write the certificate into the folder of the run."""

    run: Path
    """The folder of a finished run, or its name in runs/; or a pretrained network by name: cpl-fast-cifar10."""
    split: Literal["test", "validation"] = "test"
    """The split whose images are certified."""
    limit: int | None = None
    """Certify only the first images, this number of them (None: all)."""
    radii: Annotated[tuple[str, ...], arg(help_behavior_hint="(default: those of the run's recipe)")] = ()
    """Radii of the table, such as 36/255 0.5."""
    network: Literal["final", "best"] = "final"
    """The network at the end of its schedule, or the one with the most certified validation images."""
    data_dir: Path | None = None
    """The folder of the data (None: where it was when the network was trained)."""

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"--limit must be at least 1, not {self.limit}")


def certify(arguments: Certify) -> int:
    """Certify, write the certificate, and print the table."""
    import torch

    from lipflow import certificate, data
    from lipflow.frozen import freeze
    from lipflow.pretrained import folder_of, load
    from lipflow.radius import parse_radius
    from lipflow.rounding import digits_up
    from lipflow.train.distributed import join, threads
    from lipflow.train.record import Record

    folder = folder_of(arguments.run)
    record, network = Record.read(folder), load(folder, arguments.network)
    run = record.run
    data_dir = arguments.data_dir or run.data_dir
    radii = {text: parse_radius(text) for text in arguments.radii or run.recipe.radii}
    with join("cpu") as ranks, threads(run.recipe.threads):
        dataset = ranks.in_turn(
            lambda: data.load(run.data, data_dir, image_size=run.image_size, validation=run.validation_images)
        )
        split = dataset.test if arguments.split == "test" else dataset.validation
        images, truth = split.images[: arguments.limit], split.labels[: arguments.limit]
        if not len(truth):
            raise ValueError(f"there are no {arguments.split} images of {run.data}: the run held none out")
        split_name = name_of_split(arguments, folder, record, dataset)
        if ranks.first and split_name == "other":
            print(f"the {arguments.split} images are not those that {folder} was trained with")
        start = time.perf_counter()
        frozen = freeze(network)
        if ranks.first:
            seconds = time.perf_counter() - start
            print(f"froze {run.model}: {len(frozen.graph.vertices)} operations, every norm bounded, in {seconds:.1f} s")
            bound, error = digits_up(frozen.lipschitz, 12), digits_up(frozen.rounding, 3)
            print(f"L = {bound:.12g}, rounding at most E = {error:.2e} over all images")
        certificate.require_pixels(images, frozen.domain)
        cache = PartCache(f"the logits of {frozen.digest}")

        @torch.no_grad()
        def logits(x: "Tensor") -> "dict[str, Tensor]":
            return {"logits": frozen(x)}

        chunk = certificate.CHUNK_IMAGES
        parts = ranks.gather(cache.run(logits, [ranks.share(images)], chunk, "certifying", ranks.first))
        if not ranks.first:
            return 0
        joined = torch.cat([part["logits"] for part in parts])
        # Logits may have been stored before an interruption; radii are always computed here.
        certificates = certificate.from_logits(joined, frozen.pair_bounds, frozen.rounding)
        certificate.save(folder, frozen, certificates, images, truth, split_name, arguments.network)
        cache.clear()
        show(certificates, truth, radii, f"{folder}: {len(truth)} {split_name} images of {run.data}")
        print(f"wrote {folder / certificate.CLAIMS}; check it with: lipflow check {folder}")
    return 0


def name_of_split(arguments: Certify, folder: Path, record: "Record", dataset: "Dataset") -> str:
    """Return the split that is certified, or "other" if its images are not those that the run was trained with."""
    if record.class_names and record.class_names != dataset.class_names:
        theirs, ours = (", ".join(names[:9]) for names in (dataset.class_names, record.class_names))
        raise ValueError(f"{folder} was trained on the classes {ours}, and these images are of {theirs}")
    if not record.other_images(dataset, arguments.split):
        return arguments.split
    if arguments.data_dir is None:
        raise ValueError(
            f"the {arguments.split} images are not those that {folder} was trained with: files were added, removed or "
            "changed, or are decoded differently, and some of these images may have been trained on; to certify other "
            "images on purpose, give their --data-dir"
        )
    return "other"


def show(certificates: "Certificates", truth: "Tensor", radii: dict[str, Fraction], title: str) -> None:
    """Print clean and certified accuracy and the average radius (0 for wrong labels), by our rule and the paper's."""
    from lipflow.report.table import percent

    def mean(values: "Tensor") -> float:
        return float(values.double().mean())

    right = certificates.label == truth
    rows = [("0 (clean)", *[percent(certificates.accuracy(truth))] * 2)]
    for name, eps in radii.items():
        paper = mean(right & (certificates.paper_radius > float(eps)))
        rows.append((name, percent(certificates.accuracy(truth, eps)), percent(paper)))
    both = certificates.radius, certificates.paper_radius
    rows.append(("average radius", *(f"{mean(radius * right):.4f}" for radius in both)))
    print_table(("radius", "certified", "by the paper's rule"), rows, title)
