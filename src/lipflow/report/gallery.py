"""Images of a run, each with the strongest attack in its certified ball and the nearest adversarial image found.

Below each is a scale with the certified radius and the distance of that nearest image. The true distance to another
label lies between the two.
"""

import base64
import io
import math
from html import escape

import numpy as np

from lipflow.attack import Examples
from lipflow.certificate import CertificateFile
from lipflow.data import DOWNLOADS
from lipflow.report.run_results import RunResults
from lipflow.report.series import thin

UNATTACKED_IMAGES = 12  # shown of a run that has not been attacked


def png(pixels: np.ndarray) -> bytes:
    """Encode uint8 pixels, (height, width) or (height, width, 3), as a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG", optimize=True)
    return file.getvalue()


def as_bytes(image: np.ndarray) -> np.ndarray:
    """Convert an image (channels, height, width) to uint8: its 3 channels, or the mean if there are not 3."""
    unit = _unit(image)
    shown = unit.transpose(1, 2, 0) if len(unit) == 3 else unit.mean(0)
    return np.rint(shown * 255).astype(np.uint8)


def difference(image: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the difference of two images around grey, scaled to the full range of uint8; and the scale factor."""
    change = other - _unit(image)
    largest = float(np.abs(change).max())
    factor = 0.5 / largest if largest > 0 else 1.0
    return as_bytes(0.5 + np.clip(factor * change, -0.5, 0.5)), factor


def _unit(image: np.ndarray) -> np.ndarray:
    return image / 255 if image.dtype == np.uint8 else image


def gallery(run: RunResults) -> str:
    """Return the cards of a run as HTML; every string of the run is escaped."""
    certificate = run.certificate
    if certificate is None or not len(certificate.truth):
        return ""
    names = _names(run, certificate.logits.shape[1])
    examples = None if run.outcome is None else run.outcome.examples
    if examples is None:
        order = certificate.radius.argsort(kind="stable").tolist()
        index = thin(order, UNATTACKED_IMAGES)
        cards = [_card(certificate, i, names, [_original(certificate, i, names)]) for i in index]
        return f'<ul class="cards plain">{"".join(cards)}</ul>'
    reach = _reach(certificate, examples)
    cards = [_attacked(certificate, examples, k, names, reach) for k in range(len(examples.index))]
    return f'<ul class="cards">{"".join(cards)}</ul>'


def _attacked(certificate: CertificateFile, examples: Examples, k: int, names: list[str], reach: float) -> str:
    """Return the card of the k-th example: the image, the strongest attack, and the nearest adversarial image."""
    i = int(examples.index[k])
    label, radius, image = int(certificate.label[i]), float(certificate.radius[i]), certificate.images[i]
    inside = '<div class="panel none">R = 0: no ball is certified</div>'
    if radius > 0:
        found = int(examples.inside_label[k])
        margin = float(certificate.logits[i, label] - np.delete(certificate.logits[i], label).max())
        verb, kind = ("still", "ok") if found == label else ("turned into", "bad")
        text = f"{verb} <b>{_name(names, found)}</b><br>at {_below(float(examples.inside_distance[k]))} &lt; R"
        alt = f"the strongest attack found inside the certified ball, {verb} {_name(names, found)}"
        note = f"margin {margin:.3f} → {float(examples.inside_margin[k]):.3f}"
        inside = _panel(examples.inside[k], difference(image, examples.inside[k]), alt, text, note, kind)
    distance = float(examples.nearest_distance[k]) if examples.found[k] else math.inf
    near = '<div class="panel none">no image with another label was found</div>'
    if examples.found[k]:
        other = _name(names, int(examples.nearest_label[k]))
        text = f"becomes <b>{other}</b><br>at {_above(distance)}"
        alt = f"the nearest adversarial image found, {other}"
        note = f"{distance / radius:.2f} R" if radius > 0 else "beyond R = 0"
        kind = "out" if distance >= radius else "bad"
        near = _panel(examples.nearest[k], difference(image, examples.nearest[k]), alt, text, note, kind)
    panels = [_original(certificate, i, names), inside, near]
    return _card(certificate, i, names, panels, _scale(radius, distance, reach))


def _card(certificate: CertificateFile, i: int, names: list[str], panels: list[str], scale: str = "") -> str:
    right = certificate.label[i] == certificate.truth[i]
    truth = "" if right else f' <span class="wrong">wrong: it is {_name(names, int(certificate.truth[i]))}</span>'
    head = f'<p class="about">image {i}: <b>{_name(names, int(certificate.label[i]))}</b>{truth}</p>'
    return f'<li class="card">{head}<div class="panels">{"".join(panels)}</div>{scale}</li>'


def _original(certificate: CertificateFile, i: int, names: list[str]) -> str:
    radius, label = float(certificate.radius[i]), _name(names, int(certificate.label[i]))
    text = f"the image<br>R = {_below(radius)}" if radius < 1e6 else "the image<br>R: no limit"
    return _panel(certificate.images[i], None, f"image {i}, labelled {label}", text, "", "own")


def _panel(image: np.ndarray, added: tuple[np.ndarray, float] | None, alt: str, text: str, note: str, kind: str) -> str:
    """Return an image and, if there is one, its scaled difference to the original, which can be shown instead."""
    if added is None:
        pictures = f'<img class="both" src="{_uri(as_bytes(image))}" alt="{alt}">'
    else:
        pixels, factor = added
        pictures = (
            f'<img class="whole" src="{_uri(as_bytes(image))}" alt="{alt}">'
            f'<img class="added" src="{_uri(pixels)}" alt="what was added, enlarged {factor:.3g} times">'
            f'<span class="times">×{factor:.3g}</span>'
        )
    return f'<div class="panel {kind}">{pictures}<p>{text}</p><p class="note">{note}</p></div>'


def _scale(radius: float, distance: float, reach: float) -> str:
    """Return a line that is solid from 0 to the radius, and dotted to the distance of the nearest adversarial image."""
    r, d = (100 * min(value, reach) / reach for value in (radius, distance))
    end = f'<circle class="found" cx="{d:.2f}%" cy="6" r="4"/>' if math.isfinite(distance) else ""
    return (
        f'<svg class="scale" role="img" aria-label="certified to {_below(min(radius, reach))}, '
        f'{f"another label found at {_above(distance)}" if end else "no other label found"}">'
        '<line class="rail" x1="0" x2="100%" y1="6" y2="6"/>'
        f'<line class="open" x1="{r:.2f}%" x2="{d:.2f}%" y1="6" y2="6"/>'
        f'<line class="held" x1="0" x2="{r:.2f}%" y1="6" y2="6"/>{end}</svg>'
    )


def _below(value: float) -> str:
    """Round a radius down to three decimals."""
    return f"{math.floor(value * 1000) / 1000:.3f}"


def _above(value: float) -> str:
    """Round a distance up to three decimals."""
    return f"{math.ceil(value * 1000) / 1000:.3f}"


def _reach(certificate: CertificateFile, examples: Examples) -> float:
    ends = [*examples.nearest_distance[examples.found], *np.minimum(certificate.radius[examples.index], 1e6)]
    return 1.04 * max((float(end) for end in ends), default=1.0) or 1.0


def _uri(pixels: np.ndarray) -> str:
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def _names(run: RunResults, classes: int) -> list[str]:
    known = DOWNLOADS.get(run.record.run.data)
    found = list(run.record.class_names or (known.class_names if known else ()))
    return found if len(found) == classes else [str(i) for i in range(classes)]


def _name(names: list[str], label: int) -> str:
    """Return the escaped name of a label; labels in attack.npz may not be one of the classes."""
    return escape(names[label]) if 0 <= label < len(names) else str(label)
