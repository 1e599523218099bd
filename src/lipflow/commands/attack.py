"""`lipflow attack RUN`: L2-PGD against the certified network, beside what it certifies."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Attack:
    """Attack the network that was certified with L2-PGD, as the paper runs it, and show the accuracy that is left."""

    run: Path
    """The folder of a run, after `lipflow certify`."""
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


def attack(arguments: Attack) -> int:
    """Attack, write attack.json, and print the table; certified ≤ attacked ≤ clean, or something is wrong (1)."""
    import numpy as np
    import torch
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    from lipflow import record
    from lipflow.attack import PGD, pgd
    from lipflow.frozen import Frozen
    from lipflow.rounding import down
    from lipflow.train.recipe import radius
    from lipflow.train.record import Record

    weights, rows = (arguments.run / name for name in (record.WEIGHTS, record.ROWS))
    if not (weights.is_file() and rows.is_file()):
        raise ValueError(f"{arguments.run} holds no certificate; run `lipflow certify {arguments.run}` first")
    recipe = Record.read(arguments.run).run.recipe
    torch.set_num_threads(recipe.threads or torch.get_num_threads())  # a small network runs best as it was trained
    names = sorted(arguments.epsilon or recipe.radii, key=radius)
    eps = [radius(name) for name in names]
    with np.load(rows, allow_pickle=False) as columns:
        found = {k: torch.from_numpy(columns[k][: arguments.images]) for k in ("images", "truth", "label", "radius")}
    frozen, how = Frozen.load(weights), PGD(steps=arguments.steps, restarts=arguments.restarts, seed=arguments.seed)
    indices = torch.arange(len(found["truth"])).split(100)
    steps = track(indices, "attacking", transient=True) if len(indices) > 1 else indices
    parts = [pgd(frozen, found["images"][i], found["truth"][i], eps, how, i) for i in steps]
    broken = torch.cat([p.success for p in parts])  # (images, radii): wrong to begin with counts as broken
    right = found["label"] == found["truth"]
    table = Table("radius", "certified", "under attack", title=f"{arguments.run}: {len(right)} images under L2-PGD")
    clean, sound, outcome = float(right.double().mean()), True, {}
    table.add_row("0 (clean)", f"{clean:.2%}", f"{clean:.2%}")
    for column, (name, ball) in enumerate(zip(names, eps, strict=True)):
        certified = right & (found["radius"] > down(ball))
        standing = ~broken[:, column]
        sound &= not bool((certified & ~standing).any()) and float(standing.double().mean()) <= clean
        outcome[name] = standing.tolist()
        table.add_row(name, f"{float(certified.double().mean()):.2%}", f"{float(standing.double().mean()):.2%}")
    Console().print(table)
    text = json.dumps({"attack": "L2-PGD", **asdict(how), "clean": right.tolist(), "standing": outcome})
    (arguments.run / "attack.json").write_text(text)
    print(f"wrote {arguments.run / 'attack.json'}")
    if not sound:
        print("a certified image was broken: this is a bug in lipflow; please report it with the folder of the run")
    return 0 if sound else 1
