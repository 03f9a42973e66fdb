"""Build the images of polyreme and write them as archives, which every kind of cluster can load."""

import hashlib
import os
import subprocess
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.build_cache import BuildError, say
from tools.images import base, pip_settings
from tools.images.engine import Build, Engine
from tools.s3.server import program as s3_program

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build/images"
PYTHON_IMAGES = ("operator", "datahub", "trainer", "cli")
IMAGES = (*PYTHON_IMAGES, "s3")
THIN_SUFFIX = "-thin"
PUBLIC_BASE = "python:3.11-slim-bookworm"
SOURCE = "https://polyreme.dev"
"""Address in the label of the source, unless SOURCE names another."""
TAG_CHARACTERS = 12
LOCAL_NAMES = {name: f"localhost/polyreme-{name}" for name in ("base", "builder", "versitygw")}


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What to build."""

    images: Sequence[str] = IMAGES
    thin: Sequence[str] = ()
    """Of the images with Python, those to build without packages of others as well."""
    base: str = PUBLIC_BASE
    builder: str | None = None
    """Image with pip and the base's Python; the base itself, unless it is given."""
    prefix: str = "polyreme"
    tag: str = ""
    """The version of the project, unless it is given."""
    cached: bool = True


def build(
    request: BuildRequest, engine: Engine, environment: Mapping[str, str], *, folder: Path = FOLDER
) -> dict[str, Path]:
    """Build images, and return the archive of each by its file's name.

    Raises:
        BuildError: If a name is unknown, or an engine fails.
    """
    unknown = [name for name in request.images if name not in IMAGES]
    unknown += [name for name in request.thin if name not in PYTHON_IMAGES]
    if unknown:
        raise BuildError(f"no image is called {', '.join(unknown)}: there are {', '.join(IMAGES)}; s3 is never thin")
    folder.mkdir(parents=True, exist_ok=True)
    local = request.base == base.LOCAL
    arguments = _arguments(environment) | (_local_images(engine, environment) if local else _public(request, engine))
    archives: dict[str, Path] = {}
    with tempfile.TemporaryDirectory() as secrets_folder:
        secrets = pip_settings.secrets(Path(secrets_folder), environment)
        for name, thin in [*((name, False) for name in request.images), *((name, True) for name in request.thin)]:
            file = name + (THIN_SUFFIX if thin else "")
            called = f"{request.prefix}/{name}:{request.tag or version()}"
            one = Build(
                name=called + (THIN_SUFFIX if thin else ""),
                containerfile=ROOT / "images" / ("s3.Containerfile" if name == "s3" else "Containerfile"),
                context=ROOT,
                target=None if name == "s3" else name,
                arguments=_of(name, arguments) | ({"PACKAGES": "none"} if thin else {}),
                secrets={} if name == "s3" else secrets,
                local=local,
                cached=request.cached,
            )
            say(f"building {one.name}{' without packages of others' if thin else ''}")
            engine.build(one)
            archives[file] = folder / f"{file}.tar"
            engine.save(one.name, archives[file], called=called)
    return archives


def version() -> str:
    """Return the version of the project, which images, chart and wheel share."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return str(project["version"])


def revision() -> str:
    """Return the commit that is built, marked when the checkout differs from it; nothing outside git."""
    described = subprocess.run(
        ["git", "describe", "--always", "--abbrev=40", "--match=", "--dirty"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    return described.stdout.strip()


def _arguments(environment: Mapping[str, str]) -> dict[str, str]:
    return {"VERSION": version(), "REVISION": revision(), "SOURCE": environment.get("SOURCE") or SOURCE}


def _public(request: BuildRequest, engine: Engine) -> dict[str, str]:
    """Images of a registry, all pulled before the first image is built."""
    arguments = {"BASE": request.base, "BUILDER": request.builder or request.base}
    needed = (
        {"BASE": request.base, "BUILDER": arguments["BUILDER"]} if {*request.images, *request.thin} - {"s3"} else {}
    )
    if "s3" in request.images:
        needed["GO"] = _go_image()
    for argument, image in needed.items():
        if not engine.has(image):
            try:
                engine.pull(image)
            except BuildError as error:
                raise BuildError(
                    f"{argument}={image} can't be pulled ({error}): say BASE=local, by which this machine makes the "
                    "base of Debian packages and compiles the S3 server, or name a base that it reaches by BASE=IMAGE"
                ) from error
    return arguments


def _go_image() -> str:
    """Return the image with Go that s3.Containerfile builds in."""
    lines = (ROOT / "images/s3.Containerfile").read_text().splitlines()
    (found,) = (line.partition("=")[2] for line in lines if line.startswith("ARG GO="))
    return found


def listed(request: BuildRequest) -> list[str]:
    """Return the names of images, as pods name them."""
    return [f"{request.prefix}/{name}:{request.tag or version()}" for name in request.images]


def _of(image: str, arguments: Mapping[str, str]) -> dict[str, str]:
    """Arguments that the Containerfile of an image declares."""
    others = {"BASE", "BUILDER"} if image == "s3" else {"VERSITYGW"}
    return {name: value for name, value in arguments.items() if name not in others}


def _local_images(engine: Engine, environment: Mapping[str, str]) -> dict[str, str]:
    """Images that are made on this machine: base and builder by debootstrap, the S3 server by this machine's Go."""
    tars = dict(base.tar_files(environment))
    with tempfile.TemporaryDirectory() as folder:
        tars["versitygw"] = Path(folder, "versitygw.tar")
        _write_program(s3_program(environment), tars["versitygw"])
        names = {name: f"{LOCAL_NAMES[name]}:{_content_tag(tar)}" for name, tar in tars.items()}
        for name, image in names.items():
            if not engine.has(image):
                _import(engine, image, tars[name])
    return {"BASE": names["base"], "BUILDER": names["builder"], "VERSITYGW": names["versitygw"]}


def _content_tag(tar: Path) -> str:
    """Tag of a local image: the history of what is built on it holds its name, so one content has one name."""
    with tar.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:TAG_CHARACTERS]


def _import(engine: Engine, image: str, tar: Path) -> None:
    """Make an image of one layer from a tar file, by a context that holds nothing else."""
    with tempfile.TemporaryDirectory(dir=tar.parent) as context:
        os.link(tar, Path(context, tar.name))
        containerfile = Path(context, "Containerfile")
        containerfile.write_text((ROOT / "images/base.Containerfile").read_text())
        Path(context, "Containerfile.dockerignore").write_text("Containerfile*\n")
        engine.build(
            Build(
                name=image,
                containerfile=containerfile,
                context=Path(context),
                arguments={"ROOT": tar.name},
                local=True,
            )
        )


def _write_program(program: Path, path: Path) -> None:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as archive:
        member = tarfile.TarInfo("versitygw")
        member.size, member.mode, member.mtime = program.stat().st_size, 0o755, base.EPOCH_S
        with program.open("rb") as file:
            archive.addfile(member, file)
