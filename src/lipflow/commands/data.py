"""`lipflow data NAME`: fetch a dataset, and show what is in it."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Data:
    """Fetch a dataset, unless it is there, check it and show what is in it."""

    name: str
    """digits, cifar10, cifar100, or folder (your own images, with --data-dir)."""
    data_dir: Path | None = None
    """Where the data is or should go, instead of the download cache."""
    image_size: int | None = None
    """The side that images of a folder are resized to."""


def data(arguments: Data) -> int:
    """Print the splits of a dataset, after downloading it if need be."""
    from rich.console import Console
    from rich.table import Table

    from lipflow.data import DOWNLOADS, fetch, load

    if arguments.name in DOWNLOADS:
        print(f"{arguments.name} is in {fetch(arguments.name, arguments.data_dir)}")
    found = load(arguments.name, arguments.data_dir, image_size=arguments.image_size)
    table = Table("split", "images", "shape", "classes", title=found.name)
    for title, split in (("train", found.train), ("validation", found.validation), ("test", found.test)):
        table.add_row(title, str(len(split)), "×".join(map(str, found.shape)), str(found.classes))
    Console().print(table)
    return 0
