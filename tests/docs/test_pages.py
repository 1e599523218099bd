"""The pages: their code prints the text below it, and their links and names exist."""

import ast
import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest
from torch import nn

import lipflow
from tests.test_layout import ORDER

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!\\)\]\(([^)#\s]+)(?:#[^)]*)?\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`|^    .*?$", re.MULTILINE | re.DOTALL)


def run(page: Path) -> tuple[int, list[str]]:
    """Run the Python blocks of a page in order; return the number of right outputs, and messages about wrong ones."""
    blocks = [(match[1], match[2]) for match in BLOCK.finditer(page.read_text(encoding="utf-8"))]
    names: dict[str, object] = {"__name__": "page"}
    right, wrong = 0, []
    for i, (language, code) in enumerate(blocks):
        if language != "python":
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, f"{page.name}, block {i}", "exec"), names)
        expected = blocks[i + 1][1] if i + 1 < len(blocks) and blocks[i + 1][0] == "text" else ""
        if doctest.OutputChecker().check_output(expected, printed.getvalue(), doctest.ELLIPSIS):
            right += 1
        else:
            wrong.append(f"block {i} printed\n{printed.getvalue()}and the page says\n{expected}")
    return right, wrong


def test_code_of_building_prints_what_the_page_says():
    right, wrong = run(ROOT / "docs" / "building.md")
    assert wrong == []
    assert right >= 9


def test_run_detects_another_output(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n2\n```\n\n```python\nx = 1\n```\n")
    assert len(run(page)[1]) == 1
    page.write_text("```python\nprint(1.25)\n```\n\n```text\n1.2...\n```\n\n```python\nx = 1\n```\n")
    assert run(page) == (2, [])


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_to_files_exist(page):
    text = CODE.sub("", page.read_text(encoding="utf-8"))
    links = [link for link in LINK.findall(text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_readme_quotes_the_error_of_freeze():
    model = nn.Sequential(*[nn.Identity() for _ in range(3)], nn.LayerNorm(8))
    with pytest.raises(lipflow.LoweringError) as refused:
        lipflow.freeze(model, in_shape=(4, 8, 8))
    assert f"    {refused.value}\n" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_and_theory_have_the_same_steps():
    for page in ("README.md", "docs/theory.md"):
        steps = re.findall(r"^\| `(\w+)\(", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert steps == ["ExplicitEuler", "ImplicitEuler", "Midpoint", "Exponential"]
        assert all(issubclass(getattr(lipflow, step), lipflow.flows.Step) for step in steps)


def definitions(body: list[ast.stmt]) -> set[str]:
    """The names of functions and classes, and of methods as Class.method."""
    named = [node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    inner = {f"{n.name}.{name}" for n in named if isinstance(n, ast.ClassDef) for name in definitions(n.body)}
    return {node.name for node in named} | inner


def test_architecture_names_functions_and_modules_that_exist():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("## Packages and modules")[1].split("```text\n")[1].split("```")[0]
    assert [line.split()[0].rstrip("/") for line in table.splitlines()] == ORDER
    pairs = re.findall(r"^\| `([\w.]+)` \| `([\w/]+\.py)` \|", page, re.MULTILINE)
    pairs += re.findall(r"`([\w.]+)` in `([\w/]+\.py)`", page)
    assert len(pairs) > 30
    for name, file in pairs:
        tree = ast.parse((ROOT / "src" / "lipflow" / file).read_text(encoding="utf-8"))
        assert name.removeprefix("lipflow.") in definitions(tree.body), f"{name} is not in {file}"


def test_contributing_names_tables_that_exist():
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    pairs = re.findall(r"`([A-Z]{4,})`\s+(?:in|of)\s+`([\w/]+\.py)`", page)
    assert len(pairs) >= 9
    for name, file in pairs:
        found = next(folder / file for folder in (ROOT, ROOT / "src" / "lipflow") if (folder / file).is_file())
        assert re.search(rf"^{name}\b.*=", found.read_text(encoding="utf-8"), re.MULTILINE), f"{name} is not in {file}"
