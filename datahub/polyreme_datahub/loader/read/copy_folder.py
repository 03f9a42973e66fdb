"""The folder of local copies that the processes of a machine share: its locks, its limit, and what is removed.

A copy is made under the name ``NAME.partial``, then renamed; one process makes it, under the lock ``NAME.lock``, while
the others wait for it. One that holds the lock and makes no progress (it is stopped, or its disk hangs) is not waited
for longer than ``STUCK_S``. A process that uses a copy holds a shared lock on its file, which the kernel drops with the
last descriptor or map; so the copies that no process uses can be removed, the least recently used first, once the
folder reaches its limit. The length that a partial file has is what its copy will take.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from polyreme_api.environment import CACHE_BYTES, CACHE_DIRECTORY
from polyreme_api.errors import EnvironmentFailedError
from polyreme_datahub.object_rules import Sleep

PARTIAL = ".partial"
LOCK = ".lock"
POLL_S = 0.01
STUCK_S = 20.0
"""A process that holds a lock and shows no progress for so long is stuck. It is longer than any one request."""

_log = logging.getLogger(__name__)


class NoRoomError(EnvironmentFailedError):
    """The folder of local copies has no room for another one, or can't be written."""


@dataclasses.dataclass(frozen=True, slots=True)
class LockWaits:
    """How locks are waited for: a clock that never jumps, and a wait."""

    steady_s: Callable[[], float] = time.monotonic  # noqa: TID251 - the shell's default
    sleep: Sleep = time.sleep  # noqa: TID251 - the shell's default

    def take(self, file: BinaryIO, how: int, progress: Callable[[], int] = lambda: 0) -> bool:
        """Lock a file; return False if its holder shows no progress for ``STUCK_S``.

        Args:
            file: Open file.
            how: ``fcntl.LOCK_SH`` or ``fcntl.LOCK_EX``.
            progress: A number that changes while the holder works.
        """
        seen, seen_s = progress(), self.steady_s()
        while True:
            try:
                fcntl.flock(file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                now_s = self.steady_s()
                if (current := progress()) != seen:
                    seen, seen_s = current, now_s
                elif now_s - seen_s >= STUCK_S:
                    return False
                self.sleep(POLL_S)
            else:
                return True


class CopyFolder:
    """A folder of copies.

    Args:
        path: The folder; it is made with the first copy.
        bytes_max: Most bytes of all copies together.
        waits: How the locks of other processes are waited for.
    """

    def __init__(self, path: Path, *, bytes_max: int, waits: LockWaits) -> None:
        self.path, self.waits, self.bytes_max = path, waits, bytes_max

    def locked(self, name: str, *, writable: bool = False) -> BinaryIO | None:
        """Open a copy and lock it, unless there is none, or a stuck process holds it."""
        path = self.path / name
        try:
            file: BinaryIO = path.open("r+b" if writable else "rb")
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not self.waits.take(file, fcntl.LOCK_SH) or os.fstat(file.fileno()).st_nlink == 0:
            file.close()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return file

    @contextmanager
    def alone(self, name: str, *, watched: str) -> Iterator[bool | None]:
        """Hold the lock under which something is made; give None where another process has just let it go.

        Gives True with the lock, and False where another process holds it and is stuck: then nothing is held.

        Args:
            name: Of the lock.
            watched: A file that changes while the lock's holder makes progress.
        """
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        path, seen = self.path / f"{name}{LOCK}", self.path / watched
        with path.open("ab") as lock:
            if not self.waits.take(lock, fcntl.LOCK_EX, lambda: _changed_ns(seen)):
                _log.warning("%s is held by a process without progress for %g s; not waited for", path, STUCK_S)
                yield False
                return
            if os.fstat(lock.fileno()).st_nlink == 0:
                yield None
                return
            try:
                yield True
            finally:
                path.unlink(missing_ok=True)

    @contextmanager
    def making(self, name: str) -> Iterator[Path | None]:
        """Hold the lock of a copy; give the file to write, None where another process has just ended its try.

        Where another process holds the lock and is stuck, the file is one of this thread's own.
        """
        with self.alone(name, watched=f"{name}{PARTIAL}") as mine:
            if mine is False:
                yield self.path / f"{name}.{os.getpid()}-{threading.get_ident()}{PARTIAL}"
            elif mine is None or (self.path / name).exists():
                yield None
            else:
                yield self.path / f"{name}{PARTIAL}"

    def make_room(self, partial: BinaryIO, size_bytes: int) -> None:
        """Lock a partial file, reserve its bytes, and remove copies that no process uses until they fit.

        Raises:
            NoRoomError: If the copies in use leave no room, or a stuck process holds a lock.
        """
        self._take(partial)
        with (self.path / f"folder{LOCK}").open("ab") as lock:
            self._take(lock)
            mine = os.fstat(partial.fileno()).st_ino
            files = sorted(self._files(), key=lambda found: found[1].st_mtime_ns)
            taken = sum(seen.st_size for _, seen in files) + size_bytes
            for path, seen in files:
                if taken <= self.bytes_max:
                    break
                if seen.st_ino != mine and _remove_unused(path):
                    taken -= seen.st_size
            if taken > self.bytes_max:
                raise NoRoomError(
                    f"local copies of stored data don't fit: {taken} bytes with those in use, {self.path} may hold "
                    f"{self.bytes_max}",
                    field=f"{CACHE_BYTES}, or {CACHE_DIRECTORY} to a larger disk",
                )
            if size_bytes:
                os.posix_fallocate(partial.fileno(), 0, size_bytes)

    def not_written(self, error: OSError) -> NoRoomError:
        """Return the error of a folder that refuses to be written."""
        return NoRoomError(
            f"local copies of stored data can't be written to {self.path}: {error.strerror}", field=CACHE_DIRECTORY
        )

    def _take(self, file: BinaryIO) -> None:
        """Lock a file that others hold for moments only."""
        if not self.waits.take(file, fcntl.LOCK_EX):
            raise NoRoomError(
                f"local copies of stored data can't be made: another process has held {file.name} for {STUCK_S:g} s",
                field=CACHE_DIRECTORY,
            )

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for entry in os.scandir(self.path):
            if not entry.name.endswith(LOCK):
                with contextlib.suppress(FileNotFoundError):
                    yield Path(entry.path), entry.stat()


def _changed_ns(path: Path) -> int:
    """Return when a file was last written; 0: there is none."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _remove_unused(path: Path) -> bool:
    """Remove a copy that no process uses, or what a killed process left."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
