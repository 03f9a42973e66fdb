"""The pipe for rank 0's progress records to the leader: lines of JSON; the newest one counts."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable

from polyreme_api.progress import ProgressRecord

READ_BYTES = 1 << 16
LINE_BYTES_MAX = 1 << 16


class ProgressPipe:
    """Read end, watched by the loop; the write end goes to the rank.

    Args:
        on_record: Called for every record.
    """

    def __init__(self, on_record: Callable[[ProgressRecord], None]) -> None:
        self._on_record = on_record
        self._read, self.write_descriptor = os.pipe()
        os.set_blocking(self._read, False)
        self._rest = b""
        self._open = True
        self._handed_over = False
        asyncio.get_running_loop().add_reader(self._read, self.drain)

    def handed_over(self) -> None:
        """Close our copy of the write end: the rank now has its own, and when it closes, the pipe ends."""
        if not self._handed_over:
            self._handed_over = True
            os.close(self.write_descriptor)

    def drain(self) -> None:
        """Read everything that has been written so far."""
        while self._open:
            try:
                data = os.read(self._read, READ_BYTES)
            except BlockingIOError:
                return
            if not data:
                self.close()
                return
            *lines, self._rest = (self._rest + data).split(b"\n")
            if len(self._rest) > LINE_BYTES_MAX:
                self._rest = b""
            for line in lines:
                self._take(line)

    def close(self) -> None:
        """Stop reading."""
        if self._open:
            self._open = False
            asyncio.get_running_loop().remove_reader(self._read)
            os.close(self._read)
            self.handed_over()

    def _take(self, line: bytes) -> None:
        try:
            record = ProgressRecord.model_validate_json(line)
        except ValueError:
            print(f"rank 0 wrote no progress record: {line[:200]!r}", file=sys.stderr)
            return
        self._on_record(record)
