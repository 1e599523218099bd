"""The numbers that the paper prints, as data with their source: accuracies in percent, seconds per epoch.

Meunier, Delattre, Araujo and Allauzen, "A Dynamical System Perspective for Lipschitz Neural Networks", ICML 2022. Each
number is the mean of three runs. The rows SOC+ are quoted there from Singla, Singla and Feizi 2022. The tables of batch
sizes are of networks with last-layer normalization; some of their numbers at 256 differ from the main tables.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lipflow.train.run import Run

PAPER = "Meunier et al. 2022"
EPSILONS: tuple[str, ...] = ("36/255", "72/255", "108/255")


class Published(NamedTuple):
    """A row of a table of the paper: accuracy, clean and certified at each of EPSILONS."""

    title: str
    clean: float
    certified: tuple[float, float, float]
    seconds: float | None  # per epoch, on the authors' machine
    source: str


def _rows(source: str, rows: Mapping[str, tuple[str, float, float, float, float, float | None]]) -> dict:
    return {
        model: Published(title, clean, (a, b, c), seconds, f"{PAPER}, {source}")
        for model, (title, clean, a, b, c, seconds) in rows.items()
    }


CIFAR10: Mapping[str, Published] = _rows(
    "Table 2",
    {
        "cpl-s": ("CPL-S", 75.6, 62.3, 46.9, 32.2, 21.9),
        "cpl-m": ("CPL-M", 76.8, 63.3, 47.5, 32.5, 40.0),
        "cpl-l": ("CPL-L", 77.7, 63.9, 48.1, 32.9, 93.4),
        "cpl-xl": ("CPL-XL", 78.5, 64.4, 48.0, 33.0, 163.0),
        "cayley-kw3": ("Cayley (KW3)", 74.6, 61.4, 46.4, 32.1, 30.8),
        "soc-10": ("SOC-10", 77.6, 62.0, 45.0, 29.5, 33.4),
        "soc-20": ("SOC-20", 78.0, 62.7, 46.0, 30.3, 52.2),
        "soc+-10": ("SOC+-10", 76.2, 62.6, 47.7, 34.2, None),
        "soc+-20": ("SOC+-20", 76.3, 62.6, 48.7, 36.0, None),
    },
)

CIFAR100: Mapping[str, Published] = _rows(
    "Table 3",
    {
        "cpl-s": ("CPL-S", 44.0, 29.9, 19.1, 11.0, 22.4),
        "cpl-m": ("CPL-M", 45.6, 31.1, 19.3, 11.3, 40.7),
        "cpl-l": ("CPL-L", 46.7, 31.8, 20.1, 11.7, 93.8),
        "cpl-xl": ("CPL-XL", 47.8, 33.4, 20.9, 12.6, 164.0),
        "cayley-kw3": ("Cayley (KW3)", 43.3, 29.2, 18.8, 11.0, 31.3),
        "soc-10": ("SOC-10", 48.2, 34.3, 22.7, 14.0, 33.8),
        "soc-20": ("SOC-20", 48.3, 34.4, 22.7, 14.2, 52.7),
        "soc+-10": ("SOC+-10", 47.1, 34.5, 23.5, 15.7, None),
        "soc+-20": ("SOC+-20", 47.8, 34.8, 23.7, 15.8, None),
    },
)

TABLES: Mapping[str, Mapping[str, Published]] = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def published(model: str, data: str) -> Published | None:
    """Return the paper's row for a model on a dataset, if it has one."""
    return TABLES.get(data, {}).get(model)


# (clean, 36/255, 72/255, 108/255, seconds per epoch) of a model at a batch size: Tables 4 and 5.
BatchSizes = Mapping[tuple[str, int], tuple[float, float, float, float, float]]

BATCH_SIZES_CIFAR10: BatchSizes = {
    ("cpl-s", 64): (76.5, 62.9, 47.3, 32.0, 48),
    ("cpl-s", 128): (76.1, 62.8, 47.1, 32.3, 31),
    ("cpl-s", 256): (75.6, 62.3, 46.9, 32.2, 22),
    ("cpl-m", 64): (77.4, 63.6, 47.4, 32.1, 77),
    ("cpl-m", 128): (77.2, 63.5, 47.5, 32.1, 50),
    ("cpl-m", 256): (76.8, 63.2, 47.4, 32.4, 40),
    ("cpl-l", 64): (78.4, 64.2, 47.8, 32.2, 162),
    ("cpl-l", 128): (78.2, 64.3, 47.9, 32.5, 109),
    ("cpl-l", 256): (77.6, 63.9, 48.1, 32.7, 93),
    ("cpl-xl", 64): (78.9, 64.2, 47.2, 31.2, 271),
    ("cpl-xl", 128): (78.9, 64.2, 47.5, 31.8, 198),
    ("cpl-xl", 256): (78.5, 64.4, 47.8, 32.4, 163),
}

BATCH_SIZES_CIFAR100: BatchSizes = {
    ("cpl-s", 64): (45.6, 30.8, 19.3, 11.2, 47),
    ("cpl-s", 128): (44.9, 30.7, 19.2, 11.0, 31),
    ("cpl-s", 256): (44.0, 29.9, 19.1, 10.9, 23),
    ("cpl-m", 64): (46.6, 31.6, 19.6, 11.6, 78),
    ("cpl-m", 128): (46.3, 31.1, 19.7, 11.5, 55),
    ("cpl-m", 256): (45.6, 31.1, 19.3, 11.3, 41),
    ("cpl-l", 64): (48.1, 32.7, 20.3, 11.7, 163),
    ("cpl-l", 128): (47.4, 32.3, 20.0, 11.8, 116),
    ("cpl-l", 256): (46.8, 31.8, 20.1, 11.7, 95),
    ("cpl-xl", 64): (49.0, 33.7, 21.1, 12.0, 293),
    ("cpl-xl", 128): (48.0, 33.7, 21.0, 12.1, 209),
    ("cpl-xl", 256): (47.8, 33.4, 20.9, 12.6, 164),
}

# Convolutional layers, channels, dense layers, features: Table 1.
ARCHITECTURES: Mapping[str, tuple[int, int, int, int]] = {
    "cpl-s": (20, 45, 7, 2048),
    "cpl-m": (30, 60, 10, 2048),
    "cpl-l": (90, 60, 15, 4096),
    "cpl-xl": (120, 70, 15, 4096),
}

# Networks with a fixed step h, which is not certified: (clean, under PGD at 36/255), from an unnumbered table of the
# appendix.
RELAXED: Mapping[float, tuple[float, float]] = {1.0: (85.10, 61.45), 0.1: (82.23, 62.99), 0.01: (78.53, 60.98)}


class Reference(NamedTuple):
    """A network of the paper as reports show it, with its accuracies in percent."""

    title: str
    source: str
    clean: float
    at: tuple[tuple[str, float], ...]  # (ε, accuracy)


def reference(run: Run) -> Reference | None:
    """Return the network of the paper with a run's model, data and step h, whatever else the run changes.

    With a fixed h nothing is certified in the paper, so a run with one is compared with the paper's relaxed networks.
    """
    h = run.model_args.get("h")
    if h is None:
        row = published(run.model, run.data)
        if row is None:
            return None
        pairs = tuple(zip(EPSILONS, row.certified, strict=True))
        return Reference(f"{row.title} on {run.data}, certified", row.source, row.clean, pairs)
    if run.model not in ARCHITECTURES or run.data != "cifar10" or not isinstance(h, int | float) or h not in RELAXED:
        return None
    clean, attacked = RELAXED[h]
    source = f"{PAPER}, appendix, relaxed layers; the network is not named"
    return Reference(f"CPL with h = {h:g} on cifar10, under PGD", source, clean, ((EPSILONS[0], attacked),))


def references(runs: Sequence[Run]) -> list[Reference]:
    """Return the networks of the paper for several runs, without repetition."""
    return list(dict.fromkeys(found for run in runs if (found := reference(run)) is not None))
