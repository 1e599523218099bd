"""How each model is trained: published recipes as data, one table entry each. Without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal, get_args, get_origin, get_type_hints

from lipflow.train.duration import parse_duration


@dataclass(frozen=True)
class Recipe:
    """The training recipe; every default below is that of the model named by --model (in the time of --budget)."""

    optimiser: Literal["adam", "sgd"] = "adam"
    """How weights are updated."""
    lr: float = 1e-3
    """The greatest learning rate."""
    momentum: float = 0.9
    """Momentum of sgd (adam has its usual betas)."""
    nesterov: bool = False
    """Nesterov's form of momentum, for sgd."""
    weight_decay: float = 0.0
    """Weight decay, on all but the parameters of activations."""
    schedule: Literal["triangular", "linear", "multistep", "exponential", "constant"] = "triangular"
    """The learning rate over the run: triangular (the paper's: peak at 2/5, lr/20 at 4/5), linear (peak at 1/5), …"""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """Where multistep decays, as fractions of the run."""
    decay: float = 0.1
    """The factor of multistep at a milestone, and of exponential after an epoch."""
    epochs: int = 200
    """Passes over the training images (unless --budget sets the number of steps)."""
    batch_size: int = 256
    """Images a step, over all processes."""
    loss: Literal["multi-margin", "cross-entropy", "offset-cross-entropy", "certificate"] = "multi-margin"
    """What is minimised."""
    margin: float = 0.7
    """The margin of multi-margin."""
    offset: float = 0.0
    """How far offset-cross-entropy sets the true class back."""
    temperature: float = 1.0
    """What offset-cross-entropy divides logits by."""
    gamma: float = 0.1
    """The weight of the certificate in the loss `certificate`."""
    pad: int = 4
    """Augmentation: crops are shifted by up to so many pixels."""
    pad_mode: Literal["reflect", "zeros"] = "reflect"
    """Augmentation: what lies beyond the border."""
    flip: bool = True
    """Augmentation: mirror half of the images."""
    erase: int = 0
    """Augmentation: set a square of so many pixels a side, anywhere, to the image's mean colour."""
    inputs: Literal["mean", "mean-std", "model"] = "mean"
    """The input: less the training mean, also divided by std (then L = 1/min std), or as the model has it."""
    lln: bool = False
    """Last-layer normalization: unit rows and a bias instead of truncation."""
    radii: tuple[str, ...] = ("36/255", "72/255", "108/255")
    """Where certified accuracy is estimated on validation images; the first one selects best.safetensors."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What products are computed in; weights, sums and certificates are as ever."""
    threads: int = 0
    """CPU threads a process; 0 is torch's own choice."""

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"--{flag(name)} is one of {', '.join(choices)}, not {getattr(self, name)!r}")
        at_least = {"lr": 0, "weight_decay": 0, "epochs": 1, "batch_size": 1, "pad": 0, "erase": 0, "threads": 0}
        at_least |= {"momentum": 0, "decay": 0}
        for name, least in at_least.items():
            if not getattr(self, name) >= least:
                raise ValueError(f"--{flag(name)} must be at least {least}, not {getattr(self, name)}")
        if not all(0 < milestone < 1 for milestone in self.milestones):
            raise ValueError(f"--milestones are fractions of the run, between 0 and 1, not {self.milestones}")
        if not self.radii:
            raise ValueError("--radii needs at least one radius, such as 36/255")
        for text in self.radii:
            radius(text)


# Which choice a number belongs to: with another one it says nothing.
OF: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "margin": ("loss", ("multi-margin",)),
    "offset": ("loss", ("offset-cross-entropy",)),
    "temperature": ("loss", ("offset-cross-entropy",)),
    "gamma": ("loss", ("certificate",)),
    "momentum": ("optimiser", ("sgd",)),
    "nesterov": ("optimiser", ("sgd",)),
    "milestones": ("schedule", ("multistep",)),
    "decay": ("schedule", ("multistep", "exponential")),
}


def require_used(recipe: Recipe, base: Recipe) -> None:
    """Refuse numbers that were changed from those of `base`, and that the choices of `recipe` do not look at."""
    for name, (choice, values) in OF.items():
        chosen = getattr(recipe, choice)
        if getattr(recipe, name) != getattr(base, name) and chosen not in values:
            raise ValueError(
                f"--{flag(name)} is for --{choice} {' or '.join(values)}; this run has --{choice} {chosen}"
            )


def flag(name: str) -> str:
    """How a field is typed on the command line."""
    return name.replace("_", "-")


CHOICES: Mapping[str, tuple[str, ...]] = {
    name: get_args(kind) for name, kind in get_type_hints(Recipe).items() if get_origin(kind) is Literal
}


GREATEST = 10**6  # the diameter of [0, 1]ᵈ for d = 10¹²
PLACES = 300  # of an exponent: 1e-999999999 as a fraction would fill the memory


def radius(text: str) -> Fraction:
    """A radius as written: "36/255" or "0.25", exactly; at most 10⁶, so that it is a float64 too."""
    try:
        exponent = int(text.lower().partition("e")[2] or 0)
        value = Fraction(text if abs(exponent) <= PLACES else 0)
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"a radius is a number such as 36/255 or 0.25, not {text!r}") from None
    if value < 0:
        raise ValueError(f"a radius is at least 0, not {text}")
    if value > GREATEST or abs(exponent) > PLACES:
        raise ValueError(f"a radius is at most {GREATEST}, its exponent within ±{PLACES}, not {text!r}")
    return value


# Meunier et al. 2022, section 5, and the authors' code; the defaults above are theirs.
CPL = Recipe()
CPL_LLN = replace(CPL, lln=True)

# Trockman and Kolter 2021; Li et al. 2019; Singla and Feizi 2021; Singla, Singla and Feizi 2022.
CAYLEY = Recipe(lr=1e-2, margin=0.5)
BCOP = Recipe(schedule="exponential", decay=0.96235, batch_size=128, margin=0.707, inputs="model", pad_mode="zeros")
SOC = Recipe(
    optimiser="sgd",
    lr=0.1,
    weight_decay=5e-4,
    schedule="multistep",
    batch_size=128,
    loss="cross-entropy",
    pad_mode="zeros",
)
SOC_PLUS = replace(SOC, loss="certificate", gamma=0.1, lln=True)

# Ours, for a quick look: half a minute on one thread, and at this size more threads cost more than they bring.
CPL_DIGITS = Recipe(
    lr=1e-2,
    epochs=60,
    batch_size=128,
    margin=1.0,
    pad=0,
    flip=False,
    lln=True,
    radii=("36/255", "0.25", "0.5", "1"),
    threads=1,
)

# Ours, for the most certified accuracy per minute (docs/log.md); an epoch takes about a minute on two cores.
CPL_FAST = Recipe(
    lr=1e-2,
    schedule="linear",
    epochs=40,
    batch_size=128,
    loss="offset-cross-entropy",
    offset=0.35,
    temperature=0.25,
    pad=2,
    lln=True,
    precision="bfloat16",
)

# With time for a hundred epochs it overfits: crops are shifted further, and squares are erased.
CPL_FAST_LONG = replace(CPL_FAST, pad=4, erase=8)

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

# What a paper does otherwise on one dataset: CPL's CIFAR-100 table is with last-layer normalization, for all networks.
ON_DATA: Mapping[tuple[str, str], Recipe] = {
    **{(model, "cifar100"): CPL_LLN for model in _PAPER},
    **{(model, "cifar100"): replace(RECIPES[model], lln=True) for model in ("cayley-kw3", "soc-10", "soc-20")},
}

# What a recipe of ours does otherwise with a --budget of so much or more; published ones are fitted to any time as is.
ON_BUDGET: Mapping[tuple[str, str], tuple[str, Recipe]] = {("cpl-fast", "cifar10"): ("1h", CPL_FAST_LONG)}


def recipe_for(model: str, data: str, budget: str | None = None) -> Recipe:
    """The published recipe of a model on a dataset; other sizes of CPL take CPL's, and nothing else is guessed."""
    if budget is not None and (model, data) in ON_BUDGET:
        least, longer = ON_BUDGET[model, data]
        if parse_duration(budget) >= parse_duration(least):
            return longer
    recipe = ON_DATA.get((model, data)) or RECIPES.get(model) or (CPL if model.startswith("cpl-") else None)
    if recipe is None:
        raise ValueError(f"there is no recipe for a model {model!r}; there are {', '.join(RECIPES)}")
    return recipe
