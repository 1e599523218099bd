"""The certified object: a flat list of primitives, its constants, and its file.

Let f be the composition of the exact primitives, fᵢ, and f̂ the program that runs them. Over the box [0, 1]ᵈ,

    ‖f̂(x) - f(x)‖ ≤ E,    Eᵢ = Lᵢ·Eᵢ₋₁ + δᵢ(Xᵢ₋₁),    ‖x̂ᵢ‖ ≤ Xᵢ = ‖x̂ᵢ(c)‖ + L₁⋯Lᵢ·√d/2 + 4Eᵢ

with c the centre of the box, at distance at most √d/2 from all of it: run once, it bounds every layer's input.
"""

import dataclasses
import functools
import hashlib
import json
import math
import zlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, ParamSpec, TypeVar, final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from lipflow.blocks.head import row_distances
from lipflow.bound import Shape, require_batch
from lipflow.certificate import Certificates, from_logits, require_pixels
from lipflow.files import save_tensors, write_atomic
from lipflow.frozen.linear import ROOM, Map, geometry_of
from lipflow.frozen.lower import lower, shape_for
from lipflow.frozen.primitive import PRIMITIVES, Affine, Primitive
from lipflow.operators.columns import CACHE_BYTES
from lipflow.operators.norm import NO_TORUS
from lipflow.rounding import RANGE, above, in_range, mul_up, norm_up, sqrt_up, up

P = ParamSpec("P")
T = TypeVar("T")
SCHEMA = 1
CHUNK = 250  # images that `certify` runs at a time
MANY = 64  # images that go through a layer together where its weights are larger than they are


_COMPILED = "compiled, a frozen network is another program than the one that is certified"


class Row(NamedTuple):
    """One line of the ledger: a primitive, its constant and where it comes from, its rounding, what it may be fed."""

    kind: str
    shape: str
    lipschitz: float
    how: str
    rounding: float
    reach: float


def _refusal(words: str) -> Any:
    """A method that only says why it is not there."""

    def refuse(self: nn.Module, *arguments: Any, **named: Any) -> NoReturn:
        raise TypeError(words)

    return refuse


def _on_the_cpu(function: Callable[P, T]) -> Callable[P, T]:
    """The function, whose new tensors are on the CPU also where the user has set another default device."""

    @functools.wraps(function)
    def there(*arguments: P.args, **named: P.kwargs) -> T:
        if torch.get_default_device().type == "cpu":
            return function(*arguments, **named)
        with torch.device("cpu"):
            return function(*arguments, **named)

    return there


@final
class Frozen(nn.Module):
    """A network that can be certified: immutable, float64, differentiable in its input.

    It takes images `(batch, *in_shape)`, uint8 as k/255 or floats in [0, 1], to scores `(batch, classes)`.
    `lipschitz` is the L of the whole network, `rounding` its E, `pair_bounds` the constants of fᵢ - fⱼ; `ledger` has a
    row for each primitive.
    """

    primitives: tuple[Primitive, ...]
    in_shape: Shape
    ledger: list[Row]
    lipschitz: float
    rounding: float
    pair_bounds: Tensor
    classes: int

    def __init__(self, primitives: Sequence[Primitive], in_shape: Shape) -> None:
        super().__init__()
        require_arithmetic()
        put = self.__dict__.__setitem__
        put("primitives", tuple(primitives))
        put("in_shape", tuple(in_shape))
        _account(self, put)
        put("_fingerprint", self._bits())
        self.eval()  # there is nothing to train

    def forward(self, x: Tensor) -> Tensor:
        x = self.receive(x)
        flat = self.__dict__["_flat"]
        # While they are images, few at a time: what passes between layers stays in the cache, if not their weights.
        parts = [_through(self.primitives[:flat], part) for part in x.split(self.__dict__["_at_a_time"])]
        return _through(self.primitives[flat:], torch.cat(parts))

    def receive(self, x: Tensor) -> Tensor:
        """Images as the network computes with them: float64 on the CPU, uint8 as k/255."""
        require_batch(x, self.in_shape)
        if x.dtype == torch.uint8:
            return x.to("cpu", torch.float64) / 255
        if not x.is_floating_point():
            raise TypeError(f"images are uint8, or floats in [0, 1], not {x.dtype}")
        return x.to("cpu", torch.float64)

    def predict(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(label, certified radius) of each image."""
        certificates = certify(self, x)
        return certificates.label, certificates.radius

    def require_untouched(self) -> None:
        """Refuse to certify with what was changed after the norms were bounded, by whatever way to its memory."""
        if self._bits() != self.__dict__["_fingerprint"]:
            raise RuntimeError("a number of this frozen network was changed in place; freeze the model again")

    def _bits(self) -> int:
        """CRC-32 over every number it computes with: writing through .data or NumPy moves no version counter."""
        maps = [geometry_of(m.op) for p in self.primitives for m in vars(p).values() if isinstance(m, Map)]
        plain = zlib.crc32(json.dumps([describe(self), maps, self.rounding], sort_keys=True).encode())
        held = [self.pair_bounds, *(t for p in self.primitives for t in computed_with(p))]
        return functools.reduce(lambda crc, t: zlib.crc32(t.contiguous().numpy().data, crc), held, plain)

    # Immutable

    def __init_subclass__(cls) -> None:
        raise TypeError("Frozen is final: a subclass would be another program than the one that is certified")

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_is_torch_compile":  # what torch.compile would leave in it
            raise TypeError(_COMPILED)
        if name != "training":
            raise AttributeError(f"a frozen network is immutable; {name} cannot be set")
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a frozen network is immutable; {name} cannot be deleted")

    compile = _refusal(_COMPILED)
    register_forward_hook = register_forward_pre_hook = _refusal(
        "with a forward hook, a frozen network is another program than the one that is certified; wrap it"
    )
    state_dict = load_state_dict = _refusal(
        "a frozen network has no state dict: frozen.save(path) writes it, and lipflow.Frozen.load(path) reads it"
    )

    def _apply(self, fn: Any, recurse: bool = True) -> "Frozen":
        moved = fn(torch.zeros(1, dtype=torch.float64))
        if moved.dtype != torch.float64 or moved.device.type != "cpu":
            given = f"{moved.dtype} on {moved.device}"
            raise TypeError(
                f"a certificate is of the program in float64 on the CPU; the network stays there, not {given}"
            )
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Frozen":
        return self

    def extra_repr(self) -> str:
        kinds = ", ".join(p.kind for p in self.primitives[:6]) + (", …" if len(self.primitives) > 6 else "")
        return f"{self.in_shape} → {self.classes}, L = {self.lipschitz}, E = {self.rounding:.3g}, [{kinds}]"

    # Files

    def save(self, path: str | Path) -> None:
        """Write the network to a safetensors file: tensors, and the list of primitives as metadata."""
        metadata = {"lipflow": json.dumps(describe(self), sort_keys=True)}
        tensors = {name: t.contiguous() for name, t in tensors_of(self.primitives)}
        write_atomic(Path(path), lambda temporary: save_tensors(tensors, temporary, metadata))

    @staticmethod
    @_on_the_cpu
    def load(path: str | Path) -> "Frozen":
        """Read a network from its file. Every norm is bounded anew: a file's word is not taken."""
        try:
            with safe_open(str(path), framework="pt") as file:
                text = (file.metadata() or {}).get("lipflow")
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
        except SafetensorError as error:
            raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
        if text is None:
            raise ValueError(f"{path} is no frozen lipflow network: its metadata has no 'lipflow'")
        description = json.loads(text)
        if "model" in description:
            raise ValueError(f"{path} is a network that is not frozen: lipflow.freeze(lipflow.load(path))")
        if description.get("schema") != SCHEMA:
            raise ValueError(f"{path} has schema {description.get('schema')!r}; this version reads {SCHEMA}")
        primitives = [_restore(i, entry, tensors) for i, entry in enumerate(description["primitives"])]
        return Frozen(primitives, tuple(description["in_shape"]))

    @property
    def digest(self) -> str:
        """SHA-256 over the list of primitives and every tensor."""
        sha = hashlib.sha256(json.dumps(describe(self), sort_keys=True).encode())
        for name, t in tensors_of(self.primitives):
            sha.update(name.encode())
            sha.update(t.contiguous().numpy().tobytes())
        return sha.hexdigest()


@_on_the_cpu
def freeze(model: nn.Module, in_shape: Shape | None = None) -> Frozen:
    """Lower a model to primitives in float64, bound every norm once, and return what can be certified.

    Built networks know their input shape; for a Sequential of your own, give in_shape=(channels, height, width).
    """
    if isinstance(model, Frozen):
        return model
    shape = shape_for(model, in_shape)
    return Frozen(list(lower(model, shape, "")), shape)


@_on_the_cpu
@torch.no_grad()
def certify(frozen: Frozen, images: Tensor) -> Certificates:
    """A label and a radius for each of some images `(n, *in_shape)`: uint8, or floats in [0, 1]."""
    if not isinstance(frozen, Frozen):
        raise TypeError(f"certify takes a frozen network: lipflow.freeze(model), not {type(frozen).__name__}")
    require_batch(images, frozen.in_shape)
    frozen.require_untouched()
    require_pixels(images)
    # The method of the class, as a call could go by way of hooks that torch keeps for all modules.
    parts = [Frozen.forward(frozen, chunk) for chunk in images.split(CHUNK)]
    return from_logits(torch.cat(parts), frozen.pair_bounds, frozen.rounding)


def _account(frozen: Frozen, put: Any) -> None:
    """Run the centre of the box through the network, and fold constants and rounding errors on the way."""
    radius = sqrt_up(Fraction(math.prod(frozen.in_shape))) / 2
    x = torch.full((1, *frozen.in_shape), 0.5, dtype=torch.float64)
    total, reach = 1.0, (Fraction(norm_up(x)) + radius) * (1 + ROOM)
    error = Fraction(x.numel(), 2**126)  # of pixels so small that the processor reads them as 0, in float32 too
    ledger, features, flat, largest = [], 1.0, 0, 1
    for i, p in enumerate(frozen.primitives):
        require_fit(p, tuple(x.shape[1:]), f"primitive {i}")
        require_numbers(p, f"primitive {i}")
        x_next = p(x)
        entries = max(x[0].numel(), x_next[0].numel())
        local = in_range(p.error(in_range(reach), entries)) * (1 + ROOM)
        features, total = total, mul_up(total, p.lipschitz)
        error = Fraction(up(Fraction(p.lipschitz) * error + local))
        ledger.append(Row(p.kind, p.shape, p.lipschitz, p.how, up(local), up(reach)))
        if x.ndim > 2:
            flat, largest = i + 1, max(largest, x.numel(), x_next.numel())
        x = x_next
        widest = max(norm_up(row) for row in x)
        if math.isinf(widest):
            raise ValueError(f"primitive {i}: {p.kind} ({p.shape}) gives numbers that are not finite")
        reach = Fraction(up((Fraction(widest) + Fraction(total) * radius + 4 * error) * (1 + ROOM)))
    if x.ndim != 2 or len(x) != 1 or x.shape[1] < 2:
        raise ValueError(f"a classifier ends in (batch, classes) with at least 2 classes, not {tuple(x.shape)}")
    rounding = up(error)
    if not (math.isfinite(total) and math.isfinite(rounding)):
        raise ValueError(f"the constants of this network are beyond float64: L = {total}, E = {rounding}")
    put("_flat", flat)
    weights = max((t.numel() for _, t in tensors_of(frozen.primitives[:flat])), default=0)
    put("_at_a_time", max(1, CACHE_BYTES // (8 * largest), min(MANY, weights // largest)))
    put("ledger", ledger)
    put("lipschitz", total)
    put("rounding", rounding)
    put("classes", x.shape[1])
    put("pair_bounds", pair_bounds(frozen.primitives, features, total, x.shape[1]))


def _through(primitives: Sequence[Primitive], x: Tensor) -> Tensor:
    for p in primitives:
        x = p(x)
    return x


def require_fit(p: Primitive, shape: Shape, name: str) -> None:
    """Refuse an input that a primitive's constants do not speak of."""
    if not p.fits(shape):
        raise ValueError(f"{name}: {p.kind} ({p.shape}) does not take an input of shape {shape}")


def require_numbers(p: Primitive, name: str) -> None:
    """Refuse stored numbers that are not finite, that overflow once they are multiplied, or that some processors read
    as 0: an error of a subnormal weight is not small, where the weight meets large numbers."""
    for field, t in tensors_of([p]):
        bits = t.contiguous().view(torch.int64)
        exponent = (bits >> 52) & 2047  # read from the bits: a processor that flushes would not see them
        if bool(((exponent == 0) & (bits << 1 != 0)).any()):
            raise ValueError(f"{name}: {p.kind} has a subnormal number in {field}, below 2⁻¹⁰²²; set it to 0")
        if bool((t.abs() > float(RANGE)).any()) or not bool(torch.isfinite(t).all()):
            raise ValueError(f"{name}: {p.kind} has a number in {field} that is beyond float64 once it is multiplied")


def pair_bounds(primitives: Sequence[Primitive], features: float, total: float, classes: int) -> Tensor:
    """Bounds on the Lipschitz constants of fᵢ - fⱼ  # (classes, classes).

    After a last matrix W on L-Lipschitz features, ‖wᵢ - wⱼ‖·L; after anything else, √2 times the whole L.
    """
    last = primitives[-1] if primitives else None
    if isinstance(last, Affine) and last.map.geometry is None:
        distances, constant = row_distances(last.map.weight), features
    else:
        distances = up(sqrt_up(Fraction(2))) * (1 - torch.eye(classes, dtype=torch.float64))
        constant = total
    return above(distances * up(Fraction(constant) * (1 + ROOM))).fill_diagonal_(0.0)


def describe(frozen: Frozen) -> dict[str, Any]:
    """The network without its tensors, as plain data."""
    primitives = [dict(kind=p.kind, **_plain(p)) for p in frozen.primitives]
    return dict(schema=SCHEMA, in_shape=list(frozen.in_shape), primitives=primitives)


def _plain(p: Primitive) -> dict[str, Any]:
    plain = {}
    for field in dataclasses.fields(p):
        value = getattr(p, field.name)
        if isinstance(value, Map):
            plain[field.name] = dict(geometry=value.geometry)
        elif not isinstance(value, Tensor):
            plain[field.name] = value
    return plain


def tensors_of(primitives: Sequence[Primitive]) -> list[tuple[str, Tensor]]:
    """Every tensor of a list of primitives, by name: "3.weight", "3.bias", …"""
    named = []
    for index, p in enumerate(primitives):
        for field in dataclasses.fields(p):
            value = getattr(p, field.name)
            if isinstance(value, Map):
                named.append((f"{index}.weight", value.weight))
            elif isinstance(value, Tensor):
                named.append((f"{index}.{field.name}", value))
    return named


def computed_with(p: Primitive) -> list[Tensor]:
    """The tensors that a primitive reads when it runs: its own, those it has made of them, and those of its map."""
    held = [value for value in vars(p).values() if isinstance(value, Tensor)]
    for value in vars(p).values():
        if isinstance(value, Map):
            held += {id(t): t for t in (value.weight, value.op.weight, value.matrix)}.values()
    return held


def _restore(index: int, entry: dict[str, Any], tensors: dict[str, Tensor]) -> Primitive:
    """A primitive from its description and the tensors of its file."""
    kind = PRIMITIVES.get(entry.get("kind", ""))
    if kind is None:
        raise ValueError(f"primitive {index} is of a kind that is not known: {entry.get('kind')!r}")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name == "map":
            geometry = entry["map"]["geometry"]
            held = Map(_tensor(tensors, f"{index}.weight"), geometry, math.inf, math.inf, NO_TORUS)
            values["map"] = Map.of(held.op)
        elif field.name in entry:
            values[field.name] = entry[field.name]
        else:
            values[field.name] = _tensor(tensors, f"{index}.{field.name}")
    return kind(**values)


def _tensor(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors or tensors[name].dtype != torch.float64 or not bool(torch.isfinite(tensors[name]).all()):
        raise ValueError(f"the file has no finite float64 tensor {name!r}")
    return tensors[name]


def require_arithmetic() -> None:
    """Refuse a machine whose float64 is not IEEE with rounding to nearest, as far as a quick test can tell."""
    one = torch.ones(1, dtype=torch.float64)
    half = one * 2.0**-53
    right = [
        (one + half == one).item(),  # a tie goes to even
        (one + half * 1.5 > one).item(),
        (one - half < one).item(),
        (one / 3 * 3 == one).item(),
        ((one * 2.0**27 + 1).square() - 2.0**54 == 2.0**28).item(),
    ]
    exact = torch.arange(1, 10001, dtype=torch.float64) @ torch.arange(1, 10001, dtype=torch.float64)
    if not all(right) or exact.item() != 10000 * 10001 * 20001 // 6:
        raise RuntimeError(
            "float64 arithmetic here does not round to nearest as IEEE 754 says; nothing can be certified"
        )
