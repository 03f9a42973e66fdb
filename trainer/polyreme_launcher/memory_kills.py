"""Processes of this container that the kernel killed for want of memory, from its control group (cgroups(7)).

A kubelet reports ``OOMKilled`` only of a container's first process. Where a rank alone is killed (cgroup v1, or a
kubelet with ``singleProcessOOMKill``), this counter is the only evidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_COUNTER = "oom_kill"


class MemoryKills:
    """Watches the counter of this process's control group.

    Args:
        root: The root of the file system; another one in tests.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._files = list(_files(root))
        self._known = self._count()

    def explain(self) -> str:
        """Return a sentence if the kernel killed a process since the last call; empty if it did not, or can't say."""
        before, self._known = self._known, self._count()
        if before is None or self._known is None or self._known <= before:
            return ""
        killed = self._known - before
        return f"the kernel killed {killed} process{'es' if killed > 1 else ''} of its container for want of memory"

    def _count(self) -> int | None:
        for path in self._files:
            try:
                lines = path.read_text().splitlines()
            except OSError:
                continue
            counts = [line.split()[1] for line in lines if line.startswith(f"{_COUNTER} ")]
            if counts and counts[0].isdigit():
                return int(counts[0])
        return None


def _files(root: Path) -> Iterator[Path]:
    """Yield where the counter may be: of cgroup v1 where it controls memory, else of v2.

    A container sees its own group as the root, but without a namespace of its own reads its path on the node.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    groups = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    for _, controllers, path in groups:
        if "memory" in controllers.split(","):
            yield root / "sys/fs/cgroup/memory" / path.lstrip("/") / "memory.oom_control"
            yield root / "sys/fs/cgroup/memory/memory.oom_control"
            return
    for number, _, path in groups:
        if number == "0":
            yield root / "sys/fs/cgroup" / path.lstrip("/") / "memory.events"
            yield root / "sys/fs/cgroup/memory.events"
