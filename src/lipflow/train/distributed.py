"""Training with one process or several: the ranks, their shares and their collective operations.

All settings refer to the *global* batch, so the result does not depend on the number of processes:
`torchrun --nproc-per-node=2 -m lipflow train …` has the loss curve of one process, up to rounding.
"""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # see Note [leaving a process group]
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from lipflow.data import share
from lipflow.train.signals import ProcessLost

T = TypeVar("T")

_GROUPS = itertools.count()
LEAVE_SECONDS = 5.0  # after an error: the wait for collectives, and then for the end of the process that failed


@dataclass(frozen=True)
class Ranks:
    """This process, one of `world`, and its device."""

    rank: int
    world: int
    device: torch.device
    wrapped: list[nn.Module] = field(default_factory=list, repr=False, compare=False)  # results of `wrap`

    @property
    def first(self) -> bool:
        """Only the first rank writes files and prints."""
        return self.rank == 0

    def share(self, items: Tensor) -> Tensor:
        """The part of `items` of this rank; it may be empty."""
        return share(items, self.rank, self.world)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sums over the ranks, the same on each."""
        if self.world == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.tolist()

    def gather(self, parts: list[T]) -> list[T]:
        """The concatenated lists of all ranks, on each."""
        if self.world == 1:
            return parts
        gathered: list[list[T]] = [[] for _ in range(self.world)]
        dist.all_gather_object(gathered, parts)
        return [part for rank in gathered for part in rank]

    def agree(self, value: int) -> int:
        """The first rank's value, on every rank."""
        return round(self.sum([value if self.first else 0])[0])

    def require_same(self, **parts: str) -> None:
        """Raise an error, on every rank, that names the parts that differ between ranks."""
        every = self.gather([parts])
        if other := [name for name in parts if len({of_rank[name] for of_rank in every}) > 1]:
            raise ValueError(
                f"the processes do not have the same {' and '.join(other)}; start all with the same command and data"
            )

    def in_turn(self, action: Callable[[], T]) -> T:
        """Run `action` on the first rank, then on the others, which find the files that the first has downloaded."""
        result = action() if self.first else None
        self.wait()
        return action() if result is None else result

    def wait(self) -> None:
        """Wait for all ranks."""
        self.sum([0.0])

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network whose backward pass averages gradients over the ranks.

        Each forward pass starts with the buffers of the first rank, so power-iteration vectors are equal on all ranks.
        As they depend on the weights alone, this makes no difference on equal machines.
        """
        if self.world == 1:
            return network
        device_ids = [self.device] if self.device.type == "cuda" else None
        self.wrapped.append(DistributedDataParallel(network, device_ids=device_ids))
        return self.wrapped[-1]


# Note [leaving a process group]
# The threads of a gloo group end when its last reference is deleted. A thread that still runs when the interpreter has
# ended aborts the process: it deletes the tensor of the last collective, waits for the GIL, and is ended in a
# destructor. So no reference to the group may be left once it is destroyed. Two objects hold one:
# - DistributedDataParallel, which the frames of a traceback may keep alive. Its attributes are deleted.
# - torch.distributed.nn, if it is imported when a group exists: its functions have the group as a default argument.
#   DistributedDataParallel imports it, so it is imported above, before a group exists.


@contextmanager
def join(device: str) -> Iterator[Ranks]:
    """The process group of torchrun, or this process alone.

    A group that the caller has initialised is used and left as it is. A group that is initialised here is always
    destroyed, with its threads.
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
        _init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    ranks = Ranks(dist.get_rank(), world, chosen)
    try:
        yield ranks
    except BaseException as error:
        _leave(ranks, own, LEAVE_SECONDS)
        if isinstance(error, RuntimeError) and "gloo/transport" in str(error):
            time.sleep(LEAVE_SECONDS)  # torchrun reports the process that ends first, which should be the failed one
            raise ProcessLost("another process has ended early; see its own message") from error
        raise
    _leave(ranks, own)


def _init_process_group(backend: str) -> None:
    """A group of the processes that torchrun has started, with its own prefix of keys in their store.

    Without the prefix, a second group would read the addresses that the first one wrote there.
    """
    # One rank may read the data or certify for hours while the others wait, and torch's default is 10 minutes.
    timeout = timedelta(days=7)
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    store = PrefixStore(f"lipflow-{next(_GROUPS)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _leave(ranks: Ranks, own: bool, seconds: float | None = None) -> None:
    """Delete references to the process group, and destroy it if `own`; see Note [leaving a process group].

    Destroying it waits for the collectives of this process. After an error the other processes may never join them, so
    the wait is limited; otherwise all processes would wait for each other.
    """
    for module in ranks.wrapped:
        vars(module).clear()
    if not own:
        return
    if seconds is None:
        dist.destroy_process_group()
    else:
        thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
        thread.start()
        thread.join(seconds)


def choose_device(name: str, local_rank: int = 0) -> torch.device:
    """The device of a name; `auto` and `cuda` without a number are the GPU of this rank."""
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
    """A context with this number of CPU threads; 0 keeps the current number."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
