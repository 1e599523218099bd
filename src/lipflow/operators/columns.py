"""A convolution by matrix products, a few images at a time, so that what it unfolds stays in the cache.

A convolution joins a wide side, of many channels, and a narrow one. Only the narrow side is unfolded: its taps,
gathered into columns P at each position of the wide side, give narrow → wide as one product MᵀP; and wide → narrow is
the product P = MX, whose taps are then added where they belong. The wide side is not padded, and copied only where
many images lie side by side.

Every entry is one sum of channels·taps products in some order, so the error model of frozen networks covers it.
Autograd does not see in here: the functions that call this know their derivatives.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from lipflow.operators.conv import Axis, ConvOperator

CACHE_BYTES = 2 * 2**20  # the columns of one chunk of images
MANY_BYTES = 16 * CACHE_BYTES  # those of images that run at once, as the matrix is larger than the columns of one
Places = tuple[slice, slice]  # along one axis, the positions that a tap joins

LANES = 16  # rows of columns are made up to a multiple of this with zeros, as matrix products like them


class Columns:
    """A zero-padded convolution as its matrix M  # (groups, taps · narrow, wide), and the places of its taps."""

    def __init__(self, op: ConvOperator, like: "Columns | None" = None, matrix: Tensor | None = None) -> None:
        """`like` is another convolution of the same geometry, not run at the same time, whose memory may be used.

        `matrix` is `matrix_of(op)`, if it is known.
        """
        if op.padding_mode != "zeros":
            raise ValueError("only zero-padded convolutions have columns; pad, and give the one without padding")
        out_is_narrow, self.order = _sides(op)
        self.out_is_narrow = out_is_narrow
        self.narrow_shape, self.wide_shape = (op.out_shape, op.in_shape)[:: 1 if out_is_narrow else -1]
        self.kernel_shape = op.kernel.shape
        self.groups, self.channels = op.groups, self.narrow_shape[0] // op.groups
        self.matrix = matrix_of(op) if matrix is None else matrix
        # Of each row tap and each column tap, the positions on the narrow side and those on the wide side that it joins
        self.row_taps, self.column_taps = (
            [(out, into) if out_is_narrow else (into, out) for into, out in _places(axis)]
            for axis in (op.rows, op.columns)
        )
        self.rooms = _Rooms(self) if like is None else like.rooms

    def layout(self, x: Tensor, like: Tensor | None = None) -> Tensor:
        """x as the products need it in memory, however another lies."""
        return x.contiguous()

    def chunks(self, batch: int) -> Iterator[slice]:
        """The batch in parts whose columns fit the cache."""
        chunk = self.rooms.open(batch)
        return (slice(first, first + chunk) for first in range(0, max(1, batch), chunk))

    def unfold(self, narrow: Tensor) -> Tensor:
        """The taps of a chunk of the narrow side, in columns  # (chunk, groups, taps · narrow, rows, columns)."""
        columns, between = (room[: len(narrow)] for room in self.rooms.gathered)
        narrow = narrow.unflatten(1, (self.groups, -1))
        for a, (r, rows) in enumerate(self.row_taps):
            between[:, :, a, :, rows] = narrow[..., r, :]
        by_tap = self._by_tap(columns)
        for b, (c, cols) in enumerate(self.column_taps):
            by_tap[:, :, :, b, ..., cols] = between[..., c]
        return columns

    def narrow(self, wide: Tensor, bias: Tensor | None = None) -> Tensor:
        """Wide → narrow: the taps of P = MX, added where they belong; and a bias of the narrow channels."""
        columns, between = (room[: len(wide)] for room in self.rooms.products)
        torch.bmm(self._repeated(len(wide)), self._split(wide), out=self._flat(columns))
        between = _add_taps(self._by_tap(columns).movedim(3, 0), self.column_taps, -1, between)
        out = wide.new_empty(len(wide), *self.narrow_shape)
        total = out.unflatten(1, (self.groups, -1))
        total.copy_(_add_taps(between.movedim(2, 0), self.row_taps, -2, total))
        return out if bias is None else out.add_(bias[:, None, None])

    def widen(self, columns: Tensor, out: Tensor, onto: Tensor | None = None, sign: int = 1) -> None:
        """Narrow → wide: out = MᵀP, or onto ± MᵀP."""
        left, right = self._repeated(len(columns)).mT, self._flat(columns)
        if onto is None:
            torch.bmm(left, right, out=self._split(out))
        else:
            torch.baddbmm(self._split(onto), left, right, alpha=sign, out=self._split(out))

    @property
    def many_channels(self) -> bool:
        """Whether the matrix is larger than the columns of an image: then it is read once for many images."""
        return self.matrix.shape[2] > math.prod(self.wide_shape[1:])

    def at_once(self, x: Tensor, to_narrow: bool) -> Tensor:
        """Wide → narrow or back, of some images as if they lay side by side in one."""
        taps, size = (len(self.row_taps), len(self.column_taps), self.channels), (len(x), *self.wide_shape[1:])
        x = x.unflatten(1, (self.groups, -1)).permute(1, 2, 0, 3, 4)  # (groups, channels, images, rows, columns)
        between = x.new_empty(self.groups, taps[0], self.channels, *size[:2], self.narrow_shape[2])
        if to_narrow:
            columns = torch.bmm(self.matrix, x.reshape(self.groups, -1, math.prod(size)))
            by_tap = columns[:, : math.prod(taps)].unflatten(1, taps).unflatten(-1, size)
            between = _add_taps(by_tap.movedim(2, 0), self.column_taps, -1, between)
            room = x.new_empty(self.groups, self.channels, size[0], *self.narrow_shape[1:])
            out = _add_taps(between.movedim(1, 0), self.row_taps, -2, room)
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
        """Zero, for `add_gradient` to add to."""
        return torch.zeros_like(self.matrix.mT)

    def add_gradient(self, total: Tensor, columns: Tensor, wide: Tensor, sign: int = 1) -> None:
        """total ± the derivative of ⟨P, MX⟩ with respect to Mᵀ."""
        each = torch.bmm(self._split(wide), self._flat(columns).mT)
        total.add_(each.unflatten(0, (-1, self.groups)).sum(0), alpha=sign)

    def weight_of(self, total: Tensor) -> Tensor:
        """A matrix of Mᵀ's shape as a kernel."""
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


def _add_taps(by_tap: Tensor, taps: Sequence[Places], axis: int, room: Tensor) -> Tensor:
    """Along one axis, what the taps of the wide side add up to on the narrow one, in `room` or in place of a tap.

    A tap that joins all of one side to all of the other, as the middle one does where sizes are kept, needs no room.
    """
    everything = slice(0, room.shape[axis])
    same = by_tap.shape[axis] == room.shape[axis]
    whole = [i for i, places in enumerate(taps) if same and places == (everything, everything)]
    total = by_tap[whole[0]] if whole else room.zero_()
    for i, (narrow, wide) in enumerate(taps):
        if i not in whole[:1]:
            _along(total, axis, narrow).add_(_along(by_tap[i], axis, wide))
    return total


def _along(t: Tensor, axis: int, where: slice) -> Tensor:
    return t[..., where] if axis == -1 else t[..., where, :]


class _Rooms:
    """Memory for the columns of a chunk, and for what has its row taps taken apart but not yet its column taps.

    Gathered columns begin as zero, and places that no tap reaches stay so.
    """

    def __init__(self, of: Columns) -> None:
        height, width = of.wide_shape[1:]
        self.shapes = (
            (*of.matrix.shape[:2], height, width),
            (of.groups, len(of.row_taps), of.channels, height, of.narrow_shape[2]),
        )
        self.matrix, self.chunk = of.matrix, 0

    def fit(self, cache: int) -> int:
        """How many images have columns of so many bytes."""
        return max(1, cache // (math.prod(self.shapes[0]) * self.matrix.element_size()))

    def open(self, batch: int) -> int:
        """How many images of a batch make a chunk, with room for them."""
        chunk = min(self.fit(CACHE_BYTES), max(1, batch))
        if chunk != self.chunk:
            self.chunk = chunk
            self.gathered = [self.matrix.new_zeros(chunk, *shape) for shape in self.shapes]
            self.products = [self.matrix.new_empty(chunk, *shape) for shape in self.shapes]
        return chunk


def matrix_of(op: ConvOperator) -> Tensor:
    """The matrix M of a convolution: what does not depend on the images  # (groups, taps · narrow, wide)."""
    blocks = op.kernel.unflatten(0, (op.groups, -1)).flatten(3).permute(_sides(op)[1])
    return F.pad(blocks.flatten(1, 2), (0, 0, 0, -blocks.shape[1] * blocks.shape[2] % LANES))


def _sides(op: ConvOperator) -> tuple[bool, tuple[int, ...]]:
    """Whether the output is narrow; and the order from (groups, out, in, taps) to (groups, taps, narrow, wide)."""
    out_is_narrow = op.kernel.shape[0] <= op.kernel.shape[1] * op.groups
    return out_is_narrow, (0, 3, 1, 2) if out_is_narrow else (0, 3, 2, 1)


def run(op: ConvOperator, x: Tensor, forward: bool = True, matrix: Tensor | None = None) -> Tensor:
    """Wx, or else Wᵀx; `matrix` is `matrix_of(op)`, if it is known."""
    if op.padding_mode == "circular":
        size = [axis.size + axis.before + axis.after for axis in (op.rows, op.columns)]
        unpadded = ConvOperator(op.kernel, **dict(op.geometry, in_size=size, padding=0, padding_mode="zeros"))
        return run(unpadded, op.pad(x), True, matrix) if forward else op.unpad(run(unpadded, x, False, matrix))
    columns, x = Columns(op, matrix=matrix), x.contiguous()
    out = x.new_empty(len(x), *(op.out_shape if forward else op.in_shape))
    if columns.many_channels and len(x) > 1:
        size = columns.rooms.fit(MANY_BYTES)
        for part, room in zip(x.split(size), out.split(size), strict=True):
            room.copy_(columns.at_once(part, forward == columns.out_is_narrow))
        return out
    for part in columns.chunks(len(x)):
        if forward == columns.out_is_narrow:
            out[part] = columns.narrow(x[part])
        else:
            columns.widen(columns.unfold(x[part]), out[part])
    return out


def _places(axis: Axis) -> Iterator[Places]:
    """Of each tap j of an axis, the inputs i·stride + j·dilation - before that it reads, and the outputs i it feeds."""
    for j in range(axis.kernel):
        offset = j * axis.dilation - axis.before
        first = max(0, -(offset // axis.stride))
        last = max(first, min(axis.outputs, (axis.size - 1 - offset) // axis.stride + 1))
        start, stop = first * axis.stride + offset, (last - 1) * axis.stride + offset + 1
        step = axis.stride if axis.stride > 1 else None
        yield slice(start, max(start, stop), step), slice(first, last)
