"""Reads the kernel's own log, ``/dev/kmsg``: records of facility kern, each once."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from polyreme_agent.findings import FINDINGS_MAX, Finding, Look, State
from polyreme_agent.kernel_lines import finding_of

RECORDS_MAX: Final = 2_000
"""Records of one look; the rest waits in the kernel's ring."""
RECORD_BYTES_MAX: Final = 8_192
_FIRST = re.compile(rb"(\d{1,4}),(\d{1,19}),(\d{1,19}),[^;]{0,64};", re.ASCII)
_FACILITY_SHIFT: Final = 3


class KernelLog:
    """The kernel log below a root.

    Args:
        root: The host's root directory.
        now_s: Time of day.
        uptime_s: Seconds since boot, the clock of the records.
    """

    name = "kernel-log"

    def __init__(self, root: Path, *, now_s: Callable[[], float], uptime_s: Callable[[], float]) -> None:
        self._path, self._now_s, self._uptime_s = root / "dev" / "kmsg", now_s, uptime_s
        self._descriptor: int | None = None
        self._rest = b""
        self._sequence = -1
        self.read, self.lost, self.foreign = 0, 0, 0
        """Records that were read, that the ring overwrote before, and that the kernel did not write."""
        self.more = False
        """Whether the last look ended at its limit."""

    def fileno(self) -> int | None:
        """Return the descriptor to wait on; None while the log can't be read."""
        return self._descriptor

    def look(self) -> Look:
        """Read what is new, at most ``RECORDS_MAX`` records."""
        if self._descriptor is None:
            try:
                self._descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                return Look(state=State.FAILED, why=f"{self._path} can't be opened: {error.strerror}")
        found: list[Finding] = []
        boot_s = self._now_s() - self._uptime_s()
        self.more = False
        for turn in range(RECORDS_MAX):
            try:
                data = os.read(self._descriptor, RECORD_BYTES_MAX)
            except BlockingIOError:
                break
            except OSError as error:
                # The ring overwrote what came next: the following read gives the oldest record that is left.
                if error.errno in {errno.EPIPE, errno.EINVAL}:
                    continue
                self.close()
                return Look(state=State.FAILED, why=f"{self._path} can't be read: {error.strerror}")
            if not data:
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._rest = self._rest[-RECORD_BYTES_MAX:]
            for line in lines:
                one = self._record(line, boot_s)
                if one is not None and len(found) < FINDINGS_MAX:
                    found.append(one)
            self.more = turn == RECORDS_MAX - 1
        return Look(state=State.WORKS, why=self._lost_text(), occurred=tuple(found))

    def close(self) -> None:
        """Close the log; the next look opens it again, and records that were seen are skipped."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._rest = None, b""

    def _lost_text(self) -> str:
        """Return a text that changes only when the number of lost records has doubled."""
        return f"{1 << (self.lost.bit_length() - 1)} or more records were overwritten unread" if self.lost else ""

    def _record(self, line: bytes, boot_s: float) -> Finding | None:
        head = _FIRST.match(line)
        if head is None:
            return None  # a key of the record before, or none of the kernel's form
        sequence = int(head[2])
        if sequence <= self._sequence:
            return None
        if self._sequence >= 0:
            self.lost += sequence - self._sequence - 1
        self._sequence = sequence
        self.read += 1
        if int(head[1]) >> _FACILITY_SHIFT:
            self.foreign += 1
            return None
        text = line[head.end() :].decode("ascii", "replace")
        return finding_of(text, at_s=boot_s + int(head[3]) / 1e6, sequence=sequence)
