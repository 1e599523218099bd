"""The programs in examples/ print what docs/examples.md says, up to rounding."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lipflow

ROOT = Path(__file__).parents[2]
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[+-]?\d+)?")


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look for their module
    spec.loader.exec_module(module)
    return module


def printed_on_the_page(name: str) -> str:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    return page.split(f"<!-- output: {name}.py -->\n```text\n")[1].split("```")[0]


def require_close(printed: str, expected: str) -> None:
    """The same words, and close numbers: percentages to 5 points, others to 20 %."""
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", expected).split()
    for ours, theirs in zip(NUMBER.findall(printed), NUMBER.finditer(expected), strict=True):
        near = dict(rel=0, abs=5) if expected[theirs.end() :].startswith("%") else dict(rel=0.2, abs=1e-6)
        assert float(ours) == pytest.approx(float(theirs[0]), **near), expected


@pytest.mark.parametrize("name", ["certify_your_cnn", "custom_field"])
def test_example_prints_what_its_page_says(name, capsys):
    torch.set_num_threads(1)
    example(name).main()
    require_close(capsys.readouterr().out, printed_on_the_page(name))


def test_require_close_detects_another_output():
    for printed in ("a 2.00% 0.5", "a 90.00% 0.5", "a 98.00 0.5", "b 98.00% 0.5", "a 98.00% 0.7", "a 98.00%"):
        with pytest.raises(AssertionError):
            require_close(printed, "a 98.00% 0.5")
    require_close("a 97.67%  0.51", "a 98.00% 0.5")


def test_largest_ratio_exceeds_a_bound_that_is_too_small():
    module = example("custom_field")
    too_smooth = lipflow.Potential(module.SmoothVariation(delta=0.5), smoothness=1.0)
    layer = lipflow.Flow(too_smooth, lipflow.ExplicitEuler()).double().eval()
    torch.set_default_dtype(torch.float64)
    assert lipflow.lipschitz_bound(layer, in_shape=(8,)).lipschitz == 1
    assert module.largest_ratio(layer, 0.0) > 5


def test_custom_step_through_our_fields_freezes():
    module = example("custom_field")
    field = lipflow.ConvexPlusSkew(
        lipflow.ConvexPotential(lipflow.DenseWeight(8, 32)), lipflow.Skew(lipflow.DenseWeight(8, 8))
    )
    layer = lipflow.Flow(field, module.Strang(lipflow.ExplicitEuler(), lipflow.Midpoint(0.5)))
    frozen = lipflow.freeze(nn.Sequential(layer).eval(), in_shape=(8,))
    assert [row.kind for row in frozen.ledger] == ["input", "affine", "descent", "affine"]
    assert frozen.lipschitz < 1 + 1e-8
    x = torch.rand(5, 8)
    torch.testing.assert_close(frozen(x).float(), layer(x), rtol=1e-2, atol=1e-3)  # h differs: estimated, certified
    with pytest.raises(TypeError, match="Strang steps through a ConvexPlusSkew"):
        lipflow.Flow(
            lipflow.Skew(lipflow.DenseWeight(8, 8)), module.Strang(lipflow.ExplicitEuler(), lipflow.Midpoint())
        )
