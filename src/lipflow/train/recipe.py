"""Recipes: how a network is trained, as data, and the table of published ones. Does not import torch.

A recipe chooses an optimiser, a schedule and a loss, each a small dataclass whose fields are its numbers. The command
line and `vary` take all of them by flat names: `--loss multi-margin --margin 0.3`, `vary(loss="multi-margin",
margin=0.3)`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tyro.conf import Fixed, Suppress

from lipflow.losses import LOSSES, CertificateRegularisation, CrossEntropy, Loss, MultiMargin, OffsetCrossEntropy
from lipflow.radius import parse_radius
from lipflow.train.budget import parse_duration
from lipflow.train.schedule import SCHEDULES, Exponential, Linear, MultiStep, Schedule, Triangular

MAX_THREADS = 1024  # of a process


def flag(name: str) -> str:
    """The name of a field as a flag of the command line."""
    return name.replace("_", "-")


def typed(value: object) -> str:
    """The value of a flag as a user types it."""
    if isinstance(value, Mapping):
        return " ".join(f"{name}={argument}" for name, argument in value.items())
    return "by default" if value is None else " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _require_at_least(least: Mapping[str, int], owner: object) -> None:
    for name, low in least.items():
        if not getattr(owner, name) >= low:
            raise ValueError(f"--{flag(name)} must be at least {low}, not {getattr(owner, name)}")


def require_threads(threads: Any) -> None:
    """Raise unless it is a number of threads that the libraries of torch can start: they crash on a million."""
    if type(threads) is not int or not 0 <= threads <= MAX_THREADS:
        raise ValueError(f"--threads must be from 0 to {MAX_THREADS}, not {threads!r}")


@dataclass(frozen=True)
class Adam:
    """torch.optim.Adam with its usual betas. Weight decay applies to all but the parameters of activations."""

    lr: float = 1e-3
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _require_at_least({"lr": 0, "weight_decay": 0}, self)


@dataclass(frozen=True)
class SGD:
    """torch.optim.SGD. Weight decay applies to all but the parameters of activations."""

    lr: float = 1e-3
    weight_decay: float = 0.0
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        _require_at_least({"lr": 0, "weight_decay": 0, "momentum": 0}, self)


OPTIMISERS: Mapping[str, type[Adam | SGD]] = {"adam": Adam, "sgd": SGD}


@dataclass(frozen=True)
class Recipe:
    """How a network is trained; on the command line the defaults depend on --model, --data and --budget."""

    optimiser: Annotated[Adam | SGD, Fixed, Suppress] = field(default_factory=Adam)
    """How weights are updated: an `Adam` or an `SGD`."""
    schedule: Annotated[Schedule, Fixed, Suppress] = field(default_factory=Triangular)
    """The learning rate over the run: a `Triangular`, `Linear`, `MultiStep`, `Exponential` or `Constant`."""
    loss: Annotated[Loss, Fixed, Suppress] = field(default_factory=MultiMargin)
    """What is minimised: one of `lipflow.losses`."""
    epochs: int = 200
    """Passes over the training images (unless --budget sets the number of steps)."""
    batch_size: int = 256
    """Images per step, over all processes."""
    crop_padding: int = 4
    """Augmentation: crops are shifted by up to this number of pixels."""
    padding_mode: Literal["reflect", "zeros"] = "reflect"
    """Augmentation: the values beyond the border of an image."""
    flip: bool = True
    """Augmentation: mirror half of the images."""
    cutout: int = 0
    """Augmentation: set a random square with sides of this number of pixels to the image's mean colour."""
    normalize: Literal["mean", "mean-std", "model"] = "mean"
    """Normalization of the input: subtract the mean; also divide by std (then L = 1/min std); or the model's own."""
    lln: bool = False
    """Last-layer normalization: unit rows and a bias instead of truncation."""
    radii: tuple[str, ...] = ("36/255", "72/255", "108/255")
    """Radii at which certified accuracy is estimated on validation images; the first selects best.safetensors."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """The precision of products in training; weights and sums are float32, and certificates float64."""
    threads: int = 0
    """CPU threads of a process; 0 is the default of torch."""

    def __post_init__(self) -> None:
        for name, kinds in CHOICES.items():
            if type(getattr(self, name)) not in kinds.values():
                known = ", ".join(f"{kind.__name__}(...)" for kind in kinds.values())
                raise TypeError(f"the {name} of a recipe is one of {known}, not {getattr(self, name)!r}")
        for name, words in _LITERALS.items():
            if getattr(self, name) not in words:
                raise ValueError(f"--{flag(name)} is one of {', '.join(words)}, not {getattr(self, name)!r}")
        _require_at_least({"epochs": 1, "batch_size": 1, "crop_padding": 0, "cutout": 0}, self)
        require_threads(self.threads)
        if not self.radii:
            raise ValueError("--radii needs at least one radius, such as 36/255")
        for text in self.radii:
            parse_radius(text)

    def rate(self, progress: float) -> float:
        """The learning rate at a progress from 0 to 1."""
        return self.optimiser.lr * self.schedule.factor(progress, self.epochs)

    def flat(self) -> dict[str, Any]:
        """The values of all flags of this recipe: the names of its choices, their numbers, and its own fields."""
        values = {own.name: getattr(self, own.name) for own in fields(self)}
        for name in CHOICES:
            chosen = values[name]
            values[name] = type_name(name, chosen)
            values |= {number.name: getattr(chosen, number.name) for number in fields(type(chosen))}
        return values

    def vary(self, **flat: Any) -> "Recipe":
        """This recipe with other values of flags: `vary(loss="cross-entropy", lr=0.1)`.

        A new optimiser, schedule or loss keeps the numbers that the old one has too. Raise on a name that is no flag of
        the new recipe, such as the margin of another loss.
        """
        changes: dict[str, Any] = {name: value for name, value in flat.items() if name in _OWN}
        for name in CHOICES:
            before = getattr(self, name)
            kind = _kind(name, flat.get(name, type_name(name, before)))
            common = {n.name: getattr(before, n.name) for n in fields(kind) if hasattr(before, n.name)}
            given = {n.name: flat[n.name] for n in fields(kind) if n.name in flat}
            changes[name] = kind(**{**common, **given})
        recipe = replace(self, **changes)
        if unused := [name for name in flat if name not in recipe.flat()]:
            raise _unused(unused[0], recipe)
        return recipe


CHOICES: Mapping[str, Mapping[str, type]] = {"optimiser": OPTIMISERS, "schedule": SCHEDULES, "loss": LOSSES}
_LITERALS = {name: get_args(kind) for name, kind in get_type_hints(Recipe).items() if get_origin(kind) is Literal}
_OWN = {own.name for own in fields(Recipe)} - set(CHOICES)


def flat_names() -> set[str]:
    """The names that `Recipe.vary` knows."""
    return _OWN | set(CHOICES) | {n.name for kinds in CHOICES.values() for kind in kinds.values() for n in fields(kind)}


def type_name(choice: str, value: object) -> str:
    """The name of a chosen optimiser, schedule or loss, such as "adam"."""
    return next(name for name, kind in CHOICES[choice].items() if kind is type(value))


def _kind(choice: str, name: str) -> type:
    if name not in CHOICES[choice]:
        raise ValueError(f"--{choice} is one of {', '.join(CHOICES[choice])}, not {name!r}")
    return CHOICES[choice][name]


def _unused(name: str, recipe: Recipe) -> Exception:
    for choice, kinds in CHOICES.items():
        if users := [other for other, kind in kinds.items() if name in {n.name for n in fields(kind)}]:
            chosen = type_name(choice, getattr(recipe, choice))
            return ValueError(
                f"--{flag(name)} is for --{choice} {' or '.join(users)}; this run has --{choice} {chosen}"
            )
    return TypeError(f"a recipe has no field {name!r}")


# Meunier et al. 2022, section 5, and the authors' code; the defaults above are theirs.
CPL = Recipe()
CPL_LLN = replace(CPL, lln=True)

# Trockman and Kolter 2021; Li et al. 2019; Singla and Feizi 2021; Singla, Singla and Feizi 2022.
CAYLEY = Recipe(optimiser=Adam(lr=1e-2), loss=MultiMargin(0.5))
BCOP = Recipe(
    schedule=Exponential(decay=0.96235),
    loss=MultiMargin(0.707),
    batch_size=128,
    normalize="model",
    padding_mode="zeros",
)
SOC = Recipe(
    optimiser=SGD(lr=0.1, weight_decay=5e-4, momentum=0.9),
    schedule=MultiStep(milestones=(0.5, 0.75), decay=0.1),
    loss=CrossEntropy(),
    batch_size=128,
    padding_mode="zeros",
)
SOC_PLUS = replace(SOC, loss=CertificateRegularisation(gamma=0.1), lln=True)

# Our own, for a first try: half a minute on one thread. At this size more threads are slower.
CPL_DIGITS = Recipe(
    optimiser=Adam(lr=1e-2),
    loss=MultiMargin(1.0),
    epochs=60,
    batch_size=128,
    crop_padding=0,
    flip=False,
    lln=True,
    radii=("36/255", "0.25", "0.5", "1"),
    threads=1,
)

# Our own, for the most certified accuracy per minute (docs/log.md); an epoch takes about a minute on two cores.
CPL_FAST = Recipe(
    optimiser=Adam(lr=1e-2),
    schedule=Linear(),
    loss=OffsetCrossEntropy(offset=0.35, temperature=0.25),
    epochs=40,
    batch_size=128,
    crop_padding=2,
    lln=True,
    precision="bfloat16",
)

# Over about a hundred epochs the network overfits, so the augmentation is stronger.
CPL_FAST_LONG = replace(CPL_FAST, crop_padding=4, cutout=8)

_PAPER = ("cpl", "cpl-s", "cpl-m", "cpl-l", "cpl-xl")

RECIPES: Mapping[str, Recipe] = {
    **dict.fromkeys(_PAPER, CPL),
    "cpl-fast": CPL_FAST,
    "cpl-digits": CPL_DIGITS,
    "cayley-kw3": CAYLEY,
    "bcop-large": BCOP,
    "soc-10": SOC,
    "soc-20": SOC,
    "soc+-10": SOC_PLUS,
    "soc+-20": SOC_PLUS,
}

# Recipes that differ by dataset: the CIFAR-100 table of the CPL paper has last-layer normalization for all networks.
ON_DATA: Mapping[tuple[str, str], Recipe] = {
    **{(model, "cifar100"): CPL_LLN for model in _PAPER},
    **{(model, "cifar100"): replace(RECIPES[model], lln=True) for model in ("cayley-kw3", "soc-10", "soc-20")},
}

# Recipes of our own for a --budget of at least this time. Published recipes do not depend on the budget.
ON_BUDGET: Mapping[tuple[str, str], tuple[str, Recipe]] = {("cpl-fast", "cifar10"): ("1h", CPL_FAST_LONG)}


def recipe_for(model: str, data: str, budget: str | None = None) -> Recipe:
    """The published recipe of a model on a dataset; a CPL network of another size has the recipe of CPL."""
    least, longer = ON_BUDGET.get((model, data), ("", None))
    if longer and budget is not None and parse_duration(budget) >= parse_duration(least):
        return longer
    recipe = ON_DATA.get((model, data)) or RECIPES.get(model) or (CPL if model.startswith("cpl-") else None)
    if recipe is None:
        raise ValueError(f"there is no recipe for a model {model!r}; there are {', '.join(RECIPES)}")
    return recipe
