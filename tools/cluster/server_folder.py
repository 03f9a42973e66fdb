"""A folder in which servers run: one command at a time, what was started, and what it left there."""

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tools.build_cache import locked, say
from tools.cluster.servers import ServerError, Servers

TRIES = 3
"""A port that was free may be taken before its server listens."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFolder:
    """The folder of a cluster, or of services."""

    path: Path
    what: str
    """What runs there, for messages."""
    data: tuple[str, ...]
    """Names of the files, folders and links to folders that servers leave, but for their logs."""

    def locked(self) -> AbstractContextManager[None]:
        """Hold the folder: another command waits."""
        return locked(self.path, busy=f"another command is at work in {self.path}: waiting for it")

    def start(self, start: Callable[[Servers], _Result]) -> _Result:
        """Start servers in place of what an earlier start left; where a port was taken meanwhile, on other ports.

        Raises:
            ServerError: If a server does not get ready; the others are stopped.
        """
        for number in range(1, TRIES + 1):
            servers = Servers(self.path)
            servers.stop()
            self._clear("logs")
            started_s = time.monotonic()
            try:
                result = start(servers)
                servers.note_ready()
            except ServerError as error:
                servers.stop()
                if number == TRIES or "address already in use" not in str(error).lower():
                    raise
                say("a port was taken meanwhile: trying others")
                continue
            except BaseException:
                servers.stop()
                raise
            say(f"up in {time.monotonic() - started_s:.1f} s")
            return result
        raise AssertionError("unreachable")

    def down(self) -> None:
        """Stop what was started here, and nothing else; its data go, its logs stay."""
        if not self.path.exists():
            say(f"no {self.what} in {self.path}")
            return
        with self.locked():
            stopped = Servers(self.path).stop()
            self._clear()
        say(f"stopped {', '.join(stopped)}" if stopped else f"nothing runs in {self.path}")

    def status(self) -> bool:
        """Print what was started here; return whether all of it is up."""
        servers = Servers(self.path)
        for server in servers.all:
            print(f"{server.name:<24} pid {server.pid:<8} {'runs' if server.lives else 'ended'}")
        if not servers.all:
            print(f"no {self.what} in {self.path}")
        return bool(servers.all) and servers.are_up

    def _clear(self, *more: str) -> None:
        for name in (*self.data, *more):
            remove(self.path / name)


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there, and what a link leads to with the link."""
    if path.is_symlink():
        shutil.rmtree(path.resolve(), ignore_errors=True)
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
