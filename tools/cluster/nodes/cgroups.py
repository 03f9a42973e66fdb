"""One control group for everything that nodes start: its members are known and ended even when nothing was recorded."""

import contextlib
import os
import signal
import time
from pathlib import Path

PROCESSES = "cgroup.procs"
MOUNTS = Path("/proc/self/mountinfo")
END_S_MAX = 20.0
"""Longest wait for killed processes to be gone."""
POLL_S = 0.05
_CPUSET = ("cpuset.cpus", "cpuset.mems")


class Cgroup:
    """A control group of one name in every hierarchy of this machine, version 1 or 2.

    Args:
        name: Its path below each hierarchy's root.
        roots: Roots of the hierarchies; by default those that are mounted.
    """

    def __init__(self, name: str, roots: list[Path] | None = None) -> None:
        self.name = name
        self._roots = hierarchies() if roots is None else roots

    @property
    def folders(self) -> list[Path]:
        """Its folder in each hierarchy that has it."""
        return [root / self.name for root in self._roots if (root / self.name).is_dir()]

    def make(self, child: str) -> "Cgroup":
        """Create the group and a child of it, with the processors and memory nodes of their parents."""
        group = self.child(child)
        for root in self._roots:
            for folder in (root / self.name, root / group.name):
                folder.mkdir(exist_ok=True)
                _inherit(folder)
        return group

    def processes(self) -> set[int]:
        """Return the pids of the members, of children too."""
        found: set[int] = set()
        for folder in self.folders:
            for path in folder.rglob(PROCESSES):
                with contextlib.suppress(OSError):
                    found.update(int(line) for line in path.read_text().split())
        # A process of another PID namespace reads as 0.
        return found - {0, os.getpid()}

    def freeze(self, frozen: bool) -> None:
        """Stop every member where it is, as when a machine hangs, or let all of them continue."""
        for folder in self.folders:
            # Version 1, then version 2.
            for name, word in (
                ("freezer.state", "FROZEN" if frozen else "THAWED"),
                ("cgroup.freeze", str(int(frozen))),
            ):
                if (folder / name).exists():
                    (folder / name).write_text(word)

    def child(self, name: str) -> "Cgroup":
        """Return a child, whether or not it is there."""
        return Cgroup(f"{self.name}/{name}", self._roots)

    def kill(self) -> int:
        """Kill every member, and those that they start meanwhile; return how many were killed.

        Raises:
            TimeoutError: If some are still there after ``END_S_MAX``.
        """
        deadline_s, killed = time.monotonic() + END_S_MAX, set[int]()
        # A frozen process dies only when it is thawed.
        for folder in sorted({path.parent for root in self.folders for path in root.rglob("freezer.state")}):
            (folder / "freezer.state").write_text("THAWED")
        while members := self.processes():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"processes {sorted(members)} of {self.name} outlive SIGKILL by {END_S_MAX:.0f} s")
            for pid in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= members
            time.sleep(POLL_S)
        return len(killed)

    def remove(self) -> None:
        """Remove the group, whose members have ended, with its children.

        Raises:
            OSError: If the kernel still counts a member after ``END_S_MAX``.
        """
        deadline_s = time.monotonic() + END_S_MAX
        while folders := self.folders:
            for folder in folders:
                for path in sorted((path for path in folder.rglob("*") if path.is_dir()), reverse=True):
                    _remove(path, last=False)
                _remove(folder, last=time.monotonic() > deadline_s)
            time.sleep(POLL_S)


def hierarchies() -> list[Path]:
    """Return the mount points of the control groups' hierarchies."""
    found = []
    for line in MOUNTS.read_text().splitlines():
        before, _, after = line.partition(" - ")
        if after.split()[0] in {"cgroup", "cgroup2"}:
            found.append(Path(before.split()[4]))
    return found


def _inherit(folder: Path) -> None:
    """A new cpuset of version 1 has no processor, and a new group of version 2 delegates no controller."""
    for name in _CPUSET:
        path = folder / name
        if path.exists() and not path.read_text().strip() and (folder.parent / name).exists():
            path.write_text((folder.parent / name).read_text())
    available, delegated = folder.parent / "cgroup.controllers", folder.parent / "cgroup.subtree_control"
    if available.exists():
        for controller in available.read_text().split():
            with contextlib.suppress(OSError):
                delegated.write_text(f"+{controller}")


def _remove(path: Path, *, last: bool) -> None:
    try:
        path.rmdir()
    except FileNotFoundError:
        pass
    except OSError:
        if last:
            raise
