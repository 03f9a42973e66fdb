"""Install the Debian packages that images and nodes of test clusters need: as root with apt-get, else name them."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.build_cache import say
from tools.cluster.nodes.node import CNI_FOLDERS
from tools.cluster.nodes.probe import PACKAGES as OF_NODES

PACKAGES = {**OF_NODES, "buildah": "buildah", "debootstrap": "debootstrap", "host-local": "containernetworking-plugins"}
"""Package by program."""
NOT_ON_PATH = (Path("/usr/sbin"), Path("/sbin"), *map(Path, CNI_FOLDERS))
"""Folders of administrators' programs and of CNI plugins."""
APT_S_MAX = 600


def main() -> int:
    """Install what is missing; 1 when apt-get failed."""
    packages = missing(_found)
    if not packages:
        return 0
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        say(f"not installed, and this takes root and apt-get: {' '.join(packages)}; images and nodes can't be built")
        return 0
    say(f"installing Debian packages: {' '.join(packages)}")
    for command in commands(packages):
        done = subprocess.run(
            command,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr,
            timeout=APT_S_MAX,
            check=False,
        )
        if done.returncode != 0:
            say(f"{' '.join(command)} exited with {done.returncode}; it said why above")
            return 1
    return 0


def missing(found: Callable[[str], bool]) -> list[str]:
    """Return the packages of the programs that are not found."""
    return sorted({package for program, package in PACKAGES.items() if not found(program)})


def commands(packages: Sequence[str]) -> list[list[str]]:
    """Return what installs them; another apt-get that runs is waited for."""
    apt = ["apt-get", "--quiet", "--quiet", "--option=DPkg::Lock::Timeout=300"]
    return [[*apt, "update"], [*apt, "install", "--yes", "--no-install-recommends", *packages]]


def _found(program: str) -> bool:
    return shutil.which(program) is not None or any((folder / program).exists() for folder in NOT_ON_PATH)


if __name__ == "__main__":
    sys.exit(main())
