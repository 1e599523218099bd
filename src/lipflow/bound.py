"""What a module promises: the pair (L, ε), how pairs fold, and the refusal of modules that promise nothing.

A map f̂ keeps the promise (L, ε) on a domain if some exactly L-Lipschitz map f has ‖f̂(x) - f(x)‖ ≤ ε for every x
of the domain. A tolerance is additive and never hidden in L: two close points could be stretched without limit.
The promise is about the program in real arithmetic; rounding is priced by `lipflow.freeze`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor, nn

from lipflow.operators import Conv2d, Dense, norm_bound
from lipflow.operators.conv import Padding
from lipflow.rounding import add_up, mul_up, norm_up, sqrt_up, up

Shape = tuple[int, ...]


class Bound(NamedTuple):
    """The promise (L, ε): within ε = `tolerance` of a map that is exactly L = `lipschitz`-Lipschitz in L2."""

    lipschitz: float
    tolerance: float = 0.0

    def then(self, after: "Bound") -> "Bound":
        """The promise of `after ∘ self`: (L₁L₂, L₂ε₁ + ε₂), rounded up."""
        return Bound(
            mul_up(self.lipschitz, after.lipschitz),
            add_up(mul_up(self.tolerance, after.lipschitz), after.tolerance),
        )


class Domain(NamedTuple):
    """What is known of a module's inputs: the shape of one of them, and a bound on its norm."""

    shape: Shape | None = None
    reach: float = math.inf


class Lipschitz(nn.Module, ABC):
    """A module that declares its promise. Subclass it to give your own layer one."""

    @abstractmethod
    def bound(self, domain: Domain) -> Bound:
        """The pair (L, ε) of this module, in evaluation mode, over the domain."""

    @abstractmethod
    def origin(self, domain: Domain) -> float:
        """A bound on ‖f(0)‖: how far the module moves the origin (∞ if unknown)."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """The map itself, on a batch."""

    def parts(self) -> Iterable[nn.Module]:
        """The modules that its promise is about, itself included: a hook on one of them voids it."""
        yield self
        for child in self.children():
            yield from child.parts() if isinstance(child, Lipschitz) else child.modules()


class Nonexpansive(Lipschitz):
    """A module that is exactly 1-Lipschitz and fixes the origin."""

    def bound(self, domain: Domain) -> Bound:
        return Bound(1.0)

    def origin(self, domain: Domain) -> float:
        return 0.0


class Assume(Lipschitz):
    """A module whose promise is taken on your word: `Assume(module, bound=L)`.

    lipflow can check nothing of it: `lipschitz_bound` takes it, and `freeze` does not.
    """

    def __init__(self, module: nn.Module, bound: float, tolerance: float = 0.0) -> None:
        super().__init__()
        if not (math.isfinite(bound) and bound >= 0 and math.isfinite(tolerance) and tolerance >= 0):
            raise ValueError(
                f"Assume takes finite numbers that are at least 0, not bound={bound}, tolerance={tolerance}"
            )
        self.module = module
        self.assumed = Bound(float(bound), float(tolerance))

    def bound(self, domain: Domain) -> Bound:
        return self.assumed

    def origin(self, domain: Domain) -> float:
        return math.inf

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)

    def parts(self) -> Iterable[nn.Module]:
        return (self,)

    def extra_repr(self) -> str:
        return f"bound={self.assumed.lipschitz}, tolerance={self.assumed.tolerance}"


def lipschitz_bound(module: nn.Module, in_shape: Shape | None = None, reach: float = math.inf) -> Bound:
    """The promise (L, ε) of a module over the inputs of norm at most `reach`, certified from above.

    `in_shape` is the shape of one input, without the batch; layers of lipflow know their own once they have seen
    it. A module that declares no bound is refused by name; nothing is ever guessed to be 1.
    """
    domain = Domain(None if in_shape is None else shape_of(in_shape), reach)
    return _promise(module, domain, type(module).__name__, moved=False)[0]


def shape_of(in_shape: Shape) -> Shape:
    """The shape of one input as a tuple; what is no shape is refused."""
    if not isinstance(in_shape, Sequence) or not all(isinstance(n, int) and n >= 0 for n in in_shape):
        given = "a tensor (of images x it is x.shape[1:])" if isinstance(in_shape, Tensor) else repr(in_shape)
        raise ValueError(
            f"in_shape is the shape of one input, such as (channels, height, width) or (features,), not {given}"
        )
    return tuple(in_shape)


def require_batch(x: Tensor, in_shape: Shape) -> None:
    """Refuse what is no batch of inputs of a shape, and say how it becomes one."""
    if not isinstance(x, Tensor):
        kind = type(x).__name__
        raise TypeError(
            f"images are a tensor, not {kind}: torch.from_numpy of an array, one batch of a loader at a time"
        )
    shape = tuple(x.shape)
    if shape[1:] == in_shape and shape:
        return
    hint = ""
    if shape == in_shape:
        hint = "; one image is a batch of one, x[None]"
    elif x.ndim == 4 and (shape[3], *shape[1:3]) == in_shape:
        hint = "; channels come first, x.permute(0, 3, 1, 2)"
    raise ValueError(f"this network takes images (batch, {', '.join(map(str, in_shape))}), not {shape}{hint}")


def fold(modules: Iterable[tuple[str, nn.Module]], domain: Domain) -> Bound:
    """(L, ε) of a chain: L = Π Lᵢ and ε = Σ εᵢ Π_{j>i} Lⱼ, each over the domain that the layers before it reach."""
    return _fold(modules, domain, moved=False)[0]


def fold_origin(modules: Iterable[tuple[str, nn.Module]], domain: Domain) -> float:
    """‖f(0)‖ of a chain, from above: each layer carries 0 at most Lᵢ times as far, and moves it by its own."""
    return _fold(modules, domain, moved=True)[1]


def _fold(modules: Iterable[tuple[str, nn.Module]], domain: Domain, moved: bool) -> tuple[Bound, float]:
    """(L, ε) and ‖f(0)‖ of a chain in one pass, as a norm costs much; ‖f(0)‖ where it is asked for or needed."""
    total, origin = Bound(1.0), 0.0
    for name, module in modules:
        bound, step = _promise(module, domain, name, moved or math.isfinite(domain.reach))
        total, origin = total.then(bound), add_up(mul_up(origin, bound.lipschitz), step)
        # Where the module sends its domain: ‖f̂(x)‖ ≤ L‖x‖ + ‖f(0)‖ + ε.
        reach = add_up(mul_up(domain.reach, bound.lipschitz), add_up(step, bound.tolerance))
        domain = Domain(_out_shape(module, domain.shape), reach if math.isfinite(domain.reach) else math.inf)
    return total, origin


def _promise(module: nn.Module, domain: Domain, name: str, moved: bool) -> tuple[Bound, float]:
    """(L, ε) of a module, and ‖f(0)‖ if it is asked for (0 otherwise)."""
    known = isinstance(module, Lipschitz) or type(module) is nn.Sequential or type(module) in _TORCH
    if not known:
        raise TypeError(refusal(module, name))
    require_plain(module, name)
    if isinstance(module, Lipschitz):
        return module.bound(domain), module.origin(domain) if moved else 0.0
    if isinstance(module, nn.Sequential):
        return _fold(_children(module, name), domain, moved)
    return Bound(_TORCH[type(module)](module, domain, name)), _moves(module, domain) if moved else 0.0


def require_plain(module: nn.Module, name: str) -> None:
    """Refuse a module with a part that something was attached to: it may compute anything, whatever its type declares.

    The children of a chain are looked at one by one, each by its own name.
    """
    for part in module.parts() if isinstance(module, Lipschitz) else (module,):
        if part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part):
            where = next((inner for inner, found in module.named_modules() if found is part), "")
            has = f"{called(module, name)} has forward hooks, or a forward of its own"
            raise TypeError(f"{has}{f', in {where}' if where else ''}, so its bound is unknown; remove them")


def _moves(module: nn.Module, domain: Domain) -> float:
    """‖f(0)‖ of one of torch's own modules: its bias, at every position."""
    bias = module.bias if isinstance(module, nn.Linear | nn.Conv2d) else None
    if bias is None:
        return 0.0
    if domain.shape is None:
        return math.inf  # it may be applied to any number of vectors at once
    shape = _out_shape(module, domain.shape) if isinstance(module, nn.Conv2d) else None
    return mul_up(norm_up(bias), up(sqrt_up(Fraction(math.prod(shape[1:]) if shape else 1))))


def in_order(module: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """The children of a chain as they are applied; `named_children` would give a module that comes twice only once."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _children(module: nn.Sequential, name: str) -> Iterable[tuple[str, nn.Module]]:
    return ((f"{name}.{child}", m) for child, m in in_order(module))


def refusal(module: nn.Module, name: str) -> str:
    """Why a module is refused, and what to use instead."""
    inside = any(True for _ in module.children())
    unknown = "write it as an nn.Sequential, as its forward is not looked into" if inside else "use a layer of lipflow"
    instead = INSTEAD.get(type(module), unknown)
    word = "Assume(module, bound=...) if you know one"
    return f"{called(module, name)} declares no Lipschitz bound; {instead}, or {word}"


def called(module: nn.Module, name: str) -> str:
    """A module in a message: its type, and its place where that says more."""
    kind = type(module)
    spelled = f"nn.{kind.__name__}" if kind.__module__.startswith("torch.nn") else kind.__qualname__
    return f"{spelled} (at {name})" if name not in ("", kind.__name__) else spelled


def _out_shape(module: nn.Module, shape: Shape | None) -> Shape | None:
    """The shape after a module, by running it on one zero input in evaluation mode."""
    if shape is None:
        return None
    tensor = next((t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()), torch.empty(0))
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            return tuple(module(torch.zeros(1, *shape, dtype=tensor.dtype, device=tensor.device)).shape[1:])
    finally:
        for m, training in modes:
            m.training = training


# What is known of torch's own modules, of exact types only: a subclass may compute anything.


def _nonexpansive(module: nn.Module, domain: Domain, name: str) -> float:
    return 1.0


def _flatten(module: nn.Flatten, domain: Domain, name: str) -> float:
    if (module.start_dim, module.end_dim) != (1, -1):
        raise ValueError(f"{name}: nn.Flatten must keep the batch and flatten the rest, so start_dim=1, end_dim=-1")
    return 1.0


def _linear(module: nn.Linear, domain: Domain, name: str) -> float:
    require_vectors(domain.shape, name)
    return norm_bound(Dense(module.weight))


def _convolution(module: nn.Conv2d, domain: Domain, name: str) -> float:
    if domain.shape is None:
        raise ValueError(
            f"{name}: the norm of an nn.Conv2d depends on its input size; give in_shape=(channels, height, width)"
        )
    if len(domain.shape) != 3 or domain.shape[0] != module.in_channels:
        raise ValueError(f"{name}: it takes inputs ({module.in_channels}, height, width), not {domain.shape}")
    return norm_bound(operator_of(module, domain.shape[-2:]))


def require_vectors(shape: Shape | None, name: str) -> None:
    """An nn.Linear would act on many vectors at once, and its bias count as often: flatten first."""
    if shape is not None and len(shape) != 1:
        raise ValueError(f"{name}: nn.Linear takes (batch, features) here, not (batch, {str(shape)[1:]}; flatten first")


def operator_of(module: nn.Conv2d, in_size: Shape) -> Conv2d:
    """The linear operator that an nn.Conv2d applies to inputs of a size."""
    if module.padding_mode not in ("zeros", "circular"):
        raise ValueError(f"nn.Conv2d with padding_mode={module.padding_mode!r} has no bound; zeros and circular have")
    words: dict[str, Padding] = {"same": "same", "valid": 0}
    padding = words[module.padding] if isinstance(module.padding, str) else (module.padding[0], module.padding[1])
    return Conv2d(
        module.weight,
        in_size=(in_size[0], in_size[1]),
        padding=padding,
        padding_mode=module.padding_mode,
        stride=(module.stride[0], module.stride[1]),
        dilation=(module.dilation[0], module.dilation[1]),
        groups=module.groups,
    )


def _max_pool(module: nn.MaxPool2d, domain: Domain, name: str) -> float:
    """A maximum is 1-Lipschitz in each window; an input in `overlap` windows counts that often: √overlap."""
    if module.return_indices:
        raise ValueError(f"{name}: nn.MaxPool2d with return_indices=True is not a map to tensors")
    return up(sqrt_up(Fraction(overlap(module.kernel_size, module.stride, module.dilation))))


def _avg_pool(module: nn.AvgPool2d, domain: Domain, name: str) -> float:
    """Rows sum to at most 1 and columns to overlap/k²; by Schur's test the norm is at most √overlap/k."""
    unpadded = _pair(module.padding) == (0, 0)
    if module.ceil_mode or module.divisor_override is not None or not (module.count_include_pad or unpadded):
        raise ValueError(f"{name}: nn.AvgPool2d has a bound only as the plain average of k² entries, not as {module}")
    area = math.prod(_pair(module.kernel_size))
    return up(sqrt_up(Fraction(overlap(module.kernel_size, module.stride, 1), area)))


def overlap(kernel: int | Shape, stride: int | Shape, dilation: int | Shape) -> int:
    """The greatest number of windows that read one position: per axis ⌈k·gcd(d, s)/s⌉, multiplied."""
    axes = zip(_pair(kernel), _pair(stride), _pair(dilation), strict=True)
    return math.prod(-(-k * math.gcd(d, s) // s) for k, s, d in axes)


def _pair(x: int | Shape) -> tuple[int, int]:
    return (x, x) if isinstance(x, int) else (x[0], x[1])


_TORCH: dict[type, Callable[..., float]] = {
    nn.ReLU: _nonexpansive,
    nn.Identity: _nonexpansive,
    nn.PixelUnshuffle: _nonexpansive,
    nn.PixelShuffle: _nonexpansive,
    nn.Flatten: _flatten,
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.MaxPool2d: _max_pool,
    nn.AvgPool2d: _avg_pool,
}

# What to use in the place of modules that have no bound.
INSTEAD: dict[type, str] = {
    **dict.fromkeys(
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.InstanceNorm2d, nn.LayerNorm, nn.GroupNorm),
        "leave it out, as no signal grows in these layers",
    ),
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d), "leave it out, as it scales by 1/(1 - p) in training"),
    **dict.fromkeys(
        (nn.GELU, nn.SiLU, nn.ELU, nn.LeakyReLU, nn.PReLU, nn.Tanh, nn.Sigmoid, nn.Softplus),
        "use nn.ReLU or lipflow.blocks.MaxMin",
    ),
    **dict.fromkeys((nn.Softmax, nn.LogSoftmax), "leave it out, as labels, losses and certificates are of scores"),
    **dict.fromkeys((nn.DataParallel, nn.parallel.DistributedDataParallel), "give the network inside, model.module"),
    nn.ModuleList: "make a chain of it, nn.Sequential(*modules)",
    nn.ModuleDict: "make a chain of it, nn.Sequential(*modules.values())",
    nn.AdaptiveAvgPool2d: "use lipflow.blocks.AvgPool(k), with k the side of its input",
    nn.ConvTranspose2d: "use lipflow.cpl_conv, which applies a convolution and its transpose",
}
