"""The one direction of dependency, and how light an import is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "lipflow"

# Each room may use itself and the rooms before it.
ORDER = [
    "check",
    "files",
    "machine",
    "rounding",
    "shapes",
    "radius",
    "untrusted",
    "operators",
    "node",
    "primitives",
    "graph",
    "bound",
    "fast",
    "flows",
    "blocks",
    "models",
    "losses",
    "data",
    "frozen",
    "certificate",
    "attack",
    "testing",
    "train",
    "pretrained",
    "report",
    "commands",
    "cli",
    "__main__",
]
SEPARATE = {"check": set()}  # the checker stands alone, on NumPy


def _imports(path: Path) -> set[str]:
    """The rooms of lipflow that a file names in an import, at any depth of its code."""
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "lipflow":
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "lipflow" else [node.module]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("lipflow.")]
        else:
            continue
        rooms.update(name.split(".")[1] for name in names)
    return rooms


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_dependencies_point_one_way(path):
    room = _room(path)
    if room == "__init__":
        return
    used = _imports(path) - {room}
    if room in SEPARATE:
        assert used == SEPARATE[room]
        return
    assert room in ORDER, f"{room} has no place in the order of dependency"
    assert all(ORDER.index(other) < ORDER.index(room) for other in used if other in ORDER), used
    assert not {other for other in used if other not in ORDER}


def test_files_are_short():
    """The checker is one file by intent: a reader should need no other."""
    lengths = {p.relative_to(PACKAGE): len(p.read_text().splitlines()) for p in PACKAGE.rglob("*.py")}
    assert lengths.pop(Path("check.py")) <= 1080
    assert max(lengths.values()) <= 430


def test_import_is_light():
    code = "import sys, lipflow; assert 'torch' not in sys.modules; assert 'build' in dir(lipflow)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_exists():
    import lipflow

    for name in lipflow.__all__:
        assert getattr(lipflow, name) is not None


def test_the_source_distribution_has_every_folder_that_tests_and_the_makefile_use():
    tomllib = pytest.importorskip("tomllib", reason="it came with Python 3.11")
    root = PACKAGE.parents[1]
    included = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"][
        "include"
    ]
    imported = set()
    for path in (root / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported |= {name.split(".")[0] for name in names if name}
    folders = {name for name in imported if (root / name).is_dir()}
    assert {"tests", "experiments"} <= folders
    assert {f"/{name}" for name in folders | {"examples", "benchmarks"}} <= set(included)


def test_types_promise_the_names_that_exist_and_no_others():
    """Type checkers read the imports in `if TYPE_CHECKING`, and a running program the tables of names."""
    import lipflow

    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    [promised] = [node for node in tree.body if isinstance(node, ast.If)]
    named: dict[str, str | None] = {}
    for node in promised.body:
        assert isinstance(node, ast.ImportFrom)
        assert node.module is not None
        for alias in node.names:
            assert alias.asname == alias.name, "a name is exported where it is imported as itself"
            named[alias.name] = node.module.partition(".")[2] or None
    assert named == {**lipflow._HOME, **dict.fromkeys(lipflow._MODULES)}
    assert {*named, "__version__"} == set(lipflow.__all__)


def test_every_room_is_an_attribute():
    """Where nothing but lipflow was imported; the command line is a program and no part of the library."""
    rooms = {_room(path) for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__", "cli", "commands", "files"}
    code = f"import lipflow; assert all(getattr(lipflow, room).__name__ == f'lipflow.{{room}}' for room in {rooms})"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_checker_is_reached_without_torch():
    code = "import sys, lipflow; lipflow.check.check; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
