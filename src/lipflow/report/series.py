"""The data of the charts on the page and in figures: curves against ε, histograms of radii, and training."""

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from lipflow.certificate import CertificateFile
from lipflow.radius import parse_radius
from lipflow.report.published import references
from lipflow.report.run_results import RunResults
from lipflow.report.table import Summary, accuracy
from lipflow.rounding import down

BINS = 30


def payload(runs: Sequence[RunResults], summary: Summary) -> dict[str, Any]:
    """Return the data of the page's charts as JSON values. Radii stay float64, so that R > ε is decided exactly."""
    reach = epsilon_reach(runs, summary.epsilons)
    return {
        "reach": reach,
        "marks": [{"text": eps, "value": down(parse_radius(eps))} for eps in summary.epsilons],
        "bins": BINS,
        "runs": [_run(run, reach) for run in runs],
        "published": [{"title": title, "points": points} for title, points in paper(runs)],
    }


def epsilon_reach(runs: Sequence[RunResults], epsilons: Sequence[str]) -> float:
    """Return the end of the axis of ε: above each ε of the table and nearly all radii, at most the box's diameter."""
    reach = max([float(parse_radius(eps)) for eps in epsilons], default=0.0)
    for certificate in (run.certificate for run in runs):
        if certificate is not None and certificate.right.any():
            diameter = math.sqrt(certificate.images[0].size)
            reach = max(reach, min(float(np.quantile(certificate.radius[certificate.right], 0.995)), diameter))
    if reach < 1e-9:  # too small for an axis
        return 1.0
    step = 10.0 ** math.floor(math.log10(reach)) / 10
    return round(math.ceil(1.02 * reach / step) * step, 10)


def histogram(certificate: CertificateFile, reach: float) -> tuple[np.ndarray, np.ndarray]:
    """Count images with a right and with a wrong label in BINS bins of radius; the last one includes larger radii."""
    column = np.minimum(np.minimum(certificate.radius, reach) / reach * BINS, BINS - 1).astype(int)
    right, wrong = (np.bincount(column[flags], minlength=BINS) for flags in (certificate.right, ~certificate.right))
    return right, wrong


def attacked(run: RunResults) -> list[tuple[str, float, float]]:
    """Return (ε as text, ε, accuracy) for each attack, and at ε = 0 the clean accuracy of the same images."""
    if run.outcome is None:
        return []
    points = [(eps, down(parse_radius(eps)), accuracy(robust)) for eps, robust in run.outcome.robust.items()]
    return [("0", 0.0, accuracy(run.outcome.clean)), *(p for p in points if p[1] > 0)]


def paper(runs: Sequence[RunResults]) -> list[tuple[str, list[tuple[str, float, float]]]]:
    """Return (title, points as in `attacked`) for each network of the paper that has the name of a run's model."""
    found = []
    for row in references([run.record.run for run in runs]):
        points = [(eps, float(parse_radius(eps)), value / 100) for eps, value in row.at]
        found.append((row.title, [("0", 0.0, row.clean / 100), *points]))
    return found


def _run(run: RunResults, reach: float) -> dict[str, Any]:
    certificate = run.certificate
    values: dict[str, Any] = {"name": run.name, "attacked": attacked(run)}
    if certificate is not None:
        right, wrong = histogram(certificate, reach)
        values |= _radii(certificate) | {"histogram": {"right": right.tolist(), "wrong": wrong.tolist()}}
        if run.part:
            values["part"] = _radii(certificate.first(run.part))
    values["losses"] = smooth(run.losses)
    validated = [epoch for epoch in run.epochs if epoch.clean is not None]
    values["epochs"] = [
        [_finite(e.number), _finite(e.clean), _finite(next(iter(e.certified.values()), None))] for e in thin(validated)
    ]
    values["estimatedAt"] = next((next(iter(e.certified), "") for e in run.epochs if e.certified), "")
    return values


def _radii(certificate: CertificateFile) -> dict[str, Any]:
    radii = np.sort(certificate.radius[certificate.right]).astype("<f8")
    return {"images": len(certificate.right), "radii": base64.b64encode(radii.tobytes()).decode()}


def smooth(losses: Sequence[tuple[float, float]], most: int = 60) -> list[tuple[float, float]]:
    """Average the finite losses over at most `most` ranges of steps; each mean is at the last step of its range."""
    finite = np.array([pair for pair in losses if all(map(math.isfinite, pair))]).reshape(-1, 2)
    parts = np.array_split(finite, min(most, len(finite))) if len(finite) else []
    return [(float(part[-1, 0]), float(part[:, 1].mean())) for part in parts]


def thin(items: Sequence[Any], most: int = 400) -> list[Any]:
    """Keep at most `most` items of a sequence, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    return [items[i] for i in np.linspace(0, len(items) - 1, most).round().astype(int)]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
