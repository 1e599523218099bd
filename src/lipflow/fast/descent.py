"""Convex Potential Layers x - hWᵀσ(Wx + b), one or a chain, as one autograd function.

Autograd would save four activations of each layer, and read each of them several times. Here only the products read and
write the wide side of a layer. With z = x - hWᵀr, y = Wx + b, r = σ(y), a gradient g at z, and q ⊗ x for the derivative
of ⟨q, Wx⟩ with respect to W,

    q = -hσ'(y)·Wg,   dx = g + Wᵀq,   dW = q ⊗ x - hr ⊗ g,   db = Σq,   dh = -⟨r, Wg⟩.

For h = 2/(s‖Wu‖²) with a fixed unit vector u, -(2h/‖Wu‖²)dh·(Wu ⊗ u) is added to dW.

A chain saves its first x, its last z and the narrow y of each layer. The backward pass computes x = z + hWᵀr with one
product, as r is known. So memory grows with the narrow sides only, and a few images at a time go through all layers
without leaving the cache.

Under autocast to bfloat16, all tensors and z are bfloat16. Only h, the sums within a product and the sums over chunks
have the precision of the parameters.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipflow.operators import ConvOperator, DenseOperator, LinearOperator
from lipflow.operators.columns import Columns
from lipflow.operators.norm import norm, two_over
from lipflow.operators.operator import add_bias
from lipflow.torch_state import autocasts, is_batch_of_gradients, product_dtype, transformed, without_autocast

Sigma = Callable[[Tensor], Tensor]
MIN_CHANNELS = 16  # convolutions to fewer channels run by columns: oneDNN computes 16 at a time


class NormStep(NamedTuple):
    """The step size h = 2/(s‖Wu‖²), for slopes of σ in [0, s] and a unit vector u with ‖Wu‖ close to ‖W‖."""

    u: Tensor
    slope: float

    def size(self, op: LinearOperator) -> tuple[Tensor, Tensor]:
        """h, differentiable in W, and Wu."""
        with without_autocast(self.u):
            wu = op(self.u[None])
            return two_over(self.slope * norm(wu) ** 2), wu


class Layer(NamedTuple):
    """x - hWᵀσ(Wx + b), with b along the rows of a matrix, or the output channels of a convolution."""

    op: LinearOperator
    bias: Tensor | None
    h: NormStep | float
    sigma: Sigma

    def plain(self, x: Tensor) -> Tensor:
        """The layer, computed by its formula with separate functions, for autograd, compilers and transforms."""
        return x - self.size()[0] * self.op.adjoint(self.sigma(add_bias(self.op(x), self.bias)))

    def size(self) -> tuple[Tensor | float, Tensor | None]:
        """h, and Wu if h depends on it."""
        return self.h.size(self.op) if isinstance(self.h, NormStep) else (self.h, None)

    def joins(self, other: "Layer", x: Tensor) -> bool:
        """Whether the two can run on x as one chain: both by columns, with equal shapes and steps 2/ℓ̂.

        With a fixed h the values may grow, and the x that is computed from z would be mostly rounding error.
        """
        a, b = self.op, other.op
        if not (isinstance(self.h, NormStep) and isinstance(other.h, NormStep)):
            return False
        if not (isinstance(a, ConvOperator) and isinstance(b, ConvOperator)):
            return False
        same = a.kernel.shape == b.kernel.shape and (a.rows, a.columns) == (b.rows, b.columns)
        return same and self.by_columns(x) and other.by_columns(x)

    def by_columns(self, x: Tensor) -> bool:
        return isinstance(self.op, ConvOperator) and _by_columns(self.op, product_dtype(x))


def descend(x: Tensor, *layers: Layer) -> Tensor:
    """x after a chain of layers; each layer but the last `joins` the next one."""
    if not all(_fusible(x, layer.op) for layer in layers):
        for layer in layers:
            x = layer.plain(x)
        return x
    return _Descend.apply(x, layers, *(t for layer in layers for t in (layer.op.weight, layer.bias)))


def _fusible(x: Tensor, op: LinearOperator) -> bool:
    """Whether `_Descend` can be used; if not (compilers, transforms, float16), `plain` is."""
    return (
        type(op) in (DenseOperator, ConvOperator)  # a subclass may compute something else
        and not x.is_meta
        and not torch.compiler.is_compiling()
        and not transformed()
        and (product_dtype(x) == torch.bfloat16 if autocasts(x) else x.dtype == op.weight.dtype)
    )


class _Descend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Sequence[Layer], *parameters: Tensor | None) -> Tensor:
        ctx.layers, ctx.dtype = layers, product_dtype(x)
        with without_autocast(x):
            return _forward(ctx, x, layers, parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        g, count = grads[0], len(ctx.layers)
        x, *saved = ctx.saved_tensors
        rounded, saved = saved[len(saved) - ctx.rounded :], saved[: len(saved) - ctx.rounded]
        # create_graph=True may differentiate the derivative again; is_grads_batched=True gives a batch of gradients.
        if (again := torch.is_grad_enabled()) or is_batch_of_gradients(g):
            with torch.enable_grad(), torch.autocast(g.device.type, ctx.dtype) if rounded else without_autocast(g):
                return _differentiable(x, ctx.layers, saved[-2 * count :], ctx.needs_input_grad, g, again)
        with without_autocast(g):
            return _backward(ctx, _runners(ctx.layers, ctx.dtype, rounded), x, saved[: -2 * count], g)


def _forward(ctx: Any, x: Tensor, layers: Sequence[Layer], parameters: Sequence[Tensor | None]) -> Tensor:
    runners = _runners(layers, ctx.dtype)
    rounded = [w.op.weight for w in runners if isinstance(w, _Whole) and w.op.weight.dtype != w.full.dtype]
    wide = runners[0].layout(x.to(ctx.dtype))
    steps, ctx.wu = zip(*(layer.size() for layer in layers), strict=True)
    sizes = [torch.as_tensor(h, dtype=layers[0].op.weight.dtype, device=x.device) for h in steps]
    parts = list(runners[0].chunks(len(wide)))
    many = len(parts) > 1
    z = torch.empty_like(wide)
    # Many chunks are saved in one tensor: small ones would fragment memory.
    ys = [wide.new_empty(len(x), *layer.op.out_shape) for layer in layers] if many else []
    for part in parts:
        at, out = wide[part], z[part]
        for i, (w, layer, h) in enumerate(zip(runners, layers, sizes, strict=True)):
            y = w.narrow(at, layer.bias)
            w.widen(w.unfold(layer.sigma(y) * -h), out, onto=at)
            at = out
            if many:
                ys[i][part] = y
            else:
                ys.append(y)
    ctx.rounded = len(rounded)
    ctx.save_for_backward(x, *([z] if len(layers) > 1 else []), *ys, *sizes, *parameters, *rounded)
    return z


def _backward(
    ctx: Any, runners: "list[Runner]", x: Tensor, saved: list[Tensor], g: Tensor
) -> tuple[Tensor | None, ...]:
    layers, count = ctx.layers, len(ctx.layers)
    z, ys, sizes = (saved.pop(0) if count > 1 else x), saved[:-count], saved[-count:]
    x, z, g = (runners[0].layout(t.to(ctx.dtype), like=x) for t in (x, z, g))
    needs_x, _, *needs = ctx.needs_input_grad
    dx = torch.empty_like(x) if needs_x else None
    sums = [
        _Sums(w, layer, *needs[2 * i : 2 * i + 2]) for i, (w, layer) in enumerate(zip(runners, layers, strict=True))
    ]
    for part in runners[0].chunks(len(x)):
        at, grad = z[part], g[part]  # the value after layer i, and the gradient there
        for i in reversed(range(count)):
            w, h, total = runners[i], sizes[i], sums[i]
            wg = w.narrow(grad)
            r, slope_wg = _with_slope(layers[i].sigma, ys[i][part], wg)
            if i or total.weight is not None:
                hr = w.unfold(r * h)
                total.step(r, wg)
                total.outer(hr, grad, sign=-1)
                if i:
                    before = at if i + 1 < count else torch.empty_like(at)  # z is saved, so it must not change
                    w.widen(hr, before, onto=at)
                    at = before
                else:
                    at = x[part]
            q = slope_wg.mul_(-h)
            total.shift(q)
            if i or dx is not None or total.weight is not None:
                unfolded = w.unfold(q)
                total.outer(unfolded, at)
                if i or dx is not None:
                    below = dx[part] if dx is not None and not i else torch.empty_like(grad)
                    w.widen(unfolded, below, onto=grad)
                    grad = below
    results = [t for total, h, wu in zip(sums, sizes, ctx.wu, strict=True) for t in total.results(h, wu)]
    return dx, None, *results


class _Sums:
    """The sums over chunks for one layer: the derivatives of its weight, bias and step size."""

    def __init__(self, w: "Runner", layer: Layer, needs_weight: bool, needs_bias: bool) -> None:
        self.w, self.layer = w, layer
        self.weight = w.gradient() if needs_weight else None
        self.bias = torch.zeros_like(layer.bias) if needs_bias and layer.bias is not None else None
        self.dh: Tensor | float = 0.0

    def step(self, r: Tensor, wg: Tensor) -> None:
        if self.weight is not None:
            wide = torch.promote_types(r.dtype, torch.float32)
            self.dh = self.dh - (r * wg).sum(dtype=wide)  # both have the same memory format, so neither is copied

    def shift(self, q: Tensor) -> None:
        if self.bias is not None:
            self.bias += q.sum([axis for axis in range(q.ndim) if axis != 1], dtype=self.bias.dtype)

    def outer(self, unfolded: Tensor, wide: Tensor, sign: int = 1) -> None:
        if self.weight is not None:
            self.w.add_gradient(self.weight, unfolded, wide, sign)

    def results(self, h: Tensor, wu: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        if self.weight is None:
            return None, self.bias
        if isinstance(self.layer.h, NormStep) and wu is not None:
            factor = -self.layer.h.slope * h**2 * self.dh  # as 2h/‖Wu‖² = sh²
            self.outer(self.w.unfold(factor * wu), self.layer.h.u[None])
        return self.w.weight_of(self.weight), self.bias


def _with_slope(sigma: Sigma, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """σ(y), and σ'(y)·t."""
    if sigma is torch.relu:
        return torch.relu(y), torch.ops.aten.threshold_backward(t, y, 0)
    with torch.enable_grad():
        leaf = y.detach().requires_grad_()
        r = sigma(leaf)
    return r.detach(), torch.autograd.grad(r, leaf, t)[0]


def _differentiable(
    x: Tensor,
    layers: Sequence[Layer],
    parameters: Sequence[Tensor | None],
    needed: Sequence[bool],
    g: Tensor,
    again: bool,
) -> tuple[Tensor | None, ...]:
    """The derivatives of the plain form, differentiable again if `again`.

    Aliases make them partial derivatives: x may depend on the same weights, and two layers may share them.
    """
    x, parameters = x.view_as(x), [t if t is None else t.view_as(t) for t in parameters]
    z = x
    for layer, weight, bias in zip(layers, parameters[::2], parameters[1::2], strict=True):
        assert weight is not None
        z = layer._replace(op=layer.op.with_weight(weight), bias=bias).plain(z)
    inputs = (x, None, *parameters)
    wanted = [t for t, need in zip(inputs, needed, strict=True) if need and t is not None]
    found = iter(torch.autograd.grad(z, wanted, g.to(z), create_graph=again))
    return tuple(next(found) if need else None for need in needed)


# Products with W: by torch on the whole batch, or by columns on a few images at a time


def _runners(layers: Sequence[Layer], dtype: torch.dtype, rounded: Sequence[Tensor] = ()) -> "list[Runner]":
    """The runner of each layer, for products in `dtype`. `rounded` are the weights in that dtype, if known."""
    runners: list[Runner] = []
    for i, op in enumerate(layer.op for layer in layers):
        known = rounded[i] if rounded else None
        if isinstance(op, DenseOperator):
            runners.append(_Matrix(op, dtype, known))
        else:
            assert isinstance(op, ConvOperator)
            like = runners[0] if runners and isinstance(runners[0], Columns) else None
            runners.append(Columns(op, like) if _by_columns(op, dtype) else _Convolution(op, dtype, known))
    return runners


def _by_columns(op: ConvOperator, dtype: torch.dtype) -> bool:
    out, into = op.kernel.shape[:2]
    few = dtype == torch.float64 or (out < MIN_CHANNELS and dtype == op.kernel.dtype)  # oneDNN has no float64
    return few and out <= into and op.groups == 1 and op.padding_mode == "zeros" and op.kernel.device.type == "cpu"


class _Whole(ABC):
    """Products with W by torch, on the whole batch."""

    def __init__(self, op: DenseOperator | ConvOperator, dtype: torch.dtype, rounded: Tensor | None = None) -> None:
        self.full, self.dtype = op.weight, dtype
        low = rounded if rounded is not None else op.weight.detach().to(dtype)
        self.op = op if dtype == op.weight.dtype else op.with_weight(low)

    def layout(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        """x, in the memory format of `like`."""
        last = like is not None and like.ndim == 4 and not like.is_contiguous()
        return x.contiguous(memory_format=torch.channels_last) if last else x

    def chunks(self, batch: int) -> Iterator[slice]:
        yield slice(None)

    def narrow(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        x = x.to(self.dtype)
        if bias is None or self.dtype == self.full.dtype:
            return add_bias(self.op(x), bias)
        return self.op(x, bias.to(self.dtype))  # rounded once, in one pass over memory

    def unfold(self, y: Tensor) -> Tensor:
        return y

    @abstractmethod
    def widen(self, y: Tensor, out: Tensor, onto: Tensor) -> None:
        """Write onto + Wᵀy to `out`."""

    @abstractmethod
    def gradient(self) -> Any:
        """A sum of no products y ⊗ x, to which `add_gradient` adds."""

    @abstractmethod
    def add_gradient(self, total: Any, y: Tensor, x: Tensor, sign: int = 1) -> None:
        """Add ± y ⊗ x to a sum."""

    @abstractmethod
    def weight_of(self, total: Any) -> Tensor:
        """A sum as a tensor of W's shape."""


class _Matrix(_Whole):
    op: DenseOperator

    def widen(self, y: Tensor, out: Tensor, onto: Tensor) -> None:
        torch.addmm(onto, y, self.op.weight, out=out)

    def gradient(self) -> list[tuple[Tensor, Tensor]]:
        return []

    def add_gradient(self, total: list[tuple[Tensor, Tensor]], y: Tensor, x: Tensor, sign: int = 1) -> None:
        total.append((y.to(self.dtype) * sign, x.to(self.dtype)))

    def weight_of(self, total: list[tuple[Tensor, Tensor]]) -> Tensor:
        """All products as one, so that the result, of W's size, is written once."""
        ys, xs = zip(*total, strict=True)
        return (torch.cat(ys).T @ torch.cat(xs)).to(self.full)


class _Convolution(_Whole):
    op: ConvOperator

    def gradient(self) -> Tensor:
        return torch.zeros_like(self.full)

    def weight_of(self, total: Tensor) -> Tensor:
        return total

    def widen(self, y: Tensor, out: Tensor, onto: Tensor) -> None:
        torch.add(onto, self.op.adjoint(y), out=out)

    def add_gradient(self, total: Tensor, y: Tensor, x: Tensor, sign: int = 1) -> None:
        total += sign * self.op.outer(y.to(self.dtype), x.to(self.dtype))


Runner = _Whole | Columns
