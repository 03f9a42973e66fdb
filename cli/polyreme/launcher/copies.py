"""The pod's folder in memory, where ranks keep a copy of their newest checkpoint for those that come after them.

It is this launcher's: it goes with it. A launcher that was killed can't take it away, so the next one on the machine
does: who owns a folder holds a lock on a file of it, which the kernel lets go of whatever ends the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

MEMORY = Path("/dev/shm")  # noqa: S108 - memory that looks like files, which is the point
PREFIX = "polyreme-copies-"
EMPTY_AGE_S = 60.0
"""Age beyond which a folder without a copy is nobody's: a launcher locks its own within moments."""
SWEEP_MAX = 100
"""Folders of others that one launcher looks at."""
_OWNER = "owner"


class CopiesFolder:
    """A folder in memory, as long as this process lives."""

    def __init__(self, memory: Path = MEMORY) -> None:
        self._memory = memory
        self._lock: IO[bytes] | None = None
        self.path: Path | None = None
        """The folder; None where this machine has no memory that looks like files."""

    def open(self) -> None:
        """Make the folder, and take away those that nobody owns any more."""
        with contextlib.suppress(OSError):
            path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=self._memory))
            self._lock = (path / _OWNER).open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = path
            self._sweep(path.stat().st_mtime)

    def close(self) -> None:
        """Give the memory back."""
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _sweep(self, now_s: float) -> None:
        """Take away what nobody owns; ``now_s`` is by the file system's own clock."""
        for path in sorted(self._memory.glob(f"{PREFIX}*"))[:SWEEP_MAX]:
            with contextlib.suppress(OSError), (path / _OWNER).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # One that was just made and is not locked yet belongs to somebody who is this far: it has no copy.
                left = any(path.glob("rank-*")) or now_s - path.stat().st_mtime > EMPTY_AGE_S
                if path.stat().st_uid == os.getuid() and left:
                    shutil.rmtree(path, ignore_errors=True)
