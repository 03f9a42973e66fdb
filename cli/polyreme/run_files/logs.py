"""Lines of the ranks of a run on this machine: from the files of its pods, followed as they grow, and as stored."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from polyreme.run_files.identity import read_identity
from polyreme.run_files.paths import RunDirectory
from polyreme.run_files.processes import is_same_process
from polyreme_api.rank_logs import RankAttempt
from polyreme_launcher.log_files import PART_BYTES_MAX, earlier_part, read_end
from polyreme_launcher.log_lines import LineCutter, lines_of

POLL_S = 0.2
"""How often followed files are looked at."""
READ_BYTES = 1 << 16
_FILE = re.compile(r"rank-([0-9]{1,9})\.a([0-9]{1,9})\.log")


def rank_files(
    run: RunDirectory, *, rank: int | None = None, attempt: int | None = None
) -> list[tuple[RankAttempt, Path]]:
    """Return the files of a rank, or of all, in an attempt, or in all, by pod, rank and attempt."""
    found = []
    for path in sorted(run.pods.glob("*/rank-*.log")):
        if (name := _FILE.fullmatch(path.name)) is not None:
            log = RankAttempt(int(name[2]), int(name[1]))
            if rank in {None, log.rank} and attempt in {None, log.attempt}:
                found.append((log, path))
    return found


def last_lines(path: Path, count: int | None) -> list[str]:
    """Return the last lines of a file; None: all that are kept.

    Raises:
        OSError: If it can't be read.
    """
    lines = lines_of(read_end(path, bytes_max=2 * PART_BYTES_MAX))
    return lines if count is None else lines[max(0, len(lines) - count) :]


def is_served(run: RunDirectory) -> bool:
    """Tell whether a process runs a run."""
    host = (read_identity(run) or {}).get("host", {})
    return is_same_process(host.get("pid"), host.get("processStartedAt"))


def follow(
    run: RunDirectory,
    take: Callable[[str], object],
    *,
    rank: int | None,
    attempt: int | None,
    tail: int,
    sleep: Callable[[float], object],
) -> None:
    """Hand on lines of ranks as they are written, each with its rank and attempt, until no process runs the run.

    Args:
        run: The run.
        take: Takes each line.
        rank: The rank; None: all.
        attempt: The attempt; None: all.
        tail: Last lines that are shown of each file that is there.
        sleep: Waits between two looks.

    Raises:
        OSError: If a file can't be read.
    """
    followed: dict[Path, _Followed] = {}
    first = True
    with contextlib.ExitStack() as files:
        while True:
            # Looked at first: what was written before the end is read then.
            served = is_served(run)
            for log, path in rank_files(run, rank=rank, attempt=attempt):
                known = path in followed
                if not known:
                    followed[path] = files.enter_context(contextlib.closing(_Followed(path)))
                lines = followed[path].lines() + ([] if served else followed[path].end())
                for line in lines if known or not first else lines[-tail:]:
                    take(f"{log.prefix}{line}")
            if not served:
                return
            first = False
            sleep(POLL_S)


class _Followed:
    """One file of a rank, with its earlier part: when it is full, it becomes that, and another one takes its place."""

    def __init__(self, path: Path) -> None:
        self._parts = (earlier_part(path), path)
        self._cutter = LineCutter()
        self._descriptor: int | None = None

    def lines(self) -> list[str]:
        """Return the lines that were written since the last call."""
        lines = list(self._read())
        while (part := self._next_part()) is not None:
            # What came between the last read and its end.
            lines += self._read()
            self.close()
            self._descriptor = part
            lines += self._read()
        return lines

    def end(self) -> list[str]:
        """Return the last line, if it has no end."""
        return self._cutter.end()

    def close(self) -> None:
        """Close."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _read(self) -> Iterator[str]:
        while self._descriptor is not None and (chunk := os.read(self._descriptor, READ_BYTES)):
            yield from self._cutter.feed(chunk)

    def _next_part(self) -> int | None:
        """Open the part after the one that is being read; None if that is the newest."""
        found: list[int] = []
        for part in self._parts:
            with contextlib.suppress(FileNotFoundError):
                found.append(os.open(part, os.O_RDONLY | os.O_CLOEXEC))
        own = None if self._descriptor is None else os.fstat(self._descriptor)
        same = [own is not None and os.path.samestat(own, os.fstat(part)) for part in found]
        # One that was removed is followed by the oldest that is left.
        chosen = same.index(True) + 1 if True in same else 0
        for number, descriptor in enumerate(found):
            if number != chosen:
                os.close(descriptor)
        return found[chosen] if chosen < len(found) else None
