"""The parent's side of one child process: start it, exchange frames with it, find out why it ended."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import mmap
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from polyreme_datahub.sandbox.child import EXIT_MEMORY, EXIT_OUTSIDE, STATUS
from polyreme_datahub.sandbox.frames import READ_BYTES, Frame, FrameError, encode_frame, read_frame
from polyreme_datahub.sandbox.tasks import CRASH, MEMORY, TIME

BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from polyreme_datahub.sandbox.child import main; main(*map(int, sys.argv[2:]))"
)
ENVIRONMENT: Mapping[str, str] = {
    "LC_ALL": "C.UTF-8",
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "16777216",
    "MALLOC_TRIM_THRESHOLD_": "67108864",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
"""All that a child sees. It is one worker's core, so libraries start no threads; and it keeps freed memory for the next
sample (0.20 ms less CPU at 300 KB of output)."""
DEVICE_VARIABLES = ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES")
"""What an unconfined child sees as well: which GPUs are its own, and where their libraries are."""
PIPE_BYTES = 2**20
"""The most that Linux grants without privileges."""
BUFFERS_MAX = 64
"""Buffers of one write."""
END_WAIT_S = 10.0
CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGSYS, signal.SIGTRAP}
)
"""Signals by which a process ends itself. Others come from outside, but SIGXCPU, which is our limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Death:
    """Why a child ended."""

    rule: str | None
    """Rule of the verdict that this may become; None: something outside ended it, and the sample has no part in it."""
    how: str


class ChildEnded(Exception):  # noqa: N818 - it tells what happened
    """The child is gone."""

    def __init__(self, death: Death) -> None:
        super().__init__(death.how)
        self.death = death


class ChildProcess:
    """A child and the pipes to it. Nothing here waits longer than its caller allows."""

    def __init__(self, *, output_bytes_max: int, confined: bool) -> None:
        passed = {} if confined else {name: os.environ[name] for name in DEVICE_VARIABLES if name in os.environ}
        self._output_bytes_max = output_bytes_max
        self._waiting: deque[memoryview] = deque()
        self._reader: Generator[int, Sequence[bytes], Frame] | None = None
        self._needed = 0
        self._pieces: list[bytes] = []
        self.used = False
        """Whether it has run a sample before."""
        self._last: frozenset[str] = frozenset()
        self._kept: frozenset[str] = frozenset()
        """Digests of the blobs of the last frame, and of those that the child keeps."""
        task_end, self._tasks = os.pipe()
        self._outcomes, outcome_end = os.pipe()
        status = _shared_page()
        try:
            for descriptor in (self._tasks, self._outcomes):
                os.set_blocking(descriptor, False)
                with contextlib.suppress(OSError, AttributeError):  # fewer bytes are slower, and right
                    fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
            self._status = mmap.mmap(status, mmap.PAGESIZE)
            numbers = [str(number) for number in (task_end, outcome_end, status, os.getpid())]
            places = json.dumps([os.path.abspath(place) for place in sys.path])  # noqa: PTH100 - "" is this folder
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", BOOT, places, *numbers],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**ENVIRONMENT, **passed},
                pass_fds=(task_end, outcome_end, status),
                start_new_session=True,
            )
        finally:
            for descriptor in (task_end, outcome_end, status):
                os.close(descriptor)
        self._poll = select.poll()
        self._poll.register(self._outcomes, select.POLLIN)

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    @property
    def step(self) -> int:
        """Number of the step that the child noted last."""
        return int(STATUS.unpack_from(self._status, 0)[0])

    def send_tasks(self, tasks: Sequence[Mapping[str, Any]], blobs: Mapping[str, bytes]) -> None:
        """Queue a frame of tasks; what the child keeps is not sent again.

        It keeps what two frames in a row name, such as the document of many pages, for as long as every frame names it.
        """
        named = frozenset(blobs)
        known = named & self._kept
        self._kept = named & (self._kept | self._last)
        self._last = named
        fresh = {digest: data for digest, data in blobs.items() if digest not in known}
        self.send({"tasks": list(tasks), "known": sorted(known), "keep": sorted(self._kept)}, fresh)

    def send(self, header: Mapping[str, Any], blobs: Mapping[str, bytes]) -> None:
        """Queue a frame; ``receive`` writes it as the pipe takes it."""
        if not self._waiting:
            self._poll.register(self._tasks, select.POLLOUT)
        self._waiting.extend(memoryview(data) for data in encode_frame(header, blobs) if data)

    def receive(self, *, wait_s: float) -> Frame | None:
        """Write what is queued and read what has come, for one wait; return a frame once it is complete.

        Raises:
            ChildEnded: If the child is gone, or sent what is no frame.
        """
        events = self._poll.poll(max(0.0, wait_s) * 1000)
        for descriptor, event in events:
            if descriptor == self._tasks:
                self._write()
            elif event:
                frame = self._read()
                if frame is not None:
                    return frame
        return None

    def _write(self) -> None:
        try:
            written = os.writev(self._tasks, [self._waiting[at] for at in range(min(len(self._waiting), BUFFERS_MAX))])
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._waiting.clear()
            written = 0
        while written and self._waiting:
            first = self._waiting[0]
            if written < len(first):
                self._waiting[0] = first[written:]
                break
            written -= len(first)
            self._waiting.popleft()
        if not self._waiting:
            self._poll.unregister(self._tasks)

    def _read(self) -> Frame | None:
        while True:
            if self._reader is None:
                self._reader = read_frame(bytes_max=self._output_bytes_max)
                self._needed = next(self._reader)
            try:
                piece = os.read(self._outcomes, min(self._needed, READ_BYTES)) if self._needed else b""
            except BlockingIOError:
                return None
            if not piece and self._needed:
                raise ChildEnded(self._wait_for_end())
            self._pieces.append(piece)
            self._needed -= len(piece)
            if self._needed:
                continue
            pieces, self._pieces = self._pieces, []
            try:
                self._needed = self._reader.send(pieces)
            except StopIteration as end:
                self._reader = None
                frame: Frame = end.value
                return frame
            except FrameError as error:
                raise ChildEnded(Death(rule=CRASH, how=f"answered out of form: {error}")) from error

    def _wait_for_end(self) -> Death:
        try:
            code = self._process.wait(END_WAIT_S)
        except subprocess.TimeoutExpired:
            return Death(rule=CRASH, how="closed its pipe")
        return death_of(code)

    def close(self) -> None:
        """Kill the child and free what belongs to it."""
        self._process.kill()
        self._process.wait()
        for descriptor in (self._tasks, self._outcomes):
            os.close(descriptor)
        self._status.close()


def death_of(code: int) -> Death:
    """Say why a process ended, by its exit code (negative: a signal)."""
    if code >= 0:
        known = {EXIT_MEMORY: Death(MEMORY, "ran out of memory"), EXIT_OUTSIDE: Death(None, "lost its memory limit")}
        return known.get(code) or Death(rule=CRASH, how=f"exited with code {code}")
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    if -code == signal.SIGXCPU:
        return Death(rule=TIME, how="used up its CPU time")
    return Death(rule=CRASH if -code in CRASHES else None, how=f"died of {name}")


def _shared_page() -> int:
    """Open a page of memory without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("polyreme-sandbox")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, mmap.PAGESIZE)
    return descriptor
