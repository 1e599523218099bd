"""One power iteration of many operators at once.

Convolutions of equal shape and geometry become the groups of one grouped convolution, instead of many small products.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from lipflow.operators import ConvOperator, LinearOperator
from lipflow.operators.columns import convolve
from lipflow.operators.norm import power_iteration
from lipflow.torch_state import without_autocast

MAX_GROUP = 32  # operators in one iteration: their vectors and columns are in memory at once


@torch.no_grad()
def joint_power_iteration(ops: Sequence[LinearOperator], us: Sequence[Tensor]) -> list[Tensor]:
    """The unit vectors WᵀWu/‖WᵀWu‖ of every operator W and its u."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for i, (op, u) in enumerate(zip(ops, us, strict=True)):
        # Matrices stay separate: stacking would copy them, and saves no reads.
        can_join = isinstance(op, ConvOperator) and not u.is_meta
        alike[(op.weight.shape, repr(op.geometry), u.dtype, u.device) if can_join else i].append(i)
    groups = [group[i : i + MAX_GROUP] for group in alike.values() for i in range(0, len(group), MAX_GROUP)]
    new: dict[int, Tensor] = {}
    for group in groups:
        if len(group) == 1:
            found = [power_iteration(ops[group[0]], us[group[0]], 1)]
        else:
            convolutions = [op for op in (ops[i] for i in group) if isinstance(op, ConvOperator)]
            found = _iterate_as_one(convolutions, torch.stack([us[i] for i in group]))
        new.update(zip(group, found, strict=True))
    return [new[i] for i in range(len(ops))]


def _iterate_as_one(ops: Sequence[ConvOperator], us: Tensor) -> list[Tensor]:
    count = len(ops)
    geometry = dict(ops[0].geometry, groups=count * ops[0].groups)
    op = ConvOperator(torch.cat([other.kernel.detach() for other in ops]), **geometry)
    with without_autocast(us):
        v = _units(_apply(op, us.reshape(1, *op.in_shape)), count)
        new = _units(_apply(op, v, forward=False), count).reshape(us.shape)
    flat = new.flatten(1)
    moved = (flat != 0).any(1) & flat.isfinite().all(1)  # u stays if W is zero, NaN or infinite
    return list(torch.where(moved.reshape(-1, *[1] * (us.ndim - 1)), new, us))


def _apply(op: ConvOperator, x: Tensor, forward: bool = True) -> Tensor:
    if op.padding_mode == "zeros" and x.device.type == "cpu":
        return convolve(op, x, forward)
    return op(x) if forward else op.adjoint(x)


def _units(x: Tensor, count: int) -> Tensor:
    """Each of `count` equal parts of x, divided by its norm; 0 stays 0."""
    parts = x.reshape(count, -1)
    scaled = parts / parts.abs().amax(1, keepdim=True)  # squares would overflow or vanish
    units = scaled / scaled.norm(dim=1, keepdim=True)
    return torch.where(parts.ne(0).any(1, keepdim=True), units, 0.0).reshape(x.shape)
