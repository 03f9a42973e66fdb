"""Check a release before it is tagged: wheel, sdist, extras, images and chart.

The wheel and the sdist are built and judged by twine, the sdist gives the same wheel, each extra is installed alone in
an environment of its own and imports what it is for, and wheel, chart, manifests, images and tag have one version.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tools.images import archive
from tools.images.build import FOLDER as IMAGES_FOLDER
from tools.images.build import IMAGES, version

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build/release"
BIN = ROOT / ".venv/bin"
TWINE = FOLDER / "tools/bin/twine"
"""Installed by ``make release-check``, from its own lock."""
COMMAND_S_MAX = 600

IMPORTS = {
    "": ("polyreme_api", "polyreme_planner.plan"),
    "operator": ("polyreme_operator.service",),
    "datahub": ("polyreme_datahub.hub", "polyreme_datahub.loader.open"),
    "services": ("polyreme_datahub.topics.pulsar", "polyreme_datahub.lakehouse_admin"),
    "trainer": ("polyreme_launcher.main", "polyreme_launcher.rank", "polyreme.main", "polyreme.serving.server"),
    "cli": ("polyreme.main",),
    "kubectl": ("polyreme.plugin.main", "polyreme.plugin.completion"),
    "processor": ("polyreme_processor",),
    "samples": (),  # a data file; the package is never imported
    "run": ("polyreme.local_run.session", "polyreme.commands.quickstart"),
    "datahub-service": ("polyreme_datahub_service.service", "polyreme.main", "polyreme_datahub.topics.pulsar"),
}
"""What each extra, installed alone, must be able to import; the first is no extra at all."""
SCRIPTS = {
    "operator": ("polyreme-operator",),
    "trainer": ("polyreme",),
    "cli": ("polyreme",),
    "kubectl": ("kubectl-polyreme",),
    "datahub-service": ("polyreme-datahub",),
}
"""Commands that must show their help where this extra alone is installed."""


class CheckError(Exception):
    """A check failed; the message says what was seen and what is expected."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every check, and report all failures; 1 when there is one."""
    parser = argparse.ArgumentParser(prog="python -m tools.release_check", description=__doc__)
    parser.add_argument("--extras", nargs="*", default=list(IMPORTS), help="install only these")
    parser.add_argument("--require-images", action="store_true", help="fail for images that are not built")
    options = parser.parse_args(arguments)
    failures: list[str] = []
    try:
        wheel, sdist = build_distributions(FOLDER / "dist")
        twine_check(wheel, sdist)
        print(f"wheel and sdist: {wheel.name}, {sdist.name}; twine has no objection; the sdist gives the same wheel")
        versions = seen_versions(wheel)
    except (CheckError, OSError) as error:
        print(f"release check failed: {error}", file=sys.stderr)
        return 1
    failures += disagreements(versions)
    missing = [image for image in IMAGES if f"image {image}" not in versions]
    if missing and options.require_images:
        failures.append(f"images not built: {', '.join(missing)}; run make images")
    print(f"versions: {', '.join(f'{what} {seen}' for what, seen in sorted(versions.items()))}")
    if missing:
        print(f"images not built, so not compared: {', '.join(missing)}")
    for extra in options.extras:
        try:
            check_extra(extra, wheel)
            print(f"extra {extra or '(none)'}: installs alone and imports {', '.join(IMPORTS[extra]) or 'nothing'}")
        except CheckError as error:
            failures.append(str(error))
    for failure in failures:
        print(f"release check failed: {failure}", file=sys.stderr)
    return int(bool(failures))


def build_distributions(folder: Path) -> tuple[Path, Path]:
    """Build the sdist and the wheel, and the wheel once more from the sdist.

    Raises:
        CheckError: If a build fails, or the two wheels differ.
    """
    shutil.rmtree(folder, ignore_errors=True)
    _run([BIN / "python", "-m", "hatchling", "build", "--directory", folder], cwd=ROOT, what="the build")
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    source = folder.with_name("sdist")
    shutil.rmtree(source, ignore_errors=True)
    with tarfile.open(sdist) as packed:
        packed.extractall(source, filter="data")
    (unpacked,) = source.iterdir()
    again: list[str | Path] = [BIN / "python", "-m", "hatchling", "build", "--target", "wheel", "--directory", source]
    _run(again, cwd=unpacked, what="the build from the sdist")
    (second,) = source.glob("*.whl")
    if _digest(wheel) != _digest(second):
        raise CheckError("the sdist gives another wheel than the checkout: is a file in neither git nor .gitignore?")
    return wheel, sdist


def twine_check(*distributions: Path) -> None:
    """Let twine judge metadata and readme.

    Raises:
        CheckError: If it objects.
    """
    _run([TWINE, "check", "--strict", *distributions], cwd=ROOT, what="twine check")


def check_extra(extra: str, wheel: Path) -> None:
    """Install the wheel with one extra in a new environment, at the tested versions, and import what it is for.

    Raises:
        CheckError: If it does not install, or an import or a command fails.
    """
    venv = FOLDER / f"extra-{extra or 'none'}"
    _environment(venv)
    try:
        named = f"polyreme{f'[{extra}]' if extra else ''} @ {wheel.as_uri()}"
        _install(venv, "--constraints", ROOT / "requirements/dev.lock", named)
        for module in IMPORTS[extra]:
            _run([venv / "bin/python", "-I", "-c", f"import {module}"], cwd=FOLDER, what=f"extra {extra}: {module}")
        for script in SCRIPTS.get(extra, ()):
            _run([venv / "bin" / script, "--help"], cwd=FOLDER, what=f"extra {extra}: {script} --help")
    finally:
        shutil.rmtree(venv, ignore_errors=True)


def seen_versions(wheel: Path) -> dict[str, str]:
    """Versions by what has them: project, wheel, chart, manifests, images, and the tag of the commit if it has one."""
    seen = {"project": version(), "wheel": wheel_version(wheel)}
    seen |= text_versions(
        {
            str(path.relative_to(ROOT)): path.read_text()
            for path in (ROOT / "charts/polyreme/Chart.yaml", *sorted((ROOT / "manifests").glob("*.yaml")))
            if path.exists()
        }
    )
    for path in sorted(IMAGES_FOLDER.glob("*.tar")):
        try:
            image = archive.read(path)
        except ValueError:
            continue  # docker's own format has no index to read
        label = image.config.get("Labels", {}).get("org.opencontainers.image.version", "none")
        seen |= {f"image {path.stem}": label, f"tag of image {path.stem}": image.name.rpartition(":")[2]}
    described = subprocess.run(
        ["git", "describe", "--exact-match", "--match=v*"], cwd=ROOT, check=False, capture_output=True, text=True
    )
    return seen | ({"git tag": described.stdout.strip()[1:]} if described.returncode == 0 else {})


def text_versions(texts: Mapping[str, str]) -> dict[str, str]:
    """Versions that the chart and the manifests state."""
    patterns = {
        r"^(version|appVersion): *\"?([^\"\s]+)\"?$": "{path} {found}",
        r"\b(polyreme/[a-z0-9]+):([\w.-]+)": "{path} {found}",
    }
    return {
        name.format(path=path, found=found): seen
        for path, text in texts.items()
        for pattern, name in patterns.items()
        for found, seen in re.findall(pattern, text, re.MULTILINE)
    }


def disagreements(versions: Mapping[str, str]) -> list[str]:
    """Versions that differ from the project's."""
    return [
        f"{what} has version {seen}, the project {versions['project']} (pyproject.toml, field project.version)"
        for what, seen in sorted(versions.items())
        if seen != versions["project"]
    ]


def wheel_version(wheel: Path) -> str:
    """Return the version in a wheel's metadata."""
    with zipfile.ZipFile(wheel) as packed:
        (name,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        (found,) = re.findall(r"^Version: (.+)$", packed.read(name).decode(), re.MULTILINE)
    return str(found)


def uncovered(project: Mapping[str, object]) -> Iterator[str]:
    """Extras and commands of pyproject.toml that no check knows, and the other way round."""
    table = project["project"]
    assert isinstance(table, dict)
    known = {"extra": set(IMPORTS) - {""}, "command": {name for names in SCRIPTS.values() for name in names}}
    # Shells call the completion with half a command: it has no help.
    wanted = {
        "extra": set(table["optional-dependencies"]),
        "command": {name for name in table["scripts"] if not name.startswith("kubectl_complete")},
    }
    for kind, names in known.items():
        yield from (f"{kind} {name}" for name in sorted(names ^ wanted[kind]))


def _environment(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    _run([BIN / "uv", "venv", "--quiet", "--python", sys.executable, folder], cwd=ROOT, what="uv venv")


def _install(venv: Path, *words: str | Path) -> None:
    command = [BIN / "uv", "pip", "install", "--quiet", "--python", venv / "bin/python", *words]
    _run(command, cwd=ROOT, what=f"the installation into {venv.name}")


def _run(command: Sequence[str | Path], *, cwd: Path, what: str) -> None:
    variables = {"SOURCE_DATE_EPOCH": "315532800", "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **variables},
        check=False,
        capture_output=True,
        text=True,
        timeout=COMMAND_S_MAX,
    )
    if done.returncode != 0:
        raise CheckError(f"{what} exited with {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    sys.exit(main())
