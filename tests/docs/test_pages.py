"""The code on the pages runs and prints the output below it, and links to files are not broken."""

import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest
from torch import nn

import lipflow

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\\)\]\(([^)#\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`|^    .*?$", re.MULTILINE | re.DOTALL)


def run(page: Path) -> tuple[int, list[str]]:
    """Run the Python blocks of a page; count those that print the text block below, and describe the others."""
    blocks = [(match[1], match[2]) for match in BLOCK.finditer(page.read_text(encoding="utf-8"))]
    names: dict[str, object] = {"__name__": "page"}
    passed, failed = 0, []
    for i, (language, code) in enumerate(blocks):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{page.name}, block {i}", "exec"), names)
        expected = blocks[i + 1][1] if i + 1 < len(blocks) and blocks[i + 1][0] == "text" else ""
        if doctest.OutputChecker().check_output(expected, printed.getvalue(), doctest.ELLIPSIS):
            passed += 1
        else:
            failed.append(f"block {i} printed\n{printed.getvalue()}and the page says\n{expected}")
    return passed, failed


def test_the_code_of_building_prints_the_output_on_the_page():
    passed, failed = run(ROOT / "docs" / "building.md")
    assert failed == []
    assert passed >= 9


def test_run_notices_another_output(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n\n```python\nx = 1\n```\n")
    assert len(run(page)[1]) == 1
    page.write_text("```python\nprint(1.25)\n```\n\n```text\n1.2...\n```\n\n```python\nx = 1\n```\n")
    assert run(page) == (2, [])


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]), ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_to_files_are_not_broken(page):
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    links = [link for link in LINK.findall(text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_readme_quotes_the_error_of_freeze():
    model = nn.Sequential(*[nn.Identity() for _ in range(3)], nn.LayerNorm(8))
    with pytest.raises(lipflow.LoweringError) as refused:
        lipflow.freeze(model, in_shape=(4, 8, 8))
    assert f"    {refused.value}\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_and_the_theory_have_a_row_for_every_step():
    for page in ("README.md", "docs/theory.md"):
        steps = re.findall(r"^\| `(\w+)\(", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert steps == ["ExplicitEuler", "ImplicitEuler", "Midpoint", "Exponential"]
        assert all(issubclass(getattr(lipflow, step), lipflow.flows.Step) for step in steps)
