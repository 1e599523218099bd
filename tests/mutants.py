"""Mutants: mistakes that make certificates unsound. Each is put into a copy of the source, and some test must fail.

python tests/mutants.py            all of them, and a table for docs/mutants.md
python tests/mutants.py slack std  those with one of these words in their name
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
SOUNDNESS, FROZEN, GRAPH = "tests/soundness", "tests/test_frozen.py", "tests/graph"
CLAIMS = f"{SOUNDNESS}/test_norm_claims.py"
BY_TORUS = ["tests/operators/test_norm.py", "-k", "never_below and torus"]


class Edit(NamedTuple):
    """One replacement in a file of src/lipflow; the old text must occur exactly once."""

    file: str
    old: str
    new: str


class Mutant(NamedTuple):
    """A mistake, its edits, and arguments of pytest that select the tests that must fail."""

    name: str
    edits: list[Edit]
    tests: list[str]


NORM, STRIP, FOLD, LOWER = "operators/norm.py", "operators/strip.py", "graph/fold.py", "graph/lower.py"
DESCENT, LINEAR, MOVES, RULES = "primitives/descent.py", "primitives/linear.py", "graph/address.py", "graph/rules.py"
REWRITE, REARRANGE = "graph/rewrite.py", "primitives/rearrange.py"
MODULES, PROBE = "graph/modules.py", "graph/probe.py"
TORUS = "least = max(axis.size + axis.before, (axis.outputs - 1) * axis.stride - axis.before + axis.extent)"

MUTANTS = [
    Mutant(
        "power iteration in place of the bound",
        [
            Edit(
                NORM,
                "bound = up((scaled + underflow) * Fraction(scale) + (underflow if subnormal else 0))",
                "bound = float(norm_estimate(op.with_weight(weight)))",
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
        "one output at each position of a circular torus",
        [Edit(NORM, "max(map(positions.count, set(positions)))", "1")],
        BY_TORUS,
    ),
    Mutant(
        "a twisted torus for circular padding",
        [Edit(NORM, "return [(axis.size, 0)]", "return [(axis.size, 0), (axis.size, 1)]")],
        BY_TORUS,
    ),
    Mutant(
        "the real part of the symbol alone",
        [Edit("operators/fourier.py", "return part(cosine), part(sine)", "return part(cosine), 0 * part(sine)")],
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
        [CLAIMS, "-k", "below"],
    ),
    Mutant(
        "a checker that takes any torus",
        [Edit("check.py", "isinstance(side, int) and side >= least and side % s == 0", "True")],
        [CLAIMS, "-k", "below or proves_nothing"],
    ),
    Mutant(
        "a cache that is never compared with its weights",
        [Edit("flows/cache.py", "self._key == key and self._fits(inputs)", "self._key == key")],
        ["tests/flows/test_cache.py", "-k", "stale"],
    ),
    Mutant(
        "evaluation with the vector of the last training step",
        [
            Edit(
                "flows/weight.py", "cache.constant(lambda: top_singular_vector(op, u), op.weight, key=op.in_shape)", "u"
            )
        ],
        ["tests/flows/test_cache.py", "-k", "stale"],
    ),
    Mutant(
        "Lanczos from the likely vector alone",
        [Edit(NORM, "_unit(_unit(start) + _unit(start_vector(op.in_shape, start)))", "_unit(start)")],
        ["tests/operators/test_norm_estimate.py", "-k", "top_singular"],
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
        [Edit(DESCENT, "return down(h) if TINY", "return -down(-h) if TINY")],
        [f"{SOUNDNESS}/test_norm_attack.py", "-k", "step"],
    ),
    Mutant(
        "a relaxed step taken for a safe one",
        [
            Edit(
                DESCENT,
                "return max(Fraction(1), Fraction(self.h) * self.smoothness(norm) - 1) * distances[0]",
                "return distances[0]",
            )
        ],
        [f"{SOUNDNESS}/test_norm_attack.py", "-k", "relaxed"],
    ),
    Mutant(
        "√2 where unit rows differ by up to 2",
        [Edit(FOLD, "apart = above(row_distances(rows) + either)", "apart = torch.full_like(either, 2**0.5)")],
        [f"{SOUNDNESS}/test_norm_attack.py", "-k", "pair"],
    ),
    Mutant(
        "pairs that forget what came by another way",
        [Edit(FOLD, "                more = before + more\n", "                more = more + 0 * before\n")],
        [f"{GRAPH}/test_fold.py", "-k", "pairs"],
    ),
    Mutant(
        "pairs that forget the terms of a sum but the last",
        [Edit(FOLD, "total = above(total + above(apart", "total = above(0 * total + above(apart")],
        [f"{GRAPH}/test_fold.py", "-k", "pairs"],
    ),
    Mutant(
        "the missing std in the constant of a scale",
        [Edit(LINEAR, "return Fraction(float(self.factor.abs().max())) * distances[0]", "return distances[0]")],
        [f"{SOUNDNESS}/test_norm_attack.py", "-k", "deviation"],
    ),
    Mutant(
        "overlapping windows counted once",
        [
            Edit(
                REARRANGE,
                "return _root(overlap(self.kernel, self.stride, self.dilation)) * distances[0]",
                "return distances[0]",
            )
        ],
        [FROZEN, "-k", "jacobians and overlapping"],
    ),
    Mutant(
        "a series taken for the exponential it stands for",
        [
            Edit(
                "primitives/series.py",
                "angle = Fraction(self.h) * Fraction(norm(self.op))",
                "angle = Fraction(0)",
            )
        ],
        [FROZEN, "-k", "jacobians and skew"],
    ),
    Mutant(
        "no rounding slack",
        [Edit("certificate/rule.py", "slack = up(4 * sqrt_up(Fraction(2)) * Fraction(rounding))", "slack = 0.0")],
        [f"{SOUNDNESS}/test_rounding_attack.py", "-k", "no_violation or attained"],
    ),
    Mutant(
        "overflow on the way unnoticed",
        [Edit("rounding.py", "    if error > RANGE:", "    if False:")],
        [f"{SOUNDNESS}/test_bias_amplification.py", "-k", "intermediate_overflow"],
    ),
    Mutant(
        "a checker that does not notice overflow on the way",
        [Edit("check.py", "    require(error <= 2**900,", "    require(True,")],
        [f"{SOUNDNESS}/test_bias_amplification.py", "-k", "checker_refuses"],
    ),
    Mutant(
        "slack for one of the two points only",
        [Edit("certificate/rule.py", "slack = up(4 * sqrt_up(Fraction(2)) *", "slack = up(sqrt_up(Fraction(2)) *")],
        ["tests/test_certificate.py", "-k", "rule"],
    ),
    Mutant(
        "E folded without L",
        [Edit(FOLD, "else up(Fraction(carried) + added)", "else up(max(Fraction(k.error) for k in inputs) + added)")],
        [f"{SOUNDNESS}/test_enclosure.py", "-k", "carried"],
    ),
    Mutant(
        "E at the centre of the box only",
        [
            Edit(
                FOLD,
                "(Fraction(widest) + Fraction(lipschitz) * radius + 4 * Fraction(error))",
                "(Fraction(widest) + 2 * Fraction(error))",
            )
        ],
        [f"{SOUNDNESS}/test_enclosure.py", "-k", "reaches"],
    ),
    Mutant(
        "biases forgotten in E",
        [
            Edit(
                LINEAR,
                "return Fraction(norm_up(bias)) * sqrt_up(Fraction(math.prod(op.out_shape) // len(bias)))",
                "return Fraction(0)",
            )
        ],
        [f"{SOUNDNESS}/test_bias_amplification.py"],
    ),
    Mutant(
        "a bias counted once, and not at every position",
        [
            Edit(
                LINEAR,
                "return Fraction(norm_up(bias)) * sqrt_up(Fraction(math.prod(op.out_shape) // len(bias)))",
                "return Fraction(norm_up(bias))",
            )
        ],
        [f"{SOUNDNESS}/test_enclosure.py", "-k", "position"],
    ),
    Mutant(
        "what a reflection leaves unsolved forgotten",
        [Edit(DESCENT, "left = Fraction(up((1 - tau) ** self.iterations)) *", "left = 0 *")],
        [f"{SOUNDNESS}/test_enclosure.py", "-k", "reflection"],
    ),
    Mutant(
        "a certified tie",
        [
            Edit(
                "certificate/rule.py",
                "rivals = torch.arange(logits.shape[1]) != label[:, None]",
                "rivals = logits != logits.gather(1, label[:, None])",
            )
        ],
        [f"{SOUNDNESS}/test_refusals.py", "-k", "tie"],
    ),
    Mutant(
        "scores that are NaN or infinite certified",
        [
            Edit(
                "certificate/rule.py",
                "finite = torch.isfinite(logits).all(1)",
                "finite = torch.ones(len(logits)).bool()",
            )
        ],
        [f"{SOUNDNESS}/test_refusals.py", "-k", "nan_and_infinite_scores"],
    ),
    Mutant(
        "pixels outside of the box certified",
        [Edit("certificate/rule.py", "if not bool(inside.all()):", "if False:")],
        [f"{SOUNDNESS}/test_refusals.py", "-k", "pixels"],
    ),
    Mutant(
        "tensors broadcast against channels that they do not fit",
        [Edit("primitives/primitive.py", "    if not fits:\n", "    if False:\n")],
        [f"{SOUNDNESS}/test_forgeries.py", "-k", "fit or load"],
    ),
    Mutant(
        "a checker that lets tensors be broadcast",
        [
            Edit(
                "check.py",
                "require(holds, f\"a {self.p['kind']} does not",
                "require(True, f\"a {self.p['kind']} does not",
            )
        ],
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
        [f"{SOUNDNESS}/test_forgeries.py", "-k", "scores_of_any_size"],
    ),
    Mutant(
        "a checker that looks for pixels outside of the box in no image",
        [Edit("check.py", 'require(inside, f"an image lies outside', 'require(True, f"an image lies outside')],
        ["tests/test_check.py", "-k", "whatever"],
    ),
    Mutant(
        "a checker that takes the paper's radii on trust",
        [Edit("check.py", "require((paper == least_ratio(logits, label, claimed)).all(),", "require(True,")],
        ["tests/test_check.py", "-k", "whatever"],
    ),
    Mutant(
        "a sum that does not round",
        [
            Edit(
                LINEAR,
                "return in_range(gamma(roundings) * size + len(reaches) * entries * TINY)",
                "return Fraction(0)",
            )
        ],
        [f"{SOUNDNESS}/test_enclosure.py", "-k", "rounding_error and sum"],
    ),
    Mutant(
        "a sum that stretches by its greatest term",
        [
            Edit(
                LINEAR,
                "return sum((abs(Fraction(c)) * d for c, d in terms), Fraction(0))",
                "return max(abs(Fraction(c)) * d for c, d in terms)",
            )
        ],
        [f"{GRAPH}/test_rules.py", "-k", "jacobian"],
    ),
    Mutant(
        "entries that are taken often counted once",
        [
            Edit(
                REARRANGE,
                "return [int(part.max()) for part in counts.split(self.sizes)]",
                "return [1 for _ in self.sizes]",
            )
        ],
        [f"{GRAPH}/test_rules.py", "-k", "jacobian"],
    ),
    Mutant(
        "an average that forgets the root of its window",
        [
            Edit(
                LINEAR,
                "return sqrt_up(Fraction(math.prod(self.window))) / Fraction(self.divisor) * distances[0]",
                "return 1 / Fraction(self.divisor) * distances[0]",
            )
        ],
        [f"{GRAPH}/test_rules.py", "-k", "jacobian"],
    ),
    Mutant(
        "a constant that is taken for one that moves by 0 and has no norm",
        [Edit(FOLD, "widest = norm_up(value)", "widest = norm_up(value) if vertex.inputs else 0.0")],
        [f"{SOUNDNESS}/test_enclosure.py", "-k", "reaches"],
    ),
    # What leaks past the mode, and other traps of lowering
    Mutant(
        "a node that computes",
        [
            Edit(
                "node.py",
                '        raise LoweringError(\n            f"{func} computes outside',
                "        with torch._C._DisableTorchDispatch():\n            return func(*args, **(kwargs or {}))\n"
                '        raise LoweringError(\n            f"{func} computes outside',
            )
        ],
        [f"{GRAPH}/test_refusals.py", "-k", "leak or numbers"],
    ),
    Mutant(
        "numbers that are looked at",
        [
            Edit(
                LOWER,
                "        if func in INSTEAD:\n"
                "            raise LoweringError(INSTEAD[func])\n"
                "        raise LoweringError(",
                "        return func(plain(args[0]), *args[1:], **kwargs)\n        raise LoweringError(",
            )
        ],
        [f"{GRAPH}/test_refusals.py", "-k", "leak"],
    ),
    Mutant(
        "a plain tensor that keeps its numbers when a node is written into it",
        [Edit(LOWER, "        target.fill_(torch.nan)\n", "")],
        [f"{GRAPH}/test_refusals.py", "-k", "leak and view"],
    ),
    Mutant(
        "a plain tensor that a node was written into, and that stays plain",
        [Edit(LOWER, "        if not self.written:\n            return value\n", "        return value\n")],
        [f"{GRAPH}/test_rules.py", "-k", "plain"],
    ),
    Mutant(
        "constants that differ between images",
        [Edit(RULES, "    if not torch.equal(t[0], t[1]):", "    if False:")],
        [f"{GRAPH}/test_refusals.py", "-k", "mixes"],
    ),
    Mutant(
        "NaN constants",
        [Edit(LOWER, "if isinstance(vertex.primitive, Constant) and not", "if False and not")],
        [f"{GRAPH}/test_refusals.py", "-k", "finite"],
    ),
    Mutant(
        "addresses in the same order for both images",
        [Edit(MOVES, "torch.stack([upwards, upwards.flip(0)])", "torch.stack([upwards, upwards])")],
        [f"{GRAPH}/test_rules.py", "-k", "addresses"],
    ),
    Mutant(
        "addresses without a random part",
        [
            Edit(
                MOVES,
                "torch.stack([upwards, upwards.flip(0)]) + jitter",
                "torch.stack([upwards, upwards.flip(0)]) + 0 * jitter",
            )
        ],
        [f"{GRAPH}/test_rules.py", f"{GRAPH}/test_refusals.py", "-k", "addresses or computes"],
    ),
    Mutant(
        "images of a batch that mix",
        [Edit(MOVES, "(known[index] == first) & (self.known[1][index] == second)", "(known[index] == first)")],
        [f"{GRAPH}/test_refusals.py", "-k", "mixes"],
    ),
    Mutant(
        "arguments that a rule does not name",
        [
            Edit(
                LOWER,
                '        raise LoweringError(f"its rule does not know these arguments: {error}") from None',
                "        named = {k: v for k, v in kwargs.items() if k in inspect.signature(rule).parameters}\n"
                "        return rule(*args, **named)",
            )
        ],
        [f"{GRAPH}/test_refusals.py", "-k", "argument"],
    ),
    Mutant(
        "a dropout in training taken for the identity",
        [
            Edit(
                RULES,
                '    if training:\n        raise LoweringError("it is random',
                '    if False:\n        raise LoweringError("it is random',
            )
        ],
        [f"{GRAPH}/test_refusals.py", "-k", "argument"],
    ),
    Mutant(
        "views that do not see a change of their base",
        [Edit("node.py", "and self._base_value is not self.base.vertex:", "and self._base_value is None:")],
        [f"{GRAPH}/test_rules.py", "-k", "views"],
    ),
    Mutant(
        "a view that is changed alone",
        [
            Edit(
                "node.py",
                "        if self.base is None:\n            self._value",
                "        if True:\n            self._value",
            )
        ],
        [f"{GRAPH}/test_rules.py", "-k", "views"],
    ),
    Mutant(
        "complex weights made real",
        [Edit(MODULES, "torch.complex128 if t.is_complex() else torch.float64", "torch.float64")],
        [f"{GRAPH}/test_lower.py", "-k", "imaginary"],
    ),
    Mutant(
        "a probe of as many images as a node stands for",
        [
            Edit(PROBE, "torch.randn(IMAGES + 1, *graph", "torch.randn(IMAGES, *graph"),
            Edit(PROBE, "images = IMAGES + 1", "images = IMAGES"),
        ],
        [f"{GRAPH}/test_lower.py", "-k", "something_else"],
    ),
    Mutant(
        "an original that is in training mode",
        [Edit(MODULES, "    module.eval()\n    try:", "    try:")],
        [f"{GRAPH}/test_lower.py", "-k", "evaluation_mode"],
    ),
    Mutant(
        "a float64 copy that shares its input with the graph",
        [Edit(PROBE, "x.to(dtype, copy=True)", "x.to(dtype)")],
        [f"{GRAPH}/test_rules.py", "-k", "views"],
    ),
    Mutant(
        "a lower that a subclass has left behind",
        [Edit(MODULES, 'or not issubclass(owners["lower"], owners["forward"])', "or False")],
        [f"{GRAPH}/test_lower.py", "-k", "beside"],
    ),
    Mutant(
        "no probe",
        [Edit(LOWER, "    probe(module, graph, {name", "    _ = (module, graph, {name")],
        [f"{GRAPH}/test_lower.py", "-k", "something_else"],
    ),
    Mutant(
        "a probe at the scale of pixels only",
        [Edit(PROBE, "SCALES = (1.0, 30.0, 1e-3)", "SCALES = (1.0,)")],
        [f"{GRAPH}/test_lower.py", "-k", "something_else"],
    ),
    # Rules and rewrites
    Mutant(
        "products of values that depend on the input",
        [
            Edit(
                RULES,
                "    if isinstance(input, Node) and isinstance(other, Node):\n"
                '        raise LoweringError("a product of two values that depend on the input has no '
                'Lipschitz bound")\n'
                "    node, factor",
                "    if isinstance(input, Node) and isinstance(other, Node):\n        return input\n    node, factor",
            )
        ],
        [f"{GRAPH}/test_refusals.py", "-k", "bound and product"],
    ),
    Mutant(
        "batch statistics taken for running ones",
        [
            Edit(
                RULES,
                "    if training or running_mean is None or running_var is None:",
                "    if running_mean is None or running_var is None:",
            )
        ],
        [f"{GRAPH}/test_refusals.py", "-k", "argument"],
    ),
    Mutant(
        "a maximum of dependent values taken for a sort of independent ones",
        [
            Edit(
                RULES,
                "GroupSort(2)(torch.cat([expanded(a, shape), expanded(b, shape)], 1)).chunk(2, 1)",
                "Pointwise('abs')(expanded(a, shape)), expanded(b, shape)",
            )
        ],
        [f"{GRAPH}/test_rules.py", "-k", "maximum or minimum"],
    ),
    Mutant(
        "a shift that a padded border does not see",
        [Edit(REWRITE, "return flat[:, 0].clone() if spread <= SAME * largest else None", "return flat.mean(1)")],
        [f"{GRAPH}/test_rewrite.py", "-k", "border"],
    ),
    Mutant(
        "circular padding taken for zeros",
        [Edit(REWRITE, '("circular", _period(index))', '("zeros", _period(index))')],
        [f"{GRAPH}/test_rewrite.py", "-k", "padding"],
    ),
    Mutant(
        "a step up a potential taken for one down",
        [
            Edit(REWRITE, "if ratios is None or bool((-c * ratios < 0).any()):", "if ratios is None:"),
            Edit(REWRITE, "t, name = -c * ratios,", "t, name = (-c * ratios).abs(),"),
        ],
        [f"{GRAPH}/test_rewrite.py", "-k", "descent"],
    ),
    Mutant(
        "another matrix taken for the adjoint",
        [
            Edit(
                REWRITE,
                "return ratios if bool((off <= SAME * theirs.norm(dim=1).max()).all()) else None",
                "return ratios",
            )
        ],
        [f"{GRAPH}/test_rewrite.py", "-k", "descent"],
    ),
    Mutant(
        "a descent of another input",
        [
            Edit(
                REWRITE,
                "isinstance(forth.primitive, Affine) and forth.inputs == (x,)",
                "isinstance(forth.primitive, Affine) and forth.inputs[0].shape == x.shape",
            )
        ],
        [f"{GRAPH}/test_rewrite.py", "-k", "descent"],
    ),
    Mutant(
        "an identity in the middle of a window that is not symmetric",
        [Edit(REWRITE, "axis.stride != 1 or 2 * axis.before != axis.extent - 1 or", "axis.stride != 1 or")],
        [f"{GRAPH}/test_rewrite.py", "-k", "middle"],
    ),
    Mutant(
        "matrices joined the wrong way round",
        [
            Edit(
                REWRITE,
                "builder.vertex(Affine(DenseOperator(after @ before), bias)",
                "builder.vertex(Affine(DenseOperator((before.T @ after.T).T * 0.5), bias)",
            )
        ],
        [f"{GRAPH}/test_rewrite.py", "-k", "join"],
    ),
    Mutant(
        "an average whose divisor is multiplied",
        [Edit(REWRITE, "AvgPool(q.window, q.divisor / c)", "AvgPool(q.window, q.divisor * c)")],
        [f"{GRAPH}/test_rewrite.py", "-k", "averages"],
    ),
    Mutant(
        "a checker whose gather takes every entry once",
        [
            Edit(
                "check.py",
                "self.counts = [int(part.max()) for part in np.split(counts, ends[:-1])]",
                "self.counts = [1 for _ in self.sizes]",
            )
        ],
        ["tests/test_check.py", f"{SOUNDNESS}/test_forgeries.py"],
    ),
    Mutant(
        "a checker that forgets what came to a vertex by another way",
        [
            Edit(
                "check.py",
                "                    more = before + more\n",
                "                    more = more + 0 * before\n",
            )
        ],
        ["tests/test_check.py", f"{SOUNDNESS}/test_forgeries.py"],
    ),
    Mutant(
        "a checker of another domain",
        [Edit("check.py", 'require(description["domain"] == claims["domain"],', "require(True,")],
        ["tests/test_check.py", f"{SOUNDNESS}/test_forgeries.py"],
    ),
    Mutant(
        "subnormal weights read as 0 at no price",
        [Edit(NORM, "(underflow if subnormal else 0)", "0")],
        ["tests/operators/test_norm_exact.py", "-k", "subnormal"],
    ),
    Mutant(
        "pixels read as 0 at no price",
        [
            Edit(FOLD, "added = Fraction(size(vertex), 2**126) if rounding else Fraction(0)", "added = Fraction(0)"),
            Edit("check.py", "Fraction(entries, 2**126), Fraction(1),", "Fraction(0), Fraction(1),"),
        ],
        [f"{SOUNDNESS}/test_bias_amplification.py", "-k", "pixels"],
    ),
    Mutant(
        "constants so small that a processor reads them as 0",
        [
            Edit("rounding.py", "x = max(float(q), NORMAL) if q > 0 else float(q)", "x = float(q)"),
            Edit("rounding.py", ".clamp_min(NORMAL)", ""),
        ],
        [f"{SOUNDNESS}/test_bias_amplification.py", "-k", "tiny_pair_bounds"],
    ),
    Mutant(
        "a checker that takes every scale for 1",
        [
            Edit(
                "check.py",
                'self.greatest = Fraction(float(np.abs(self.t["factor"]).max()))',
                "self.greatest = Fraction(1)",
            )
        ],
        ["tests/test_check.py", "-k", "lowered and center"],
    ),
    Mutant(
        "a checker that forgets what a series leaves out",
        [
            Edit(
                "check.py",
                "return (1 + angle**self.terms / math.factorial(self.terms)) * distances[0]",
                "return distances[0]",
            )
        ],
        ["tests/test_check.py", "-k", "lowered and (soc or series or exponential)"],
    ),
    Mutant(
        "phases of the checker that wrap around at 2⁶³",
        [Edit("check.py", 'axis["dilation"] * j % turn]', 'axis["dilation"] * j]')],
        ["tests/test_check.py", "-k", "far_taps"],
    ),
]


class Result(NamedTuple):
    """The first test that failed on a mutant; None if the mutant survived."""

    mutant: str
    red: str | None
    seconds: float


def main(words: list[str]) -> int:
    """Run the mutants whose name contains one of the words; return 1 if one survives."""
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
    """Check that the tests pass on the source, and return the first that fails on the mutant."""
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
    """The first test that fails, or None if all pass. It is an error if no test runs."""
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
