"""What learns: a network, its optimiser and its loss, and the two halves of a step."""

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from lipflow.data import Dataset, Split, augment, batches, steps_per_epoch, to_unit
from lipflow.losses import LOSSES, Loss
from lipflow.models import Network, build
from lipflow.train.distributed import Ranks
from lipflow.train.estimate import input_lipschitz
from lipflow.train.optimiser import load_state_tensors, make_optimiser, state_tensors
from lipflow.train.recipe import Recipe
from lipflow.train.run import Run


def make_network(run: Run, data: Dataset) -> Network:
    """The run's network with its initial weights, which depend on the seed and on nothing else."""
    inputs = {
        "mean": {"mean": list(data.mean)},
        "mean-std": {"mean": list(data.mean), "std": list(data.std)},
        "model": {},
    }
    if run.sizes.get("mirror") and not run.recipe.flip:
        raise ValueError(
            "with mirror=True the network is judged by mirror images too, and --no-flip leaves them out of training; "
            "add --flip, or drop mirror=True"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        sizes = {**inputs[run.recipe.inputs], "lln": run.recipe.lln, **run.sizes}
        return build(run.model, data.classes, data.shape, **sizes)


def make_loss(recipe: Recipe, network: Network) -> Loss:
    """The recipe's loss, with those of the run's numbers that are its fields."""
    kind = LOSSES[recipe.loss]
    assert dataclasses.is_dataclass(kind)
    numbers = {**dataclasses.asdict(recipe), "lipschitz": input_lipschitz(network)}
    return kind(**{field.name: numbers[field.name] for field in dataclasses.fields(kind)})


class Learner:
    """Everything that a training step changes. A step is `gradients`, then `update`."""

    def __init__(self, network: Network, run: Run, split: Split, ranks: Ranks) -> None:
        self.network = network.to(ranks.device).train()
        self.run, self.split, self.ranks = run, split, ranks
        self._augmented(torch.zeros(1, dtype=torch.int64), 0)  # refuses images that the recipe does not fit
        self.network.recompute_activations(run.checkpoint_activations)
        self.loss = make_loss(run.recipe, network)
        self.parallel = ranks.wrap(network)
        self.optimiser = make_optimiser(network, run.recipe)

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(len(self.split), self.run.recipe.batch_size)

    def visits(self, start: int) -> Iterator[tuple[int, int, Tensor]]:
        """(step, epoch, indices of the global batch) from step `start` on, all counted from 0, without end."""
        step = start
        while True:
            epoch, first = divmod(step, self.steps_per_epoch)
            for batch in batches(len(self.split), self.run.recipe.batch_size, self.run.seed, epoch, start=first):
                yield step, epoch, batch
                step += 1

    def gradients(self, batch: Tensor, epoch: int) -> float:
        """Leave the gradient of the batch's mean loss in the parameters; return this rank's share of that mean.

        The rank sums over its part and divides by the size of the whole batch. DistributedDataParallel takes the mean
        over the ranks, hence the factor `world`: parts may differ in size, or be empty, and the gradient is the same.
        """
        part = self.ranks.share(batch)
        images = self._augmented(part, epoch)
        labels = self.split.labels[part].to(self.ranks.device)
        self.optimiser.zero_grad(set_to_none=True)
        with self._precision():
            logits = self.parallel(to_unit(images)).float()
        share = self.loss.each(logits, labels, self.network.head).sum() / len(batch)
        (share * self.ranks.world).backward()
        return share.item()

    def _augmented(self, part: Tensor, epoch: int) -> Tensor:
        recipe, images = self.run.recipe, self.split.images[part].to(self.ranks.device)
        if not (recipe.pad or recipe.flip or recipe.erase):
            return images
        return augment(
            images,
            part,
            self.run.seed,
            epoch,
            pad=recipe.pad,
            mode=recipe.pad_mode,
            flip=recipe.flip,
            erase=recipe.erase,
        )

    def _precision(self) -> AbstractContextManager[object]:
        """What the recipe says products are computed in."""
        low = self.run.recipe.precision == "bfloat16"
        return torch.autocast(self.ranks.device.type, torch.bfloat16) if low else nullcontext()

    def update(self, rate: float) -> None:
        """Move the parameters along their gradients."""
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()

    def tensors(self) -> dict[str, Tensor]:
        """The whole state, by name: weights and buffers, and the optimiser's."""
        return {
            **{f"network.{name}": tensor for name, tensor in self.network.state_dict().items()},
            **{f"optimiser.{name}": tensor for name, tensor in state_tensors(self.optimiser).items()},
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take up a state that `tensors` gave. It is copied, so that memory is aligned as if it had been computed."""

        def of(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v.clone() for k, v in tensors.items() if k.startswith(prefix)}

        self.network.load_state_dict(of("network."))
        self.optimiser = make_optimiser(self.network, self.run.recipe)
        load_state_tensors(self.optimiser, of("optimiser."))
