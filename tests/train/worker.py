"""What each rank of test_distributed runs: a tiny run, and a digest of all that it ends with."""

import hashlib
import json
import os
import sys
from pathlib import Path

from lipflow.train import train
from tests.train.tiny import SGD, tiny

if __name__ == "__main__":
    out, resume, rank = Path(sys.argv[1]), "--resume" in sys.argv, os.environ["RANK"]
    if "--apart" in sys.argv:
        try:
            train(tiny(out / "run", epochs=1, lr=0.1 * (1 + int(rank))))
        except ValueError as error:
            (out / f"rank-{rank}.txt").write_text(str(error))
        sys.exit()
    result = train(tiny(out / "run", epochs=2, images=31, batch_size=3, **SGD), resume)
    state = {
        name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()
        for name, tensor in result.network.state_dict().items()
    }
    assert result.validation is not None
    (out / f"rank-{rank}.json").write_text(json.dumps([state, result.validation.certified]))
