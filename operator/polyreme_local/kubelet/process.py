"""One pod's process: started so that it dies with this host, ended with grace, recognised after a restart."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from polyreme_system.parent_death import end_with_parent

TOKEN_VARIABLE = "POLYREME_HOST_TOKEN"
"""In the environment of every process that a host starts, and of what those start: by it leftovers are known."""
UID_VARIABLE = "POLYREME_POD_UID"
"""Beside the token: the pod that a process belongs to."""
SWEEPS_MAX = 20
"""Searches for what a pod left; each finds what was forked during the one before."""
LAST_WORDS_BYTES = 4096
RECORD_FILE = "process.json"
LOG_FILE = "pod.log"
STOPPED_STATES = frozenset("TtZXx")
"""States of processes that are stopped, traced or dead (proc(5))."""
END_WAIT_MS = 5_000
"""How long a killed leftover may take to end."""


class PodProcess:
    """A running process group."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._ended = asyncio.get_running_loop().create_future()
        self._watch()

    @property
    def pid(self) -> int:
        """Pid, and name of the process group."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it lives and is not stopped."""
        return not self._ended.done() and runs(self.pid)

    async def wait(self) -> int:
        """Wait for its end; return the exit code, negative for a signal."""
        return int(await asyncio.shield(self._ended))

    def signal(self, number: int) -> None:
        """Signal the group, unless it has ended."""
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    async def stop(self, *, grace_s: float) -> int:
        """Ask it to end, and end it after the grace."""
        self.signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            return await asyncio.wait_for(self.wait(), grace_s)
        self.signal(signal.SIGKILL)
        return await self.wait()

    def _watch(self) -> None:
        self._descriptor = os.pidfd_open(self._process.pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_end)

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        # What it left in its group goes too, while the unreaped process still keeps the group's name.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        if not self._ended.done():
            self._ended.set_result(code)


def start_process(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    directory: Path,
    uid: str,
    token: str,
    descriptors: Sequence[int],
) -> PodProcess:
    """Start a pod's process and record who it is.

    Args:
        command: Command line.
        environment: Its variables.
        directory: The pod's folder; takes log and record.
        uid: UID of the pod.
        token: This host's run token.
        descriptors: Descriptors that the process inherits, under the same numbers.

    Raises:
        OSError: If the command can't be started.
    """
    record: dict[str, str | int | None] = {"uid": uid, "token": token, "pid": None, "startedTicks": None}
    # Before the start: a host killed in between must find that this pod may have run.
    write_durably(directory / RECORD_FILE, json.dumps(record).encode())
    with (directory / LOG_FILE).open("ab") as log:
        process = subprocess.Popen(
            list(command),
            env={**environment, TOKEN_VARIABLE: token, UID_VARIABLE: uid},
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            pass_fds=list(descriptors),
            process_group=0,
            # System calls and no lock: what makes this hook unsafe beside threads does not happen.
            preexec_fn=functools.partial(end_with_parent, os.getpid()),  # noqa: PLW1509
        )
    try:
        record |= {"pid": process.pid, "startedTicks": started_ticks(process.pid)}
        write_durably(directory / RECORD_FILE, json.dumps(record).encode())
        return PodProcess(process)
    except BaseException:
        # Nothing would watch it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise


def end_leftovers(pods: Path) -> list[int]:
    """Kill what an earlier host of these pod folders left running, and nothing else; return the pids.

    A process is ours when its environment bears the token of a host that this folder records. Pids are compared by
    start time before the kill, so that one given to a stranger meanwhile is spared.
    """
    tokens = {token for token in map(_recorded_token, sorted(pods.glob(f"*/{RECORD_FILE}"))) if token}
    if not tokens:
        return []
    return [pid for token in sorted(tokens) for pid in _sweep({f"{TOKEN_VARIABLE}={token}".encode()})]


def end_strays(uid: str, token: str) -> list[int]:
    """Kill what a pod whose first process has ended left running, and wait until it is dead; return the pids.

    Ranks die with their launcher by the kernel's hand, but a moment later, and what they started may have left their
    groups. Only when nothing of a pod lives may its end be reported.
    """
    marks = {f"{TOKEN_VARIABLE}={token}".encode(), f"{UID_VARIABLE}={uid}".encode()}
    return _sweep(marks)


def last_line(directory: Path) -> str:
    """Return the last line of a pod's log, its reason where it failed; empty when there is none."""
    try:
        with (directory / LOG_FILE).open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
            lines = log.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _sweep(marks: set[bytes]) -> list[int]:
    """Kill every process that bears all of these variables, until a search finds none."""
    killed: list[int] = []
    for _ in range(SWEEPS_MAX):
        found = list(_kill_marked(marks))
        if not found:
            break
        killed += found
    return killed


def _kill_marked(marks: set[bytes]) -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        with contextlib.suppress(OSError):
            ticks = started_ticks(pid)
            variables = set((entry / "environ").read_bytes().split(b"\0"))
            if marks <= variables and _kill_exactly(pid, ticks):
                yield pid


def has_run(directory: Path, uid: str) -> bool:
    """Tell whether a process was ever started for a pod, also by an earlier host."""
    try:
        return bool(json.loads((directory / RECORD_FILE).read_bytes())["uid"] == uid)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def started_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name in parentheses may hold anything; fields are counted after it (proc(5): the start time is the 22nd).
    return int(text.rpartition(")")[2].split()[19])


def runs(pid: int) -> bool:
    """Tell whether a process lives and is not stopped; one that waits for a processor runs, too."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in STOPPED_STATES


def write_durably(path: Path, data: bytes, *, mode: int = 0o600) -> None:
    """Replace a file, atomically and durably, readable by its owner only."""
    temporary = path.with_name(f".{path.name}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    try:
        os.fchmod(descriptor, mode)
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)


def _recorded_token(path: Path) -> str | None:
    try:
        token = json.loads(path.read_bytes()).get("token")
    except (OSError, ValueError, AttributeError):
        return None
    return token if isinstance(token, str) else None


def _kill_exactly(pid: int, ticks: int | None) -> bool:
    """Kill a process through a descriptor that names it for good."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if started_ticks(pid) != ticks:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll(END_WAIT_MS)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True
