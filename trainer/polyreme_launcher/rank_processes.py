"""The launcher's side of the fork server: keep one alive, let it fork, signal and kill ranks, and report every exit.

The launcher is a subreaper: when a fork server dies, its ranks, which the kernel kills with it, become children of the
launcher. So the launcher can wait until none of them is alive before it reports their exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyreme_api.errors import EnvironmentFailedError
from polyreme_api.exit_codes import ExitCode
from polyreme_launcher.fork_server_channel import ForkServerChannel
from polyreme_launcher.proc_stats import is_stopped, parent_of, state_of
from polyreme_launcher.protocol.hang_evidence import ENDS_WITHIN_S

FORK_SERVER_DEATHS_MAX = 5
"""Fork servers that may die before one has run ranks; then the launcher gives up."""
END_WAIT_S = 2.0
KILLED_WAIT_S = 10.0
"""How long processes that were killed may take to end: on a busy machine, with much memory, seconds."""
STOPPED_MAX_S = 10.0
"""Longest time that a fork server may be stopped: it neither reaps nor kills ranks, and nothing else continues it."""
KILL_WAIT_S = 2.0
"""How long a warm fork server may take to kill its ranks."""
_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.005

ALLOCATOR = {"MALLOC_TRIM_THRESHOLD_": str(1 << 30), "MALLOC_MMAP_THRESHOLD_": str(32 << 20)}
"""Settings of glibc for ranks: memory that a step frees stays with the process, and the next step finds it mapped.

By default the kernel takes most of it back after each use, and returns it page by page, zeroed, a moment later. glibc
reads the settings once, when a process starts, so they are the fork server's; ranks inherit its allocator. 32 MiB is
the largest threshold that glibc takes. Variables of the pod take precedence.
"""

TORCH = {
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
"""Settings of torch and CUDA for ranks: they read them when they first use a device, and a fork server never does.

Segments that grow bound the fragments which rows of varying numbers leave. Exchanges of several groups overlap, and
CUDA's default of eight queues can queue one after another that waits for it. One H200 has run with them; exchanges of
several GPUs have not.
"""
_FORMER_ALLOC_CONF = "PYTORCH_CUDA_ALLOC_CONF"

OnExit = Callable[[int, int, int | None, int | None, str], None]
"""Called with attempt, rank, code, signal, last message."""


def with_torch_settings(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return a pod's variables with those of torch that it lacks.

    Args:
        environment: Of the pod.
        folder: Where a rank whose exchange timed out writes the last exchanges of all groups (torch's flight recorder).
    """
    settings = {**TORCH, "TORCH_FR_DUMP_TEMP_FILE": str(folder / "exchanges-of-rank-")}
    if _FORMER_ALLOC_CONF in environment:
        del settings["PYTORCH_ALLOC_CONF"]
    return settings | dict(environment)


class RankParent:
    """A fork server and the ranks it has forked.

    Args:
        environment: Environment of the fork server itself.
        on_exit: Called once for every rank that ``fork`` was asked for.
        on_forked: Called when ``pids`` has changed.
        on_fail: Called when fork servers die too often.
    """

    def __init__(
        self,
        *,
        environment: Mapping[str, str],
        on_exit: OnExit,
        on_forked: Callable[[], None],
        on_fail: Callable[[EnvironmentFailedError], None],
    ) -> None:
        self._environment = dict(environment)
        self._on_exit = on_exit
        self._on_forked = on_forked
        self._on_fail = on_fail
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: ForkServerChannel | None = None
        self._live: dict[tuple[int, int], int | None] = {}
        """Pid by (attempt, rank), None until the fork server has forked it."""
        self._finished: set[tuple[int, int]] = set()
        """Ranks that were killed after their work was done."""
        self._deaths = 0
        self._failure = ""
        """Why the newest fork server ended, if it reported that."""
        self._closing = False
        self._stopped_s = 0.0
        self._warm = False
        self._cleanup: asyncio.Task[None] | None = None
        self.pids: dict[int, int] = {}
        """Pid by rank, of the newest forks; for logs and tests."""

    @property
    def fork_server_pid(self) -> int | None:
        """Pid of the fork server, for logs and tests."""
        return None if self._process is None else self._process.pid

    @property
    def living(self) -> dict[int, int]:
        """Pid by rank, of those that have been forked and have not ended."""
        return {rank: pid for (_, rank), pid in self._live.items() if pid is not None}

    def start(self) -> None:
        """Start a fork server; it warms while the launcher continues."""
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "polyreme_launcher.fork_server", str(theirs.fileno()), str(os.getpid())],
                env={**ALLOCATOR, **self._environment},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        self._channel = ForkServerChannel(ours, on_message=self._on_message, on_end=self._on_channel_end)
        self._warm = False

    def fork(
        self, *, attempt: int, rank: int, environment: Mapping[str, str], output: int, descriptors: Mapping[str, int]
    ) -> None:
        """Fork a rank.

        Args:
            attempt: Attempt of the rank.
            rank: Global rank.
            environment: Its whole environment.
            output: Descriptor that becomes its standard output and error.
            descriptors: Descriptors that it gets, by the variable with their numbers.
        """
        self._send(
            {
                "type": "fork",
                "attempt": attempt,
                "rank": rank,
                "environment": dict(environment),
                "descriptors": list(descriptors),
            },
            [output, *descriptors.values()],
        )
        self._live[attempt, rank] = None

    def end_if_stopped(self, since_s: float) -> None:
        """Kill a fork server that has been stopped (state T) for too long, and the ranks with it.

        Args:
            since_s: Time since the last call.
        """
        pid = self.fork_server_pid
        self._stopped_s = self._stopped_s + since_s if pid is not None and is_stopped(pid) else 0.0
        if self._stopped_s >= STOPPED_MAX_S:
            self._stopped_s = 0.0
            print(f"the ranks' parent process was stopped for {STOPPED_MAX_S:g} s; it is killed", file=sys.stderr)
            self._kill_all()

    def end_finished(self, ranks: Collection[int]) -> None:
        """Kill ranks that have done all of their work and do not end; they count as ended with code 0."""
        for (attempt, rank), pid in self._live.items():
            if rank in ranks and pid is not None and (attempt, rank) not in self._finished:
                self._finished.add((attempt, rank))
                late = f"has done its work and has not ended within {ENDS_WITHIN_S:g} s"
                print(f"rank {rank} of attempt {attempt} {late}; it is killed, and nothing is lost", file=sys.stderr)
                self._kill_rank(pid)

    def kill(self) -> None:
        """Kill every rank; a fork server that does not answer in time is killed itself, and its ranks with it."""
        self._send({"type": "kill"})
        asyncio.get_running_loop().call_later(KILL_WAIT_S, self._kill_if_unresponsive, self._process, dict(self._live))

    def signal(self, number: int) -> None:
        """Send a signal to every rank."""
        self._send({"type": "signal", "signal": number})

    async def close(self) -> None:
        """End the fork server, and the ranks with it."""
        self._closing = True
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._cleanup is not None:
            await self._cleanup
        if self._process is None:
            return
        await _reap_all(kill=False, wait_s=END_WAIT_S)
        self._kill_all()
        await _reap_all(kill=True, wait_s=KILLED_WAIT_S)
        self._forget_process()

    def _forget_process(self) -> None:
        if self._process is not None:
            # Its object must know that it is reaped already.
            if self._process.poll() is None:
                pid = self._process.pid
                said = f"the ranks' parent process {pid} was killed and has not ended (state {state_of(pid)})"
                print(f"{said}; it is left to the system", file=sys.stderr)
                self._process.returncode = -signal.SIGKILL
            self._process = None

    def _send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        if self._channel is not None and not self._channel.send(message, descriptors):
            # Only a fork server that hangs lets so many commands pile up: a new one is the remedy.
            self._kill_all()

    def _on_channel_end(self) -> None:
        self._channel = None
        self._cleanup = asyncio.get_running_loop().create_task(self._clean_up())

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["type"] == "ready":
            self._warm = True
        elif message["type"] == "forked":
            self._deaths = 0
            self._live[message["attempt"], message["rank"]] = message["pid"]
            self.pids[message["rank"]] = message["pid"]
            self._on_forked()
        elif message["type"] == "exited":
            self._end(message["attempt"], message["rank"], message["code"], message["signal"], message["message"])
        elif message["type"] == "failed":
            self._failure = message["message"]

    def _end(self, attempt: int, rank: int, code: int | None, number: int | None, message: str) -> None:
        if (attempt, rank) in self._live:
            del self._live[attempt, rank]
            if (attempt, rank) in self._finished:
                self._finished.discard((attempt, rank))
                code, number, message = int(ExitCode.OK), None, ""
            self._on_exit(attempt, rank, code, number, message)

    def _kill_if_unresponsive(
        self, fork_server: subprocess.Popen[bytes] | None, asked: dict[tuple[int, int], int | None]
    ) -> None:
        # While it warms it has forked nothing yet, and it obeys in order once it is warm.
        if fork_server is not None and fork_server is self._process and self._warm and asked.keys() & self._live.keys():
            self._kill_all()

    def _kill_all(self) -> None:
        """Kill the fork server and every rank's group."""
        fork_server = None if self._process is None else self._process.pid
        if fork_server is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(fork_server, signal.SIGKILL)
        for pid in filter(None, self._live.values()):
            self._kill_rank(pid)

    def _kill_rank(self, pid: int) -> None:
        """Kill a rank's group."""
        # A pid is only valid with its parent: a fork server that died right after reaping a rank never reported it.
        if parent_of(pid) in {self.fork_server_pid, os.getpid()}:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    async def _clean_up(self) -> None:
        """Handle a fork server's death: wait until its ranks are dead too, report them, and start another one."""
        if self._closing:
            return
        self._kill_all()
        await _reap_all(kill=True)
        self._forget_process()
        for (attempt, rank), pid in list(self._live.items()):
            # A rank that was never forked did not crash: the machine failed it.
            if pid is None:
                self._end(
                    attempt, rank, int(ExitCode.ENVIRONMENT), None, self._with_failure("the ranks' parent process died")
                )
            else:
                self._end(attempt, rank, None, int(signal.SIGKILL), "")
        self._deaths += 1
        if self._deaths >= FORK_SERVER_DEATHS_MAX:
            message = self._with_failure(f"the ranks' parent process died {self._deaths} times before it ran ranks")
            self._on_fail(EnvironmentFailedError(f"{message}, at most {FORK_SERVER_DEATHS_MAX - 1} are allowed"))
            return
        self._failure = ""
        if not self._closing:
            self.start()

    def _with_failure(self, what: str) -> str:
        return f"{what}: {self._failure}" if self._failure else what


async def _reap_all(*, kill: bool, wait_s: float = math.inf) -> None:
    """Wait until this process has no child; the fork server's ranks become its children when the fork server dies.

    Looks are counted, not time: while a machine is frozen no process can end.
    """
    for _ in itertools.count() if wait_s == math.inf else range(round(wait_s / _POLL_S)):
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)  # noqa: ASYNC222 - WNOHANG does not block
        except ChildProcessError:
            return
        if pid == 0:
            if kill:
                _kill_children()
            await asyncio.sleep(_POLL_S)


def _kill_children() -> None:
    """Kill all adopted processes, also those that left their rank's group; an unreaped child's pid is not reused."""
    for path in Path("/proc/self/task").glob("*/children"):
        for pid in path.read_text().split():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(pid), signal.SIGKILL)
