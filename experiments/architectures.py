"""Table 1: the sizes of CPL-S, M, L and XL, ordered by their number of parameters. No training is needed."""

from typing import Any

from experiments.draw import bars
from experiments.experiment import Claim, Column, Experiment, Rows, Verdict, holds
from lipflow.report.published import ARCHITECTURES, PAPER, TABLES

SIZES = ("conv. layers", "channels", "lin. layers", "lin. features")
TITLES = {model: TABLES["cifar10"][model].title for model in ARCHITECTURES}


def networks() -> dict[str, list[dict[str, Any]]]:
    """The sizes of the networks, counted in the built networks; their weights take no memory (device "meta")."""
    import torch

    from lipflow.flows import ConvexPotential, Flow
    from lipflow.models import build

    found = {}
    for model, title in TITLES.items():
        with torch.device("meta"):
            network = build(model)
        fields = (flow.field for flow in network.modules() if isinstance(flow, Flow))
        weights = [field.weight.weight for field in fields if isinstance(field, ConvexPotential)]
        conv, dense = ([w for w in weights if w.ndim == n] for n in (4, 2))
        counted = dict(zip(SIZES, (len(conv), conv[0].shape[1], len(dense), dense[0].shape[0]), strict=True))
        found[title] = [{**counted, "parameters": sum(p.numel() for p in network.parameters())}]
    return found


def as_published(rows: Rows) -> Verdict:
    ours = {title: tuple(rows.values(title, size)[0] for size in SIZES) for title in TITLES.values()}
    theirs = {TITLES[model]: sizes for model, sizes in ARCHITECTURES.items()}
    return holds(ours == theirs, ", ".join(f"{title} {'/'.join(map(str, sizes))}" for title, sizes in ours.items()))


def ordered(rows: Rows) -> Verdict:
    counts = [rows.values(title, "parameters")[0] for title in TITLES.values()]
    text = ", ".join(f"{t} {n / 1e6:.1f} M" for t, n in zip(TITLES.values(), counts, strict=True))
    return holds(counts == sorted(set(counts)), text)


EXPERIMENTS = (
    Experiment(
        name="architectures",
        title="Architectures of CPL-S, M, L and XL",
        source=f"{PAPER}, Table 1",
        claims=(
            Claim("The networks have the published layers, channels and features.", as_published),
            Claim("S, M, L and XL are in the order of their number of parameters.", ordered),
        ),
        columns=(
            *(Column(size, (size,), percent=False) for size in SIZES),
            Column("parameters", ("parameters",), percent=False),
        ),
        draw=bars("parameters", "parameters"),
        fixed=networks,
        published={
            TITLES[model]: dict(zip(SIZES, map(float, sizes), strict=True)) for model, sizes in ARCHITECTURES.items()
        },
    ),
)
