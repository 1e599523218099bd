"""A convolution by matrix products, a few images at a time, so that the unfolded images stay in the cache.

A convolution maps between a wide side, of many channels, and a narrow one. Only the narrow side is unfolded: its taps,
gathered into columns P at each position of the wide side, give narrow → wide as one product MᵀP; and wide → narrow is
the product P = MX, whose taps are then added up at their positions. The wide side is never padded, and copied only when
many images run as one.

Every entry is one sum of channels·taps products in some order, so the error model of frozen networks covers it.
Autograd does not record these operations: the callers define their derivatives.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lipflow.operators.conv import Axis, ConvOperator

CACHE_BYTES = 2 * 2**20  # the most for the columns of one chunk of images
MANY_BYTES = 16 * CACHE_BYTES  # the most for the columns of images that run as one (`many_channels`)
LANES = 16  # columns are padded with zero rows to a multiple of this, for which matrix products are faster
Places = tuple[slice, slice]  # of a tap along one axis: the positions on both sides that it connects


class Columns:
    """A zero-padded convolution as its matrix M  # (groups, taps · narrow, wide), and the places of its taps."""

    def __init__(self, op: ConvOperator, like: "Columns | None" = None, matrix: Tensor | None = None) -> None:
        """`like` is another convolution of the same geometry, not run at the same time, whose buffers are reused.

        `matrix` is `matrix_of(op)`, if it is known.
        """
        if op.padding_mode != "zeros":
            raise ValueError(f"only zero-padded convolutions have columns, not {op}; pad x first, and use padding=0")
        out_is_narrow, self.order = _sides(op)
        self.out_is_narrow = out_is_narrow
        self.narrow_shape, self.wide_shape = (op.out_shape, op.in_shape)[:: 1 if out_is_narrow else -1]
        self.kernel_shape = op.kernel.shape
        self.groups, self.channels = op.groups, self.narrow_shape[0] // op.groups
        self.matrix = matrix_of(op) if matrix is None else matrix
        # For each row tap and each column tap, the positions on the narrow side and on the wide side that it connects
        self.row_taps, self.column_taps = (
            [(out, into) if out_is_narrow else (into, out) for into, out in _places(axis)]
            for axis in (op.rows, op.columns)
        )
        self.buffers = _Buffers(self) if like is None else like.buffers

    def layout(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        """x in the memory format of the products, whatever the format of `like`."""
        return x.contiguous()

    def chunks(self, batch: int) -> Iterator[slice]:
        """The batch in parts whose columns fit the cache."""
        chunk = self.buffers.allocate(batch)
        return (slice(first, first + chunk) for first in range(0, max(1, batch), chunk))

    def unfold(self, narrow: Tensor) -> Tensor:
        """The taps of a chunk of the narrow side, in columns  # (chunk, groups, taps · narrow, rows, columns)."""
        columns, between = (buffer[: len(narrow)] for buffer in self.buffers.gathered)
        narrow = narrow.unflatten(1, (self.groups, -1))
        for a, (r, rows) in enumerate(self.row_taps):
            between[:, :, a, :, rows] = narrow[..., r, :]
        by_tap = self._by_tap(columns)
        for b, (c, cols) in enumerate(self.column_taps):
            by_tap[:, :, :, b, ..., cols] = between[..., c]
        return columns

    def narrow(self, wide: Tensor, bias: Tensor | None = None) -> Tensor:
        """Wide → narrow: the taps of P = MX, added up at their positions; and a bias of the narrow channels."""
        columns, between = (buffer[: len(wide)] for buffer in self.buffers.products)
        torch.bmm(self._repeated(len(wide)), self._split(wide), out=self._flat(columns))
        between = _add_taps(self._by_tap(columns).movedim(3, 0), self.column_taps, -1, between)
        out = wide.new_empty(len(wide), *self.narrow_shape)
        total = out.unflatten(1, (self.groups, -1))
        total.copy_(_add_taps(between.movedim(2, 0), self.row_taps, -2, total))
        return out if bias is None else out.add_(bias[:, None, None])

    def widen(self, columns: Tensor, out: Tensor, onto: Tensor | None = None) -> None:
        """Narrow → wide: out = MᵀP, or onto + MᵀP."""
        left, right = self._repeated(len(columns)).mT, self._flat(columns)
        if onto is None:
            torch.bmm(left, right, out=self._split(out))
        else:
            torch.baddbmm(self._split(onto), left, right, out=self._split(out))

    @property
    def many_channels(self) -> bool:
        """Whether the matrix is larger than the columns of an image: then many images run as one."""
        return self.matrix.shape[2] > math.prod(self.wide_shape[1:])

    def run_as_one(self, x: Tensor, to_narrow: bool) -> Tensor:
        """Wide → narrow or back, for some images side by side as one."""
        taps, size = (len(self.row_taps), len(self.column_taps), self.channels), (len(x), *self.wide_shape[1:])
        x = x.unflatten(1, (self.groups, -1)).permute(1, 2, 0, 3, 4)  # (groups, channels, images, rows, columns)
        between = x.new_empty(self.groups, taps[0], self.channels, *size[:2], self.narrow_shape[2])
        if to_narrow:
            columns = torch.bmm(self.matrix, x.reshape(self.groups, -1, math.prod(size)))
            by_tap = columns[:, : math.prod(taps)].unflatten(1, taps).unflatten(-1, size)
            between = _add_taps(by_tap.movedim(2, 0), self.column_taps, -1, between)
            out = x.new_empty(self.groups, self.channels, size[0], *self.narrow_shape[1:])
            out = _add_taps(between.movedim(1, 0), self.row_taps, -2, out)
        else:
            between.zero_()
            for a, (r, rows) in enumerate(self.row_taps):
                between[:, a, ..., rows, :] = x[..., r, :]
            columns = x.new_zeros(*self.matrix.shape[:2], *size)
            by_tap = columns[:, : math.prod(taps)].unflatten(1, taps)
            for b, (c, cols) in enumerate(self.column_taps):
                by_tap[:, :, b, ..., cols] = between[..., c]
            out = torch.bmm(self.matrix.mT, columns.flatten(2)).unflatten(-1, size)
        return out.permute(2, 0, 1, 3, 4).flatten(1, 2)

    def gradient(self) -> Tensor:
        """Zeros, to which `add_gradient` adds."""
        return torch.zeros_like(self.matrix.mT)

    def add_gradient(self, total: Tensor, columns: Tensor, wide: Tensor, sign: int = 1) -> None:
        """total ± the derivative of ⟨P, MX⟩ with respect to Mᵀ."""
        each = torch.bmm(self._split(wide), self._flat(columns).mT)
        total += sign * each.unflatten(0, (-1, self.groups)).sum(0)

    def weight_of(self, total: Tensor) -> Tensor:
        """A matrix of the shape of Mᵀ as a kernel."""
        taps = len(self.row_taps) * len(self.column_taps)
        blocks = total.mT[:, : taps * self.channels].unflatten(1, (taps, self.channels))
        return blocks.permute([self.order.index(axis) for axis in range(4)]).reshape(self.kernel_shape)

    def _by_tap(self, columns: Tensor) -> Tensor:
        """Columns as (chunk, groups, row taps, column taps, narrow, rows, columns)."""
        taps = (len(self.row_taps), len(self.column_taps), self.channels)
        return columns[:, :, : math.prod(taps)].unflatten(2, taps)

    def _flat(self, columns: Tensor) -> Tensor:
        return columns.flatten(3).flatten(0, 1)

    def _split(self, wide: Tensor) -> Tensor:
        return wide.view(len(wide) * self.groups, self.matrix.shape[2], math.prod(self.wide_shape[1:]))

    def _repeated(self, batch: int) -> Tensor:
        return self.matrix.expand(batch, *self.matrix.shape).flatten(0, 1)


def _add_taps(by_tap: Tensor, taps: Sequence[Places], axis: int, buffer: Tensor) -> Tensor:
    """Add up the taps of the wide side on the narrow side along one axis, in `buffer` or in place of a tap.

    A tap that connects all positions of both sides, as the middle one does if the size is kept, needs no buffer.
    """
    everything = slice(0, buffer.shape[axis])
    same = by_tap.shape[axis] == buffer.shape[axis]
    whole = [i for i, places in enumerate(taps) if same and places == (everything, everything)]
    total = by_tap[whole[0]] if whole else buffer.zero_()
    for i, (narrow, wide) in enumerate(taps):
        if i not in whole[:1]:
            _along(total, axis, narrow).add_(_along(by_tap[i], axis, wide))
    return total


def _along(t: Tensor, axis: int, where: slice) -> Tensor:
    return t[..., where] if axis == -1 else t[..., where, :]


class _Buffers:
    """Buffers for the columns of a chunk, and for an intermediate in which only the row taps are separate.

    Gathered columns are zero at first, and positions that no tap reaches stay zero.
    """

    def __init__(self, columns: Columns) -> None:
        height, width = columns.wide_shape[1:]
        self.shapes = (
            (*columns.matrix.shape[:2], height, width),
            (columns.groups, len(columns.row_taps), columns.channels, height, columns.narrow_shape[2]),
        )
        self.matrix, self.chunk = columns.matrix, 0

    def fit(self, cache_bytes: int) -> int:
        """The number of images whose columns fit into `cache_bytes`, at least 1."""
        return max(1, cache_bytes // (math.prod(self.shapes[0]) * self.matrix.element_size()))

    def allocate(self, batch: int) -> int:
        """Allocate the buffers of a chunk, and return its number of images."""
        chunk = min(self.fit(CACHE_BYTES), max(1, batch))
        if chunk != self.chunk:
            self.chunk = chunk
            self.gathered = [self.matrix.new_zeros(chunk, *shape) for shape in self.shapes]
            self.products = [self.matrix.new_empty(chunk, *shape) for shape in self.shapes]
        return chunk


def matrix_of(op: ConvOperator) -> Tensor:
    """The matrix M of a convolution  # (groups, taps · narrow, wide)."""
    blocks = op.kernel.unflatten(0, (op.groups, -1)).flatten(3).permute(_sides(op)[1])
    return F.pad(blocks.flatten(1, 2), (0, 0, 0, -blocks.shape[1] * blocks.shape[2] % LANES))


def _sides(op: ConvOperator) -> tuple[bool, tuple[int, ...]]:
    """Whether the output is narrow, and the permutation of (groups, out, in, taps) to (groups, taps, narrow, wide)."""
    out_is_narrow = op.kernel.shape[0] <= op.kernel.shape[1] * op.groups
    return out_is_narrow, (0, 3, 1, 2) if out_is_narrow else (0, 3, 2, 1)


def convolve(op: ConvOperator, x: Tensor, forward: bool = True, matrix: Tensor | None = None) -> Tensor:
    """Wx, or Wᵀx if not `forward`; `matrix` is `matrix_of(op)`, if it is known."""
    if op.padding_mode == "circular":
        size = [op.rows.padded, op.columns.padded]
        unpadded = ConvOperator(op.kernel, **dict(op.geometry, in_size=size, padding=0, padding_mode="zeros"))
        if forward:
            return convolve(unpadded, op.pad(x), True, matrix)
        return op.unpad(convolve(unpadded, x, False, matrix))
    columns, x = Columns(op, matrix=matrix), x.contiguous()
    out = x.new_empty(len(x), *(op.out_shape if forward else op.in_shape))
    if columns.many_channels and len(x) > 1:
        size = columns.buffers.fit(MANY_BYTES)
        for part, result in zip(x.split(size), out.split(size), strict=True):
            result.copy_(columns.run_as_one(part, forward == columns.out_is_narrow))
        return out
    for part in columns.chunks(len(x)):
        if forward == columns.out_is_narrow:
            out[part] = columns.narrow(x[part])
        else:
            columns.widen(columns.unfold(x[part]), out[part])
    return out


def _places(axis: Axis) -> Iterator[Places]:
    """For each tap j of an axis: its inputs i·stride + j·dilation - before, and its outputs i."""
    for j in range(axis.kernel):
        offset = j * axis.dilation - axis.before
        first = max(0, -(offset // axis.stride))
        last = max(first, min(axis.outputs, (axis.size - 1 - offset) // axis.stride + 1))
        start, stop = first * axis.stride + offset, (last - 1) * axis.stride + offset + 1
        step = axis.stride if axis.stride > 1 else None
        yield slice(start, max(start, stop), step), slice(first, last)
