"""The operator's image, built for real: twice the same, small, without root, installer and torch."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.machine import require
from tools import debian
from tools.images import archive, base
from tools.images.build import PUBLIC_BASE, BuildRequest, build, revision, version
from tools.images.engine import Buildah

pytestmark = pytest.mark.services

LAYERS_ABOVE_BASE = 3
"""User and group; packages of others; polyreme."""
ABOVE_BASE_BYTES_MAX = 80e6
# What a build may read of this machine and an image must not hold.
MIRROR = "mirror-of-this-machine.example"
CANARY = "canary-30db1c5f"
SECRETS = ("AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "POLYREME_TOPICS_TOKEN")
OF_THIS_MACHINE = re.compile(r"^(etc/pip\.conf|run/secrets/.*|var/cache/pip/.*|build/.*|root/..*)$")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> list[archive.Archive]:
    """Two archives: with layers that an earlier build may have left, and from nothing."""
    require(debian.FOR_IMAGES)
    wishes = [BuildRequest(images=("operator",), base=_base(), cached=cached) for cached in (True, False)]
    folders = [tmp_path_factory.mktemp("images") for _ in wishes]
    secrets = dict.fromkeys(SECRETS, CANARY)
    environment = {**os.environ, **secrets, "SOURCE": "https://source.example/polyreme", "PIP_TRUSTED_HOST": MIRROR}
    return [
        archive.read(build(request, Buildah(), environment, folder=folder)["operator"])
        for request, folder in zip(wishes, folders, strict=True)
    ]


@pytest.fixture(scope="module")
def container(images: list[archive.Archive]) -> Iterator[str]:
    """A container of the image, to run commands in as its own user."""
    assert images
    name = f"localhost/polyreme/operator:{version()}"
    made = _buildah("from", "--pull-never", name).stdout.strip()
    yield made
    _buildah("rm", made)


def test_two_builds_give_one_digest(images: list[archive.Archive]) -> None:
    first, second = images
    assert first.layers == second.layers
    assert first.digest == second.digest


def test_the_operators_image_adds_at_most_80_mb_to_its_base(images: list[archive.Archive]) -> None:
    above = sum(layer.bytes for layer in images[0].layers[-LAYERS_ABOVE_BASE:])
    assert 1e6 < above <= ABOVE_BASE_BYTES_MAX, f"{above / 1e6:.1f} MB"


def test_the_image_says_what_it_is_and_runs_as_no_root(images: list[archive.Archive]) -> None:
    config = images[0].config
    assert config["User"] == "65532:65532"
    assert "PYTHONSAFEPATH=1" in config["Env"]
    assert config["Labels"] == {
        "org.opencontainers.image.title": "polyreme operator",
        "org.opencontainers.image.licenses": "Apache-2.0",
        "org.opencontainers.image.version": version(),
        "org.opencontainers.image.revision": revision(),
        "org.opencontainers.image.source": "https://source.example/polyreme",
    }


def test_the_image_holds_no_torch_no_installer_and_nothing_of_this_machine(images: list[archive.Archive]) -> None:
    image = images[0]
    files: dict[str, tuple[tarfile.TarInfo, bytes]] = {}
    for number in range(-LAYERS_ABOVE_BASE, 0):
        files |= {member.name: (member, file.read() if file else b"") for member, file in image.files(number)}
    packages = {
        path.parts[2] for path in map(Path, files) if path.parts[:2] == ("opt", "packages") and len(path.parts) > 2
    }
    assert {"kubernetes", "kopf", "numpy"} <= packages
    assert not {"torch", "pip", "setuptools", "uv"} & packages
    assert [name for name in files if OF_THIS_MACHINE.match(name)] == []
    for private in (MIRROR, CANARY):
        assert private not in str(image.config)
        assert [name for name, (_, content) in files.items() if private.encode() in content] == []
    # Where a builder mounts its own over them, empty files stay.
    assert not any(files[name][1] for name in ("etc/hosts", "etc/hostname", "etc/resolv.conf") if name in files)
    times = {member.mtime for member, _ in files.values()}
    assert times == {base.EPOCH_S}
    assert [name for name, (member, _) in files.items() if member.mode & 0o6000 or member.uid != 0] == []


def test_the_operator_starts_in_its_image_as_its_user(container: str) -> None:
    shown = _run_in(container, "python", "-m", "polyreme_operator", "--help")
    assert "--checkpoint-root" in shown
    script = "import os, polyreme_operator.service as s; print(os.getuid(), s.__file__)"
    assert _run_in(container, "python", "-c", script).split() == ["65532", "/opt/polyreme/polyreme_operator/service.py"]


def test_no_installer_runs_in_the_image(container: str) -> None:
    found = _buildah("run", "--isolation=chroot", container, "--", "python", "-m", "pip", "--version", check=False)
    assert "No module named pip" in found.stderr


def _base() -> str:
    """A base of this machine where it can be made, as on one without a registry; else the public one."""
    return base.LOCAL if os.geteuid() == 0 else PUBLIC_BASE


def _run_in(container: str, *command: str) -> str:
    return _buildah("run", "--isolation=chroot", container, "--", *command).stdout


def _buildah(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["buildah", *words], check=check, capture_output=True, text=True)
