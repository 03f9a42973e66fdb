"""Output of the processes of a pod, standard output and error: read from pipes by a thread.

Each process has one pipe for both, so that C libraries are read too and what it wrote last is there however it ended.
The thread does nothing but to read, append to the process' file and pass the bytes on, so that no process waits for a
terminal, a log collector or an object store. It waits for the disk of the pod's folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from polyreme_launcher.log_files import LogFile, remove_expired

PIPE_BYTES = 1 << 20
"""What a process may write before anyone reads, where the system allows it; 64 KiB otherwise."""
READ_BYTES = 1 << 16
ROUND_BYTES_MAX = 1 << 20
"""Most bytes that are read of one process before it is the next one's turn."""
LAST_BYTES_MAX = 4 << 20
"""Most bytes that are read of a process after it ended: a child that outlives it may hold the pipe and write on."""
NAP_S = 0.01
"""After little was read, so long no pipe is looked at: lines that come one by one are then read together."""
FINISH_WAIT_S = 0.5
"""How long an end waits until the last bytes are in the file; longer only where the disk is stuck."""
_SET_PIPE_SIZE = getattr(fcntl, "F_SETPIPE_SZ", None)

Key = tuple[int, int]
"""Attempt and number of a process."""


class RankOutput:
    """The pipes of a pod's processes. Only the reading thread touches pipes and files.

    Args:
        on_data: Takes the prefix and the bytes of a process as they come; must not wait. Called by the thread.
        on_end: Takes the prefix of a process that has ended. Called by the thread.
        on_trouble: Takes the prefix and a sentence where a file can't be written. Called by the thread.
    """

    def __init__(
        self,
        *,
        on_data: Callable[[str, bytes], None],
        on_end: Callable[[str], None],
        on_trouble: Callable[[str, str], None],
    ) -> None:
        self._on_data, self._on_end, self._on_trouble = on_data, on_end, on_trouble
        self._open: dict[Key, _Pipe] = {}
        self._new: deque[_Pipe] = deque()
        self._woken, self._wakes = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._wakes, False)
        self._closing = False
        self._attempt = 0
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def open(self, key: Key, *, path: Path, prefix: str) -> Iterator[int]:
        """Give a descriptor for a process to write to; it is valid until the block ends.

        Args:
            key: Attempt and number of the process.
            path: File that takes its bytes.
            prefix: Names it in the pod's own output.

        Raises:
            OSError: If there can't be another pipe.
        """
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        if _SET_PIPE_SIZE is not None:
            with contextlib.suppress(OSError):
                fcntl.fcntl(reader, _SET_PIPE_SIZE, PIPE_BYTES)
        pipe = _Pipe(descriptor=reader, attempt=key[0], path=path, file=LogFile(path), prefix=prefix)
        self._open[key] = pipe
        self._new.append(pipe)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rank-output", daemon=True)
            self._thread.start()
        self._wake()
        try:
            yield writer
        finally:
            os.close(writer)

    def finish(self, key: Key) -> None:
        """Take the end of a process: what it has written is in its file then."""
        pipe = self._open.pop(key, None)
        if pipe is not None:
            pipe.ending = True
            self._wake()
            pipe.done.wait(FINISH_WAIT_S)

    def close(self) -> None:
        """Finish every process, and end."""
        for key in list(self._open):
            self.finish(key)
        self._closing = True
        self._wake()
        if self._thread is not None:
            self._thread.join(FINISH_WAIT_S)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._wakes, b"\0")

    def _run(self) -> None:
        pipes: list[_Pipe] = []
        while pipes or self._new or not self._closing:
            # A nap may have taken the byte by which another thread woke this one.
            called = self._new or self._closing or any(pipe.ending for pipe in pipes)
            ready = self._poll(pipes, timeout_s=0.0 if called else None)
            while self._new:
                pipes.append(self._begin(self._new.popleft()))
            received = 0
            for pipe in pipes:
                # Looked at before the read: what was written before the end is read then.
                ending = pipe.ending
                if ending or pipe.descriptor in ready:
                    received += self._read(pipe, LAST_BYTES_MAX if ending else ROUND_BYTES_MAX)
                if ending:
                    self._end(pipe)
            pipes = [pipe for pipe in pipes if not pipe.done.is_set()]
            if received < READ_BYTES:
                self._poll([], timeout_s=NAP_S)

    def _poll(self, pipes: list[_Pipe], timeout_s: float | None = None) -> set[int]:
        """Wait for something to read, or for a call of another thread."""
        poll = select.poll()
        for descriptor in (self._woken, *(pipe.descriptor for pipe in pipes if not pipe.at_end)):
            poll.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else timeout_s * 1000.0)}
        if self._woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self._woken, READ_BYTES)
        return ready

    def _begin(self, pipe: _Pipe) -> _Pipe:
        if pipe.attempt > self._attempt:
            self._attempt = pipe.attempt
            with contextlib.suppress(OSError):
                remove_expired(pipe.path.parent)
        # A file without a line says that the process has written none.
        self._keep(pipe, b"")
        return pipe

    def _read(self, pipe: _Pipe, bytes_max: int) -> int:
        received = 0
        while not pipe.at_end and received < bytes_max:
            try:
                data = os.read(pipe.descriptor, READ_BYTES)
            except BlockingIOError:
                break
            pipe.at_end = not data
            if data:
                received += len(data)
                self._keep(pipe, data)
        return received

    def _keep(self, pipe: _Pipe, data: bytes) -> None:
        try:
            pipe.file.write(data)
            pipe.troubled = False
        except OSError as error:
            if not pipe.troubled:
                pipe.troubled = True
                self._on_trouble(pipe.prefix, f"output can't be kept in {pipe.path}: {error.strerror}")
        if data:
            self._on_data(pipe.prefix, data)

    def _end(self, pipe: _Pipe) -> None:
        os.close(pipe.descriptor)
        pipe.file.close()
        self._on_end(pipe.prefix)
        pipe.done.set()


@dataclasses.dataclass(slots=True, kw_only=True)
class _Pipe:
    descriptor: int
    attempt: int
    path: Path
    file: LogFile
    prefix: str
    ending: bool = False
    """Whether its process has ended; set by another thread."""
    at_end: bool = False
    """Whether no process holds its other end."""
    troubled: bool = False
    """Whether it was reported that the file can't be written."""
    done: threading.Event = dataclasses.field(default_factory=threading.Event)
