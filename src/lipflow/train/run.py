"""A run: the one dataclass that says what is trained, on what, how and where. Without torch."""

import ast
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from tyro.constructors import PrimitiveConstructorSpec

from lipflow.train.duration import parse_duration
from lipflow.train.recipe import Recipe, flag, recipe_for

Size = int | float | bool | str | None | list[float]


def _parse_sizes(words: list[str]) -> dict[str, Size]:
    """["depth=4", "lln=True"] → {"depth": 4, "lln": True}; what is no Python literal is text."""
    sizes: dict[str, Size] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name.isidentifier() and equals and value):
            raise ValueError(f"a size is written as NAME=VALUE, such as depth=4, not {word!r}")
        if name in sizes:
            raise ValueError(f"the size {name} is given twice")
        try:
            literal = ast.literal_eval(value)
            sizes[name] = list(literal) if isinstance(literal, tuple) else literal
        except (ValueError, SyntaxError):
            sizes[name] = value
    return sizes


Sizes = Annotated[
    dict[str, Size],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME=VALUE",
        instance_from_str=_parse_sizes,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda sizes: [f"{name}={value}" for name, value in sizes.items()] or ["none"],
    ),
]


@dataclass(frozen=True)
class Run:
    """What is trained, on what, and where it goes; `Run.of("cpl-s", "cifar10")` is the published run of a model."""

    model: str = "cpl-digits"
    """The network, by name: `lipflow models` lists them."""
    data: str = "digits"
    """The images: digits (in the package), cifar10, cifar100, or folder (your own, with --data-dir)."""
    data_dir: Path | None = None
    """Where the data is, instead of the download cache."""
    image_size: int | None = None
    """The side that images of --data folder are resized to."""
    validation: int | None = None
    """How many training images are held out for validation (None: 300 of digits, 5000 of CIFAR, a tenth)."""
    sizes: Sizes = field(default_factory=dict)
    """Sizes of the model other than its own, such as depth=4 channels=16."""
    out: Path | None = None
    """The folder of the run (None: runs/MODEL-DATA-SEED)."""
    seed: int = 0
    """Of the initial weights, the order of images and their augmentation."""
    device: str = "auto"
    """cpu, cuda, cuda:1, … ; auto takes a GPU where there is one."""
    budget: str | None = None
    """End the schedule within this time (90s, 30m, 1h30m), by the measured speed; cpl-fast changes its recipe at 1h."""
    checkpoint_activations: bool = False
    """Spare memory: keep the activations of about √n of n layers, and compute the others again (more time)."""
    checkpoint_every: str = "5m"
    """How much time a crash may cost: a checkpoint is written so often, and when the run is asked to stop."""
    exact: int | None = None
    """How many validation images are certified exactly, by the frozen network, when the run ends (None: all)."""
    recipe: Recipe = field(default_factory=lambda: recipe_for("cpl-digits", "digits"))

    def __post_init__(self) -> None:
        plain = {name: list(size) if isinstance(size, tuple) else size for name, size in self.sizes.items()}
        object.__setattr__(self, "sizes", plain)  # as JSON gives it back
        if self.budget is not None and parse_duration(self.budget) <= 0:
            raise ValueError(f"--budget must be above 0, not {self.budget!r}")
        if isinstance(self.seed, int) and not -(2**63) <= self.seed < 2**64:  # text is refused by the command line
            raise ValueError(f"--seed is an integer of 64 bits, not {self.seed}")
        parse_duration(self.checkpoint_every)
        if self.exact is not None and self.exact < 0:
            raise ValueError(f"--exact is a number of images, at least 0, not {self.exact}")

    @classmethod
    def of(cls, model: str, data: str = "digits", budget: str | None = None) -> "Run":
        """The published run of a model, in a budget if there is one; vary it with `dataclasses.replace`."""
        return cls(model=model, data=data, budget=budget, recipe=recipe_for(model, data, budget))

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.model}-{self.data}-{self.seed}"

    def to_json(self) -> dict[str, Any]:
        """The run as JSON values."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Run":
        """The inverse of `to_json`, through JSON and back; anything else than a run's fields is refused."""
        if not isinstance(values, Mapping):
            raise ValueError(f"a run is a table of fields, not {values!r}")
        recipe = _typed(Recipe, values.get("recipe", {}))
        return cls(**{**_typed(cls, {k: v for k, v in values.items() if k != "recipe"}), "recipe": Recipe(**recipe)})


# Where a run is kept, found, computed and judged may change when it is resumed; what it computes may not.
PLACE = ("out", "data_dir", "device", "checkpoint_activations", "checkpoint_every", "exact")


class Difference(NamedTuple):
    """A flag, its value in the run that is there, and the one that is asked for."""

    flag: str
    stored: Any
    asked: Any

    def __str__(self) -> str:
        return f"--{self.flag} {self.asked} (the run has {self.stored})"


def differences(stored: Run, asked: Run) -> list[Difference]:
    """The flags in which `asked` would change what `stored` computes."""
    pairs = [(f.name, getattr(stored, f.name), getattr(asked, f.name)) for f in fields(Run) if f.name != "recipe"]
    pairs += [(f.name, getattr(stored.recipe, f.name), getattr(asked.recipe, f.name)) for f in fields(Recipe)]
    return [Difference(flag(name), old, new) for name, old, new in pairs if old != new and name not in PLACE]


def _typed(cls: type, values: Any) -> dict[str, Any]:
    """Values from JSON as a dataclass's arguments: each field by name and of its type, or an error that names it."""
    if not isinstance(values, dict):
        raise ValueError(f"a {cls.__name__} is a table of fields, not {values!r}")
    kinds = get_type_hints(cls)
    if unknown := [name for name in values if name not in kinds]:
        raise ValueError(f"a {cls.__name__} has no field {', '.join(map(repr, unknown))}")
    return {name: _convert(name, value, kinds[name]) for name, value in values.items()}


def _convert(name: str, value: Any, kind: Any) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:  # of some type and None
        return None if value is None else _convert(name, value, parts[0])
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(name, entry, parts[0]) for entry in value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is (origin or kind) or (origin is Literal and value in parts):
        return value
    raise ValueError(f"the field {name!r} cannot be {value!r}")
