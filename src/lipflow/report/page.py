"""The page: one HTML file with its style, its script, its numbers and its images, which opens offline.

Names, flags and ledgers come from folders that a stranger may have written. Each string is escaped where it enters the
page, and the script sets text, never markup. If a string were not escaped, the page's Content-Security-Policy would
still allow only our script and our style, by their hashes, and no requests.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from html import escape
from importlib import resources

import lipflow
from lipflow.certificate import CertificateFile
from lipflow.frozen import LedgerRow
from lipflow.report.consistency import compared, contradictions, untested
from lipflow.report.gallery import gallery
from lipflow.report.run_results import RunResults
from lipflow.report.series import epsilon_reach, payload
from lipflow.report.table import Entry, Summary, images_of
from lipflow.rounding import digits_up

SECTIONS = {  # the name in the navigation, and the heading
    "curves": ("Accuracy", "Accuracy against ε"),
    "radii": ("Radii", "Certified radii"),
    "training": ("Training", "Training"),
    "gallery": ("Gallery", "Gallery"),
    "ledger": ("Certificates", "Certificates"),
}


def page(runs: Sequence[RunResults], summary: Summary) -> str:
    """Return the whole file."""
    style, script = _read("page.css"), _read("chart.js") + _read("page.js")
    bodies = {
        "curves": _curves(runs, summary),
        "radii": _radii(runs),
        "training": _training(runs),
        "gallery": _gallery(runs),
        "ledger": _ledger(runs),
    }
    shown = {key: body for key, body in bodies.items() if body}
    models = dict.fromkeys(f"{run.record.run.model} on {run.record.run.data}" for run in runs)
    values = {
        "version": escape(lipflow.__version__),
        "heading": escape(runs[0].name) if len(runs) == 1 else f"{len(runs)} runs compared",
        "lede": escape("; ".join(models)),
        "nav": "".join(f'<a href="#{key}">{SECTIONS[key][0]}</a>' for key in shown),
        "verdict": _verdict(runs),
        "summary": _summary(summary),
        "remarks": _remarks(summary),
        "sections": "\n\n".join(_section(key, body) for key, body in shown.items()),
        "style": style,
        "style_hash": _hash(style),
        "script": script,
        "script_hash": _hash(script),
        "data": embed(payload(runs, summary)),
    }
    # All names are replaced at once, so that no text from a run is searched for names.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], _read("page.html"))


def embed(values: object) -> str:
    """Return JSON for a script element. It has no <, > and &, so nothing in it ends the element."""
    text = json.dumps(values, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _read(name: str) -> str:
    return resources.files("lipflow.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _section(key: str, body: str) -> str:
    return f'<section id="{key}" aria-labelledby="h-{key}"><h2 id="h-{key}">{SECTIONS[key][1]}</h2>\n{body}</section>'


def _verdict(runs: Sequence[RunResults]) -> str:
    """Return all contradictions as HTML; without any, say what was compared."""
    found = [text for run in runs for text in contradictions(run)]
    if found:
        items = "".join(f"<li>{escape(text)}</li>" for text in found)
        return f"""<div class="verdict bad" role="alert"><b>Contradiction: do not trust these numbers.</b>
<ul>{items}</ul>
A certificate or an attack is wrong. Run <code>lipflow check</code> on the run, and report the bug.</div>"""
    pairs = sum(compared(run) for run in runs)
    without = "; ".join(f"{run.name} ({why})" for run in runs if (why := untested(run)))
    if not pairs:
        return f'<p class="verdict warn"><span><b>Nothing was compared</b>: {escape(without)}.</span></p>'
    kind, title, rest = "", "Consistent.", ""
    if without:
        kind, title, rest = " warn", "Consistent as far as compared.", f" Not compared: {escape(without)}."
    return f"""<p class="verdict{kind}"><span><b>{title}</b>
Certified ≤ attacked ≤ clean for each image: {pairs:,} attacks
inside of certified balls, and none changed a label.{rest}</span></p>"""


def _summary(summary: Summary) -> str:
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in (*summary.header, "average radius"))
    columns = len(summary.header) + 2
    groups = "".join(_group(entry, f"c{number % 8}", columns) for number, entry in enumerate(summary.entries))
    groups += "".join(_group(entry, "grey", columns) for entry in summary.paper)
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="Summary of all runs"><table class="summary">
<thead><tr><th scope="col">accuracy</th>{head}</tr></thead>{groups}</table></div>"""


def _group(entry: Entry, tone: str, columns: int) -> str:
    name = (
        f'<tr><th scope="rowgroup" colspan="{columns}"><span class="name"><span class="swatch {tone}"></span>'
        f"{escape(entry.name)}<small>{escape(entry.about)}</small></span></th></tr>"
    )
    rows = []
    for line in entry.lines:
        cells = "".join(f"<td>{escape(value)}</td>" for value in (*line.values, line.average))
        kind = f'<th scope="row" class="words kind" title="{escape(line.note)}">{escape(line.title)}</th>'
        rows.append(f'<tr class="{line.kind}">{kind}{cells}</tr>')
    if not rows:
        rows.append(f'<tr><td class="words kind" colspan="{columns}">nothing certified yet</td></tr>')
    return f"<tbody>{name}{''.join(rows)}</tbody>"


def _remarks(summary: Summary) -> str:
    items = "".join(
        f"<li><b>{escape(entry.name)}</b>: {escape('; '.join(entry.notes))}</li>"
        for entry in (*summary.entries, *summary.paper)
    )
    return f'<ul class="remarks">{items}</ul>'


def _choice(runs: Sequence[RunResults]) -> str:
    """Return check boxes for the runs, if there are several."""
    if len(runs) == 1:
        return ""
    boxes = "".join(
        f'<label><input type="checkbox" checked data-hides="run {i}"><span class="swatch c{i % 8}"></span>'
        f"{escape(run.name)}</label>"
        for i, run in enumerate(runs)
    )
    return f'<fieldset class="choose"><legend>Runs</legend>{boxes}</fieldset>'


_MARK = '<circle class="point" cx="14" cy="6" r="3.5"/>'
_KINDS = {  # of curves: a sample of the line, and its name
    "certified": (f'<line class="line" x2="28" y1="6" y2="6"/>{_MARK}', "certified"),
    "attacked": (
        f'<line class="line dashed" x2="28" y1="6" y2="6"/>{_MARK}',
        "under attack{of}, measured at the marks",
    ),
    "published": (
        '<line class="paper" x2="28" y1="6" y2="6"/><path class="point" d="M10.5,2.5l7,7M10.5,9.5l7,-7"/>',
        "the paper's own networks",
    ),
}


def _kinds(runs: Sequence[RunResults], summary: Summary) -> str:
    """Return check boxes for the kinds of curves."""
    present = {line.kind for lines in (*(e.lines for e in summary.entries), summary.published) for line in lines}
    counts = sorted({run.part or math.inf for run in runs if run.outcome is not None})
    of = " or ".join("all" if count == math.inf else f"first {count}" for count in counts)
    of = "" if of in ("", "all") else f", {of} images"
    boxes = "".join(
        f'<label><input type="checkbox" checked data-hides="kind {kind}">'
        f'<svg class="grey" width="28" height="12" aria-hidden="true">{sample}</svg>{text.format(of=of)}</label>'
        for kind, (sample, text) in _KINDS.items()
        if kind in present
    )
    return f'<fieldset class="choose key"><legend>Curves</legend>{boxes}</fieldset>'


def _curves(runs: Sequence[RunResults], summary: Summary) -> str:
    if not any(run.certificate is not None for run in runs):
        return ""
    reach = epsilon_reach(runs, summary.epsilons)
    marks = "".join(f'<button type="button">{escape(eps)}</button>' for eps in summary.epsilons)
    rows = "".join(_readout(i, run) for i, run in enumerate(runs))
    part = " Certified curves are of all images. If only some were attacked, the table also has the numbers of those."
    return f"""<p>Choose an ε with the slider, the buttons, or a click on the chart. An attack at a smaller ε bounds the
accuracy from above (≤).{part if any(run.part for run in runs) else ""}</p>
{_choice(runs)}{_kinds(runs, summary)}
<div id="epsilon-chart"></div>
<div class="dial"><label for="epsilon">ε = <output id="epsilon-value" for="epsilon"></output></label>
<input id="epsilon" type="range" min="0" max="{reach}" step="{reach / 200:.10g}" value="0">
<div class="marks" role="group" aria-label="ε of the table">{marks}</div></div>
<div class="scroll" tabindex="0" role="region" aria-label="Accuracy at the chosen ε"><table class="readout"><thead><tr>
<th scope="col">run</th><th scope="col" class="words bars">proved, and at most</th><th scope="col">certified</th>
<th scope="col">under attack</th><th scope="col">clean</th></tr></thead>
<tbody aria-live="polite">{rows}</tbody></table></div>"""


def _readout(number: int, run: RunResults) -> str:
    """Return the rows that the slider fills in: of all images and, if only some were attacked, of those."""
    images = "" if run.certificate is None else f"<small>{escape(images_of(run.certificate))}</small>"
    names = {"whole": f'<span class="swatch"></span>{escape(run.name)}{images}'}
    if run.part:
        names["part"] = f'<span class="swatch part"></span>first {run.part} images'
    return "".join(
        f'<tr data-run="{number}" data-of="{of}" class="c{number % 8}"><th scope="row" class="{of}">{name}</th>'
        '<td class="bars"><div class="track"><i class="may"></i><i class="is"></i></div></td>'
        '<td class="proved">–</td><td class="left">–</td><td class="clean">–</td></tr>'
        for of, name in names.items()
    )


def _radii(runs: Sequence[RunResults]) -> str:
    cells = []
    for i, run in enumerate(runs):
        certificate = run.certificate
        if certificate is None or not len(certificate.truth):
            continue
        wrong, zero = int((~certificate.right).sum()), int((certificate.radius == 0).sum())
        about = f"{escape(images_of(certificate))}, {wrong} of them wrong{f', {zero} with R = 0' if zero else ''}"
        title = f"<h3>{escape(run.name)}</h3><p>{about}</p>"
        cells.append(f'<div data-run="{i}">{title}<div data-histogram="{i}"></div></div>')
    if not cells:
        return ""
    return f"""<p>The certified radii of the images: filled where the label is right, outlined where it is wrong, as a
share of the images.</p><div class="many">{"".join(cells)}</div>"""


def _training(runs: Sequence[RunResults]) -> str:
    if not any(run.losses for run in runs):
        return ""
    validated = any(epoch.clean is not None for run in runs for epoch in run.epochs)
    validation = """<div><h3>Validation accuracy</h3>
<p>Dashed: clean. Solid: certified, <em>estimated</em>, at the first radius of the recipe.</p>
<div id="validation-chart"></div></div>"""
    return f"""{_choice(runs)}<div class="many"><div><h3>Loss</h3><p>On training images, as means over some steps.</p>
<div id="loss-chart"></div></div>{validation if validated else ""}</div>"""


def _gallery(runs: Sequence[RunResults]) -> str:
    shown = [(run, cards) for run in runs if (cards := gallery(run))]
    if not shown:
        return ""
    parts = []
    for number, (run, cards) in enumerate(shown):
        attacked = run.outcome is not None and run.outcome.examples is not None
        command = f"<code>lipflow attack {escape(str(run.folder))}</code>"
        hint = "" if attacked else f"<p>Not attacked yet, or without a gallery: {command}</p>"
        parts.append(
            f"<details{' open' if number == 0 else ''}><summary><b>{escape(run.name)}</b></summary>"
            f'<div class="within">{hint}{cards}</div></details>'
        )
    return f"""<p>Images spread evenly over the radii. Next to each: the strongest attack found inside its certified
ball, where the label cannot change, and the nearest image found with another label. Below: the certified radius (solid)
and the distance of that image (dot). The true distance to another label lies between the two.</p>
<p><label><input type="checkbox" id="differences"> show what was added, enlarged</label></p>
{"".join(parts)}"""


def _ledger(runs: Sequence[RunResults]) -> str:
    parts = [_certificate(run, run.certificate, len(runs) == 1) for run in runs if run.certificate is not None]
    if not parts:
        return ""
    return f"""<p>Every operation with its Lipschitz constant, how that was proved, and the rounding error that it adds.
The network as it runs is within E of a map whose Lipschitz constant is L.</p>{"".join(parts)}"""


def _certificate(run: RunResults, certificate: CertificateFile, alone: bool) -> str:
    most = max([row.rounding for row in certificate.ledger], default=0.0) or 1.0
    rows = "".join(_ledger_row(i, row, most) for i, row in enumerate(certificate.ledger, 1))
    facts = {
        "Lipschitz constant L": f"{digits_up(certificate.lipschitz, 12):.12g}",
        "rounding at most E": f"{digits_up(certificate.rounding, 4):.3e}",
        "digest": f"<code>{escape(certificate.digest[:16])}…</code>",
        "verify it": f"<code>lipflow check {escape(str(run.folder))}</code>",
    }
    listed = "".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in facts.items())
    name = escape(run.name)
    return f"""<details{" open" if alone else ""}>
<summary><b>{name}</b><span>{len(certificate.ledger)} operations</span></summary>
<div class="within"><dl>{listed}</dl></div>
<div class="scroll" tabindex="0" role="region" aria-label="Layers of {name}"><table class="ledger">
<thead><tr><th scope="col">#</th><th scope="col" class="words">operation</th><th scope="col" class="words">module</th>
<th scope="col" class="words">size</th>
<th scope="col">L</th><th scope="col">norm ≤</th><th scope="col">rounding ≤</th><td></td>
<th scope="col" class="words">why</th></tr></thead>
<tbody>{rows}</tbody></table></div></details>"""


def _ledger_row(number: int, row: LedgerRow, most: float) -> str:
    norm = "" if row.norm is None else f"{digits_up(row.norm, 6):.6g}"
    rounding = f"{digits_up(row.rounding, 3):.2e}" if row.rounding else "0"
    share = 100 * max(0.0, row.rounding) / most
    return (
        f'<tr><th scope="row">{number}</th>'
        f'<td class="words">{escape(row.kind)}</td><td class="words">{escape(row.name)}</td>'
        f'<td class="words">{escape(row.size)}</td>'
        f"<td>{digits_up(row.lipschitz, 9):.9g}</td><td>{norm}</td><td>{rounding}</td>"
        f'<td class="share"><svg aria-hidden="true"><rect width="{share:.1f}%" height="100%"/></svg></td>'
        f'<td class="words">{escape(row.how)}</td></tr>'
    )
