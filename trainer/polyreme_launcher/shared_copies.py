"""Memory of the pod in which ranks keep a copy of their newest checkpoint for the ranks after them.

Each rank has two files in memory without a name: the launcher opens them and passes them on with each fork. So the
kernel frees the memory as soon as the launcher and its ranks are gone, however they ended.
"""

from __future__ import annotations

import os
from pathlib import Path

MEMORY = Path("/dev/shm")  # noqa: S108 - memory that looks like files, which is the point


class CopyFiles:
    """Two nameless files in memory for each rank, as long as this process or a rank of it lives."""

    def __init__(self, memory: Path = MEMORY) -> None:
        self._memory = memory
        self._files: dict[int, tuple[int, int]] = {}

    def of(self, rank: int) -> tuple[int, int] | None:
        """Return the descriptors of a rank's copy and of its record; None if this machine has no such memory."""
        if rank not in self._files:
            try:
                data = self._open()
            except OSError:
                return None
            try:
                self._files[rank] = (data, self._open())
            except OSError:
                os.close(data)
                return None
        return self._files[rank]

    def close(self) -> None:
        """Free the memory, once no rank lives any more."""
        while self._files:
            _, descriptors = self._files.popitem()
            for descriptor in descriptors:
                os.close(descriptor)

    def _open(self) -> int:
        return os.open(self._memory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
