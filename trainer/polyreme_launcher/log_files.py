"""The file that a rank's output is kept in: raw bytes, of a bounded size, with one earlier part beside it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from polyreme_api.rank_logs import PREVIOUS, attempt_of_file, expired_attempts

PART_BYTES_MAX = 4 << 20
"""Size at which a file is set aside as the earlier part; so at least as much of the newest output is there."""


class LogFile:
    """Appends to a file, and sets it aside when it is full.

    Args:
        path: The file. Its earlier part has the same name and the suffix ``.1``.
        part_bytes_max: Size of a part.
    """

    def __init__(self, path: Path, *, part_bytes_max: int = PART_BYTES_MAX) -> None:
        self._path, self._part_bytes_max = path, part_bytes_max
        self._descriptor: int | None = None
        self._size_bytes = 0

    def write(self, data: bytes) -> None:
        """Append; no bytes: only have the file be there.

        Raises:
            OSError: If the disk does not take it; the next call tries again with what comes then.
        """
        if self._descriptor is not None and self._size_bytes + len(data) > self._part_bytes_max:
            self.close()
            self._path.replace(earlier_part(self._path))
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._size_bytes = os.fstat(self._descriptor).st_size
        view = memoryview(data)
        while view:
            written = os.write(self._descriptor, view)
            self._size_bytes += written
            view = view[written:]

    def close(self) -> None:
        """Close; a later write opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def earlier_part(path: Path) -> Path:
    """Return the path of a file's earlier part."""
    return path.with_name(path.name + PREVIOUS)


def read_end(path: Path, *, bytes_max: int) -> bytes:
    """Return the last bytes of both parts of a file, from the beginning of a line; empty if there is no file.

    Raises:
        OSError: If it can't be read.
    """
    data = b""
    for part in (path, earlier_part(path)):
        # One more than asked for shows whether something before it is left out.
        with contextlib.suppress(FileNotFoundError), part.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (bytes_max + 1 - len(data))))
            data = file.read(bytes_max + 1 - len(data)) + data
    return data if len(data) <= bytes_max else data.partition(b"\n")[2]


def remove_expired(folder: Path) -> None:
    """Remove the logs of all but the newest attempts from a pod's folder.

    Raises:
        OSError: If the folder can't be read or changed.
    """
    logs = {path: attempt for path in folder.iterdir() if (attempt := attempt_of_file(path.name)) is not None}
    old = expired_attempts(logs.values())
    for path, attempt in logs.items():
        if attempt in old:
            path.unlink(missing_ok=True)
