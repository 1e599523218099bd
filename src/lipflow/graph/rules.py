"""Rules: functions of torch on nodes. The table of functions is in table.py.

A rule has the parameter names and defaults of its function; arguments that it does not name are refused. All functions
that only move numbers share one rule (address.py).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lipflow.node import IMAGES, NO_NUMBERS, LoweringError, Node
from lipflow.operators import Adjoint, ConvOperator, DenseOperator, FourierMultiplier
from lipflow.operators.conv import Padding
from lipflow.operators.multiplier import block_diagonal
from lipflow.primitives import Affine, AvgPool, GroupSort, MaxPool, Pointwise, Scale, Sum
from lipflow.shapes import format_batch

Pair = int | Sequence[int]
Number = int | float


# Sums, scales and constants


def add(input: Any, other: Any, *, alpha: Number = 1) -> Any:
    return combine(input, 1.0, other, float(alpha))


def sub(input: Any, other: Any, *, alpha: Number = 1) -> Any:
    return combine(input, 1.0, other, -float(alpha))


def rsub(input: Any, other: Any, *, alpha: Number = 1) -> Any:
    return combine(other, 1.0, input, -float(alpha))


def neg(input: Node) -> Any:
    return Sum([-1.0])(input)


def mul(input: Any, other: Any) -> Any:
    if isinstance(input, Node) and isinstance(other, Node):
        raise LoweringError("a product of two values that depend on the input has no Lipschitz bound")
    node, factor = (input, other) if isinstance(input, Node) else (other, input)
    return scaled(node, factor)


def div(input: Any, other: Any) -> Any:
    if isinstance(other, Node):
        raise LoweringError("a quotient by a value that depends on the input has no Lipschitz bound")
    return scaled(input, 1 / torch.as_tensor(other, dtype=torch.float64))


def combine(a: Any, first: float, b: Any, second: float) -> Any:
    """first·a + second·b of nodes and constants."""
    node = a if isinstance(a, Node) else b
    shape = broadcast(a, b)
    a, b = (expanded(t, shape) if isinstance(t, Node) else constant(t, shape, node) for t in (a, b))
    terms = [(c, t) for c, t in ((first, a), (second, b)) if isinstance(t, Node)]
    return Sum([c for c, _ in terms])(*(t for _, t in terms))


def broadcast(*values: Any) -> torch.Size:
    """The common shape of tensors and numbers."""
    return torch.broadcast_shapes(*(t.shape if isinstance(t, Tensor) else () for t in values))


def scaled(node: Node, factor: Any) -> Any:
    """A node times a constant, which is one number, a number for each channel, or one for each entry."""
    shape = broadcast(node, factor)
    node, value = expanded(node, shape), constant_value(factor, shape)
    by_channel = value.reshape(len(value), -1) if value.ndim else value.reshape(1, 1)
    if bool((value == by_channel[0, 0]).all()):
        return Sum([float(by_channel[0, 0])])(node)
    if bool((by_channel == by_channel[:, :1]).all()):
        value = by_channel[:, 0]
    return Scale(value.contiguous())(node)


def expanded(node: Node, shape: torch.Size) -> Any:
    """A node broadcast to a shape."""
    if shape[0] != IMAGES:
        raise LoweringError("it mixes the images of a batch")
    return node if node.shape == shape else node.expand(shape)


def constant(value: Any, shape: torch.Size, node: Node) -> Node | None:
    """The node of a constant; None if it is zero everywhere."""
    number = constant_value(value, shape)
    return Node.of(node.builder.constant(number), node.builder) if bool(number.any()) else None


def constant_value(value: Any, shape: torch.Size) -> Tensor:
    """One image of a constant, which must be finite and the same for all images."""
    if not isinstance(value, Tensor | int | float):
        raise LoweringError(f"it takes a tensor or a number, not {type(value).__name__}")
    if isinstance(value, Tensor) and (value.is_complex() or value.dtype == torch.bool):
        raise LoweringError(f"it takes real numbers, not {value.dtype}")
    t = torch.as_tensor(value).detach().to("cpu", torch.float64).expand(shape)
    if not bool(torch.isfinite(t).all()):
        raise LoweringError("a constant is NaN or infinite")
    if not torch.equal(t[0], t[1]):
        raise LoweringError("a constant differs between the images of a batch")
    return t[0].clone()


# Matrices and convolutions


def linear(input: Node, weight: Tensor, bias: Tensor | None = None) -> Any:
    require_constant(weight, bias)
    if input.ndim != 2:
        raise LoweringError(
            f"a matrix takes (batch, features), not {format_batch(input.vertex.shape)}; flatten first, or use "
            "a 1×1 convolution to apply one matrix at many positions"
        )
    return Affine(DenseOperator(weight.detach()), detached(bias))(input)


def matmul(input: Any, other: Any) -> Any:
    if isinstance(input, Node) and isinstance(other, Node):
        raise LoweringError("a product of two values that depend on the input has no Lipschitz bound")
    if not isinstance(input, Node) or other.ndim != 2:
        raise LoweringError("it takes x @ matrix, with x of shape (batch, features); a vector is a matrix v[:, None]")
    return linear(input, other.T)


def conv2d(
    input: Node,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Any:
    require_constant(weight, bias)
    require_images(input)
    sides: Padding = "same" if padding == "same" else 0 if padding == "valid" else pair(padding)
    size = (input.shape[2], input.shape[3])
    op = ConvOperator(weight.detach(), size, sides, "zeros", pair(stride), pair(dilation), groups)
    return Affine(op, detached(bias))(input)


def conv_transpose2d(
    input: Node,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Pair = 1,
    padding: Pair = 0,
    output_padding: Pair = 0,
    groups: int = 1,
    dilation: Pair = 1,
) -> Any:
    require_constant(weight, bias)
    require_images(input)
    options = map(pair, (stride, padding, output_padding, dilation))
    axes = zip(input.shape[2:], weight.shape[2:], *options, strict=True)
    size = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, o, d in axes]
    if min(size) < 1:
        raise LoweringError(f"its output would have size {size}")
    op = ConvOperator(weight.detach(), (size[0], size[1]), pair(padding), "zeros", pair(stride), pair(dilation), groups)
    return Affine(Adjoint(op), detached(bias))(input)


def fourier_multiply(matrices: Tensor, x: Node) -> Any:
    require_constant(matrices)
    require_images(x)
    joined = block_diagonal(matrices.detach().to(torch.complex128))
    return Affine(FourierMultiplier(joined, (x.shape[2], x.shape[3])), None)(x)


def batch_norm(
    input: Node,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if training or running_mean is None or running_var is None:
        raise LoweringError("it divides by the deviation of its batch; give it running statistics, in evaluation mode")
    require_constant(running_mean, running_var, weight, bias)
    scale = (running_var.detach().double() + eps).rsqrt()
    scale = scale if weight is None else scale * weight.detach().double()
    shift = -running_mean.detach().double() * scale
    shift = shift if bias is None else shift + bias.detach().double()
    shape = (-1, *[1] * (input.ndim - 2))
    return scaled(input, scale.reshape(shape)) + shift.reshape(shape)


def dropout(input: Node, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if training:
        raise LoweringError("it is random in training; use it in evaluation mode")
    return input


# Pooling


def avg_pool2d(
    input: Node,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    require_images(input)
    window, sides = pair(kernel_size), pair(padding)
    steps = pair(stride) if stride else window
    if ceil_mode:
        raise LoweringError("average pooling has a bound only without ceil_mode")
    if not count_include_pad and sides != (0, 0) and divisor_override is None:
        raise LoweringError("average pooling with padding has a bound only with count_include_pad=True")
    divisor = float(divisor_override or math.prod(window))
    if steps == window and sides == (0, 0):
        return AvgPool(window, divisor)(input)
    channels, height, width = input.shape[1:]
    kernel = torch.full((channels, 1, *window), 1 / divisor, dtype=torch.float64)
    return Affine(ConvOperator(kernel, (height, width), sides, "zeros", steps, 1, channels), None)(input)


def adaptive_avg_pool2d(input: Node, output_size: Any) -> Any:
    require_images(input)
    given = output_size if isinstance(output_size, tuple | list) else (output_size, output_size)
    sizes = [n if out is None else out for n, out in zip(input.shape[2:], given, strict=True)]
    if any(n % out for n, out in zip(input.shape[2:], sizes, strict=True)):
        pixels = f"{tuple(input.shape[2:])} to {tuple(sizes)}"
        raise LoweringError(f"windows from {pixels} overlap; the output size must divide the input size")
    return avg_pool2d(input, [n // out for n, out in zip(input.shape[2:], sizes, strict=True)])


def mean(input: Node, dim: Any = None, keepdim: bool = False) -> Any:
    dims = sorted(d % input.ndim for d in ([dim] if isinstance(dim, int) else dim or []))
    if input.ndim != 4 or dims != [2, 3]:
        raise LoweringError(
            f"a mean has a rule over the pixels of images only, dim=(2, 3), not over dim={dim}; {NO_NUMBERS}"
        )
    pooled = avg_pool2d(input, list(input.shape[2:]))
    return pooled if keepdim else pooled.flatten(1)


def max_pool2d(
    input: Node,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    require_images(input)
    if ceil_mode or return_indices:
        raise LoweringError("max pooling has a bound only without ceil_mode and return_indices")
    return MaxPool(pair(kernel_size), pair(stride or kernel_size), pair(padding), pair(dilation))(input)


# Activations


def relu(input: Node, inplace: bool = False) -> Any:
    return _maybe_in_place(Pointwise("relu")(input), input, inplace)


def hardtanh(input: Node, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False) -> Any:
    if (min_val, max_val) != (-1.0, 1.0):
        raise LoweringError(
            f"hardtanh has a rule for the interval [-1, 1], not for [{min_val}, {max_val}]; use "
            "torch.minimum(torch.maximum(x, low), high) with tensors"
        )
    return _maybe_in_place(Pointwise("hardtanh")(input), input, inplace)


def absolute(input: Node) -> Any:
    return Pointwise("abs")(input)


class Sorted(NamedTuple):
    """What `sort` returns; the indices are unknown."""

    values: Node
    indices: None = None


def sort(input: Node, dim: int = -1, descending: bool = False, stable: bool = False) -> Sorted:
    axis = dim % input.ndim
    if axis == 0:
        raise LoweringError("it mixes the images of a batch")
    front = input.movedim(axis, 1)
    flat = front.flatten(1, 2) if front.ndim > 2 else front
    result = GroupSort(front.shape[1])(flat).reshape(front.shape)
    return Sorted((result if descending else result.flip(1)).movedim(1, axis))


def maximum_minimum(a: Any, b: Any) -> tuple[Node, Node]:
    """max(a, b) and min(a, b), as the halves of one sort of pairs."""
    shape = broadcast(a, b)
    if not (isinstance(a, Node) and isinstance(b, Node)):
        a, other = (a, b) if isinstance(a, Node) else (b, a)
        b = Node.of(a.builder.constant(constant_value(other, shape)), a.builder)
    first, second = GroupSort(2)(torch.cat([expanded(a, shape), expanded(b, shape)], 1)).chunk(2, 1)
    return first, second


def _maybe_in_place(result: Node, input: Node, inplace: bool) -> Any:
    if inplace:
        input.overwrite(result.vertex)
        return input
    return result


# Properties that do not depend on the numbers


def size(input: Node, dim: int | None = None) -> Any:
    shape = torch.Size((IMAGES, *input.vertex.shape))
    return shape if dim is None else shape[dim]


def stride(input: Node, dim: int | None = None) -> Any:
    shape = size(input)
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return strides if dim is None else strides[dim]


def to(input: Node, *args: Any, **kwargs: Any) -> Any:
    for value in (*args, *kwargs.values()):
        value = value.dtype if isinstance(value, Tensor) and not isinstance(value, Node) else value
        if isinstance(value, torch.dtype) and value not in (torch.float32, torch.float64):
            raise LoweringError(f"it has a rule for float32 and float64, not for {value}")
    return input


def as_plain(value: Any) -> Any:
    """A plain tensor of the shape and type of a node; other values unchanged."""
    return torch.zeros(size(value), dtype=value.builder.dtype) if isinstance(value, Node) else value


# Arguments


def pair(value: Any) -> tuple[int, int]:
    """A number, or a sequence of one or two, as a pair."""
    numbers = (value,) if isinstance(value, int) else tuple(map(int, value))
    if len(numbers) not in (1, 2):
        raise LoweringError(f"it takes a number or a pair, not {value!r}")
    return numbers[0], numbers[-1]


def detached(t: Tensor | None) -> Tensor | None:
    """A bias without its gradient; raise if it is not finite."""
    if t is not None and not bool(torch.isfinite(t).all()):
        raise LoweringError("the bias has NaN or infinite entries")
    return None if t is None else t.detach()


def require_constant(*tensors: Tensor | None) -> None:
    """Raise if a weight depends on the input."""
    if any(isinstance(t, Node) for t in tensors):
        raise LoweringError("its weights depend on the input, so it has no Lipschitz bound")


def require_images(x: Node) -> None:
    if x.ndim != 4:
        raise LoweringError(f"it takes images (batch, channels, height, width), not {format_batch(x.vertex.shape)}")
