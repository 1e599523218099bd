"""The order of dependencies, the size of files, and the names and imports of the package."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import lipflow

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "lipflow"

# Each module may import itself and the modules before it.
MODULES = """
    check files machine rounding shapes pixels radius untrusted torch_state operators node primitives graph bound fast
    flows blocks models losses data frozen certificate attack testing train pretrained report commands cli __main__
"""
ORDER = MODULES.split()


def top_module(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The full names of all modules and names that a file imports, at any depth of its code."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_import_only_modules_before_them(path):
    module = top_module(path)
    if module == "__init__":
        return
    used = {name.split(".")[1] for name in imported(path) if name.startswith("lipflow.")} - {module, "__version__"}
    allowed = set() if module == "check" else set(ORDER[: ORDER.index(module)])
    assert used <= allowed


def test_files_are_short():
    lengths = {p.relative_to(PACKAGE): len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")}
    assert lengths.pop(Path("check.py")) <= 1210  # one file, so that a reader needs no other
    assert max(lengths.values()) <= 430


def test_import_is_light():
    """Neither the package nor the checker imports torch, and every module is an attribute of the package."""
    code = f"""
import sys, lipflow
assert lipflow.check.check and "build" in dir(lipflow)
assert "torch" not in sys.modules
assert all(getattr(lipflow, name).__name__ == f"lipflow.{{name}}" for name in {set(ORDER)})
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_type_checkers_see_the_names_of_the_package():
    """The imports under `if TYPE_CHECKING` and the names at run time are the same objects."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name  # otherwise type checkers take the name for a private one
            declared[alias.name] = node.module
    for name, module in declared.items():
        found = importlib.import_module(f"lipflow.{name}" if module == "lipflow" else module)
        assert getattr(lipflow, name) is (found if module == "lipflow" else getattr(found, name))
    assert set(declared) == {*lipflow.__all__, *ORDER} - {"__version__", "files", "commands", "cli", "__main__"}


def test_the_source_distribution_has_every_folder_that_tests_import():
    tomllib = pytest.importorskip("tomllib", reason="it came with Python 3.11")
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    names = {name.split(".")[0] for path in (ROOT / "tests").rglob("*.py") for name in imported(path)}
    folders = {name for name in names if (ROOT / name).is_dir()}
    assert {"tests", "experiments"} <= folders
    assert {f"/{name}" for name in folders | {"examples", "benchmarks"}} <= set(build["targets"]["sdist"]["include"])
