"""The locks hold what pyproject.toml asks for, by hash, and nothing of the machine that made them."""

import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import repo_checks

ROOT = Path(__file__).parents[3]
TESTED = "requirements/dev.lock"
IMAGE_EXTRAS = {
    "operator": ("operator",),
    "datahub": ("datahub-service",),
    "trainer": ("trainer",),
    "cli": ("kubectl", "services"),
}
PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)(?P<rest>(?:[^\n]*\\\n)*[^\n]*)", re.MULTILINE)
HOSTS = {"compressed_tensors", "vllm"}
"""Of vLLM's environment, where a plugin and a check of ours run."""
NOT_OF_A_LOCK = re.compile(r"://|(?<![\w.])/\w|--(?:find-links|index-url|extra-index-url|trusted-host)")
EXTRAS = {
    "requirements/uv.lock.txt": (),
    "requirements/build.lock": (),
    "requirements/release.lock": (),
    "requirements/site.lock": (),
    "requirements/run.lock": ("run",),
    "requirements/dev.lock": ("run", "datahub-service", "kubectl"),
    **{f"requirements/{image}.lock": extras for image, extras in IMAGE_EXTRAS.items()},
}
LOCKS = tuple(EXTRAS)
NEVER_TOGETHER = (TESTED, "requirements/uv.lock.txt", "requirements/release.lock", "requirements/site.lock")
"""Tools that are installed apart from what is tested."""
GROUPS = dict.fromkeys(LOCKS, ()) | {
    "requirements/uv.lock.txt": ("bootstrap",),
    "requirements/build.lock": ("build",),
    "requirements/release.lock": ("release",),
    "requirements/site.lock": ("site",),
    "requirements/run.lock": ("build",),
    "requirements/dev.lock": ("dev",),
}


def pins(lock: str) -> dict[str, list[str]]:
    """Versions of each name; a lock for every platform may hold two of one name, under different markers."""
    found: dict[str, list[str]] = {}
    for pin in PIN.finditer(lock):
        found.setdefault(canonicalize_name(pin["name"]), []).append(pin["version"])
    return found


def wanted(project: Mapping[str, Any], extras: tuple[str, ...], groups: tuple[str, ...]) -> Iterator[Requirement]:
    """Every requirement that the extras and groups of pyproject.toml come to."""
    table = project["project"]
    if extras:
        yield from map(Requirement, table["dependencies"])
    for extra in extras:
        for text in table["optional-dependencies"][extra]:
            requirement = Requirement(text)
            if requirement.name == table["name"]:
                yield from wanted(project, tuple(sorted(requirement.extras)), ())
            else:
                yield requirement
    for group in groups:
        for entry in project["dependency-groups"][group]:
            if isinstance(entry, str):
                yield Requirement(entry)
            else:
                yield from wanted(project, (), (entry["include-group"],))


def stale(project: Mapping[str, Any], lock: str, extras: tuple[str, ...], groups: tuple[str, ...]) -> list[str]:
    """Requirements that the lock does not meet."""
    locked = pins(lock)
    return [
        text
        for text, requirement in {str(wish): wish for wish in wanted(project, extras, groups)}.items()
        if not (versions := locked.get(canonicalize_name(requirement.name)))
        or not any(requirement.specifier.contains(version, prereleases=True) for version in versions)
    ]


def unhashed(lock: str) -> list[str]:
    return [pin["name"] for pin in PIN.finditer(lock) if "--hash=sha256:" not in pin["rest"]]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_meets_what_the_project_asks_for(name: str) -> None:
    lock = (ROOT / name).read_text()
    assert stale(project(), lock, EXTRAS[name], GROUPS[name]) == [], "run make lock"


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_no_direct_requirement_that_the_project_dropped(name: str) -> None:
    lock = (ROOT / name).read_text()
    asked = {canonicalize_name(wish.name) for wish in wanted(project(), EXTRAS[name], GROUPS[name])}
    direct = {
        canonicalize_name(entry.partition("==")[0])
        for entry in re.split(r"\n(?=[A-Za-z0-9])", lock)
        if "polyreme (pyproject.toml" in entry
    }
    assert direct == asked, "run make lock"


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_pins_every_package_by_hash(name: str) -> None:
    lock = (ROOT / name).read_text()
    assert pins(lock)
    assert unhashed(lock) == []


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_holds_no_address_and_no_path(name: str) -> None:
    assert NOT_OF_A_LOCK.findall((ROOT / name).read_text()) == []


@pytest.mark.parametrize("name", [name for name in LOCKS if name not in NEVER_TOGETHER])
def test_what_runs_and_what_is_in_images_has_the_versions_that_are_tested(name: str) -> None:
    lock, tested = (pins((ROOT / path).read_text()) for path in (name, TESTED))
    assert {package: versions for package, versions in lock.items() if tested.get(package) != versions} == {}


def test_the_operators_image_has_no_torch_and_the_trainers_no_client_of_kubernetes() -> None:
    operator, trainer = (pins((ROOT / f"requirements/{name}.lock").read_text()) for name in ("operator", "trainer"))
    assert "torch" not in operator
    assert not {"kubernetes", "kopf"} & set(trainer)


def test_every_library_that_is_imported_is_asked_for() -> None:
    """A library that comes along with another leaves with it."""
    roots = {*repo_checks.SOURCE_ROOTS, "tests", "tools"}
    texts = {
        path: text
        for path, text in repo_checks.tracked_texts(ROOT).items()
        if path.suffix == ".py" and path.parts[0] in roots
    }
    asked = {canonicalize_name(wish.name) for wish in wanted(project(), EXTRAS[TESTED], ("dev",))}
    ours = {path.name for root in repo_checks.SOURCE_ROOTS for path in (ROOT / root).iterdir()} | {
        "tests",
        "tools",
        "benchmarks",
    }
    sources = packages_distributions()
    imported = {offence.rpartition(" ")[2].partition(".")[0] for offence in repo_checks.foreign_imports(texts, ours)}
    assert {"pydantic", "torch"} <= imported
    asked_for = {name for name in imported if asked & {canonicalize_name(source) for source in sources.get(name, ())}}
    assert imported - asked_for == HOSTS


def test_a_stale_lock_is_found() -> None:
    asks: dict[str, Any] = {
        "project": {"name": "p", "dependencies": ["a>=2"], "optional-dependencies": {"x": ["p[y]"], "y": ["B_c==1.0"]}},
        "dependency-groups": {"dev": [{"include-group": "lint"}], "lint": ["d"]},
    }
    assert stale(asks, "a==2.1\nb-c==1.0\nd==3\n", ("x",), ("dev",)) == []
    assert stale(asks, "a==1.9\nb-c==1.1\n", ("x",), ("dev",)) == ["a>=2", "B_c==1.0", "d"]


@pytest.mark.parametrize("line", ["# via -r /tmp/x.in", "--find-links wheels", "a @ https://host/a.whl"])
def test_an_address_or_a_path_in_a_lock_is_found(line: str) -> None:
    assert NOT_OF_A_LOCK.findall(line) != []


def test_a_pin_without_hash_is_found() -> None:
    assert unhashed("a==1 \\\n    --hash=sha256:00\nb==2\n") == ["b"]
