"""`two_processes.py FOLDER MODE`: run on each rank of a test with two processes; writes a file for the test."""

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from lipflow.train import Result, budget, loop, train
from tests.train.clock import Clock
from tests.train.tiny import SGD, tiny

RANK = int(os.environ.get("RANK", "0"))


def weights(result: Result) -> dict[str, str]:
    state = result.network.state_dict()
    return {name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest() for name, tensor in state.items()}


def whole(folder: Path) -> object:
    result = train(tiny(folder, epochs=2, images=31, batch_size=3, **SGD))
    assert result.validation is not None
    return weights(result), result.validation.certified


def apart(folder: Path) -> object:
    """Each rank with a learning rate of its own."""
    try:
        return weights(train(tiny(folder, epochs=1, lr=0.1 * (1 + RANK))))
    except ValueError as error:
        return str(error)


def on_budget(folder: Path) -> object:
    """Each rank with a clock of its own: that of the second is three times as fast."""
    budget.time = loop.time = Clock(0.005 * (1 + 2 * RANK))  # pyright: ignore[reportAttributeAccessIssue]
    return weights(train(replace(tiny(folder, images=1197, batch_size=100), budget="3s", certify_validation=0)))


if __name__ == "__main__":
    out, mode = Path(sys.argv[1]), {"whole": whole, "apart": apart, "on_budget": on_budget}[sys.argv[2]]
    (out / f"rank-{RANK}.json").write_text(json.dumps(mode(out / "run")))
