"""Prints the lines of ranks to the pod's standard output, from a thread: no rank waits for the one who reads them."""

from __future__ import annotations

import dataclasses
import os
import select
import threading

from polyreme_api.clock import Clock
from polyreme_launcher.log_lines import Backlog, LineCutter, Waiting

BACKLOG_BYTES_MAX = 1 << 20
"""Most bytes of one rank that wait to be printed; the oldest are dropped beyond that."""
BYTES_PER_S_MAX = 4 << 20
"""Most bytes that a pod prints in the long run. Ranks that write without end cost the node no more than that."""
BURST_S = 2.0
"""How long a pod that was quiet may print faster."""
PAUSE_MIN_S = 0.02
WRITE_BYTES = 1 << 16


class LinePrinter:
    """One pod's printer.

    Args:
        descriptor: Where it prints. A write may block for as long as its reader is slow.
        clock: Clock.
    """

    def __init__(self, descriptor: int, clock: Clock) -> None:
        self._descriptor, self._clock = descriptor, clock
        self._changed = threading.Condition()
        self._streams: dict[str, _Stream] = {}
        self._thread: threading.Thread | None = None
        self._hurry = threading.Event()
        """Set when the pod ends: what is left is printed without pauses."""
        self._ahead_s, self._since_s = 0.0, clock.steady_s()

    def take(self, prefix: str, data: bytes) -> None:
        """Take what a process has written; never waits.

        Args:
            prefix: Beginning of each of its lines.
            data: Bytes; a line may begin in one call and end in another.
        """
        with self._changed:
            self._streams.setdefault(prefix, _Stream()).backlog.add(data)
            self._start()
            self._changed.notify()

    def end(self, prefix: str) -> None:
        """Take the end of a process: its last line needs no line end."""
        with self._changed:
            if (stream := self._streams.get(prefix)) is not None:
                stream.ended = True
                self._changed.notify()

    def close(self, wait_s: float) -> None:
        """Print what is left, but wait for no more than some seconds."""
        with self._changed:
            self._hurry.set()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(wait_s)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="line-printer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._hurry.is_set() or any(self._streams.values()))
                ready = [(prefix, stream) for prefix, stream in self._streams.items() if stream]
                taken = [(prefix, stream, stream.backlog.take(), stream.ended) for prefix, stream in ready]
                for prefix, stream in ready:
                    if stream.ended:
                        del self._streams[prefix]
            if not taken:
                return
            for prefix, stream, waiting, ended in taken:
                self._print(prefix, stream, waiting, ended=ended)

    def _print(self, prefix: str, stream: _Stream, waiting: Waiting, *, ended: bool) -> None:
        lost, lines = waiting.lines(stream.cutter)
        if ended:
            lines += stream.cutter.end()
        lost, stream.unprinted = lost + stream.unprinted, 0
        words = "line was dropped" if lost == 1 else "lines were dropped"
        dropped = [f"{lost:,} {words}: they came faster than they are read or may be printed"] if lost else []
        try:
            self._write("".join(f"{prefix}{line}\n" for line in (*dropped, *lines)).encode())
        except OSError:
            # The reader is gone, or a disk is full. Once printing works again, these are reported.
            stream.unprinted = lost + len(lines)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                written = os.write(self._descriptor, view[:WRITE_BYTES])
            except BlockingIOError:
                # Another process that has the same output may have made it non-blocking.
                select.select([], [self._descriptor], [])
                continue
            view = view[written:]
            self._pace(written)

    def _pace(self, written: int) -> None:
        now_s = self._clock.steady_s()
        self._ahead_s = max(-BURST_S, self._ahead_s - (now_s - self._since_s)) + written / BYTES_PER_S_MAX
        self._since_s = now_s
        if self._ahead_s > PAUSE_MIN_S:
            self._hurry.wait(self._ahead_s)


@dataclasses.dataclass(slots=True)
class _Stream:
    backlog: Backlog = dataclasses.field(default_factory=lambda: Backlog(BACKLOG_BYTES_MAX))
    cutter: LineCutter = dataclasses.field(default_factory=LineCutter)
    unprinted: int = 0
    """Lines that could not be printed and have not been reported."""
    ended: bool = False

    def __bool__(self) -> bool:
        return bool(self.backlog) or self.ended
