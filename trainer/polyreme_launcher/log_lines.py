"""From the bytes that a process writes to the lines that people and log collectors read. Pure.

A line ends with LF. Of a progress bar that writes over its line with CR, the last state counts. A line of more than
``LINE_BYTES_MAX`` bytes is cut, and says by how many. What is not UTF-8 becomes U+FFFD; escape sequences and other
control characters but tabs are removed, since the colours of one rank would run into the lines of another; what looks
like a secret is hidden. No rule splits a line or joins two, so each line goes out once.
"""

from __future__ import annotations

import codecs
import dataclasses
import re
from collections import deque

from polyreme_api.redaction import hide

LINE_BYTES_MAX = 16 << 10
"""Longest line before it is cut: what container runtimes take as one."""
CHUNK_BYTES = 4 << 10
"""Writes that wait are joined up to this size."""
_CR = b"\r"
_UTF8 = codecs.getincrementaldecoder("utf-8")
_ESCAPE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]"  # colours and cursor
    r"|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?"  # titles, links and other strings
    r"|[ -/]*[0-~])?"
)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]+")


class LineCutter:
    """Cuts one stream into lines, in whatever pieces its bytes come.

    Args:
        line_bytes_max: Bytes that are shown of a line.
    """

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self._line_bytes_max = line_bytes_max
        self._head = b""
        """Beginning of the line that has no end yet, without what a CR has made void."""
        self._more = 0
        """Bytes of that line beyond the longest one."""
        self._returned = False
        """Whether its last byte is a CR: the next byte writes over it, or ends the line."""
        self._broken = False
        """Whether the rest of this line is left out, since its beginning was dropped."""

    def feed(self, data: bytes) -> list[str]:
        """Take bytes and return the lines that end in them."""
        lines: list[str] = []
        *ended, rest = data.split(b"\n")
        for piece in ended:
            self._add(piece)
            if not self._broken:
                lines.append(_text(self._head, self._more))
            self._begin()
        self._add(rest)
        return lines

    def end(self) -> list[str]:
        """Return the last line of a stream that ends here, if one has begun."""
        begun = bool(self._head or self._returned)
        last = [_text(self._head, self._more)] if begun else []
        self._begin()
        return last

    def skip(self, lines: int, *, ends: bool) -> int:
        """Note that bytes were dropped here, and return how many lines are lost by that.

        Args:
            lines: Line ends among them.
            ends: Whether the last of them is a line end.
        """
        # A line that is broken already was counted when it broke.
        lost = lines + (not ends) - self._broken
        self._begin(broken=not ends)
        return lost

    def _begin(self, *, broken: bool = False) -> None:
        self._head, self._more, self._returned, self._broken = b"", 0, False, broken

    def _add(self, piece: bytes) -> None:
        """Take bytes of the present line."""
        if self._broken or not piece:
            return
        body = piece.rstrip(_CR)
        if body:
            _, overwritten, text = body.rpartition(_CR)
            if self._returned or overwritten:
                self._head, self._more = b"", 0
            room = self._line_bytes_max - len(self._head)
            self._head += text[:room]
            self._more += max(0, len(text) - room)
        self._returned = len(body) < len(piece)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What was taken from a backlog."""

    chunks: tuple[bytes, ...] = ()
    gap: bool = False
    """Whether bytes before them were dropped."""
    lost: int = 0
    """Line ends among those."""
    ends: bool = True
    """Whether the last of them is a line end."""

    def lines(self, cutter: LineCutter) -> tuple[int, list[str]]:
        """Return how many lines were lost, and the lines that follow."""
        lost = cutter.skip(self.lost, ends=self.ends) if self.gap else 0
        return lost, [line for chunk in self.chunks for line in cutter.feed(chunk)]


class Backlog:
    """Bytes of one stream that wait to be printed, in order; of too many the oldest are dropped."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._chunks: deque[bytes] = deque()
        self._size_bytes = 0
        self._lost, self._lost_ends, self._gap = 0, True, False

    def __bool__(self) -> bool:
        return bool(self._chunks or self._gap)

    def add(self, chunk: bytes) -> None:
        """Append bytes, and drop the oldest beyond the limit."""
        self._size_bytes += len(chunk)
        if self._chunks and len(self._chunks[-1]) + len(chunk) <= CHUNK_BYTES:
            self._chunks[-1] += chunk
        else:
            self._chunks.append(chunk)
        while self._size_bytes > self._bytes_max:
            dropped = self._chunks.popleft()
            self._size_bytes -= len(dropped)
            self._lost += dropped.count(b"\n")
            self._lost_ends, self._gap = dropped.endswith(b"\n"), True

    def take(self) -> Waiting:
        """Return what waits; the backlog is empty then."""
        waiting = Waiting(chunks=tuple(self._chunks), lost=self._lost, ends=self._lost_ends, gap=self._gap)
        self._chunks.clear()
        self._size_bytes = 0
        self._lost, self._lost_ends, self._gap = 0, True, False
        return waiting


def lines_of(data: bytes, line_bytes_max: int = LINE_BYTES_MAX) -> list[str]:
    """Return the lines of bytes that are all there; a last line needs no end."""
    cutter = LineCutter(line_bytes_max)
    return [*cutter.feed(data), *cutter.end()]


def _text(line: bytes, more: int) -> str:
    """Return a line as it is shown."""
    if more:
        # A character that was cut is one of those that are left out.
        decoder = _UTF8(errors="replace")
        text = decoder.decode(line)
        more += len(decoder.getstate()[0])
    else:
        text = line.decode(errors="replace")
    if not text.isprintable():
        text = _CONTROL.sub("", _ESCAPE.sub("", text))
    return hide(text) + (f" ... ({more:,} more bytes)" if more else "")
