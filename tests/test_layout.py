"""The shape of the tree: budgets, names, and the traps that a layout of three source roots has."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("operator", "fuse", "runtime")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
P90_FUNCTION_LINES = 40
MEDIAN_FILE_LINES = 150


def tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


SOURCES = tracked(*(f"{root}/*.py" for root in SOURCE_ROOTS))
PACKAGES = sorted({path.parent for path in SOURCES if path.name == "__init__.py"})


def functions(path: Path) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text())
    return [
        (f"{path.relative_to(ROOT)}:{node.name}", (node.end_lineno or 0) - node.lineno + 1)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_the_source_roots_are_folders_of_packages_and_not_packages() -> None:
    # A package called `operator` would shadow the standard library's.
    for root in SOURCE_ROOTS:
        assert [path.name for path in (ROOT / root).glob("*.py")] == []


def test_no_test_folder_is_a_package() -> None:
    assert [str(path) for path in (ROOT / "tests").rglob("__init__.py")] == []


def test_test_modules_have_names_of_their_own() -> None:
    names = [path.name for path in tracked("tests/*.py") if path.name.startswith("test_")]
    assert sorted(names) == sorted(set(names))


def test_no_source_file_is_longer_than_the_budget() -> None:
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in SOURCES}
    assert {name: n for name, n in lengths.items() if n > MAX_FILE_LINES} == {}
    assert median(n for n in lengths.values() if n) <= MEDIAN_FILE_LINES


def test_no_function_is_longer_than_the_budget() -> None:
    lengths = [entry for path in SOURCES for entry in functions(path)]
    assert [entry for entry in lengths if entry[1] > MAX_FUNCTION_LINES] == []
    ordered = sorted(length for _, length in lengths)
    assert ordered[int(len(ordered) * 0.9)] <= P90_FUNCTION_LINES


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_package_that_exports_names_lists_them(path: Path) -> None:
    # That the list is sorted and complete is ruff's to say (RUF022, F401).
    tree = ast.parse((path / "__init__.py").read_text())
    exports = [
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
    ]
    listed = any(
        isinstance(target, ast.Name) and target.id == "__all__"
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
    )
    assert listed or not exports


def test_no_star_import_and_no_promise_of_later_work() -> None:
    later = re.compile(r"\b(TODO|FIXME|XXX)\b|NotImplementedError")
    found = []
    for path in SOURCES:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if later.search(line) or re.match(r"from \S+ import \*", line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


def test_documents_and_code_name_no_machine() -> None:
    home = re.compile(r"/(root|home)/[a-z]")
    texts = [*SOURCES, *tracked("docs/*.md", "README.md", "charts/*", "manifests/*")]
    assert [str(p) for p in texts if home.search(p.read_text(errors="replace"))] == []
