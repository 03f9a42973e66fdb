"""Load archives of images into the nodes of a cluster."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.build_cache import BuildError
from tools.images.build import THIN_SUFFIX

LOCAL = "local"


def command(cluster: str, archive: Path) -> list[str]:
    """Return the command that loads an archive.

    Args:
        cluster: ``kind`` or ``kind-NAME``, ``k3s``, or ``local`` (of ``make cluster-up``).
        archive: File that ``make images`` wrote.

    Raises:
        BuildError: If the name is none of these.
    """
    kind, _, name = cluster.partition("-")
    if kind == "kind":
        return ["kind", "load", "image-archive", str(archive), "--name", name or "kind"]
    if cluster == "k3s":
        return ["k3s", "ctr", "images", "import", str(archive)]
    if cluster == LOCAL:
        return [sys.executable, "-m", "tools.cluster", "load", str(archive)]
    raise BuildError(
        f"CLUSTER={cluster}: write kind, kind-NAME, k3s or local; "
        "other clusters pull from a registry (docs/how-to/images.md)"
    )


def whole(folder: Path) -> list[Path]:
    """Return the archives of a folder that are not thin: those have the same names, and need a volume."""
    return [path for path in sorted(folder.glob("*.tar")) if not path.stem.endswith(THIN_SUFFIX)]


def load(cluster: str, archives: Sequence[Path]) -> None:
    """Load archives, one after the other.

    Raises:
        BuildError: If there is no archive, the name is unknown, or a program fails.
    """
    if not archives:
        raise BuildError("no archives in build/images: run make images first")
    for archive in archives:
        words = command(cluster, archive)
        try:
            done = subprocess.run(words, check=False)
        except FileNotFoundError as error:
            raise BuildError(f"no program {words[0]} on PATH to load {archive.name} into {cluster}") from error
        if done.returncode != 0:
            raise BuildError(f"{' '.join(words[:3])} exited with {done.returncode} on {archive}; it said why above")
