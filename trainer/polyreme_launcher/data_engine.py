"""The launcher's side of the data engine: starts it, replaces one that has died or is stuck, ends it.

The launcher makes the socket on which the engine listens and keeps it open, so ranks need not know which engine answers
them. The socket has no name in a folder: ranks get a descriptor of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from polyreme_datahub.loader.engine.client import receive, send
from polyreme_launcher.proc_stats import IDLE_TICKS_MAX, cpu_ticks

DEATHS_MAX = 5
"""Engines that may die in one attempt; then its ranks end with exit code 7."""
STUCK_S = 20.0
"""How long an engine may let a rank or a ping wait without using CPU time; then it is killed and replaced."""
STUCK_MAX = 2
"""Engines that may be stuck in one attempt: a store that hangs is reported within a minute."""
BACKLOG = 256
END_WAIT_S = 2.0
_SOCKET_NAME = "data-engine.sock"
_MODULE = "polyreme_datahub.loader.engine.server"


@dataclasses.dataclass(frozen=True, slots=True)
class Observation:
    """The state of an engine at one moment."""

    waiting: int
    """Requests of ranks without an answer; also 1 while a ping has none."""
    answered: int
    """Requests that have been answered, and requests of its own to a bucket that had their turn."""
    ticks: int
    """CPU time that the process has used."""


@dataclasses.dataclass(slots=True)
class Watchdog:
    """Decides when an engine is stuck: a request waits, none is answered, and it uses no CPU time."""

    stuck_s: float
    idle_s: float = 0.0
    before: Observation | None = None

    def is_stuck(self, since_s: float, seen: Observation) -> bool:
        """Take an observation, and the time since the last one."""
        before, self.before = self.before, seen
        idle = (
            before is not None
            and seen.waiting > 0
            and seen.answered == before.answered
            and seen.ticks - before.ticks <= IDLE_TICKS_MAX
        )
        self.idle_s = self.idle_s + since_s if idle else 0.0
        return self.idle_s >= self.stuck_s


class DataEngine:
    """One pod's data engine.

    Args:
        directory: The pod's folder.
        environment: Variables of the engine.
        stuck_s: How long it may let others wait without using CPU time.
        command: Command line before the socket's descriptor and this process' pid.
    """

    def __init__(
        self,
        *,
        directory: Path,
        environment: Mapping[str, str],
        stuck_s: float = STUCK_S,
        command: tuple[str, ...] = (sys.executable, "-m", _MODULE),
    ) -> None:
        self._directory, self._stuck_s, self._command = directory, stuck_s, command
        self._environment = {**environment, "OMP_NUM_THREADS": "1"}
        self._listener: socket.socket | None = None
        self._path: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths = self._stuck = 0
        self._ping: socket.socket | None = None
        self._waiting = self._answered = 0
        self._watchdog = Watchdog(stuck_s)

    @property
    def pid(self) -> int | None:
        """Pid of the engine, for logs and tests."""
        return None if self._process is None else self._process.pid

    @property
    def descriptor(self) -> int | None:
        """Descriptor by which ranks connect."""
        return self._path

    def begin_attempt(self) -> None:
        """Have an engine for the ranks of a new attempt.

        Raises:
            OSError: If there can't be one.
        """
        self._deaths = self._stuck = 0
        if self._listener is None:
            self._listen()
        if self._process is None:
            self._start()

    def tick(self, since_s: float) -> None:
        """Replace an engine that has died, and kill one that is stuck.

        Args:
            since_s: Time since the last call.
        """
        if self._process is None:
            return
        if self._process.poll() is not None:
            self._replace()
            return
        self._poll()
        seen = Observation(self._waiting, self._answered, cpu_ticks(self._process.pid) or 0)
        if self._watchdog.is_stuck(since_s, seen):
            print(
                f"the data engine let ranks wait and did nothing for {self._stuck_s:g} s; it is killed", file=sys.stderr
            )
            self._stuck += 1
            self._process.kill()

    def close(self) -> None:
        """End the engine."""
        self._hang_up()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_WAIT_S)
            self._process = None
        self._stop_listening()

    def _listen(self) -> None:
        """Bind by the folder's descriptor: the path of a socket may have 107 bytes, folders are longer."""
        folder = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_SOCKET_NAME, dir_fd=folder)
            listener.bind(f"/proc/self/fd/{folder}/{_SOCKET_NAME}")
            listener.listen(BACKLOG)
            self._path = os.open(_SOCKET_NAME, os.O_PATH | os.O_CLOEXEC, dir_fd=folder)
            os.unlink(_SOCKET_NAME, dir_fd=folder)
        except OSError:
            listener.close()
            raise
        finally:
            os.close(folder)
        self._listener = listener

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._path is not None:
            os.close(self._path)
            self._path = None

    def _start(self) -> None:
        assert self._listener is not None
        self._watchdog = Watchdog(self._stuck_s)
        self._waiting = self._answered = 0
        self._process = subprocess.Popen(
            [*self._command, str(self._listener.fileno()), str(os.getpid())],
            env=self._environment,
            pass_fds=[self._listener.fileno()],
            stdin=subprocess.DEVNULL,
        )

    def _replace(self) -> None:
        self._hang_up()
        self._process = None
        self._deaths += 1
        if self._deaths >= DEATHS_MAX or self._stuck >= STUCK_MAX:
            print(
                f"the data engine died {self._deaths} times in this attempt, at most {DEATHS_MAX - 1} are allowed; "
                f"{self._stuck} times it was stuck, at most {STUCK_MAX - 1} are allowed",
                file=sys.stderr,
            )
            # Ranks that connect are refused, and end.
            self._stop_listening()
            return
        print("the data engine died; another one is started", file=sys.stderr)
        self._start()

    def _poll(self) -> None:
        """Take the answer to the last ping if it is there, and ping again."""
        try:
            if self._ping is None:
                self._ping = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                self._ping.setblocking(False)
                self._ping.connect(f"/proc/self/fd/{self._path}")
            else:
                received = receive(self._ping)
                if received is None:
                    self._hang_up()
                    return
                said = received.message
                self._waiting, self._answered = said["waiting"], said["answered"] + said["admitted"]
            send(self._ping, {"call": "ping"})
        except BlockingIOError:
            self._waiting = max(self._waiting, 1)
        except OSError:
            self._hang_up()

    def _hang_up(self) -> None:
        if self._ping is not None:
            self._ping.close()
            self._ping = None
