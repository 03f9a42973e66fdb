"""What each plane may import, and where: the contracts are import-linter's (make lint); these run the promise."""

import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from tools import repo_checks

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
for name in {packages!r}:
    package = importlib.import_module(name)
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith(".__main__") and not module.name.startswith({without!r}):
            importlib.import_module(module.name)
"""


# What speaks to a Kubernetes API server: the operator as it is installed there, `kubectl polyreme` and `polyreme node`.
CLUSTER_LIBRARIES = {"kopf", "kubernetes"}
ON_A_CLUSTER = (
    "polyreme_operator.service",
    "polyreme_operator.kopf_feed",
    "polyreme_cluster.adapters.kubernetes",
    "polyreme.plugin",
    "polyreme.local_run.node_host",
)


def import_all(*packages: str, forbidden: set[str], without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Import every module of packages, but some, in a fresh interpreter that refuses some libraries."""
    script = FORBIDDING_IMPORT.format(forbidden=forbidden, packages=packages, without=without)
    return subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
def test_every_module_imports_without_torch() -> None:
    result = import_all(
        "polyreme_api",
        "polyreme_planner",
        "polyreme_cluster",
        "polyreme_operator",
        "polyreme_local",
        "polyreme_simulator",
        "polyreme_agent",
        "polyreme_datahub",
        "polyreme_datahub_service",
        forbidden={"torch", "transformers"},
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_an_import_of_a_forbidden_library_is_found() -> None:
    result = import_all("polyreme_api", forbidden={"pydantic"})
    assert "forbidden here: pydantic" in result.stderr


def test_the_api_needs_pydantic_and_nothing_else() -> None:
    texts = {
        path: text
        for path, text in repo_checks.tracked_texts(ROOT).items()
        if path.parts[0] == "api" and path.suffix == ".py"
    }
    assert texts
    assert repo_checks.foreign_imports(texts, {"pydantic", "polyreme_api", "polyreme_planner", "polyreme_system"}) == []


@pytest.mark.parametrize("line", ["import numpy as np", "from aiohttp import web", "def f():\n    import yaml.nodes"])
def test_a_foreign_import_is_found(line: str) -> None:
    assert repo_checks.foreign_imports({PurePosixPath("a.py"): line}, {"pydantic"}) != []


def test_few_of_our_modules_are_imported_inside_functions() -> None:
    found = repo_checks.inner_imports(repo_checks.tracked_texts(ROOT))
    assert len(found) <= repo_checks.INNER_IMPORTS_MAX, "\n".join(found)


def test_an_import_inside_a_function_is_found() -> None:
    text = "import polyreme_api\ndef f():\n    import torch\n    from polyreme_api.errors import PolyremeError\n"
    found = repo_checks.inner_imports({PurePosixPath("cli/a.py"): text, PurePosixPath("tests/a.py"): text})
    assert found == ["cli/a.py:4: polyreme_api.errors"]


@pytest.mark.slow
def test_what_runs_on_one_machine_imports_without_cluster_libraries() -> None:
    """The extra ``run`` has neither kopf nor kubernetes."""
    result = import_all(
        "polyreme_cluster",
        "polyreme_operator",
        "polyreme_local",
        "polyreme_simulator",
        "polyreme_launcher",
        "polyreme_datahub_service",
        "polyreme",
        forbidden=CLUSTER_LIBRARIES,
        without=ON_A_CLUSTER,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_the_operator_as_it_is_installed_is_found_to_need_them() -> None:
    result = import_all("polyreme_operator", forbidden=CLUSTER_LIBRARIES)
    assert "forbidden here: kopf" in result.stderr


def test_cluster_libraries_are_named_only_where_a_cluster_is_spoken_to() -> None:
    """Not even inside a function elsewhere: a run on one machine would find them missing when it gets there."""
    texts = {
        path: text
        for path, text in repo_checks.tracked_texts(ROOT).items()
        if path.parts[0] in {"operator", "cli"} and path.suffix == ".py"
        if not ".".join(path.with_suffix("").parts[1:]).startswith(ON_A_CLUSTER)
    }
    assert texts
    assert repo_checks.imports_of(texts, CLUSTER_LIBRARIES) == []


@pytest.mark.parametrize("line", ["import kopf", "def f():\n    from kubernetes.client import CoreV1Api"])
def test_a_cluster_library_elsewhere_is_found(line: str) -> None:
    assert repo_checks.imports_of({PurePosixPath("a.py"): line}, CLUSTER_LIBRARIES) != []
