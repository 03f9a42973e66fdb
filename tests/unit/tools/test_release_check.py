"""The release check finds versions that differ and extras that lack what they are for."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import release_check

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# Stands in for an environment where one extra alone is installed: other libraries are not found.
ALONE = """
import importlib, importlib.abc, importlib.util, json, sys

class Alone(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

hidden = frozenset(json.loads(sys.argv[1]))
looked_up = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in hidden else looked_up(name, package)
sys.meta_path.insert(0, Alone())
for module in sys.argv[2:]:
    importlib.import_module(module)
"""


def installed_with(extra: str) -> set[str]:
    """Distributions that polyreme with one extra brings, over all that these need."""
    found: set[str] = set()
    todo = [Requirement(f"polyreme[{extra}]" if extra else "polyreme")]
    seen = set()
    while todo:
        requirement = todo.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        found.add(canonicalize_name(requirement.name))
        for text in distribution(requirement.name).requires or ():
            needed = Requirement(text)
            extras = requirement.extras or {""}
            if needed.marker is None or any(needed.marker.evaluate({"extra": one}) for one in extras):
                todo.append(needed)
    return found


def import_alone(extra: str, *modules: str) -> subprocess.CompletedProcess[str]:
    """Import modules where the libraries of one extra are visible, and no others."""
    visible = installed_with(extra)
    hidden = [
        module
        for module, sources in packages_distributions().items()
        if not visible & {canonicalize_name(source) for source in sources}
    ]
    command = [sys.executable, "-c", ALONE, json.dumps(hidden), *modules]
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("extra", release_check.IMPORTS)
def test_each_extra_alone_brings_what_its_entry_points_import(extra: str) -> None:
    done = import_alone(extra, *release_check.IMPORTS[extra])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_an_entry_point_without_its_library_is_found() -> None:
    assert "No module named 'kopf'" in import_alone("kubectl", "polyreme_operator.service").stderr


def test_every_extra_and_every_command_is_checked() -> None:
    assert list(release_check.uncovered(PROJECT)) == []


def test_an_extra_without_a_check_is_found() -> None:
    table = PROJECT["project"]
    more = {"project": {**table, "optional-dependencies": {**table["optional-dependencies"], "new": []}}}
    assert list(release_check.uncovered(more)) == ["extra new"]


def test_chart_and_manifests_have_the_projects_version() -> None:
    files = [ROOT / "charts/polyreme/Chart.yaml", *sorted((ROOT / "manifests").glob("*.yaml"))]
    seen = release_check.text_versions({path.name: path.read_text() for path in files})
    assert {"Chart.yaml version", "Chart.yaml appVersion", "operator.yaml polyreme/operator"} <= set(seen)
    assert release_check.disagreements({"project": PROJECT["project"]["version"], **seen}) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("version: 0.2.0\n", "a version has version 0.2.0"),
        ('appVersion: "0.2.0"\n', "a appVersion has version 0.2.0"),
        ("  image: polyreme/operator:0.2.0\n", "a polyreme/operator has version 0.2.0"),
        ("  image: host/polyreme/s3:latest\n", "a polyreme/s3 has version latest"),
    ],
)
def test_another_version_is_found(text: str, found: str) -> None:
    (said,) = release_check.disagreements({"project": "0.1.0", **release_check.text_versions({"a": text})})
    assert re.match(re.escape(found), said)
