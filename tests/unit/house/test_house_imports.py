"""What each plane may import: the contracts are import-linter's (make lint); these run the promise."""

import ast
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from tools import guards

ROOT = Path(__file__).parents[3]
# Stands in for a machine without the library, whatever this one has installed.
FORBIDDING_IMPORT = """
import importlib.abc, sys

class Forbid(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {forbidden!r}:
            raise ImportError("forbidden here: " + name)

sys.meta_path.insert(0, Forbid())
import importlib, pkgutil
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith(".__main__"):
        importlib.import_module(module.name)
"""


def import_all(package: str, forbidden: set[str]) -> subprocess.CompletedProcess[str]:
    """Import every module of a package in a fresh interpreter that refuses some libraries."""
    script = FORBIDDING_IMPORT.format(forbidden=forbidden, package=package)
    return subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["polyreme_api", "polyreme_operator", "polyreme_datahub"])
def test_every_module_imports_without_torch(package: str) -> None:
    result = import_all(package, {"torch", "transformers"})
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_an_import_of_a_forbidden_library_is_found() -> None:
    result = import_all("polyreme_api", {"pydantic"})
    assert "forbidden here: pydantic" in result.stderr


def test_the_api_needs_pydantic_and_nothing_else() -> None:
    texts = {
        path: text
        for path, text in guards.tracked_texts(ROOT).items()
        if path.parts[0] == "api" and path.suffix == ".py"
    }
    assert texts
    assert guards.foreign_imports(texts, {"pydantic", "polyreme_api"}) == []


@pytest.mark.parametrize("line", ["import numpy as np", "from aiohttp import web", "def f():\n    import yaml.nodes"])
def test_a_foreign_import_is_found(line: str) -> None:
    assert guards.foreign_imports({PurePosixPath("a.py"): line}, {"pydantic"}) != []


def test_the_embedded_run_needs_no_cluster_libraries() -> None:
    """The extra ``run`` leaves out kopf and kubernetes: whoever imports them does so inside a function."""
    offences = [
        f"{path}: {module}"
        for path, text in guards.tracked_texts(ROOT).items()
        if path.parts[0] in {"operator", "cli"} and path.suffix == ".py"
        for statement in ast.parse(text).body
        for module in imported(statement)
        if module.partition(".")[0] in {"kopf", "kubernetes"}
    ]
    assert offences == []


def imported(statement: ast.stmt) -> list[str]:
    match statement:
        case ast.Import():
            return [alias.name for alias in statement.names]
        case ast.ImportFrom(module=str(module)):
            return [module]
        case _:
            return []
