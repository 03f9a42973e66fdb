"""Container engines that build images: buildah, or docker with BuildKit."""

import dataclasses
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tools.build_cache import BuildError
from tools.images.base import EPOCH_S

DOCKER_ANSWERS_S_MAX = 20
LABELLED = ("VERSION", "REVISION", "SOURCE")
"""Arguments that only labels have."""
IMPLIED_HOST = "docker.io"
"""What every engine and kubelet puts before a name without a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """One image to build."""

    name: str
    """Name and tag, as pods name it."""
    containerfile: Path
    context: Path
    target: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Path] = field(default_factory=dict)
    """Files that steps of the build may read, and that leave no trace in the image."""
    local: bool = False
    """Whether it builds on images that were made on this machine: no registry is asked for them."""
    cached: bool = True


class Engine(Protocol):
    """What builds an image and writes it as an archive."""

    name: str

    def build(self, build: Build) -> None:
        """Build an image and give it its name.

        Raises:
            BuildError: If that fails.
        """

    def save(self, name: str, path: Path, *, called: str) -> None:
        """Write an image as an archive that names it ``called``.

        Raises:
            BuildError: If that fails.
        """

    def has(self, name: str) -> bool:
        """Return whether the engine's store holds an image."""

    def pull(self, name: str) -> None:
        """Get an image from its registry.

        Raises:
            BuildError: If that fails.
        """


class Buildah:
    """buildah: no daemon; steps run under chroot, so that it also works inside a container."""

    name = "buildah"

    def build(self, build: Build) -> None:
        """Build with layers, one time for all files, and nothing of this machine."""
        command = ["buildah", "build", "--quiet", "--isolation=chroot", "--layers", "--identity-label=false"]
        # Or the container of a stage without steps stays, with its mount.
        command += ["--force-rm"]
        command += [f"--timestamp={EPOCH_S}", f"--ignorefile={build.containerfile}.dockerignore"]
        command += ["--pull-never"] if build.local else ["--pull=false"]
        command += [] if build.cached else ["--no-cache"]
        with tempfile.TemporaryDirectory() as folder:
            written = Path(folder, build.containerfile.name)
            written.write_text(_with_labels(build))
            _run([*command, *_common(dataclasses.replace(build, containerfile=written))])

    def save(self, name: str, path: Path, *, called: str) -> None:
        """Write an OCI archive, whose layers are compressed."""
        temporary = path.with_suffix(".partial")
        temporary.unlink(missing_ok=True)
        _run(["buildah", "push", "--quiet", name, f"oci-archive:{temporary}:{full_name(called)}"])
        temporary.replace(path)

    def has(self, name: str) -> bool:
        """Look in the local store."""
        return _answer(["buildah", "inspect", "--type=image", "--format={{.FromImageID}}", name]) is not None

    def pull(self, name: str) -> None:
        """Print progress where progress goes."""
        _run(["buildah", "pull", "--quiet", name])


class Docker:
    """docker with BuildKit."""

    name = "docker"

    def build(self, build: Build) -> None:
        """Build; BuildKit writes the time of files only with an exporter that rewrites it (the how-to says which)."""
        command = ["docker", "build", "--quiet", "--build-arg", f"SOURCE_DATE_EPOCH={EPOCH_S}"]
        command += [] if build.cached else ["--no-cache"]
        _run([*command, *_common(build)])

    def save(self, name: str, path: Path, *, called: str) -> None:
        """Write docker's archive."""
        temporary = path.with_suffix(".partial")
        if name != called:
            _run(["docker", "tag", name, called])
        _run(["docker", "save", "--output", str(temporary), called])
        temporary.replace(path)

    def has(self, name: str) -> bool:
        """Ask the daemon."""
        return _answer(["docker", "image", "inspect", "--format={{.Id}}", name]) is not None

    def pull(self, name: str) -> None:
        """Ask the daemon."""
        _run(["docker", "pull", "--quiet", name])


def find(wanted: str | None) -> Engine:
    """Return the engine that is asked for, else the first that works.

    Raises:
        BuildError: If there is none.
    """
    engines: Sequence[Engine] = [Buildah(), Docker()]
    for engine in engines:
        if wanted == engine.name or (not wanted and _works(engine)):
            return engine
    if wanted:
        raise BuildError(f"ENGINE={wanted}: the engines are {', '.join(engine.name for engine in engines)}")
    raise BuildError("no engine to build images: install buildah (Debian and Ubuntu have a package), or start docker")


def full_name(name: str) -> str:
    """Return a name with the host that engines imply: containerd keeps images under such names."""
    first, slash, _ = name.partition("/")
    if slash and (first == "localhost" or "." in first or ":" in first):
        return name
    return f"{IMPLIED_HOST}/{name if slash else f'library/{name}'}"


def _works(engine: Engine) -> bool:
    if shutil.which(engine.name) is None:
        return False
    # The command without its daemon is common.
    return engine.name != Docker.name or _answer(["docker", "info", "--format={{.ServerVersion}}"]) is not None


def _common(build: Build) -> list[str]:
    command = [word for pair in build.arguments.items() for word in ("--build-arg", "=".join(pair))]
    command += [word for name, path in build.secrets.items() for word in ("--secret", f"id={name},src={path}")]
    command += ["--target", build.target] if build.target else []
    return [*command, "--tag", build.name, "--file", str(build.containerfile), str(build.context)]


def _with_labels(build: Build) -> str:
    """Return the Containerfile with its labels' values written out.

    buildah looks layers up by the text of their instruction, so it would take the labels of an earlier revision.
    """
    text = build.containerfile.read_text()
    for name in LABELLED:
        text = text.replace(f"${{{name}}}", build.arguments.get(name, ""))
    return text


def _run(command: list[str]) -> None:
    """Run an engine; what it prints is progress, and goes where progress goes."""
    done = subprocess.run(command, stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command[:2])} exited with {done.returncode}; it said why above")


def _answer(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DOCKER_ANSWERS_S_MAX)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
