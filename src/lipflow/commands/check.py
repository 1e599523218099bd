"""`lipflow check RUN`: run the independent checker, `lipflow.check`, on the certificate of a run."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Check:
    """Verify a certificate with the independent checker, which needs NumPy alone."""

    run: Path
    """The folder that holds certificate.json, or its name in runs/."""
    full: bool = False
    """Recompute the scores of every image, not of a sample."""


def check(arguments: Check) -> int:
    """Accept (0) or reject (1), and print why. A missing certificate is a mistake of the user (2)."""
    from lipflow.check import main

    run, named = arguments.run, Path("runs") / arguments.run
    run = named if named.exists() and not run.exists() else run
    if not (run / "certificate.json").exists():
        here = "" if run.exists() else ", and no folder of that name here or in runs/"
        raise ValueError(f"there is no certificate in {run}{here}; run `lipflow certify {arguments.run}` first")
    return main([str(run), *(["--full"] if arguments.full else [])])
