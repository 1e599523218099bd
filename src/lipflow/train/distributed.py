"""One process or many: who am I, what is my part, and how do we agree.

Every number is that of the *global* batch, so the number of processes changes who computes and never what:
`torchrun --nproc-per-node=2 -m lipflow train …` draws the loss curve of one process, up to rounding.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lipflow.data import share
from lipflow.train.ending import Interrupted

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among `world` of them, and the device it computes on."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        """Only the first rank writes files and prints."""
        return self.rank == 0

    def share(self, items: Tensor) -> Tensor:
        """The part of `items` that falls to this rank; it may be empty."""
        return share(items, self.rank, self.world)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, the same on each."""
        if self.world == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, parts: list[T]) -> list[T]:
        """The lists of all ranks, one after the other, on each."""
        if self.world == 1:
            return parts
        gathered: list[list[T]] = [[] for _ in range(self.world)]
        dist.all_gather_object(gathered, parts)
        return [part for rank in gathered for part in rank]

    def agree(self, value: int) -> int:
        """The first rank's value, on every rank."""
        return round(self.sum([value if self.first else 0])[0])

    def require_same(self, **parts: str) -> None:
        """Refuse, on every rank, what is not the same on all; the error says what that is."""
        every = self.gather([parts])
        if other := [name for name in parts if len({of_rank[name] for of_rank in every}) > 1]:
            raise ValueError(f"the processes do not have the same {' and '.join(other)}; start each as the first one")

    def in_turn(self, action: Callable[[], T]) -> T:
        """Let the first rank act before the others, so that they find what it has downloaded."""
        result = action() if self.first else None
        self.wait()
        return action() if result is None else result

    def wait(self) -> None:
        """Until every rank is here."""
        self.sum([0.0])

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network whose backward pass averages gradients over the ranks.

        It starts each forward pass with the first rank's buffers, so that power-iteration vectors are equal on all
        ranks by construction; they depend on the weights alone, so this changes nothing on equal machines.
        """
        if self.world == 1:
            return network
        return DistributedDataParallel(network, device_ids=[self.device] if self.device.type == "cuda" else None)


@contextmanager
def join(device: str) -> Iterator[Ranks]:
    """The process group that torchrun has set up for us, or this process alone.

    A group that the caller has initialised is used, and left as it is. So is ours after an error: the others may wait
    for this process, and NCCL would wait for them.
    """
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Ranks(0, 1, choose_device(device))
        return
    chosen = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")))
    own = not dist.is_initialized()
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if own:
        # One rank may read the data, or certify, for hours while the others wait; torch's default is 10 minutes.
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo", timeout=timedelta(days=7))
    try:
        yield Ranks(dist.get_rank(), world, chosen)
    except Interrupted:  # on all ranks at once
        if own:
            dist.destroy_process_group()
        raise
    if own:
        dist.destroy_process_group()


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of a name; `auto` and a bare `cuda` are this rank's own GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"there is no device {name!r}; use auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"--device {name}: torch finds no GPU here; use --device cpu")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", local_rank)
    try:
        torch.empty(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).split("\n")[0].split(". ")[0]
        raise ValueError(f"--device {name} cannot be used here: {why}") from None
    return device


@contextmanager
def threads(number: int) -> Iterator[None]:
    """So many CPU threads for a while; 0 is as many as there are now. A small network runs best as it was trained."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
