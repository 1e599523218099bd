"""The convolution x ↦ K ∗ x of images, with zero or circular padding, as an operator on inputs of one size."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from lipflow.operators.operator import LinearOperator, require_real
from lipflow.shapes import format_batch

Padding = int | tuple[int, int] | tuple[tuple[int, int], tuple[int, int]] | Literal["same"]


class Axis(NamedTuple):
    """One axis of a convolution: y[i] = Σ_j K[j] x[i·stride + j·dilation - before], for 0 ≤ i < outputs."""

    size: int
    kernel: int
    before: int
    after: int
    stride: int
    dilation: int

    @property
    def extent(self) -> int:
        """The length of a window: dilation·(kernel - 1) + 1 positions."""
        return self.dilation * (self.kernel - 1) + 1

    @property
    def padded(self) -> int:
        """The size with its padding."""
        return self.size + self.before + self.after

    @property
    def outputs(self) -> int:
        return (self.padded - self.extent) // self.stride + 1

    @property
    def unread(self) -> int:
        """The number of positions after the last window, padding included."""
        return self.padded - (self.outputs - 1) * self.stride - self.extent

    @property
    def is_centred(self) -> bool:
        """Whether the window of output i is centred at input i."""
        return self.stride == 1 and 2 * self.before == 2 * self.after == self.extent - 1


class ConvOperator(LinearOperator):
    """y = K ∗ x for a kernel K `(out, in / groups, height, width)`, on inputs `(batch, in, *in_size)`.

    `padding` is a number, a pair (rows, columns), pairs ((top, bottom), (left, right)), or "same" (stride 1 keeps
    the size; with an even kernel, the extra position is at the end). `padding_mode` is "zeros" or "circular".
    """

    def __init__(
        self,
        kernel: Tensor,
        in_size: Sequence[int],
        padding: Padding = 1,
        padding_mode: str = "zeros",
        stride: int | tuple[int, int] = 1,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
    ) -> None:
        require_real(kernel, "ConvOperator")
        if kernel.ndim != 4 or 0 in kernel.shape:
            raise ValueError(
                f"ConvOperator takes a non-empty kernel (out, in / groups, height, width), not {tuple(kernel.shape)}"
            )
        if padding_mode not in ("zeros", "circular"):
            raise ValueError(f"padding_mode is 'zeros' or 'circular', not {padding_mode!r}")
        if type(groups) is not int or groups < 1 or kernel.shape[0] % groups:
            raise ValueError(f"groups must divide the {kernel.shape[0]} output channels, not be {groups!r}")
        self.kernel, self.weight, self.padding_mode, self.groups = kernel, kernel, padding_mode, groups
        self.rows, self.columns = axes(kernel.shape[2:], in_size, padding, stride, dilation)
        self.in_shape = (kernel.shape[1] * groups, self.rows.size, self.columns.size)
        self.out_shape = (kernel.shape[0], self.rows.outputs, self.columns.outputs)

    def with_weight(self, weight: Tensor) -> "ConvOperator":
        return ConvOperator(weight, **self.geometry)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Wx, or Wx + b with b along the output channels."""
        _require_shape(x, self.in_shape, "ConvOperator takes inputs")
        stride, dilation = self._pair("stride"), self._pair("dilation")
        if self._symmetric:
            return F.conv2d(x, self.kernel, bias, stride, self._pair("before"), dilation, self.groups)
        return F.conv2d(self.pad(x), self.kernel, bias, stride, 0, dilation, self.groups)

    def adjoint(self, y: Tensor) -> Tensor:
        _require_shape(y, self.out_shape, "the adjoint of ConvOperator takes")
        stride, dilation, unread = self._pair("stride"), self._pair("dilation"), self._pair("unread")
        if self._symmetric and stride == (1, 1) and all(a.before < a.extent for a in (self.rows, self.columns)):
            margins = (self.rows.extent - 1 - self.rows.before, self.columns.extent - 1 - self.columns.before)
            return F.conv2d(y, self.adjoint_kernel, None, 1, margins, dilation, self.groups)
        if self._symmetric:
            return F.conv_transpose2d(y, self.kernel, None, stride, self._pair("before"), unread, self.groups, dilation)
        # No window reads the positions after the last window, so the adjoint is zero there.
        padded = F.conv_transpose2d(y, self.kernel, None, stride, 0, 0, self.groups, dilation)
        return self.unpad(F.pad(padded, (0, unread[1], 0, unread[0])))

    @property
    def adjoint_kernel(self) -> Tensor:
        """The kernel of the adjoint: taps reversed, and inputs and outputs exchanged in each group."""
        blocks = self.kernel.unflatten(0, (self.groups, -1))
        return blocks.transpose(1, 2).flip(3, 4).flatten(0, 1)

    def outer(self, y: Tensor, x: Tensor) -> Tensor:
        """The derivative of ⟨y, Wx⟩, summed over the batch, with respect to the kernel."""
        padded, padding = (x, self._pair("before")) if self._symmetric else (self.pad(x), (0, 0))
        pairs: Any = self._pair("stride"), padding, self._pair("dilation")  # torch declares one number each
        return conv2d_weight(padded, self.kernel.shape, y, *pairs, groups=self.groups)

    @property
    def geometry(self) -> dict[str, Any]:
        """The arguments after the kernel, as plain data."""
        return dict(
            in_size=[self.rows.size, self.columns.size],
            padding=[[axis.before, axis.after] for axis in (self.rows, self.columns)],
            padding_mode=self.padding_mode,
            stride=[self.rows.stride, self.columns.stride],
            dilation=[self.rows.dilation, self.columns.dilation],
            groups=self.groups,
        )

    @property
    def _symmetric(self) -> bool:
        """Whether torch can pad during the convolution: with zeros, equally many on both sides."""
        zeros = self.padding_mode == "zeros"
        return all(a.before == a.after and (zeros or a.before == 0) for a in (self.rows, self.columns))

    def _pair(self, field: str) -> tuple[int, int]:
        return getattr(self.rows, field), getattr(self.columns, field)

    def pad(self, x: Tensor) -> Tensor:
        """x with its padding."""
        if self.padding_mode == "zeros":
            return F.pad(x, (self.columns.before, self.columns.after, self.rows.before, self.rows.after))
        return x.index_select(-2, _wrap(self.rows, x.device)).index_select(-1, _wrap(self.columns, x.device))

    def unpad(self, y: Tensor) -> Tensor:
        """The adjoint of `pad`: drop the padding, or add it to the positions that it repeats."""
        if self.padding_mode == "zeros":
            return F.pad(y, (-self.columns.before, -self.columns.after, -self.rows.before, -self.rows.after))
        rows = y.new_zeros(*y.shape[:-2], self.rows.size, y.shape[-1]).index_add(-2, _wrap(self.rows, y.device), y)
        return rows.new_zeros(*y.shape[:-2], *self.in_shape[1:]).index_add(-1, _wrap(self.columns, y.device), rows)

    def __repr__(self) -> str:
        out, grouped, height, width = self.kernel.shape
        rows, columns = self.rows, self.columns
        return (
            f"ConvOperator({grouped * self.groups} → {out}, kernel {height}×{width}, input {rows.size}×{columns.size}, "
            f"padding {self.padding_mode} {rows.before, rows.after}×{columns.before, columns.after}, "
            f"stride {self._pair('stride')}, dilation {self._pair('dilation')}, groups {self.groups})"
        )


def axes(
    kernel_size: tuple[int, ...] | torch.Size,
    in_size: Sequence[int],
    padding: Padding,
    stride: int | tuple[int, int],
    dilation: int | tuple[int, int],
) -> tuple[Axis, Axis]:
    """The two axes of a convolution; raise unless all numbers are positive (padding: at least 0) and a window fits."""
    strides, dilations, sizes = _ints(stride, "stride"), _ints(dilation, "dilation"), _ints(in_size, "in_size")
    margins = pads(padding, kernel_size, dilations)
    both = [Axis(sizes[i], kernel_size[i], *margins[i], strides[i], dilations[i]) for i in range(2)]
    for name, axis in zip(("rows", "columns"), both, strict=True):
        if axis.outputs < 1:
            raise ValueError(
                f"a kernel that spans {axis.extent} {name} does not fit an input of {axis.size} padded by "
                f"{axis.before} and {axis.after}; pad more, or use a smaller kernel or dilation"
            )
    return both[0], both[1]


def pads(
    padding: Padding, kernel_size: tuple[int, ...] | torch.Size, dilation: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """The padding as ((top, bottom), (left, right))."""
    if padding == "same":
        rows, columns = (d * (k - 1) for k, d in zip(kernel_size, dilation, strict=True))
        return (rows // 2, rows - rows // 2), (columns // 2, columns - columns // 2)
    sides = padding if isinstance(padding, tuple | list) else (padding, padding)
    both = [p if isinstance(p, tuple | list) else (p, p) for p in sides]
    if len(both) != 2 or any(len(p) != 2 or any(type(n) is not int for n in p) for p in both):
        raise ValueError(
            f"padding is a number, (rows, columns), ((top, bottom), (left, right)) or 'same', not {padding!r}"
        )
    if min(map(min, both)) < 0:
        raise ValueError(f"padding must be at least 0, not {padding!r}")
    return (both[0][0], both[0][1]), (both[1][0], both[1][1])


def _ints(value: int | Sequence[int], name: str) -> tuple[int, int]:
    pair: Any = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2 or any(type(v) is not int or v < 1 for v in pair):
        raise ValueError(f"{name} is a number or a pair of numbers, at least 1, not {value!r}")
    return pair[0], pair[1]


def _wrap(axis: Axis, device: torch.device) -> Tensor:
    """The torus position that each padded position repeats."""
    return torch.arange(-axis.before, axis.size + axis.after, device=device) % axis.size


def _require_shape(x: Tensor, shape: tuple[int, ...], what: str) -> None:
    if x.ndim != 4 or tuple(x.shape[1:]) != shape:
        raise ValueError(f"{what} {format_batch(shape)}, not {tuple(x.shape)}")
