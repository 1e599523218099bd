"""A run: one dataclass for what is trained, on what, how and where; and its form in run.json. Does not import torch."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from tyro.constructors import PrimitiveConstructorSpec

from lipflow.train.budget import parse_duration
from lipflow.train.recipe import CHOICES, Recipe, flag, recipe_for, type_name

ModelArg = int | float | bool | str | None | list[float]


def _parse_model_args(words: list[str]) -> dict[str, ModelArg]:
    """["depth=4", "lln=True"] → {"depth": 4, "lln": True}; a value that is not a Python literal is text."""
    arguments: dict[str, ModelArg] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name.isidentifier() and equals and value):
            raise ValueError(f"a model argument is written as NAME=VALUE, such as depth=4, not {word!r}")
        if name in arguments:
            raise ValueError(f"the model argument {name} is given twice")
        try:
            literal = ast.literal_eval(value)
            arguments[name] = list(literal) if isinstance(literal, tuple) else literal
        except (ValueError, SyntaxError):
            arguments[name] = value
    return arguments


ModelArgs = Annotated[
    dict[str, ModelArg],
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME=VALUE",
        instance_from_str=_parse_model_args,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda given: [f"{name}={value}" for name, value in given.items()] or ["none"],
    ),
]


@dataclass(frozen=True)
class Run:
    """What is trained, on what, how and where; `Run.of("cpl-s", "cifar10")` is the published run of a model."""

    model: str = "cpl-digits"
    """The network, by name: `lipflow models` lists them."""
    data: str = "digits"
    """The images: digits (in the package), cifar10, cifar100, or folder (your own, with --data-dir)."""
    data_dir: Path | None = None
    """Where the data is, instead of the download cache."""
    image_size: int | None = None
    """The side that images of --data folder are resized to."""
    validation_images: int | None = None
    """Training images that are held out for validation (None: 300 of digits, 5000 of CIFAR, a tenth of a folder)."""
    model_args: ModelArgs = field(default_factory=dict)
    """Arguments of the model that differ from its defaults, such as depth=4 channels=16."""
    out: Path | None = None
    """The folder of the run (None: runs/MODEL-DATA-SEED)."""
    seed: int = 0
    """Seed of the initial weights, the order of images and their augmentation."""
    device: str = "auto"
    """cpu, cuda, cuda:1, … ; auto takes a GPU if there is one."""
    budget: str | None = None
    """End the schedule within this time (90s, 1h30m); from 1h, cpl-fast on cifar10 has another recipe."""
    recompute_activations: bool = False
    """Save memory: store the activations of about √n of n layers and recompute the others (takes more time)."""
    save_every: str = "5m"
    """The time between two checkpoints; a run that is interrupted also saves one."""
    certify_validation: int | None = None
    """Certify this number of validation images exactly, by the frozen network, when the run ends (None: all)."""
    recipe: Recipe = field(default_factory=lambda: recipe_for("cpl-digits", "digits"))

    def __post_init__(self) -> None:
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in self.model_args.items()}
        object.__setattr__(self, "model_args", plain)  # JSON has lists and no tuples
        if self.budget is not None and parse_duration(self.budget) <= 0:
            raise ValueError(f"--budget must be above 0, not {self.budget!r}")
        if isinstance(self.seed, int) and not -(2**63) <= self.seed < 2**64:  # text is refused by the command line
            raise ValueError(f"--seed is an integer from -2⁶³ to 2⁶⁴ - 1, not {self.seed}")
        parse_duration(self.save_every)
        if self.certify_validation is not None and self.certify_validation < 0:
            raise ValueError(f"--certify-validation must be at least 0, not {self.certify_validation}")

    @classmethod
    def of(cls, model: str, data: str = "digits", budget: str | None = None) -> "Run":
        """The published run of a model, within a budget if one is given; change it with `dataclasses.replace`."""
        return cls(model=model, data=data, budget=budget, recipe=recipe_for(model, data, budget))

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.model}-{self.data}-{self.seed}"

    def to_json(self) -> dict[str, Any]:
        """The run as JSON values; an optimiser, a schedule and a loss have their name as "type"."""
        return _to_json(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Run":
        """The inverse of `to_json`. Raise on unknown fields and on values of another type."""
        return from_json("run", values, cls)


# Fields that may change when a run is resumed, as they do not change what it computes.
CHANGEABLE = ("out", "data_dir", "device", "recompute_activations", "save_every", "certify_validation")


class Difference(NamedTuple):
    """A flag, and its values in the stored run and in the one that was given."""

    flag: str
    stored: Any
    asked: Any

    def __str__(self) -> str:
        return f"--{self.flag} {self.asked} (the run has {self.stored})"


def differences(stored: Run, asked: Run) -> list[Difference]:
    """The flags that make `asked` compute something else than `stored`."""
    names = [f.name for f in fields(Run) if f.name not in ("recipe", *CHANGEABLE)]
    before, after = ({name: getattr(run, name) for name in names} | run.recipe.flat() for run in (stored, asked))
    return [
        Difference(flag(name), before.get(name), value)  # None: a number that the stored run's choices do not have
        for name, value in after.items()
        if name not in before or before[name] != value
    ]


def _to_json(value: Any) -> Any:
    if not is_dataclass(value) or isinstance(value, type):
        return str(value) if isinstance(value, Path) else value
    table = {number.name: _to_json(getattr(value, number.name)) for number in fields(type(value))}
    for name in CHOICES.keys() & table.keys():
        table[name] = {"type": type_name(name, getattr(value, name)), **table[name]}
    return table


def from_json(name: str, value: Any, kind: Any) -> Any:
    """A JSON value as a value of type `kind`; raise an error that names the field if it is not one."""
    origin, parts = get_origin(kind), get_args(kind)
    if name in CHOICES and isinstance(value, dict):
        kinds, value = CHOICES[name], dict(value)
        named = value.pop("type", None)
        if named not in kinds:
            raise ValueError(f"the type of {name!r} is one of {', '.join(kinds)}, not {named!r}")
        kind = kinds[named]
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, Mapping):
        hints = get_type_hints(kind)
        known = {number.name for number in fields(kind)}
        if unknown := [entry for entry in value if entry not in known]:
            raise ValueError(f"{name} has no field {', '.join(map(repr, unknown))}")
        return kind(**{entry: from_json(entry, given, hints[entry]) for entry, given in value.items()})
    if origin is UnionType:  # of some type and None
        return None if value is None else from_json(name, value, parts[0])
    if origin is tuple and isinstance(value, list):
        return tuple(from_json(name, entry, parts[0]) for entry in value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is (origin or kind) or (origin is Literal and value in parts):
        return value
    raise ValueError(f"the field {name!r} cannot be {value!r}")
