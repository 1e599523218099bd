"""One process or many: who am I, what is my part, and how do we agree.

Every number is that of the *global* batch, so the number of processes changes who computes and never what:
`torchrun --nproc-per-node=2 -m lipflow train …` draws the loss curve of one process, up to rounding.
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
from lipflow.train.ending import ProcessLost

T = TypeVar("T")

_GROUPS = itertools.count()
LEAVE_SECONDS = 5.0  # after an error: the limit on waiting for collectives, and a lead for the process that failed


@dataclass(frozen=True)
class Ranks:
    """This process among `world` of them, and the device it computes on."""

    rank: int
    world: int
    device: torch.device
    wrapped: list[nn.Module] = field(default_factory=list, repr=False, compare=False)  # what `wrap` has returned

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
        device_ids = [self.device] if self.device.type == "cuda" else None
        self.wrapped.append(DistributedDataParallel(network, device_ids=device_ids))
        return self.wrapped[-1]


# Note [leaving a process group]
# The threads of a gloo group end when its last reference is dropped. A thread that outlives the interpreter aborts the
# process: it drops the tensor of the last collective, asks for the GIL, and is ended inside of a destructor. So nothing
# may refer to the group once it is destroyed. Two things do:
# - DistributedDataParallel. Frames of a traceback may refer to it, so it is emptied.
# - torch.distributed.nn. Its functions have the group as a default argument if it is imported when there is a group,
#   which is what DistributedDataParallel does. So it is imported above, before there is one.


@contextmanager
def join(device: str) -> Iterator[Ranks]:
    """The process group that torchrun has set up for us, or this process alone.

    A group that the caller has initialised is used, and left as it is. A group of our own is destroyed, and no thread
    of it is left, however the block ends.
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
            time.sleep(LEAVE_SECONDS)  # torchrun reports the first process to end; let the one that failed end first
            raise ProcessLost("another process has ended early; its own message says why") from error
        raise
    _leave(ranks, own)


def _init_process_group(backend: str) -> None:
    """A group of the processes that torchrun has started, with keys of its own in their store.

    A second group with the keys of the first one would read the addresses that the first one left there.
    """
    # One rank may read the data, or certify, for hours while the others wait; torch's default is 10 minutes.
    timeout = timedelta(days=7)
    store, rank, world = next(rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    store = PrefixStore(f"lipflow-{next(_GROUPS)}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _leave(ranks: Ranks, own: bool, seconds: float | None = None) -> None:
    """Let go of the process group, and destroy it if it is our own; see Note [leaving a process group].

    Destroying waits for this process's collectives. After an error some may have begun that the other processes never
    join, so the wait has a limit; without one, this process and the others would wait for each other.
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
