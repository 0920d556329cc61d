"""The shape of the source: imports point down, every module tells its story, files stay small."""

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "zeepo"
MAX_LINES = 400

# Highest first. A module imports from lower rows and from its own package, never from its own row.
# "zeepo" is zeepo/__init__.py: what it exports is for users and for the command line.
# "verify" runs a user's program, which imports zeepo, so it stands above it; so does "doctor".
# "sabotage" is the switches of the mutation tests: it imports nothing, so anyone may ask it.
ROWS = (
    ("cli",),
    ("compare",),
    ("verify", "doctor"),
    ("zeepo",),
    ("engine", "checkpoint", "report"),
    ("optim", "planner"),
    ("chunks", "data"),
    ("memory", "sharding", "launch"),
    ("native", "events"),
    ("config",),
    ("errors",),
    ("units", "sabotage"),
)
DEPTH = {name: depth for depth, row in enumerate(ROWS) for name in row}


def component_of(path: Path) -> str:
    """The name in ROWS that a file under src/zeepo belongs to."""
    first = path.relative_to(SOURCE).parts[0]
    name = first.removesuffix(".py")
    return "zeepo" if name == "__init__" else name


def imported_components(tree: ast.Module, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Every component of zeepo that a module imports, with the line; function bodies included.

    `package` is the package the module is in, which is what a relative import starts from.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _component(node.lineno, tuple(alias.name.split(".")))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                yield from _component(node.lineno, (*base, alias.name))


def _component(line: int, dotted: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    if dotted[0] == "zeepo":
        # `from zeepo import init` is a name of zeepo/__init__.py, not a component of its own.
        yield line, dotted[1] if len(dotted) > 1 and dotted[1] in DEPTH else "zeepo"


def violations(source: str, component: str, package: tuple[str, ...]) -> list[str]:
    """What in `source` imports sideways or up, as lines for a failure message."""
    return [
        f"line {line}: {component} imports {target}"
        for line, target in imported_components(ast.parse(source), package)
        if target != component and DEPTH[target] <= DEPTH[component]
    ]


FILES = sorted(SOURCE.rglob("*.py"))
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))


@each_file
def test_imports_point_down(path: Path) -> None:
    component = component_of(path)
    assert component in DEPTH, f"{component} has no place in ROWS: give it one"
    package = ("zeepo", *path.relative_to(SOURCE).parent.parts)
    assert violations(path.read_text(), component, package) == []


@each_file
def test_module_has_a_docstring(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{path} does not tell its story"


@each_file
def test_file_stays_small(path: Path) -> None:
    num_lines = len(path.read_text().splitlines())
    assert num_lines < MAX_LINES, f"{path} has {num_lines} lines; split it below {MAX_LINES}"


@pytest.mark.parametrize(
    ("component", "line"),
    [
        ("units", "from zeepo.errors import ConfigError"),
        ("memory", "import zeepo.engine.step"),
        ("memory", "import zeepo"),
        ("memory", "from zeepo import init"),
        ("memory", "from zeepo import chunks"),
        ("memory", "from ..chunks import layout"),
        ("memory", "from .. import chunks"),
        ("memory", "from zeepo.sharding import ranges"),
        ("memory", "def late():\n    from zeepo.optim import shadow"),
        ("engine", "from zeepo.checkpoint import manifest"),
        ("zeepo", "from zeepo.cli import main"),
    ],
)
def test_the_check_sees_a_violation(component: str, line: str) -> None:
    assert violations(line, component, ("zeepo", component))


@pytest.mark.parametrize(
    ("component", "line"),
    [
        ("memory", "import torch, numpy"),
        ("memory", "from zeepo.memory.pool import Pool"),
        ("memory", "from .pool import Pool"),
        ("memory", "from . import pool"),
        ("memory", "from ..units import GiB"),
        ("memory", "from zeepo import units"),
        ("engine", "from zeepo.chunks.layout import Slot"),
        ("cli", "import zeepo"),
    ],
)
def test_the_check_lets_down_and_inside_pass(component: str, line: str) -> None:
    assert violations(line, component, ("zeepo", component)) == []


def test_no_folder_of_tests_is_left_out(pytestconfig: pytest.Config) -> None:
    """By pytest's default "dist" is one of the folders that are not looked into."""
    tests = Path(__file__).parent
    folders = {part for file in tests.rglob("test_*.py") for part in file.relative_to(tests).parts}
    patterns = pytestconfig.getini("norecursedirs")
    assert not [f for f in folders for pattern in patterns if fnmatch(f, pattern)]
