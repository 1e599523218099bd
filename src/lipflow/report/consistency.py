"""certified ≤ attacked ≤ clean, image by image: what contradicts a certificate is said, and never averaged away.

A certificate says that no image in a ball has another label. One image that an attack found there refutes it, whatever
the averages are. A label that an attack is said to have mended, and a larger ball that is safer than a smaller one,
cannot be either.
"""

from itertools import pairwise

import numpy as np

from lipflow.attack import Examples, Outcome
from lipflow.certificate import CertificateFile
from lipflow.radius import parse_radius
from lipflow.report.run_results import RunResults


def contradictions(run: RunResults) -> list[str]:
    """What cannot be true in a run, in words; nothing if all is well or there is nothing to compare."""
    if run.certificate is None or run.outcome is None:
        return []
    return [f"{run.name}: {text}" for text in refuted(run.certificate, run.outcome)]


def refuted(certificate: CertificateFile, outcome: Outcome) -> list[str]:
    """What an attack on a certificate found that cannot be true, in words."""
    examples = outcome.examples
    return _outcomes(certificate, outcome) + ([] if examples is None else _examples(certificate, examples))


def compared(run: RunResults) -> int:
    """How many times a certified image was attacked inside of its ball: each could have been a contradiction."""
    if run.certificate is None or run.outcome is None:
        return 0
    counted = len(run.outcome)
    return sum(int(run.certificate.certified(parse_radius(eps))[:counted].sum()) for eps in run.outcome.robust)


def untested(run: RunResults) -> str:
    """Why nothing of a run was compared; empty if something was."""
    if run.certificate is None:
        return "no certificate"
    if run.outcome is None:
        return "its attack is of another certificate" if run.stale else "not attacked"
    return "" if compared(run) else "nothing is certified where it was attacked"


def _outcomes(certificate: CertificateFile, outcome: Outcome) -> list[str]:
    found = []
    for eps, standing in outcome.robust.items():
        certified = certificate.certified(parse_radius(eps))[: len(outcome)]
        found += _say(certified & ~standing, f"certified at ε = {eps}, yet broken there by an attack")
        found += _say(standing & ~outcome.clean, f"standing at ε = {eps}, yet wrong to begin with")
    for (smaller, before), (larger, after) in pairwise(outcome.robust.items()):
        found += _say(after & ~before, f"broken at ε = {smaller}, yet standing in the larger ball of {larger}")
    return found


def _examples(certificate: CertificateFile, examples: Examples) -> list[str]:
    label, radii = certificate.label[examples.index], certificate.radius[examples.index]
    inside = (examples.inside_label != label) & (examples.inside_distance < radii)
    near = examples.found & (examples.nearest_label != label) & (examples.nearest_distance < radii)
    return _say(inside, "with another label found inside of the certified ball", examples.index) + _say(
        near, "with an adversarial image nearer than the certified radius", examples.index
    )


def _say(wrong: np.ndarray, what: str, index: np.ndarray | None = None) -> list[str]:
    where = np.flatnonzero(wrong) if index is None else index[wrong]
    if not len(where):
        return []
    shown = ", ".join(map(str, where[:5])) + (", …" if len(where) > 5 else "")
    return [f"{len(where)} image{'s' if len(where) > 1 else ''} {what} (number {shown})"]
