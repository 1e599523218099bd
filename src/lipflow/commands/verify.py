"""`lipflow check RUN`: the independent checker, by the name people look for."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Check:
    """Verify a certificate with the independent checker, which needs NumPy alone."""

    run: Path
    """The folder that holds certificate.json."""
    full: bool = False
    """Recompute the scores of every image, not of a sample."""


def check(arguments: Check) -> int:
    """Accept (0) or reject (1), and say why."""
    from lipflow.check import main

    return main([str(arguments.run), *(["--full"] if arguments.full else [])])
