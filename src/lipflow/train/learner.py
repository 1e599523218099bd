"""A training step: the network, the loss and the optimiser, the gradients of a batch and the update."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lipflow.blocks import Householder
from lipflow.data import Dataset, Split, augment, batches, steps_per_epoch, to_unit
from lipflow.flows import Weight
from lipflow.models import Network, build
from lipflow.train.distributed import Ranks
from lipflow.train.recipe import SGD, Adam
from lipflow.train.run import Run
from lipflow.train.signals import NonFiniteLoss


def make_network(run: Run, data: Dataset) -> Network:
    """The network of a run with its initial weights, which depend on the seed alone."""
    normalize = {
        "mean": {"mean": list(data.mean)},
        "mean-std": {"mean": list(data.mean), "std": list(data.std)},
        "model": {},
    }
    if run.model_args.get("mirror") and not run.recipe.flip:
        raise ValueError(
            "with mirror=True the network also evaluates mirror images, and --no-flip leaves them out of training; "
            "add --flip, or drop mirror=True"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        arguments = {**normalize[run.recipe.normalize], "lln": run.recipe.lln, **run.model_args}
        try:
            return build(run.model, data.classes, data.shape, **arguments)
        except (RuntimeError, ArithmeticError, MemoryError, LookupError, AttributeError) as error:
            raise ValueError(f"{run.model} cannot be built with {arguments}: {' '.join(str(error).split())}") from error


def make_optimiser(network: nn.Module, chosen: Adam | SGD) -> Optimizer:
    """The torch optimiser of a recipe. Weight decay does not apply to the angles of activations."""
    angles = {id(p) for m in network.modules() if isinstance(m, Householder) for p in m.parameters()}
    options = asdict(chosen)
    decay = options.pop("weight_decay")
    decayed = [p for p in network.parameters() if id(p) not in angles]
    others = [p for p in network.parameters() if id(p) in angles]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    kinds = {Adam: torch.optim.Adam, SGD: torch.optim.SGD}
    return kinds[type(chosen)]([group for group in groups if group["params"]], fused=True, **options)


def state_tensors(optimiser: Optimizer) -> dict[str, Tensor]:
    """The state as "3.exp_avg" → tensor, by the number of the parameter; an unused momentum is None and left out."""
    state = optimiser.state_dict()["state"]
    return {
        f"{number}.{name}": torch.as_tensor(value)
        for number, entries in state.items()
        for name, value in entries.items()
        if value is not None
    }


def load_state_tensors(optimiser: Optimizer, tensors: dict[str, Tensor]) -> None:
    """The inverse of `state_tensors`. The optimiser keeps its hyperparameters, which are those of the run."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        number, name = key.split(".", 1)
        state.setdefault(int(number), {})[name] = tensor
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    names = {"momentum_buffer"} if isinstance(optimiser, torch.optim.SGD) else {"step", "exp_avg", "exp_avg_sq"}
    for number, entries in state.items():
        shape = parameters[number].shape if 0 <= number < len(parameters) else None
        same = [t.dtype == torch.float32 and t.shape == (() if n == "step" else shape) for n, t in entries.items()]
        if entries.keys() != names or not all(same):  # torch would read beyond the end of a tensor
            raise ValueError(f"the state of the optimiser does not fit parameter {number}")
    optimiser.load_state_dict({"state": state, "param_groups": optimiser.state_dict()["param_groups"]})


@torch.no_grad()
def diagnosis(network: Network) -> str:
    """The names of parameters that are NaN or infinite, and the estimated norm of each weight, one per line."""
    named = [*network.named_parameters(), *network.named_buffers()]
    bad = [name for name, tensor in named if not bool(torch.isfinite(tensor).all())]
    norms = [
        f"  {name}: {float(module.estimate(module.operator(None))):.4g}"
        for name, module in network.named_modules()
        if isinstance(module, Weight)
    ]
    return "\n".join(
        [f"not finite: {', '.join(bad) or 'no parameter'}", "norms of the layers' weights (estimated):", *norms]
    )


def require_finite(network: Network, step: int) -> None:
    """Raise on NaN or infinite weights: gradients can overflow while the loss is finite."""
    if not all(bool(torch.isfinite(tensor).all()) for tensor in network.state_dict().values()):
        raise NonFiniteLoss(f"after step {step} there are NaN or infinite weights.\n{diagnosis(network)}")


class Learner:
    """The state that a training step changes. A step is `gradients`, then `update`."""

    def __init__(self, network: Network, run: Run, split: Split, ranks: Ranks) -> None:
        self.network = network.to(ranks.device).train()
        self.run, self.split, self.ranks = run, split, ranks
        self._augmented(torch.zeros(1, dtype=torch.int64), 0)  # raises if the recipe does not fit the images
        self.network.recompute_activations(run.recompute_activations)
        self.loss = run.recipe.loss
        self.parallel = ranks.wrap(network)
        self.optimiser = make_optimiser(network, run.recipe.optimiser)

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(len(self.split), self.run.recipe.batch_size)

    def visits(self, start: int) -> Iterator[tuple[int, int, Tensor]]:
        """(step, epoch, indices of the global batch) from step `start` on, all counted from 0; it never ends."""
        step = start
        while True:
            epoch, first = divmod(step, self.steps_per_epoch)
            for batch in batches(len(self.split), self.run.recipe.batch_size, self.run.seed, epoch, start=first):
                yield step, epoch, batch
                step += 1

    def gradients(self, batch: Tensor, epoch: int) -> tuple[float, float]:
        """Compute the gradient of the mean loss of a batch; return this rank's shares of that mean and of the accuracy.

        A rank sums over its part and divides by the size of the whole batch. DistributedDataParallel averages over the
        ranks, hence the factor `world`. So the gradient is right even if parts differ in size or are empty.
        """
        part = self.ranks.share(batch)
        images = self._augmented(part, epoch)
        labels = self.split.labels[part].to(self.ranks.device)
        self.optimiser.zero_grad(set_to_none=True)
        low = self.run.recipe.precision == "bfloat16"
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=low):
            logits = self.parallel(to_unit(images)).float()
        share = self.loss.each(logits, labels, self.network.pair_constants()).sum() / len(batch)
        (share * self.ranks.world).backward()
        return share.item(), (logits.argmax(1) == labels).sum().item() / len(batch)

    def _augmented(self, part: Tensor, epoch: int) -> Tensor:
        recipe, images = self.run.recipe, self.split.images[part].to(self.ranks.device)
        return augment(
            images,
            part,
            self.run.seed,
            epoch,
            crop_padding=recipe.crop_padding,
            padding_mode=recipe.padding_mode,
            flip=recipe.flip,
            cutout=recipe.cutout,
        )

    def update(self, rate: float) -> None:
        """Take an optimiser step at a learning rate."""
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
        """Restore a state. The tensors are copied, so that their memory is aligned like that of computed tensors."""

        def of(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v.clone() for k, v in tensors.items() if k.startswith(prefix)}

        self.network.load_state_dict(of("network."))
        self.optimiser = make_optimiser(self.network, self.run.recipe.optimiser)
        load_state_tensors(self.optimiser, of("optimiser."))
