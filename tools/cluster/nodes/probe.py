"""Needs of nodes on a machine: programs, which one can install, and system calls, which it grants or refuses.

Each system call is tried, in a child process whose namespaces end with it.
"""

import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

from tools.build_cache import BuildError
from tools.cluster.nodes.cgroups import hierarchies
from tools.debian import FOR_NODES, missing_packages

NAMESPACES = {
    "CLONE_NEWNS": 0x00020000,
    "CLONE_NEWUTS": 0x04000000,
    "CLONE_NEWIPC": 0x08000000,
    "CLONE_NEWNET": 0x40000000,
}
CLONE_NEWPID = 0x20000000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
COMMAND_S_MAX = 20.0


class RefusedError(Exception):
    """The machine refuses a system call; the message quotes call and errno."""


def check_programs() -> None:
    """See that the programs are there that come with a distribution.

    Raises:
        BuildError: If some are missing, with the packages that bring them.
    """
    if packages := missing_packages(FOR_NODES):
        raise BuildError(f"nodes need programs that are not on PATH: apt-get install {' '.join(packages)}")


def refusal() -> str | None:
    """Return the first system call that this machine refuses, with its errno; None when nodes can run."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            _try_all()
        except (RefusedError, OSError, subprocess.SubprocessError) as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as stream:
        said = stream.read()
    os.waitpid(pid, 0)
    return said.decode() or None


def _try_all() -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def call(what: str, function: Callable[..., int], *arguments: object) -> None:
        if function(*arguments) != 0:
            number = ctypes.get_errno()
            raise RefusedError(f"{what}: {errno.errorcode.get(number, number)} {os.strerror(number)}")

    for name, flag in NAMESPACES.items():
        call(f"unshare({name})", libc.unshare, flag)
    call('mount("none", "/", MS_REC | MS_PRIVATE)', libc.mount, b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    scratch = Path(tempfile.mkdtemp(prefix="polyreme-probe-"))
    try:
        layers = {name: scratch / name for name in ("lower", "upper", "work", "merged")}
        for path in layers.values():
            path.mkdir()
        options = "lowerdir={lower},upperdir={upper},workdir={work}".format(**layers).encode()
        merged = bytes(layers["merged"])
        call('mount("overlay")', libc.mount, b"overlay", merged, b"overlay", 0, options)
        call('mount("tmpfs")', libc.mount, b"tmpfs", merged, b"tmpfs", 0, None)
        for _ in range(2):
            call("umount2", libc.umount2, merged, 0)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    for kind in (["veth", "peer", "name", "probe-b"], ["bridge"]):
        _command(["ip", "link", "add", f"probe-{kind[0]}", "type", *kind])
    masquerade = ["iptables", "-t", "nat", "-A", "POSTROUTING", "-m", "comment", "--comment", "probe"]
    _command([*masquerade, "-m", "statistic", "--mode", "random", "--probability", "0.5", "-j", "MASQUERADE"])
    _command(["iptables", "-A", "FORWARD", "-m", "conntrack", "--ctstate", "INVALID", "-j", "DROP"])
    for root in hierarchies():
        _control_group(root / f"polyreme-probe-{os.getpid()}")
    # The last: no second process may be started after it.
    call("unshare(CLONE_NEWPID)", libc.unshare, CLONE_NEWPID)


def _command(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMMAND_S_MAX)
    if done.returncode != 0:
        raise RefusedError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")


def _control_group(folder: Path) -> None:
    try:
        folder.mkdir()
    except OSError as error:
        raise RefusedError(f"mkdir({str(folder)!r}): {errno.errorcode[error.errno or 0]} {error.strerror}") from error
    finally:
        with contextlib.suppress(OSError):
            folder.rmdir()
