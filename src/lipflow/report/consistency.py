"""Check that certified ≤ attacked ≤ clean holds for each image.

A certificate states that no image in a ball has another label, so one such image refutes it, whatever the averages are.
An attack cannot correct a wrong label, and an attack that succeeds in a ball also does in every larger ball.
"""

from itertools import pairwise

import numpy as np

from lipflow.attack import Examples, Outcome
from lipflow.certificate import CertificateFile
from lipflow.radius import parse_radius
from lipflow.report.run_results import RunResults


def contradictions(run: RunResults) -> list[str]:
    """Describe each way in which the certificate and the attack of a run contradict each other."""
    if run.certificate is None or run.outcome is None:
        return []
    return [f"{run.name}: {text}" for text in refuted(run.certificate, run.outcome)]


def refuted(certificate: CertificateFile, outcome: Outcome) -> list[str]:
    """Describe each way in which an attack and the attacked certificate contradict each other."""
    found = []
    for eps, robust in outcome.robust.items():
        certified = certificate.certified(parse_radius(eps))[: len(outcome)]
        found += _describe(certified & ~robust, f"certified at ε = {eps}, but broken there by an attack")
        found += _describe(robust & ~outcome.clean, f"robust at ε = {eps}, but with a wrong label before the attack")
    for (smaller, before), (larger, after) in pairwise(outcome.robust.items()):
        found += _describe(after & ~before, f"broken at ε = {smaller}, but robust in the larger ball of {larger}")
    return found if outcome.examples is None else found + _examples(certificate, outcome.examples)


def compared(run: RunResults) -> int:
    """Count how many times a certified image was attacked inside of its ball: each could have been a contradiction."""
    if run.certificate is None or run.outcome is None:
        return 0
    count = len(run.outcome)
    return sum(int(run.certificate.certified(parse_radius(eps))[:count].sum()) for eps in run.outcome.robust)


def untested(run: RunResults) -> str:
    """Return why no certified image of a run was attacked; empty if one was."""
    if run.certificate is None:
        return "no certificate"
    if run.outcome is None:
        return "its attack is of another certificate" if run.stale else "not attacked"
    return "" if compared(run) else "nothing is certified where it was attacked"


def _examples(certificate: CertificateFile, examples: Examples) -> list[str]:
    label, radius = certificate.label[examples.index], certificate.radius[examples.index]
    inside = (examples.inside_label != label) & (examples.inside_distance < radius)
    near = examples.found & (examples.nearest_label != label) & (examples.nearest_distance < radius)
    return _describe(inside, "with another label inside of the certified ball", examples.index) + _describe(
        near, "with an adversarial image nearer than the certified radius", examples.index
    )


def _describe(wrong: np.ndarray, what: str, index: np.ndarray | None = None) -> list[str]:
    numbers = np.flatnonzero(wrong) if index is None else index[wrong]
    if not len(numbers):
        return []
    shown = ", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")
    return [f"{len(numbers)} image{'s' if len(numbers) > 1 else ''} {what} (number {shown})"]
