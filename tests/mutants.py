"""Mutants: each way to be unsound that we know of, put into a copy of the source, must turn some test red.

    python tests/mutants.py            all of them, and a table for docs/mutants.md
    python tests/mutants.py slack std  those with one of these words in their name

A test that cannot fail is a defect. Every line below is a mistake that somebody has made, or that we could have.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SOUNDNESS, FROZEN = "tests/soundness", "tests/frozen/test_network.py"
CLAIMS = f"{SOUNDNESS}/test_norm_claims.py"
BY_TORUS = ["tests/operators/test_norm.py", "-k", "never_below and torus"]


class Edit(NamedTuple):
    """One replacement in a file of src/lipflow; the old text must occur exactly once."""

    file: str
    old: str
    new: str


class Mutant(NamedTuple):
    """A mistake, how to make it, and the arguments of pytest that select the tests that must notice."""

    name: str
    edits: list[Edit]
    tests: list[str]


NORM, STRIP, NETWORK, PRIMITIVE = "operators/norm.py", "operators/strip.py", "frozen/network.py", "frozen/primitive.py"
TORUS = "least = max(axis.size + axis.before, (axis.outputs - 1) * axis.stride - axis.before + axis.extent)"

MUTANTS = [
    Mutant(
        "power iteration in place of the bound",
        [
            Edit(
                NORM,
                "bound = up((scaled + underflow) * Fraction(scale) + (underflow if subnormal else 0))",
                "bound = float(norm_estimate(op.with_kernel(weight) if isinstance(op, Conv2d) else Dense(weight)))",
            )
        ],
        [f"{SOUNDNESS}/test_norm_attack.py"],
    ),
    Mutant(
        "the circular norm at the same n",
        [
            Edit(
                NORM,
                'if padding_mode == "circular":\n        return [(axis.size, 0)]',
                "if True:\n        return [(axis.size, 0)]",
            )
        ],
        BY_TORUS,
    ),
    Mutant(
        "a torus of side n, twisted or not, whichever is less",
        [Edit(NORM, TORUS, "least = axis.size")],
        BY_TORUS,
    ),
    Mutant(
        "the sign of the padding",
        [Edit(NORM, TORUS, TORUS.replace("axis.size + axis.before", "axis.size - axis.before"))],
        BY_TORUS,
    ),
    Mutant(
        "the product over groups",
        [
            Edit(
                NORM,
                "greatest = max(gram_bound(b) for b in blocks(torus))",
                "parts = ((g, (op.rows.dilation, op.columns.dilation), torus, strides) for g in groups)\n"
                "    greatest = math.prod(max(gram_bound(b) for b in symbols(*part)) for part in parts)",
            )
        ],
        BY_TORUS,
    ),
    Mutant(
        "strips so thin that those two apart share inputs",
        [Edit(STRIP, "thickness = max(1, -(-axis.extent // axis.stride) - 1)", "thickness = 1")],
        ["tests/operators/test_norm.py", "-k", "never_below and exact"],
    ),
    Mutant(
        "what neighbouring strips share forgotten",
        [
            Edit(
                STRIP,
                "torch.stack(below, 1)[:, kind[1:]],",
                "0 * torch.stack(below, 1)[:, kind[1:]],",
            )
        ],
        ["tests/operators/test_norm.py", "-k", "never_below and strips"],
    ),
    Mutant(
        "a checker that forgets what neighbouring strips share",
        [
            Edit(
                "check.py",
                "np.stack(below)[None, kind[1:]],",
                "0 * np.stack(below)[None, kind[1:]],",
            )
        ],
        [CLAIMS, "-k", "low or below"],
    ),
    Mutant(
        "a checker that takes any torus",
        [Edit("check.py", "isinstance(side, int) and side >= least and side % s == 0", "True")],
        [CLAIMS, "-k", "low or no_proof"],
    ),
    Mutant(
        "a stale cache: a norm kept from before a change of weights",
        [
            Edit(
                NORM,
                "def norm_certificate(op: LinearOperator)",
                "_KEPT = {}\n\n\n"
                "def norm_certificate(op):\n"
                "    key = (type(op), tuple(op.weight.shape))\n"
                "    if key not in _KEPT:\n"
                "        _KEPT[key] = _fresh(op)\n"
                "    return _KEPT[key]\n\n\n"
                "def _fresh(op: LinearOperator)",
            )
        ],
        [f"{SOUNDNESS}/test_norm_attack.py", "-k", "follows"],
    ),
    Mutant(
        "h rounded up",
        [Edit("frozen/lower.py", "return down(h) if TINY", "return -down(-h) if TINY")],
        [f"{SOUNDNESS}/test_norm_attack.py", "-k", "step"],
    ),
    Mutant(
        "a relaxed step taken for a safe one",
        [
            Edit(
                PRIMITIVE,
                "return up(max(Fraction(1), Fraction(self.h) * Fraction(self.map.norm) ** 2 - 1))",
                "return 1.0",
            )
        ],
        [f"{SOUNDNESS}/test_norm_attack.py", "-k", "relaxed"],
    ),
    Mutant(
        "the float32 √2",
        [Edit(NETWORK, "distances = up(sqrt_up(Fraction(2))) *", "distances = float(torch.tensor(2.0).sqrt()) *")],
        [f"{SOUNDNESS}/test_norm_attack.py", "-k", "pair"],
    ),
    Mutant(
        "√2 where unit rows differ by up to 2",
        [
            Edit(
                NETWORK,
                "distances, constant = row_distances(last.map.weight), features",
                "distances, constant = 2**0.5 * (1 - torch.eye(classes, dtype=torch.float64)), features",
            )
        ],
        [f"{SOUNDNESS}/test_norm_attack.py", "-k", "pair"],
    ),
    Mutant(
        "the missing std in Center's constant",
        [Edit(PRIMITIVE, "return float(self.scale.abs().max())", "return 1.0")],
        [f"{SOUNDNESS}/test_norm_attack.py", "-k", "deviation"],
    ),
    Mutant(
        "overlapping windows counted once",
        [Edit("frozen/rearrange.py", "if count > 1 else 1.0", "if count < 1 else 1.0")],
        [FROZEN, "-k", "stretches and overlapping"],
    ),
    Mutant(
        "a series taken for the exponential it stands for",
        [Edit(PRIMITIVE, "return up(1 + power)", "return 1.0")],
        [FROZEN, "-k", "stretches and skew"],
    ),
    Mutant(
        "no rounding slack",
        [Edit("certificate.py", "slack = up(4 * sqrt_up(Fraction(2)) * Fraction(rounding))", "slack = 0.0")],
        [f"{SOUNDNESS}/test_rounding_attack.py", "-k", "no_violation or attained"],
    ),
    Mutant(
        "overflow on the way unnoticed",
        [Edit("rounding.py", "    if error > RANGE:", "    if False:")],
        [f"{SOUNDNESS}/test_bias_amplification.py", "-k", "overflow_on_the_way"],
    ),
    Mutant(
        "a checker that does not notice overflow on the way",
        [Edit("check.py", "    require(error <= 2**900,", "    require(True,")],
        [f"{SOUNDNESS}/test_bias_amplification.py", "-k", "checker_refuses"],
    ),
    Mutant(
        "slack for one of the two points only",
        [Edit("certificate.py", "slack = up(4 * sqrt_up(Fraction(2)) *", "slack = up(sqrt_up(Fraction(2)) *")],
        ["tests/test_certificate.py", "-k", "rule"],
    ),
    Mutant(
        "E folded without L",
        [Edit(NETWORK, "Fraction(up(Fraction(p.lipschitz) * error + local))", "Fraction(up(error + local))")],
        [f"{SOUNDNESS}/test_enclosure.py", "-k", "carried"],
    ),
    Mutant(
        "E at the centre of the box only",
        [
            Edit(
                NETWORK,
                "(Fraction(widest) + Fraction(total) * radius + 4 * error)",
                "(Fraction(widest) + 2 * error)",
            )
        ],
        [f"{SOUNDNESS}/test_enclosure.py", "-k", "fed"],
    ),
    Mutant(
        "biases forgotten in E",
        [Edit(PRIMITIVE, "return Fraction(norm_up(bias)) * copies", "return Fraction(0) * copies")],
        [f"{SOUNDNESS}/test_bias_amplification.py"],
    ),
    Mutant(
        "a bias counted once, and not at every position",
        [Edit(PRIMITIVE, "return Fraction(norm_up(bias)) * copies", "return Fraction(norm_up(bias))")],
        [f"{SOUNDNESS}/test_enclosure.py", "-k", "position"],
    ),
    Mutant(
        "what a reflection leaves unsolved forgotten",
        [Edit(PRIMITIVE, "left = Fraction(up((1 - tau) ** self.iterations)) *", "left = 0 *")],
        [f"{SOUNDNESS}/test_enclosure.py", "-k", "reflection"],
    ),
    Mutant(
        "a certified tie",
        [
            Edit(
                "certificate.py",
                "rivals = torch.arange(logits.shape[1]) != label[:, None]",
                "rivals = logits != logits.gather(1, label[:, None])",
            )
        ],
        [f"{SOUNDNESS}/test_refusals.py", "-k", "tie"],
    ),
    Mutant(
        "scores that are NaN or infinite certified",
        [Edit("certificate.py", "finite = torch.isfinite(logits).all(1)", "finite = torch.ones(len(logits)).bool()")],
        [f"{SOUNDNESS}/test_refusals.py", "-k", "scores or row"],
    ),
    Mutant(
        "pixels outside of the box certified",
        [Edit("certificate.py", "if not bool(inside.all()):", "if False:")],
        [f"{SOUNDNESS}/test_refusals.py", "-k", "pixels"],
    ),
    Mutant(
        "tensors broadcast against channels that they do not fit",
        [Edit(NETWORK, "if not p.fits(shape):", "if False:")],
        [f"{SOUNDNESS}/test_forgeries.py", "-k", "fit or loading"],
    ),
    Mutant(
        "a checker that lets tensors be broadcast",
        [Edit("check.py", "require(p.fits(x.shape[1:]),", "require(True,")],
        [f"{SOUNDNESS}/test_forgeries.py", "-k", "checker"],
    ),
    Mutant(
        "a checker whose squares underflow",
        [
            Edit(
                "check.py",
                "square = sum((Fraction(a) - Fraction(b)) ** 2 for",
                "square = sum(Fraction((a - b) ** 2) for",
            )
        ],
        [f"{SOUNDNESS}/test_forgeries.py", "-k", "any_size"],
    ),
    Mutant(
        "a checker that looks for pixels outside of the box in no image",
        [Edit("check.py", "require(byte or ((images >= 0) & (images <= 1)).all(),", "require(True,")],
        ["tests/test_check.py", "-k", "whatever"],
    ),
    Mutant(
        "a checker that takes the paper's radii on trust",
        [Edit("check.py", "require((paper == least_ratio(logits, label, claimed)).all(),", "require(True,")],
        ["tests/test_check.py", "-k", "whatever"],
    ),
    Mutant(
        "a mirror without its mean",
        [Edit(NETWORK, "if x.ndim != 2 or len(x) != 1 or", "if x.ndim != 2 or")],
        ["tests/blocks/test_mirror.py", "-k", "uneven"],
    ),
    Mutant(
        "a checker of images in pairs",
        [Edit("check.py", "require(x.ndim == 2 and len(x) == 1 and", "require(x.ndim == 2 and")],
        ["tests/blocks/test_mirror.py", "-k", "uneven"],
    ),
    Mutant(
        "a checker that mirrors the batch of scalars",
        [
            Edit(
                "check.py",
                "return len(shape) == 3\n\n    def run(self, x):\n        return np.stack",
                "return True\n\n    def run(self, x):\n        return np.stack",
            )
        ],
        ["tests/blocks/test_mirror.py", "-k", "images_only"],
    ),
    Mutant(
        "a mean that does not round",
        [Edit("frozen/mirror.py", "return gamma(1) * reach + 2 * entries * TINY", "return Fraction(0)")],
        [f"{SOUNDNESS}/test_enclosure.py", "-k", "by_no_more_than_it_says and mean"],
    ),
    Mutant(
        "another forward put into a frozen network",
        [Edit(NETWORK, 'if name != "training":', 'if name != "training" and name in self.__dict__:')],
        [f"{SOUNDNESS}/test_forgeries.py", "-k", "program"],
    ),
    Mutant(
        "a forward certified by way of the hooks of all modules",
        [Edit(NETWORK, "Frozen.forward(frozen, chunk)", "frozen(chunk)")],
        [f"{SOUNDNESS}/test_forgeries.py", "-k", "hooks"],
    ),
    Mutant(
        "a checksum that forgets what a primitive has made of its numbers",
        [Edit(NETWORK, "for t in computed_with(p))]", "for _, t in tensors_of([p]))]")],
        [f"{SOUNDNESS}/test_forgeries.py", "-k", "watched"],
    ),
    Mutant(
        "a checksum that forgets the matrix of a convolution",
        [Edit(NETWORK, "value.op.weight, value.matrix)", "value.op.weight)")],
        [f"{SOUNDNESS}/test_forgeries.py", "-k", "watched"],
    ),
    Mutant(
        "subnormal weights read as 0 at no price",
        [Edit(NORM, "(underflow if subnormal else 0)", "0")],
        ["tests/operators/test_norm_exact.py", "-k", "beside_a_normal"],
    ),
    Mutant(
        "pixels read as 0 at no price",
        [
            Edit(NETWORK, "error = Fraction(x.numel(), 2**126)", "error = Fraction(0)"),
            Edit("check.py", "Fraction(1), Fraction(x.size, 2**126),", "Fraction(1), Fraction(0),"),
        ],
        [f"{SOUNDNESS}/test_bias_amplification.py", "-k", "pixels"],
    ),
    Mutant(
        "constants so small that a processor reads them as 0",
        [
            Edit("rounding.py", "x = max(float(q), NORMAL) if q > 0 else float(q)", "x = float(q)"),
            Edit("rounding.py", ".clamp_min(NORMAL)", ""),
        ],
        [f"{SOUNDNESS}/test_bias_amplification.py", "-k", "no_zeros"],
    ),
    Mutant(
        "a checker that takes every scale for 1",
        [Edit("check.py", 'return Fraction(float(np.abs(self.t["scale"]).max()))', "return Fraction(1)")],
        ["tests/test_check.py", "-k", "lowered and center"],
    ),
    Mutant(
        "a checker that forgets what a series leaves out",
        [
            Edit(
                "check.py",
                "return 1 + (self.h * self.norm) ** self.terms / math.factorial(self.terms)",
                "return Fraction(1)",
            )
        ],
        ["tests/test_check.py", "-k", "lowered and (soc or series or exponential)"],
    ),
    Mutant(
        "phases of the checker that wrap around at 2⁶³",
        [Edit("check.py", 'axis["dilation"] * j % turn]', 'axis["dilation"] * j]')],
        ["tests/test_check.py", "-k", "far_taps"],
    ),
    Mutant(
        "tensors changed in place unnoticed",
        [Edit(NETWORK, 'if self._bits() != self.__dict__["_fingerprint"]:', "if False:")],
        [f"{SOUNDNESS}/test_refusals.py", "-k", "place"],
    ),
]


class Result(NamedTuple):
    """A mutant's end: the test that noticed it (none: it survived), or why it could not be made."""

    mutant: str
    red: str | None
    seconds: float


def main(words: list[str]) -> int:
    """Run the mutants whose name has one of the words; 1 if one survives, or no longer applies."""
    chosen = [m for m in MUTANTS if not words or any(word in m.name for word in words)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        scratch = Path(folder)
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, scratch / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", scratch)
        results, green = [], []
        for mutant in chosen:
            results.append(_run(scratch, mutant, green))
            print(f"{'survived' if results[-1].red is None else 'killed':9}{mutant.name}", file=sys.stderr, flush=True)
    print(table(results))
    return int(any(result.red is None for result in results) or not results)


def _run(scratch: Path, mutant: Mutant, green: list[list[str]]) -> Result:
    """The tests are green on the source as it is, and one of them is red on the mutant."""
    start = time.monotonic()
    if mutant.tests not in green:
        before = _pytest(scratch, mutant.tests)
        if before is not None:
            raise SystemExit(f"{mutant.name}: {before} is red without any mutation")
        green.append(mutant.tests)
    files = {edit.file: scratch / "src" / "lipflow" / edit.file for edit in mutant.edits}
    originals = {file: path.read_text() for file, path in files.items()}
    try:
        for edit in mutant.edits:
            text = files[edit.file].read_text()
            if text.count(edit.old) != 1:
                raise SystemExit(f"{mutant.name}: {edit.file} has {text.count(edit.old)} places like {edit.old!r}")
            files[edit.file].write_text(text.replace(edit.old, edit.new))
        red = _pytest(scratch, mutant.tests)
    finally:
        for file, text in originals.items():
            files[file].write_text(text)
    return Result(mutant.name, red, time.monotonic() - start)


def _pytest(scratch: Path, arguments: list[str]) -> str | None:
    """The first test that is red, or None if all are green. No test at all, or one that cannot be run, is an error."""
    environment = dict(os.environ, PYTHONPATH=str(scratch / "src"), OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "--tb=no", "-rfE", *arguments]
    done = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"pytest {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    red = re.search(r"^FAILED (\S+?::.*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode == 1 and red is None:
        raise SystemExit(f"pytest {' '.join(arguments)} did not run:\n{done.stdout}{done.stderr}")
    return red.group(1) if red else None


def table(results: list[Result]) -> str:
    """The results as a table in Markdown."""
    lines = [
        f"| {r.mutant} | {'**survived**' if r.red is None else f'`{r.red}`'} | {r.seconds:.0f} s |" for r in results
    ]
    killed = sum(r.red is not None for r in results)
    head = ["| mutant | first test that turned red | time |", "|---|---|---|"]
    return "\n".join([*head, *lines, "", f"{killed} of {len(results)} mutants killed."])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
