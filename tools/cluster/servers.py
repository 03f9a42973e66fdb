"""The processes of a test cluster: started apart from the terminal, known and stopped by pid and start time."""

import contextlib
import http.client
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polyreme.run_files.processes import is_same_process, started_at_s
from polyreme_system.files import read_json, write_json

LOOPBACK = "127.0.0.1"
STATE_NAME = "state.json"
POLL_S = 0.05
STOP_S = 10.0
"""Time from the request to end to SIGKILL."""
LOG_LINES_SHOWN = 15
PORTS = range(12_000, 30_000)
"""Ports of servers: below those of Kubernetes' NodePorts, and of connections that the kernel opens (from 32,768 on)."""
PORT_TRIES_MAX = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """One process that was started."""

    name: str
    pid: int
    started_at_s: float
    stop_signal: int = signal.SIGTERM
    """The signal by which it ends cleanly."""

    @property
    def lives(self) -> bool:
        """Whether it still runs, and is the process that was started."""
        return is_same_process(self.pid, self.started_at_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """By which a server proves who it is."""

    path: Path
    key: Path


class ServerError(Exception):
    """A server ended, or did not get ready in time."""


class Servers:
    """The servers of one cluster, in the order of their start; the record on disk is never out of date.

    Args:
        folder: Folder of the cluster.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATE_NAME
        self._logs = folder / "logs"
        record: dict[str, Any] = read_json(self._path) or {}
        self.all = [Server(**entry) for entry in record.get("servers", ())]
        self._ready = bool(record.get("ready"))

    @property
    def are_up(self) -> bool:
        """Whether every server was started, got ready, and still runs."""
        return self._ready and all(server.lives for server in self.all)

    def note_ready(self) -> None:
        """Write down that the last server is up: a start that was killed half-way is none."""
        self._ready = True
        self._record()

    def start(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        stop_signal: int = signal.SIGTERM,
    ) -> Server:
        """Start one server, in place of an ended one of that name; its output goes to ``logs/<name>.log``."""
        self._logs.mkdir(parents=True, exist_ok=True)
        arguments = [str(part) for part in command]
        with (self._logs / f"{name}.log").open("ab") as log:
            # Not by subprocess, which answers for its children: these outlive us.
            pid = os.posix_spawn(
                arguments[0],
                arguments,
                os.environ if environment is None else environment,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                ],
                setsid=True,
            )
        server = Server(name=name, pid=pid, started_at_s=started_at_s(pid) or 0.0, stop_signal=int(stop_signal))
        self.all = [*(known for known in self.all if known.name != name or known.lives), server]
        self._record()
        return server

    def wait(self, server: Server, holds: Callable[[], bool], *, what: str, timeout_s: float) -> None:
        """Poll until something holds.

        Raises:
            ServerError: If the server ends first, or time does; with the end of its log.
        """
        deadline_s = time.monotonic() + timeout_s
        while not holds():
            if not server.lives:
                raise ServerError(f"{server.name} ended while waiting for {what}; its log ends\n{self._tail(server)}")
            if time.monotonic() > deadline_s:
                raise ServerError(f"no {what} within {timeout_s:.0f} s; {server.name}'s log ends\n{self._tail(server)}")
            time.sleep(POLL_S)

    def named(self, name: str) -> Server | None:
        """Return the newest server of a name, if one was started."""
        return next((server for server in reversed(self.all) if server.name == name), None)

    def kill(self, server: Server) -> None:
        """End a server by SIGKILL, and forget it; its ports are free then."""
        if server.lives:
            os.kill(server.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + STOP_S
        while (server.lives or _has_threads(server.pid)) and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(server.pid, os.WNOHANG)
        self.all = [known for known in self.all if known != server]
        self._record()

    def stop(self) -> list[str]:
        """Stop what was started, newest first, and nothing else; return the names of those that were running."""
        stopped = []
        for server in reversed(self.all):
            if server.lives:
                stopped.append(server.name)
                _end(server)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(server.pid, os.WNOHANG)
        self.all, self._ready = [], False
        self._record()
        return stopped

    def _record(self) -> None:
        write_json(self._path, {"ready": self._ready, "servers": [asdict(server) for server in self.all]})

    def _tail(self, server: Server) -> str:
        path = self._logs / f"{server.name}.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(f"  {line[:300]}" for line in lines[-LOG_LINES_SHOWN:]) + f"\n  ({path})"


def _has_threads(pid: int) -> bool:
    """Tell whether threads are left beside the first: a process is a zombie while they still hold its sockets."""
    try:
        return any(task.name != str(pid) for task in Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return False


def _end(server: Server) -> None:
    deadline_s = time.monotonic() + STOP_S
    os.kill(server.pid, server.stop_signal)
    while server.lives:
        if time.monotonic() > deadline_s:
            os.kill(server.pid, signal.SIGKILL)
        time.sleep(POLL_S)


def http_status(
    port: int, path: str, *, host: str = LOOPBACK, headers: Mapping[str, str] | None = None, timeout_s: float = 1.0
) -> int | None:
    """Return the status that a server answers with; None when it does not answer."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", path, headers=dict(headers or {}))
        return connection.getresponse().status
    return None


def is_listening(port: int, *, host: str = LOOPBACK) -> bool:
    """Tell whether a process accepts connections."""
    try:
        socket.create_connection((host, port), timeout=1.0).close()
    except OSError:
        return False
    return True


def free_ports(count: int, *, host: str = LOOPBACK) -> list[int]:
    """Return ports of an address that no process listens on; they are given out together, so they differ.

    None is among those that the kernel gives to connections: a client that calls a server which is being started
    again could otherwise get the server's own port, and connect to itself.
    """
    with ExitStack() as held:
        found: list[int] = []
        for _ in range(PORT_TRIES_MAX):
            port = random.SystemRandom().choice(PORTS)
            with contextlib.suppress(OSError):
                held.enter_context(socket.create_server((host, port)))
                found.append(port)
            if len(found) == count:
                return found
    raise ServerError(f"{len(found)} of {count} ports found on {host} in {PORT_TRIES_MAX} tries, of {PORTS}")


def dump(path: Path, value: Any) -> Path:
    """Write a configuration file (JSON, which is YAML) that only its owner reads."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
        json.dump(value, stream, indent=2)
    return path
