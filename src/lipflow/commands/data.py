"""`lipflow data NAME`: download a dataset and print its splits."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Data:
    """Download a dataset if it is missing, verify it, and print its splits."""

    name: str
    """digits, cifar10, cifar100, or folder (your own images, with --data-dir)."""
    data_dir: Path | None = None
    """The folder of the data, instead of the download cache."""
    image_size: int | None = None
    """The height and width that the images of a folder are resized to."""


def data(arguments: Data) -> int:
    """Print the splits of a dataset, after downloading it if necessary."""
    from lipflow.commands.terminal import print_table
    from lipflow.data import DOWNLOADS, fetch, load

    if arguments.name in DOWNLOADS:
        print(f"{arguments.name} is in {fetch(arguments.name, arguments.data_dir)}")
    found = load(arguments.name, arguments.data_dir, image_size=arguments.image_size)
    splits = {"train": found.train, "validation": found.validation, "test": found.test}
    shape = "×".join(map(str, found.shape))
    rows = [(title, str(len(split)), shape, str(found.classes)) for title, split in splits.items()]
    print_table(("split", "images", "shape", "classes"), rows, found.name)
    return 0
