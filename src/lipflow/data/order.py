"""The order in which an epoch visits the images, and the part of each batch for a rank.

A batch is always the *global* batch, so that the number of processes does not change the result:

    for batch in batches(len(split), 256, seed, epoch):
        mine = share(batch, rank, world)        # weight its mean loss by len(mine) · world / len(batch) under DDP
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lipflow.data.counter import ORDER, bits, key


def permutation(n: int, seed: int, epoch: int) -> Tensor:
    """A permutation of {0, …, n-1}: the indices in the order of their random keys (Note [counter-based randomness])."""
    return bits(key(ORDER, seed, epoch), torch.arange(n)).argsort(stable=True)


def steps_per_epoch(n: int, batch_size: int) -> int:
    """The number of batches in an epoch, ⌈n / batch_size⌉: the last one may be short."""
    if n < 1 or batch_size < 1:
        raise ValueError(f"no batch of {batch_size} can be drawn from {n} images")
    return -(-n // batch_size)


def batches(n: int, batch_size: int, seed: int, epoch: int, *, start: int = 0) -> Iterator[Tensor]:
    """The global batches of an epoch as index tensors, from number `start` on (where a run resumes)."""
    steps = steps_per_epoch(n, batch_size)
    order = permutation(n, seed, epoch)
    return (order[step * batch_size : (step + 1) * batch_size] for step in range(start, steps))


def share(items: Tensor, rank: int, world: int) -> Tensor:
    """The contiguous part of `items` for rank `rank` of `world`; the lengths of the parts differ by at most one.

    Concatenated over the ranks, the parts are `items`. A part is empty if there are fewer items than ranks.
    """
    if not 0 <= rank < world:
        raise ValueError(f"rank must be in [0, {world}); got {rank}")
    n = len(items)
    return items[rank * n // world : (rank + 1) * n // world]
