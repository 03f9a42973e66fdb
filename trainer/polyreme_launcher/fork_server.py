"""The warm parent of the ranks: imports what ranks need, then forks and reaps them, and reports each exit at once.

Importing torch and building the first optimizer takes seconds; a fork of a process that has done so takes milliseconds.
So this process must stay fit to fork: one thread, no process group, no accelerator. Until it warms, it imports the
standard library and two small modules that need nothing else. It exchanges datagrams of JSON over an inherited socket,
which also carries file descriptors.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from polyreme_api.exit_codes import ExitCode
from polyreme_system.parent_death import end_with_parent

DEFAULT_TARGET = "polyreme_launcher.rank:main"
TARGET_VARIABLE = "POLYREME_RANK_TARGET"
ERROR_VARIABLE = "POLYREME_ERROR_FD"
ERROR_BYTES_MAX = 4096
"""Longest last message of a rank; less than a pipe takes without blocking."""
MESSAGE_BYTES_MAX = 1 << 18
DESCRIPTORS_MAX = 8
_LINE_BUFFERED = 1
"""``_IOLBF`` of C's ``stdio.h``, in glibc and musl."""


def main(arguments: list[str]) -> int:
    """Serve one launcher: ``fork_server <socket's descriptor> <launcher's pid>``."""
    end_with_parent(int(arguments[1]))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    fork_server = ForkServer(socket.socket(fileno=int(arguments[0])))
    try:
        fork_server.warm(os.environ.get(TARGET_VARIABLE) or DEFAULT_TARGET)
    except Exception as error:
        fork_server.send(type="failed", message=f"{type(error).__name__}: {error}")
        raise
    return fork_server.serve()


class ForkServer:
    """Forks, signals and reaps ranks on command."""

    def __init__(self, commands: socket.socket) -> None:
        self._commands = commands
        self._target: Callable[[], Any] | None = None
        self._ranks: dict[int, tuple[int, int, int]] = {}
        """(attempt, rank, read end of its error pipe) by pid, for every child that is not yet reaped."""
        self._woken, self._wakes = os.pipe()
        for end in (self._woken, self._wakes):
            os.set_blocking(end, False)

    def warm(self, target: str) -> None:
        """Import the ranks' code, and make torch build what it builds lazily."""
        module, _, function = target.partition(":")
        self._target = getattr(importlib.import_module(module), function)
        if "torch" in sys.modules:
            _warm_torch(optimizer=target != DEFAULT_TARGET)
        # Objects that live now live forever: the collector never touches them, so their pages stay shared with the
        # ranks.
        gc.collect()
        gc.freeze()
        self.send(type="ready", threads=len(os.listdir("/proc/self/task")))  # noqa: PTH208 - pathlib is not worth a module

    def serve(self) -> int:
        """Obey until the launcher is gone; every rank then ends too."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._commands, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self._woken in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
                self._reap()
            if self._commands.fileno() in ready and not self._obey():
                self._kill()
                return ExitCode.OK

    def _obey(self) -> bool:
        command, descriptors = _receive(self._commands)
        if command is None:
            return False
        match command["type"]:
            case "fork":
                self._fork(command, descriptors)
            case "kill":
                self._kill()
            case "signal":
                for pid in self._ranks:
                    os.kill(pid, command["signal"])
        for descriptor in descriptors:
            os.close(descriptor)
        return True

    def _fork(self, command: dict[str, Any], descriptors: list[int]) -> None:
        parent = os.getpid()
        # A pipe and not a file: a rank's message must get through even if the disk is full.
        reader, writer = os.pipe()
        for end in (reader, writer):
            os.set_blocking(end, False)
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            self._become_rank(parent, command, descriptors, writer)
        os.close(writer)
        # In both processes: whichever comes first, the group exists before anyone signals it.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.setpgid(pid, pid)
        self._ranks[pid] = (command["attempt"], command["rank"], reader)
        self.send(type="forked", attempt=command["attempt"], rank=command["rank"], pid=pid)

    def _become_rank(self, parent: int, command: dict[str, Any], descriptors: list[int], writer: int) -> NoReturn:
        code: int = ExitCode.ENVIRONMENT
        try:
            end_with_parent(parent)
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            # A request for a checkpoint or for stacks may come before the rank listens; it must not die of that.
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)
            output, *descriptors = descriptors
            _redirect(output)
            others = (reader for _, _, reader in self._ranks.values())
            for descriptor in (self._commands.fileno(), self._woken, self._wakes, *others):
                os.close(descriptor)
            self._commands.detach()
            os.environ.clear()
            os.environ.update(command["environment"])
            for variable, descriptor in zip(command["descriptors"], descriptors, strict=True):
                os.environ[variable] = str(descriptor)
            os.environ[ERROR_VARIABLE] = str(writer)
            code = ExitCode.INTERNAL
            code = _call(self._target, writer)
        except BaseException as error:  # noqa: BLE001 - a rank ends here, whatever happened, and says so by its exit code
            traceback.print_exc()
            _write_error(writer, f"{type(error).__name__}: {error}")
        finally:
            _flush()
            os._exit(code)

    def _reap(self) -> None:
        while self._ranks:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return
            # Children of the rank end with it, while its unreaped pid still keeps the name of the group.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
            pid, status = os.waitpid(ended.si_pid, 0)
            attempt, rank, reader = self._ranks.pop(pid)
            signalled = os.WIFSIGNALED(status)
            self.send(
                type="exited",
                attempt=attempt,
                rank=rank,
                code=None if signalled else os.WEXITSTATUS(status),
                signal=os.WTERMSIG(status) if signalled else None,
                message=_read_error(reader),
            )

    def _kill(self) -> None:
        for pid in self._ranks:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)

    def send(self, **message: Any) -> None:
        """Tell the launcher."""
        # The launcher reads at once or is gone; if it is gone, the next read of a command reports that.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._commands.send(json.dumps(message).encode())


def _receive(commands: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    descriptors = array.array("i")
    space = socket.CMSG_SPACE(DESCRIPTORS_MAX * descriptors.itemsize)
    data, ancillary, _, _ = commands.recvmsg(MESSAGE_BYTES_MAX, space)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return (json.loads(data) if data else None), descriptors.tolist()


def _redirect(output: int) -> None:
    """Send standard output and error to the launcher's pipe, line by line: a kill then loses no line."""
    silence = os.open(os.devnull, os.O_RDONLY)
    os.dup2(silence, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(silence)
    os.close(output)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    # C libraries print by a buffer of their own.
    with contextlib.suppress(ValueError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, _LINE_BUFFERED, ctypes.c_size_t(0))


def _call(target: Callable[[], Any] | None, writer: int) -> int:
    assert target is not None
    try:
        result = target()
    except SystemExit as leave:
        result = leave.code
        if isinstance(result, str):
            sys.stderr.write(result + "\n")
            _write_error(writer, result)
            return ExitCode.INTERNAL
    return int(result or ExitCode.OK)


def _write_error(writer: int, sentence: str) -> None:
    with contextlib.suppress(OSError):
        os.write(writer, sentence.encode(errors="replace")[:ERROR_BYTES_MAX])


def _read_error(reader: int) -> str:
    """Read a rank's error pipe; never waits, even if another process still holds the other end."""
    try:
        return os.read(reader, ERROR_BYTES_MAX).decode(errors="replace")
    except BlockingIOError:
        return ""
    finally:
        os.close(reader)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _warm_torch(*, optimizer: bool) -> None:
    """Build one optimizer: torch's first one imports the compiler, which takes seconds in every rank otherwise."""
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    if optimizer:
        torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
