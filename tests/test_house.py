"""Rules of the house that no type checker knows: imports, sizes, names, meanings."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from laminar.settings import all_settings

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "laminar"
CONTROL = PACKAGE / "control"
LINES_MAX = 400
HEAVY = ("torch", "ray", "transformers", "plotly")
IMPURE = {
    "asyncio",
    "concurrent",
    "datetime",
    "io",
    "multiprocessing",
    "os",
    "pathlib",
    "secrets",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
"""Clocks, input and output, concurrency, chance that nobody seeded: control has none of it."""
NAMELESS = {"utils", "util", "helpers", "helper", "common", "misc", "base"}


def sources(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.py"))
    assert found, f"{folder} has no source"
    return found


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports anywhere, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                assert node.level == 0, f"{path} imports relative to itself"
                yield node.module or ""
            case _:
                pass


def top(module: str) -> str:
    return module.partition(".")[0]


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("module", ["laminar.cli", "laminar.control.plane", "laminar.data.records", "laminar.settings"])
def test_a_light_import_stays_light(module):
    """`laminar --help` answers at once, and control can be read and replayed without any of these."""
    code = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("path", sources(CONTROL), ids=short)
def test_control_has_no_clock_no_input_no_output_and_no_concurrency(path):
    assert not {top(module) for module in imports(path)} & IMPURE
    tree = ast.parse(path.read_text())
    asynchronous = (ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith, ast.Await)
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, asynchronous)]
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"open", "input", "print", "hash", "id"}, "a replay would see another world"


@pytest.mark.parametrize("path", sources(CONTROL), ids=short)
def test_control_draws_by_chance_only_where_the_prompts_are_ordered_and_from_a_seed(path):
    drawing = {module for module in imports(path) if top(module) in ("random", "numpy")}
    if path.name != "prompts.py":
        assert not drawing
        return
    used = [
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random"
    ]
    assert used == ["Random"], "the module's own functions share one generator that nobody seeded"


@pytest.mark.parametrize("path", sources(CONTROL), ids=short)
def test_control_iterates_no_set(path):
    """The order of a set of texts differs from process to process, so a replay could decide otherwise."""
    looped: list[ast.expr] = []
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.For() | ast.comprehension():
                looped.append(node.iter)
            case ast.Starred():
                looped.append(node.value)
            case ast.Call(func=ast.Name(id="list" | "tuple" | "iter" | "next" | "enumerate" | "zip")):
                looped += node.args
            case _:
                pass
    assert not [expression.lineno for expression in looped if is_set(expression)]


def is_set(expression: ast.expr) -> bool:
    match expression:
        case ast.Set() | ast.SetComp() | ast.Call(func=ast.Name(id="set" | "frozenset")):
            return True
        case ast.BinOp():
            return is_set(expression.left) or is_set(expression.right)
        case _:
            return False


@pytest.mark.parametrize("folder", [PACKAGE, ROOT / "tests"], ids=short)
def test_no_file_is_too_long_or_without_a_name_of_its_own(folder):
    paths = sources(folder)
    assert [short(path) for path in paths if path.stem in NAMELESS] == []
    lengths = {short(path): len(path.read_text().splitlines()) for path in paths if PACKAGE in path.parents}
    assert {name: length for name, length in lengths.items() if length > LINES_MAX} == {}


def test_every_folder_of_tests_is_a_package():
    """So that two files may have one name, and a test imports what helps it by its whole name."""
    folders = {path.parent for path in sources(ROOT / "tests")}
    assert [short(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_every_setting_has_a_meaning():
    assert [setting.name for setting in all_settings() if not setting.meaning] == []


def test_nobody_left_a_merge_half_done():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("this is no git checkout")
    marks = tuple(7 * sign + " " for sign in "<>")
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if path.suffix in (".md", ".py", ".yaml", ".toml", ".txt", "") and path.is_file():
            for line in path.read_text(errors="replace").splitlines():
                assert not line.startswith(marks), f"{name}: {line}"
