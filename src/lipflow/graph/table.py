"""The table of functions of torch and their rules."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lipflow.graph import rules
from lipflow.node import IMAGES, Node
from lipflow.operators.multiplier import multiply


def functions(*names: str) -> Iterator[Any]:
    """The functions of these names in torch, torch.Tensor and torch.nn.functional."""
    for name in names:
        found = [getattr(owner, name) for owner in (torch, Tensor, F) if hasattr(owner, name)]
        if not found:
            raise AttributeError(f"torch has no function {name!r}")
        yield from found


def getter(name: str) -> Any:
    """The function that gets an attribute of a tensor."""
    return getattr(Tensor, name).__get__


Rule = Callable[..., Any]


def _table(rows: Iterable[tuple[Rule, Iterable[Any]]]) -> dict[Any, Rule]:
    return {function: rule for rule, known in rows for function in known}


RULES: dict[Any, Rule] = _table(
    [
        (rules.add, functions("add")),
        (rules.sub, functions("sub", "subtract")),
        (rules.rsub, [torch.rsub, Tensor.__rsub__]),
        (rules.neg, functions("neg", "negative")),
        (rules.mul, functions("mul", "multiply")),
        (rules.div, functions("div", "divide", "true_divide")),
        (rules.linear, [F.linear]),
        (rules.matmul, functions("matmul", "mm")),
        (rules.conv2d, [torch.conv2d]),
        (rules.conv_transpose2d, [torch.conv_transpose2d]),
        (rules.fourier_multiply, [multiply]),
        (rules.batch_norm, [F.batch_norm]),
        (rules.dropout, [F.dropout, F.dropout1d, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout]),
        (rules.avg_pool2d, [F.avg_pool2d]),
        (rules.adaptive_avg_pool2d, [F.adaptive_avg_pool2d]),
        (rules.mean, functions("mean")),
        (rules.max_pool2d, [F.max_pool2d, torch.max_pool2d, F.max_pool2d_with_indices]),
        (rules.relu, functions("relu")),
        (rules.hardtanh, [F.hardtanh]),
        (rules.absolute, functions("abs", "absolute")),
        (lambda input, other: rules.maximum_minimum(input, other)[0], functions("maximum", "fmax")),
        (lambda input, other: rules.maximum_minimum(input, other)[1], functions("minimum", "fmin")),
        (rules.sort, functions("sort")),
        (rules.size, [Tensor.size, getter("shape")]),
        (rules.stride, [Tensor.stride]),
        (rules.to, [Tensor.to, Tensor.type, Tensor.type_as]),
        (lambda input, *args, **kwargs: Node.of(input.vertex, input.builder), functions("clone")),
        (
            lambda input, *args, **kwargs: input,
            functions("detach", "double", "float", "cpu", "contiguous", "requires_grad_"),
        ),
        (lambda input: len(rules.size(input)), [Tensor.dim, Tensor.ndimension, getter("ndim")]),
        (lambda input: rules.size(input).numel(), functions("numel")),
        (lambda input: IMAGES, [Tensor.__len__]),
        (lambda input: True, functions("is_floating_point")),
        (lambda input: False, functions("is_complex", "is_conj")),
        (lambda input, *args, **kwargs: True, [Tensor.is_contiguous]),
        (lambda input: input.builder.dtype, [getter("dtype")]),
        (lambda input: torch.device("cpu"), [getter("device")]),
        (lambda input: torch.strided, [getter("layout")]),
        (
            lambda input: False,
            map(getter, ("requires_grad", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested")),
        ),
    ]
)

# In-place functions, with the rule of the same function out of place.
IN_PLACE: dict[Any, Rule] = _table(
    [
        (rules.add, [Tensor.add_, Tensor.__iadd__]),
        (rules.sub, [Tensor.sub_, Tensor.subtract_, Tensor.__isub__]),
        (rules.mul, [Tensor.mul_, Tensor.multiply_, Tensor.__imul__]),
        (rules.div, [Tensor.div_, Tensor.divide_, Tensor.__idiv__, Tensor.__itruediv__]),
        (rules.neg, [Tensor.neg_, Tensor.negative_, torch.neg_]),
        (rules.relu, [Tensor.relu_, torch.relu_]),
        (rules.absolute, [Tensor.abs_, Tensor.absolute_, torch.abs_]),
        (rules.hardtanh, [F.hardtanh_]),
    ]
)

# Functions that make a new tensor with the shape or type of another one.
FACTORIES: set[Any] = {
    *(Tensor.new_zeros, Tensor.new_ones, Tensor.new_empty, Tensor.new_full, Tensor.new_tensor),
    *(torch.zeros_like, torch.ones_like, torch.empty_like, torch.full_like),
}

# Functions that only move numbers: those that may share memory with their input, and those that do not.
VIEWS: set[Any] = {
    *functions(
        "reshape", "flatten", "unflatten", "permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims"
    ),
    *functions("squeeze", "unsqueeze", "narrow", "select", "split", "chunk", "tensor_split", "unbind", "ravel"),
    *functions("hsplit", "vsplit", "dsplit", "t", "adjoint", "diagonal"),
    *(Tensor.view, Tensor.view_as, Tensor.reshape_as, Tensor.expand, Tensor.expand_as, Tensor.__getitem__),
    *(Tensor.unfold, getter("T"), getter("mT")),
}
COPIES: set[Any] = {
    *functions(
        "cat", "concat", "concatenate", "stack", "hstack", "vstack", "dstack", "flip", "fliplr", "flipud", "rot90"
    ),
    *functions("roll", "tile", "index_select", "repeat_interleave", "tril", "triu", "take_along_dim"),
    *functions("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
    *(Tensor.repeat, F.pad, F.unfold, F.interpolate, F.upsample),
}

# What to use instead of functions without a rule: their names, by the message.
_INSTEAD = {
    "it divides by the deviation of its input, so it has no Lipschitz bound; use BatchNorm, or leave it out": (
        "layer_norm group_norm instance_norm"
    ),
    "leave it out, as labels, losses and certificates use scores, not probabilities": "softmax log_softmax",
    "it has no rule, as its rounding error is unknown; use torch.relu or lipflow.blocks.MaxMin, or declare a bound for "
    "lipschitz_bound with lipflow.Assume(module, bound=...)": (
        "gelu silu elu selu celu mish hardswish softplus tanh sigmoid"
    ),
    "it has no rule; for a slope of at most 1 use torch.maximum(x, slope * x)": "leaky_relu prelu",
    "it has no rule; use torch.minimum(torch.maximum(x, low), high) with tensors": "relu6 clamp clip",
    "it has no rule; to pool use avg_pool2d, max_pool2d or mean((2, 3)), and let conditions depend on shapes only, as "
    "numbers are unknown while a network is lowered": "sum max min amax amin all any argmax isnan isfinite",
    "it has no Lipschitz bound on the whole space; lipflow.Assume(module, bound=...) declares one that you know": (
        "normalize pow exp log sqrt rsqrt reciprocal norm __pow__"
    ),
    "it depends on numbers, which are unknown while a network is lowered; use shapes only": (
        "gt lt ge le eq ne __eq__ __ne__ __gt__ __lt__ __ge__ __le__ __bool__ item __float__ __int__"
    ),
    "it converts to numbers outside of torch; use functions of torch": "numpy tolist __array__ __deepcopy__",
    "attention multiplies values that depend on the input, so it has no Lipschitz bound": (
        "scaled_dot_product_attention multi_head_attention_forward"
    ),
}
INSTEAD: dict[Any, str] = {f: message for message, names in _INSTEAD.items() for f in functions(*names.split())}
