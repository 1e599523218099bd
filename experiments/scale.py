"""The three scales: the networks, recipes and evaluations of each, and their expected time.

paper    as published: 200 epochs, three seeds, all 10000 test images
small    the real images, smaller networks and few epochs: at most 20 minutes of training for a run on two cores, except
         for networks of 500 layers and more, which take an hour or two on one core
smoke    synthetic images in the official layout, seconds: it shows that the code runs, and nothing is published

All differences from the published runs are in the tables below.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lipflow.report.published import EPSILONS, TABLES
from lipflow.train.recipe import flag, flat_names, recipe_for
from lipflow.train.run import ModelArg, Run

DEEP = "cpl"  # the networks of 100 to 1000 layers, with 30 channels by default
CURVE_RADII: tuple[str, ...] = ("0.2", "0.4", "0.6", "0.8", "1")  # radii of curves: the paper mentions 0.6 and 0.8
CERTIFIED_RADII: tuple[str, ...] = (*EPSILONS, *(f"{k / 20:g}" for k in range(1, 41)))  # radii of certified accuracy
_RECIPE = flat_names()


@dataclass(frozen=True)
class Scale:
    """How the runs of a scale differ from the published ones, and how many test images are used."""

    name: str
    seeds: int
    model_args: Mapping[str, Mapping[str, ModelArg]] = field(default_factory=dict)  # model → arguments
    recipe: Mapping[str, Any] = field(default_factory=dict)  # changes of the published one
    sources: Mapping[str, str] = field(default_factory=dict)  # dataset → the dataset that replaces it
    validation_images: int | None = None
    models: tuple[str, ...] = ()  # in the two main tables
    depths: Mapping[int, int] = field(default_factory=dict)  # convolutional layers → epochs
    deep_recipe: Mapping[str, Any] = field(default_factory=dict)
    images: int | None = None  # test images certified; None is all
    attacked: int = 1000
    attacked_at: tuple[str, ...] = (*EPSILONS, *CURVE_RADII)
    probed: int = 100  # images on which gradients are measured
    folder: Path = Path("runs/experiments")
    data_dir: Path | None = None

    def run(self, model: str, data: str, seed: int = 0, **changes: Any) -> Run:
        """The run of `model` on `data` at this scale, with changes of the recipe or the model.

        Its folder is named after all of these, so that experiments that need the same run share it.
        """
        recipe = {k: v for k, v in changes.items() if k in _RECIPE}
        model_args = {k: v for k, v in changes.items() if k not in _RECIPE}
        source = self.sources.get(data if model != DEEP else f"{data}-deep", self.sources.get(data, data))
        base = recipe_for(model, data)
        words = [model, source, *(f"{flag(k)}={v}" for k, v in sorted(changes.items())), f"seed={seed}"]
        return Run(
            model=model,
            data=source,
            data_dir=self.data_dir,
            validation_images=self.validation_images,
            model_args={**self.model_args.get(model, {}), **model_args},
            out=self.folder / self.name / "-".join(words),
            seed=seed,
            certify_validation=0,  # the test images are certified afterwards
            recipe=base.vary(**{**self.recipe, **recipe}),
        )

    def runs(self, model: str, data: str, seeds: int | None = None, **changes: Any) -> list[Run]:
        """One run for each seed."""
        return [self.run(model, data, seed, **changes) for seed in range(self.seeds if seeds is None else seeds)]

    @property
    def min_seeds(self) -> int:
        """The number of seeds for a large effect, which one seed can show: one, but all at the scale of the paper."""
        return self.seeds if self.name == "paper" else 1

    def deep(self) -> dict[str, list[Run]]:
        """The runs of very deep networks, by label. Their figure is accuracy against epochs, on held-out images."""
        runs = {
            f"{depth} layers": self.runs(
                DEEP, "cifar10", self.min_seeds, depth=depth, epochs=epochs, **self.deep_recipe
            )
            for depth, epochs in self.depths.items()
        }
        held_out = self.validation_images or None
        return {label: [replace(run, validation_images=held_out) for run in row] for label, row in runs.items()}


PAPER = Scale(
    name="paper",
    seeds=3,
    validation_images=0,  # the paper trains on all 50000 images
    models=tuple(TABLES["cifar10"]),
    depths=dict.fromkeys((100, 300, 500, 700, 1000), 200),
    attacked=10000,
)

SMALL = Scale(
    name="small",
    seeds=3,
    model_args={
        "cpl-s": {"depth": 6, "channels": 16, "depth_linear": 3, "features": 512},
        "cayley-kw3": {"channels": 20, "hidden": 256, "features": 128},
        "soc-10": {"channels": 4},
        DEEP: {"depth_linear": 1, "features": 256, "pool": 2},
    },
    recipe={"epochs": 5},
    sources={"cifar10-deep": "cifar10-8x8"},
    models=("cpl-s", "cayley-kw3", "soc-10"),
    depths=dict.fromkeys((100, 300, 500, 700, 1000), 4),
    deep_recipe={"batch_size": 64, "schedule": "linear"},
    attacked=500,
)

SMOKE = Scale(
    name="smoke",
    seeds=1,
    model_args={
        "cpl-s": {"depth": 2, "channels": 4, "depth_linear": 1, "features": 16, "pool": 8},
        "cayley-kw3": {"channels": 2, "hidden": 16, "features": 16},
        "soc-10": {"channels": 2, "train_terms": 3, "terms": 6},
        DEEP: {"channels": 4, "depth_linear": 1, "features": 16, "pool": 8},
    },
    recipe={"epochs": 1, "threads": 1},
    sources={"cifar10": "cifar10-synthetic", "cifar100": "cifar100-synthetic"},
    validation_images=20,
    models=("cpl-s", "cayley-kw3", "soc-10"),
    depths={3: 1, 6: 1},
    images=20,
    attacked=4,
    attacked_at=("36/255", "0.6", "0.8"),
    probed=2,
)

SCALES: Mapping[str, Scale] = {scale.name: scale for scale in (PAPER, SMALL, SMOKE)}


# Milliseconds of one CPU thread for a training image, measured in single steps, or in whole runs (DEEP). Two threads
# are 1.7 times as fast as one. EVALUATION is the seconds of all measures of a run.
THREADS = 1.7
MILLISECONDS = {"cpl-s": 3.0, "cayley-kw3": 2.6, "soc-10": 2.0, DEEP: 0.04}  # DEEP: for each layer
TRAINING_IMAGES = 45000
EVALUATION = {"cpl-s": 70.0, "cayley-kw3": 130.0, "soc-10": 450.0, DEEP: 60.0}
SMOKE_SECONDS = 2.0

# GFLOP of a training image, forward and backward, as torch's FlopCounterMode counts them (DEEP: for each layer).
OPERATIONS = {"cpl-s": 1.106, DEEP: 0.0206}


def cost(scale: Scale, run: Run) -> float:
    """The expected seconds of a run and its evaluation; at the paper's scale, of training on one GPU of the authors.

    That is the published time of an epoch times the epochs. The paper has no time for very deep networks, which are
    taken to make as many operations a second as CPL-S, and none for SOC+, which has the layers of SOC.
    """
    layers = float(str(run.model_args["depth"])) if run.model == DEEP else 1.0
    if scale.name == "smoke":
        return SMOKE_SECONDS
    if scale.name == "small":
        milliseconds = run.recipe.epochs * TRAINING_IMAGES * MILLISECONDS[run.model] * layers
        return milliseconds / 1000 / THREADS + EVALUATION[run.model]
    epoch = TABLES[run.data]["cpl-s" if run.model == DEEP else run.model.replace("+", "")].seconds
    assert epoch is not None
    return run.recipe.epochs * epoch * (layers * OPERATIONS[DEEP] / OPERATIONS["cpl-s"] if run.model == DEEP else 1.0)


def total(scale: Scale, runs: Sequence[Run]) -> float:
    """The cost of runs, each counted once."""
    return sum(cost(scale, run) for run in {run.folder: run for run in runs}.values())


def parallel(scale: Scale, runs: Sequence[Run], machines: int) -> float:
    """The cost of runs if each machine takes the next one when it is free, the longest first."""
    busy = [0.0] * machines
    for seconds in sorted((cost(scale, run) for run in {run.folder: run for run in runs}.values()), reverse=True):
        busy[busy.index(min(busy))] += seconds
    return max(busy)
