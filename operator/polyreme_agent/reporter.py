"""The reporter: takes the reader's frames and writes them to this node's conditions. It sees nothing of the host."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from polyreme_agent.frames import Lines, known_frame, read_report
from polyreme_agent.node_status import WriteError
from polyreme_agent.publisher import Publisher
from polyreme_api.node_report import CONDITIONS

WAIT_MAX_S: Final = 5.0
SEND_S: Final = 2.0
READ_BYTES: Final = 65_536
REPORTS_MAX: Final = 64
"""Frames that are read between two writes; the newest counts."""
_log = logging.getLogger(__name__)


class Status(Protocol):
    """Status of one node."""

    def patch(self, body: dict[str, Any]) -> dict[str, tuple[str, str]]:
        """Write conditions, and return status and message of those stored, by type."""


class Reporter:
    """The loop between socket and API server.

    Args:
        address: Path of the socket to listen on.
        status: The node's status.
        uptime_s: A clock that never goes back.
        wall_s: Time of day.
        random: Returns a number from 0 to 1.
    """

    def __init__(
        self,
        address: Path,
        status: Status,
        *,
        uptime_s: Callable[[], float],
        wall_s: Callable[[], float],
        random: Callable[[], float],
    ) -> None:
        self._status, self._uptime_s, self._wall_s, self._random = status, uptime_s, wall_s, random
        self._publisher = Publisher(uptime_s())
        self._known: tuple[str, ...] | None = None
        self._peer: socket.socket | None = None
        self._greeted = False
        self._lines = Lines()
        with contextlib.suppress(FileNotFoundError):
            address.unlink()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(address))
        self._listener.listen(1)

    def run(self) -> None:
        """Listen and write forever."""
        while True:
            now_s = self._uptime_s()
            self.turn(max(0.0, min(WAIT_MAX_S, self._publisher.due_s(now_s) - now_s)))

    def turn(self, wait_s: float) -> None:
        """Wait for frames, and write what is due."""
        sources = [self._listener, *([self._peer] if self._peer is not None else [])]
        ready, _, _ = select.select(sources, [], [], wait_s)
        if self._listener in ready:
            self._accept()
        elif self._peer is not None and self._peer in ready:
            self._hear()
        self._greet()
        self._write()

    def close(self) -> None:
        """Close the sockets."""
        self._drop()
        self._listener.close()

    def _accept(self) -> None:
        """Take the newest reader: an older one has ended, or its container was started again."""
        self._drop()
        self._peer, _ = self._listener.accept()
        self._peer.settimeout(SEND_S)

    def _drop(self) -> None:
        if self._peer is not None:
            self._peer.close()
        self._peer, self._greeted, self._lines = None, False, Lines()

    def _hear(self) -> None:
        assert self._peer is not None
        try:
            data = self._peer.recv(READ_BYTES)
            if not data:
                self._drop()
                return
            for line in self._lines.feed(data)[-REPORTS_MAX:]:
                report = read_report(line)
                # What came before the greeting lacks the faults from before.
                if self._greeted:
                    self._publisher.report(report, self._uptime_s())
        except (OSError, ValueError) as error:
            _log.warning("the reader's frame is refused: %s", error)
            self._drop()

    def _greet(self) -> None:
        if self._peer is None or self._greeted or self._known is None:
            return
        try:
            self._peer.sendall(known_frame(self._known))
            self._greeted = True
        except OSError as error:
            _log.info("the reader is gone: %s", error)
            self._drop()

    def _write(self) -> None:
        now_s = self._uptime_s()
        conditions = self._publisher.next(now_s)
        if not conditions:
            return
        try:
            stored = self._status.patch(self._publisher.body(conditions, self._wall_s()))
        except WriteError as error:
            wait_s = self._publisher.failed(self._uptime_s(), self._random())
            _log.warning("conditions were not written, next try in %.1f s: %s", wait_s, error)
            return
        statuses = {kind: status for kind, (status, _) in stored.items()}
        self._publisher.succeeded(conditions, statuses, self._uptime_s())
        self._known = tuple(
            message for kind, (status, message) in stored.items() if kind in CONDITIONS and (status != "False")
        )
