"""`lipflow attack RUN`: L2-PGD against the certified network, beside what it certifies.

attack.json    how it was attacked, and per ε which images still had their label
attack.npz     some images for a gallery: the strongest attack in the certified ball, and the nearest adversarial found
"""

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipflow.commands.kept import Kept

if TYPE_CHECKING:
    from torch import Tensor

    from lipflow.attack import PGD
    from lipflow.frozen import Frozen
    from lipflow.report.run_results import Certificate, Outcome
    from lipflow.train.distributed import Ranks

AT_ONCE = 100  # images between two signs of progress
FEW = 4  # images of the gallery between two signs of progress: each takes many attacks


@dataclass(frozen=True)
class Attack:
    """Attack the network that was certified with L2-PGD, as the authors do, and show the accuracy that is left."""

    run: Path
    """The folder of a run, or its name in runs/, after `lipflow certify`; or a pretrained network by name."""
    epsilon: tuple[str, ...] = ()
    """Radii, such as 36/255 0.5 (default: those of the run's recipe)."""
    steps: int = 10
    """Steps of an attack, each of ε/5."""
    restarts: int = 1
    """How often it starts again from another point of the ball."""
    images: int | None = None
    """Only the first so many certified images (None: all)."""
    seed: int = 0
    """Of the random starts."""
    gallery: int = 24
    """So many images, spread over the radii, are attacked further for the gallery of `lipflow report` (0: none)."""

    def __post_init__(self) -> None:
        for name, least in (("images", 1), ("steps", 0), ("restarts", 1), ("gallery", 0)):
            given = getattr(self, name)
            if given is not None and given < least:
                raise ValueError(f"--{name} must be at least {least}, not {given}")


def attack(arguments: Attack) -> int:
    """Attack, each rank its share, with as many threads as the run was trained with."""
    from lipflow.pretrained import folder_of
    from lipflow.train.distributed import join, threads
    from lipflow.train.recipe import Recipe
    from lipflow.train.record import Record

    arguments = replace(arguments, run=folder_of(arguments.run))
    trained = (arguments.run / "run.json").is_file()  # or it holds a certificate alone, of a network of the user's own
    recipe = Record.read(arguments.run).run.recipe if trained else Recipe()
    with join("cpu") as ranks, threads(recipe.threads):
        return over_ranks(arguments, recipe.radii, ranks)


def over_ranks(arguments: Attack, radii: tuple[str, ...], ranks: "Ranks") -> int:
    """Attack, write the outcome, and print the table; certified ≤ attacked ≤ clean, or something is wrong (1)."""
    import torch
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from lipflow import record
    from lipflow.attack import PGD, pgd
    from lipflow.files import sha256
    from lipflow.frozen import Frozen
    from lipflow.report.run_results import Examples, Outcome, read_certificate
    from lipflow.report.table import percent
    from lipflow.rounding import down
    from lipflow.train.recipe import radius

    weights, rows, claims = (arguments.run / name for name in (record.WEIGHTS, record.ROWS, record.CLAIMS))
    if not (weights.is_file() and rows.is_file() and claims.is_file()):
        raise ValueError(f"{arguments.run} holds no certificate; run `lipflow certify {arguments.run}` first")
    names = sorted(arguments.epsilon or radii, key=radius)
    eps = [radius(name) for name in names]
    held = read_certificate(arguments.run)  # and its digest now: it may be written anew before the attack has ended
    if sha256(weights) != json.loads(claims.read_text())["files"].get(record.WEIGHTS):
        raise ValueError(f"{weights} is not the network of {claims}; run `lipflow certify {arguments.run}` again")
    found = {k: torch.from_numpy(getattr(held, k)[: arguments.images]) for k in ("images", "truth", "label", "radius")}
    found |= {k: found[k].long() for k in ("truth", "label")}
    if not len(found["truth"]):
        raise ValueError(f"{rows} holds no images to attack; run `lipflow certify {arguments.run}` again")
    if not bool(((found["truth"] >= 0) & (found["truth"] < held.logits.shape[1])).all()):
        raise ValueError(
            f"{rows} has images whose true class is none of the {held.logits.shape[1]}: it is what would be attacked"
        )
    frozen, how = Frozen.load(weights), PGD(steps=arguments.steps, restarts=arguments.restarts, seed=arguments.seed)

    def attacked(images: "Tensor", truth: "Tensor", index: "Tensor") -> dict[str, "Tensor"]:
        return {"success": pgd(frozen, images, truth, eps, how, index).success}

    given = [ranks.share(part) for part in (found["images"], found["truth"], torch.arange(len(found["truth"])))]
    kept = Kept(f"attack {frozen.digest} {how} {eps}")
    parts = ranks.gather(kept.through(attacked, given, AT_ONCE, "attacking", ranks.first))
    broken = torch.cat([part["success"] for part in parts])  # (images, radii): wrong to begin with counts as broken
    if not ranks.first:
        return 0
    right = found["label"] == found["truth"]
    title = Text(f"{arguments.run}: {len(right)} images under L2-PGD")  # a name is text, whatever brackets are in it
    table = Table("radius", "certified", "under attack", title=title)
    table.add_row("0 (clean)", *[percent(float(right.double().mean()))] * 2)
    standing = {name: ~broken[:, column] for column, name in enumerate(names)}
    for name, ball in zip(names, eps, strict=True):
        both = right & (found["radius"] > down(ball)), standing[name]
        table.add_row(name, *(percent(float(flags.double().mean())) for flags in both))
    said = {"attack": "L2-PGD", **asdict(how), "certificate": held.digest, "clean": right.tolist()}
    said["standing"] = {name: flags.tolist() for name, flags in standing.items()}
    write(arguments.run, said)  # before anything that may be interrupted: the table, and the gallery, which takes long
    columns = {name: flags.numpy() for name, flags in standing.items()}
    outcome = Outcome(how.steps, how.restarts, right.numpy(), columns, None)
    sound = alarm(held, outcome)
    Console().print(table)
    if arguments.gallery > 0:
        examples = further(frozen, found, how, arguments.gallery)
        sound &= alarm(held, replace(outcome, standing={}, examples=Examples(**examples)))
        write(arguments.run, said, examples)
    kept.forget()
    return 0 if sound else 1


def alarm(held: "Certificate", outcome: "Outcome") -> bool:
    """Whether an attack leaves a certificate as it is; if not, that is said at once."""
    from lipflow.report.consistency import refuted

    found = refuted(held, outcome)
    for text in found:
        print(f"CONTRADICTION: {text}", file=sys.stderr)
    if found:
        print("this is a bug in lipflow; please report it with the folder of the run", file=sys.stderr)
    return not found


def write(folder: Path, said: dict[str, Any], columns: dict[str, Any] | None = None) -> None:
    """Write attack.json, and attack.npz if there are examples: at every moment the former speaks of what is there."""
    import numpy as np

    from lipflow.attack import EXAMPLES, OUTCOMES
    from lipflow.files import sha256, write_atomic

    def fill(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, **(columns or {}))

    outcomes, examples = folder / OUTCOMES, folder / EXAMPLES
    if columns is not None:
        write_atomic(examples, fill)
        said = {**said, "examples": sha256(examples)}
    write_atomic(outcomes, lambda temporary: temporary.write_text(json.dumps(said)))
    if columns is None:
        examples.unlink(missing_ok=True)  # of an attack before
    print(f"wrote {outcomes if columns is None else examples}")


def further(frozen: "Frozen", found: dict[str, "Tensor"], how: "PGD", count: int) -> dict[str, Any]:
    """Some images, evenly spread by rank of radius, attacked where their certificate speaks and where it ends.

    The label attacked is the one that the network gave, be it right or wrong, as that is what is certified. `inside`
    is the strongest image in the largest ball below the radius; `nearest` has another label, if any was found.
    """
    import numpy as np
    import torch

    from lipflow.commands.progress import through

    order, count = found["radius"].argsort(stable=True), min(count, len(found["radius"]))
    index = order[torch.linspace(0, len(order) - 1, count).round().long()]
    parts = [_further(frozen, found, how, part) for part in through(index.split(FEW), "attacking for the gallery:")]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _further(frozen: "Frozen", found: dict[str, "Tensor"], how: "PGD", index: "Tensor") -> dict[str, Any]:
    import torch

    from lipflow.attack import nearest, pgd

    images, label = found["images"][index], found["label"][index]
    ball = torch.nextafter(found["radius"][index], torch.zeros(1, dtype=torch.float64))
    inside = pgd(frozen, images, label, [ball], how, index)
    outside = nearest(frozen, images, label, attack=how, indices=index)
    scores = frozen(inside.images[:, 0])
    rivals = scores.scatter(1, label[:, None], -torch.inf).amax(1)
    columns = {
        "index": index,
        "inside": inside.images[:, 0],
        "inside_label": inside.label[:, 0],
        "inside_distance": inside.distance[:, 0],
        "inside_margin": scores.gather(1, label[:, None])[:, 0] - rivals,
        "found": outside.found,
        "nearest": outside.images,
        "nearest_label": outside.label,
        "nearest_distance": outside.distance,
    }
    return {name: column.detach().numpy() for name, column in columns.items()}
