"""The page: one HTML file that holds its style, its program, its numbers and its images, and opens offline.

Note [strangers' runs]. Names, flags and ledgers come from folders that anyone may have written. Each string is escaped
where it enters the page; the program sets text, never markup; and the page's own policy allows no script and no style
but ours, by their hashes, and no request at all: what slips through the first two is not run.
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
from lipflow.certificate import CertificateFile, Operation
from lipflow.report.consistency import compared, contradictions, untested
from lipflow.report.gallery import gallery
from lipflow.report.run_results import RunResults
from lipflow.report.series import epsilon_reach, payload
from lipflow.report.table import Entry, Summary, images_of
from lipflow.rounding import digits_up


def page(runs: Sequence[RunResults], summary: Summary) -> str:
    """The whole file."""
    style, script = _read("page.css"), _read("chart.js") + _read("page.js")
    sections = {
        "curves": _curves(runs, summary),
        "radii": _radii(runs),
        "training": _training(runs),
        "gallery": _gallery(runs),
        "ledger": _ledger(runs),
    }
    heading = escape(runs[0].name) if len(runs) == 1 else f"{len(runs)} runs compared"
    titles = {"summary": "Summary", "curves": "Accuracy", "radii": "Radii", "training": "Training"}
    titles |= {"gallery": "Gallery", "ledger": "Certificates"}
    shown = {key: title for key, title in titles.items() if key == "summary" or sections[key]}
    return _fill(
        _read("page.html"),
        {
            "version": escape(lipflow.__version__),
            "title": f"lipflow: {heading}",
            "heading": heading,
            "lede": _lede(runs),
            "nav": "".join(f'<a href="#{key}">{title}</a>' for key, title in shown.items()),
            "verdict": _verdict(runs),
            "summary": _summary(summary),
            "remarks": _remarks(summary),
            **sections,
            "style": style,
            "style_hash": _hash(style),
            "script": script,
            "script_hash": _hash(script),
            "data": embed(payload(runs, summary)),
        },
    )


def embed(values: object) -> str:
    """JSON that can stand inside of a script element: no <, > or &, so that nothing in it ends the element."""
    text = json.dumps(values, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _fill(template: str, values: dict[str, str]) -> str:
    """Every {{name}} of the template replaced at once: what is put in is not looked at again."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], template)


def _read(name: str) -> str:
    return resources.files("lipflow.report").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _lede(runs: Sequence[RunResults]) -> str:
    kinds = dict.fromkeys(f"{run.record.run.model} on {run.record.run.data}" for run in runs)
    return escape("; ".join(kinds))


def _verdict(runs: Sequence[RunResults]) -> str:
    """certified ≤ attacked ≤ clean: what was compared, and every contradiction."""
    found = [text for run in runs for text in contradictions(run)]
    if found:
        items = "".join(f"<li>{escape(text)}</li>" for text in found)
        return f"""<div class="verdict bad" role="alert"><b>Contradiction: do not trust these numbers.</b>
<ul>{items}</ul>
A certificate and an attack cannot both be right. Run <code>lipflow check</code> on the run, and report it.</div>"""
    pairs = sum(compared(run) for run in runs)
    without = "; ".join(f"{run.name} ({why})" for run in runs if (why := untested(run)))
    if not pairs:
        return f'<p class="verdict warn"><span><b>Nothing was compared</b>: {escape(without)}.</span></p>'
    if without:
        kind, title, rest = " warn", "Consistent as far as compared.", f" Not compared: {escape(without)}."
    else:
        kind, title, rest = "", "Consistent.", ""
    return f"""<p class="verdict{kind}"><span><b>{title}</b>
Certified ≤ attacked ≤ clean, image by image: {pairs:,} times
an attack was sent against a certified ball, and none broke it.{rest}</span></p>"""


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
    items = []
    for entry in (*summary.entries, *summary.paper):
        items.append(f"<li><b>{escape(entry.name)}</b>: {escape('; '.join((*entry.notes, *entry.remarks)))}</li>")
    return f'<ul class="remarks">{"".join(items)}</ul>'


def _choice(runs: Sequence[RunResults]) -> str:
    """Which runs to show, if there is a choice."""
    if len(runs) == 1:
        return ""
    boxes = "".join(
        f'<label><input type="checkbox" checked data-hides="run {i}"><span class="swatch c{i % 8}"></span>'
        f"{escape(run.name)}</label>"
        for i, run in enumerate(runs)
    )
    return f'<fieldset class="choose"><legend>Runs</legend>{boxes}</fieldset>'


_KINDS = {  # how a curve looks, and what it is
    "certified": (
        '<line class="line" x2="28" y1="6" y2="6"/><circle class="point" cx="14" cy="6" r="3.5"/>',
        "certified",
    ),
    "attacked": (
        '<line class="line dashed" x2="28" y1="6" y2="6"/><circle class="point" cx="14" cy="6" r="3.5"/>',
        "under attack{of}, measured at the marks",
    ),
    "published": (
        '<line class="paper" x2="28" y1="6" y2="6"/><path class="point" d="M10.5,2.5l7,7M10.5,9.5l7,-7"/>',
        "the paper's own networks",
    ),
}


def _kinds(runs: Sequence[RunResults], summary: Summary) -> str:
    there = {line.kind for lines in (*(e.lines for e in summary.entries), summary.published) for line in lines}
    counts = sorted({run.part or math.inf for run in runs if run.outcome is not None})
    of = " or ".join("all" if count == math.inf else f"first {count}" for count in counts)
    of = "" if of in ("", "all") else f", {of} images"
    boxes = "".join(
        f'<label><input type="checkbox" checked data-hides="kind {kind}">'
        f'<svg class="grey" width="28" height="12" aria-hidden="true">{sample}</svg>{text.format(of=of)}</label>'
        for kind, (sample, text) in _KINDS.items()
        if kind in there
    )
    return f'<fieldset class="choose key"><legend>Curves</legend>{boxes}</fieldset>'


def _curves(runs: Sequence[RunResults], summary: Summary) -> str:
    if not any(run.certificate is not None for run in runs):
        return ""
    reach = epsilon_reach(runs, summary.epsilons)
    marks = "".join(f'<button type="button">{escape(eps)}</button>' for eps in summary.epsilons)
    rows = "".join(_read_off(i, run) for i, run in enumerate(runs))
    apart = " Certified curves are of all images; the table below holds an attack on some against the same images."
    return f"""<section id="curves" aria-labelledby="h-curves"><h2 id="h-curves">Accuracy against ε</h2>
<p>Choose an ε with the slider, the buttons, or a click on the chart. An attack at a smaller ε bounds the accuracy from
above (≤).{apart if any(run.part for run in runs) else ""}</p>
{_choice(runs)}{_kinds(runs, summary)}
<div id="epsilon-chart"></div>
<div class="dial"><label for="epsilon">ε = <output id="epsilon-value" for="epsilon"></output></label>
<input id="epsilon" type="range" min="0" max="{reach}" step="{reach / 200:.10g}" value="0">
<div class="marks" role="group" aria-label="ε of the table">{marks}</div></div>
<div class="scroll" tabindex="0" role="region" aria-label="Accuracy at the chosen ε"><table class="readout"><thead><tr>
<th scope="col">run</th><th scope="col" class="words bars">proved, and at most</th><th scope="col">certified</th>
<th scope="col">under attack</th><th scope="col">clean</th></tr></thead>
<tbody aria-live="polite">{rows}</tbody></table></div></section>"""


def _read_off(number: int, run: RunResults) -> str:
    """The rows of a run that the slider fills in: of all images and, if only some were attacked, of those."""
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
        if run.certificate is None or not len(run.certificate.truth):
            continue
        held = run.certificate
        wrong, none = int((~held.right).sum()), int((held.radius == 0).sum())
        told = f"{escape(images_of(held))}, {wrong} of them wrong{f', {none} with R = 0' if none else ''}"
        title = f"<h3>{escape(run.name)}</h3><p>{told}</p>"
        cells.append(f'<div data-run="{i}">{title}<div data-histogram="{i}"></div></div>')
    if not cells:
        return ""
    return f"""<section id="radii" aria-labelledby="h-radii"><h2 id="h-radii">Certified radii</h2>
<p>How far each image's certificate reaches: filled where the label is right, outlined where it is wrong, as a share of
the images.</p><div class="many">{"".join(cells)}</div></section>"""


def _training(runs: Sequence[RunResults]) -> str:
    if not any(run.losses for run in runs):
        return ""
    checked = any(epoch.clean is not None for run in runs for epoch in run.epochs)
    validation = """<div><h3>Validation accuracy</h3>
<p>Dashed: clean. Solid: certified, by <em>estimate</em>, at the first radius of the recipe.</p>
<div id="validation-chart"></div></div>"""
    return f"""<section id="training" aria-labelledby="h-training"><h2 id="h-training">Training</h2>
{_choice(runs)}<div class="many"><div><h3>Loss</h3><p>On training images, as means over some steps.</p>
<div id="loss-chart"></div></div>{validation if checked else ""}</div></section>"""


def _gallery(runs: Sequence[RunResults]) -> str:
    shown = [(run, cards) for run in runs if (cards := gallery(run))]
    if not shown:
        return ""
    parts = []
    for number, (run, cards) in enumerate(shown):
        attacked = run.outcome is not None and run.outcome.examples is not None
        command = f"<code>lipflow attack {escape(str(run.folder))}</code>"
        told = "" if attacked else f"<p>Not attacked yet, or without a gallery: {command}</p>"
        parts.append(
            f"<details{' open' if number == 0 else ''}><summary><b>{escape(run.name)}</b></summary>"
            f'<div class="within">{told}{cards}</div></details>'
        )
    return f"""<section id="gallery" aria-labelledby="h-gallery"><h2 id="h-gallery">Gallery</h2>
<p>Images spread evenly over the radii. Beside each: the strongest attack found inside its certified ball, where the
label must stand, and the nearest image found with another label. Below: the certified radius (solid) and that
distance (dot); the true distance lies between.</p>
<p><label><input type="checkbox" id="differences"> show what was added, enlarged</label></p>
{"".join(parts)}</section>"""


def _ledger(runs: Sequence[RunResults]) -> str:
    parts = [_certificate(run, run.certificate, len(runs) == 1) for run in runs if run.certificate is not None]
    if not parts:
        return ""
    return f"""<section id="ledger" aria-labelledby="h-ledger"><h2 id="h-ledger">Certificates</h2>
<p>Every operation with its Lipschitz constant, how that was proved, and what its rounding adds. The network as it
runs is within E of a map whose constant is L.</p>{"".join(parts)}</section>"""


def _certificate(run: RunResults, held: CertificateFile, alone: bool) -> str:
    most = max([p.rounding for p in held.ledger], default=0.0) or 1.0
    rows = "".join(_primitive(i, p, most) for i, p in enumerate(held.ledger, 1))
    facts = {
        "Lipschitz constant L": f"{digits_up(held.lipschitz, 12):.12g}",
        "rounding at most E": f"{digits_up(held.rounding, 4):.3e}",
        "digest": f"<code>{escape(held.digest[:16])}…</code>",
        "verify it": f"<code>lipflow check {escape(str(run.folder))}</code>",
    }
    listed = "".join(f"<div><dt>{key}</dt><dd>{value}</dd></div>" for key, value in facts.items())
    name = escape(run.name)
    return f"""<details{" open" if alone else ""}>
<summary><b>{name}</b><span>{len(held.ledger)} operations</span></summary>
<div class="within"><dl>{listed}</dl></div>
<div class="scroll" tabindex="0" role="region" aria-label="Layers of {name}"><table class="ledger">
<thead><tr><th scope="col">#</th><th scope="col" class="words">operation</th><th scope="col" class="words">module</th>
<th scope="col" class="words">size</th>
<th scope="col">L</th><th scope="col">norm ≤</th><th scope="col">rounding ≤</th><td></td>
<th scope="col" class="words">why</th></tr></thead>
<tbody>{rows}</tbody></table></div></details>"""


def _primitive(number: int, p: Operation, most: float) -> str:
    norm = "" if p.norm is None else f"{digits_up(p.norm, 6):.6g}"
    rounding = f"{digits_up(p.rounding, 3):.2e}" if p.rounding else "0"
    share = 100 * max(0.0, p.rounding) / most
    return (
        f'<tr><th scope="row">{number}</th>'
        f'<td class="words">{escape(p.kind)}</td><td class="words">{escape(p.name)}</td>'
        f'<td class="words">{escape(p.size)}</td>'
        f"<td>{digits_up(p.lipschitz, 9):.9g}</td><td>{norm}</td><td>{rounding}</td>"
        f'<td class="share"><svg aria-hidden="true"><rect width="{share:.1f}%" height="100%"/></svg></td>'
        f'<td class="words">{escape(p.how)}</td></tr>'
    )
