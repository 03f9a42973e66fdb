"""Base image made by debootstrap, for machines that reach a Debian mirror and no registry.

One root file system gives two images: the base (Python, certificates) and the builder (the same with pip). Both are tar
files of the build cache, named after what they are made from, and are imported when the engine does not have them.
Needs root, as debootstrap does.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tools.build_cache import BuildError, built, cache_folder, say

SUITE = "bookworm"
"""Debian 12, whose Python is 3.11: the oldest that polyreme supports."""
PACKAGES = ("ca-certificates", "python-is-python3", "python3")
BUILDER_PACKAGES = ("python3-pip",)
NOT_IN_BASE = (
    *BUILDER_PACKAGES,
    *("python3-setuptools", "python3-wheel", "python3-pkg-resources", "python3-distutils", "python3-lib2to3"),
)
"""What pip brings; the base has no installer."""
MIRROR = "DEBIAN_MIRROR"
"""Variable that names another mirror than debootstrap's own."""
USUAL_S = 40
EPOCH_S = 315_532_800
"""1980-01-01, the first date that a zip archive can hold: the time of every file of our images."""
LOCAL = "local"
"""Value of ``BASE`` that stands for these images."""

# Caches, logs, and what names the machine where debootstrap ran. Empty folders stay.
_EMPTIED = (
    *("boot", "dev", "run", "tmp", "var/cache/apt", "var/cache/ldconfig", "var/lib/apt/lists", "var/log"),
    *("usr/share/info", "usr/share/lintian", "usr/share/locale", "usr/share/man"),
)
_REMOVED = ("debootstrap", "etc/apt/sources.list", "etc/hostname", "etc/machine-id", "etc/resolv.conf")
_BACKUPS = ("var/lib/dpkg/*-old", "var/cache/debconf/*-old", "etc/*-")
_COPYRIGHT = "copyright"


def tar_files(environment: Mapping[str, str]) -> dict[str, Path]:
    """Return the root file systems of ``base`` and ``builder``, and make them if they are nowhere yet.

    Raises:
        BuildError: If debootstrap is missing or fails, or this is not root.
    """
    cache = cache_folder(environment, "image-base", [Path(__file__).read_bytes()])
    paths = {name: cache / f"{name}.tar" for name in ("builder", "base")}
    # The base is written last.
    built(paths["base"], lambda: _make(cache, environment))
    return paths


def _make(cache: Path, environment: Mapping[str, str]) -> None:
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise BuildError(
            f"BASE={LOCAL} needs root and the Debian package debootstrap: install it, or name an image by BASE=IMAGE"
        )
    say(f"making a base image into {cache}, once: about {USUAL_S} s on two free cores")
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        root = Path(folder, "root")
        include = ",".join((*PACKAGES, *BUILDER_PACKAGES))
        command = ["debootstrap", "--variant=minbase", f"--include={include}", SUITE, str(root)]
        _run([*command, *filter(None, [environment.get(MIRROR)])])
        _clean(root)
        _write(root, cache / "builder.tar")
        _run(["chroot", str(root), "dpkg", "--purge", *NOT_IN_BASE])
        _clean(root)
        _compile(root)
        _write(root, cache / "base.tar")


def _run(command: list[str]) -> None:
    """Run a program whose output is shown only when it fails."""
    environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive"}
    environment |= {"SOURCE_DATE_EPOCH": str(EPOCH_S), "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {name: value for name, value in os.environ.items() if name.lower().endswith("_proxy")}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, errors="replace")
    if done.returncode != 0:
        sys.stderr.write((done.stdout + done.stderr)[-4000:])
        raise BuildError(f"{Path(command[0]).name} exited with {done.returncode}; it said why above")


def _clean(root: Path) -> None:
    """Leave what two runs have in common, and no more than a container needs."""
    for name in _EMPTIED:
        folder = root / name
        for path in folder.iterdir() if folder.is_dir() else ():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    for path in [root / name for name in _REMOVED] + [path for glob in _BACKUPS for path in root.glob(glob)]:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for path in [path for path in root.glob("usr/**/__pycache__") if path.is_dir()]:
        shutil.rmtree(path)
    # Licenses stay.
    for path in (root / "usr/share/doc").rglob("*"):
        if path.is_file() and not path.is_symlink() and path.name != _COPYRIGHT:
            path.unlink()
    shadow = root / "etc/shadow"
    # The day of the last change of each password is the day of the build.
    shadow.write_text(re.sub(r"^([^:]*:[^:]*):\d*:", r"\1:0:", shadow.read_text(), flags=re.MULTILINE))


def _compile(root: Path) -> None:
    """Compile the standard library: a read-only container could not keep what it compiles."""
    command = ["python3", "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", "/usr/lib/python3.11"]
    _run(["chroot", str(root), *command])


def _write(root: Path, path: Path) -> None:
    """Write a folder as a tar file with sorted names and one time."""

    def normal(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime, member.uname, member.gname = EPOCH_S, "", ""
        return member

    temporary = path.with_suffix(".partial")
    with tarfile.open(temporary, "w", format=tarfile.GNU_FORMAT) as archive:
        archive.add(root, arcname=".", filter=normal)
    temporary.replace(path)
