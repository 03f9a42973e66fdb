"""Programs that come with a distribution and not from Go, Maven or PyPI: found on PATH, else installed by apt-get.

``python -m tools.debian`` installs those that are missing, as root on Debian or Ubuntu; ``make servers`` does so once.
Without them no images are built, no nodes run and no browser is started, and everything else works.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from tools.build_cache import BuildError, say

INSTALL_S_MAX = 600.0
LOCK_WAIT_S = 300
"""How long another apt-get that runs is waited for."""
LOCK = Path("/var/lock/polyreme-debian")
PACKAGES = {
    "buildah": "buildah",
    "conntrack": "conntrack",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "iptables": "iptables",
    "mount": "mount",
    "nsenter": "util-linux",
    "runc": "runc",
    "unshare": "util-linux",
    "bridge": "containernetworking-plugins",
    "chromium": "chromium",
}
"""Debian's package of each program."""
CNI_FOLDERS = ("/opt/cni/bin", "/usr/lib/cni", "/usr/libexec/cni")
"""Where the plugins of the container network are, which are on no PATH."""
FOR_BROWSER = ("chromium",)
FOR_IMAGES = ("buildah", "debootstrap")
FOR_NODES = ("conntrack", "ip", "iptables", "mount", "nsenter", "runc", "unshare", "bridge")


def missing_packages(programs: Iterable[str]) -> list[str]:
    """Return the packages of the programs that are not there."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *CNI_FOLDERS])
    return sorted({PACKAGES[program] for program in programs if shutil.which(program, path=path) is None})


def install(programs: Iterable[str]) -> None:
    """Install what is missing of some programs.

    Raises:
        BuildError: If that can't be done, with the command and the reason.
    """
    wanted = list(programs)
    if not missing_packages(wanted):
        return
    command = f"apt-get install {' '.join(missing_packages(wanted))}"
    if os.geteuid() != 0:
        raise BuildError(f"{command}: only root may, this is user {os.geteuid()}; run it as root")
    if shutil.which("apt-get") is None:
        raise BuildError(f"{command}: this is no Debian and no Ubuntu; install these packages by hand")
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (packages := missing_packages(wanted)):
            return
        say(f"{command}, once")
        # A fresh machine may know no packages, or others than its mirror has by now.
        for words in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            if why := _apt_get(words):
                raise BuildError(f"apt-get {' '.join(words)}: {why}")


def _apt_get(words: list[str]) -> str | None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    try:
        done = subprocess.run(
            ["apt-get", "-qq", f"--option=DPkg::Lock::Timeout={LOCK_WAIT_S}", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=INSTALL_S_MAX,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {INSTALL_S_MAX:g} s"
    return None if done.returncode == 0 else f"exit code {done.returncode}: {' '.join(done.stderr.split())[-300:]}"


if __name__ == "__main__":
    try:
        install(PACKAGES)
    except BuildError as error:
        print(f"images can't be built here, and neither nodes nor browsers run: {error}", file=sys.stderr)
        # Another user than root can't have nodes in any case, and everything else works.
        sys.exit(os.geteuid() == 0)
