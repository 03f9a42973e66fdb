"""The reader: looks at the host with every collector and reports all conditions over the socket. It has no token."""

from __future__ import annotations

import logging
import select
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from polyreme_agent.findings import Look, State
from polyreme_agent.frames import Lines, read_known, report_frame
from polyreme_agent.kernel_log import KernelLog
from polyreme_agent.ledger import Condition, Ledger
from polyreme_api.node_report import decode

LOOK_S: Final = 5.0
"""Time between two looks at everything but the kernel log, which wakes the reader."""
REPORT_S: Final = 10.0
"""Longest time between two reports."""
PAUSE_S: Final = 0.05
"""Pause after a wakeup: a burst of lines is one look."""
CONNECT_S: Final = 1.0
SEND_S: Final = 2.0
READ_BYTES: Final = 65_536
_log = logging.getLogger(__name__)


class Collector(Protocol):
    """Looks at one kind of hardware."""

    name: str

    def look(self) -> Look:
        """Look once; never raises for what hardware says, never waits."""


class Reader:
    """The loop over collectors.

    Args:
        kernel: The kernel log.
        collectors: All others.
        ledger: The faults.
        address: Path of the reporter's socket.
        now_s: Time of day.
        uptime_s: A clock that never goes back.
        sleep: Waits.
    """

    def __init__(
        self,
        kernel: KernelLog,
        collectors: Sequence[Collector],
        ledger: Ledger,
        address: Path,
        *,
        now_s: Callable[[], float],
        uptime_s: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._kernel, self._collectors, self._ledger, self._address = kernel, collectors, ledger, address
        self._now_s, self._uptime_s, self._sleep = now_s, uptime_s, sleep
        self._looked_s: float | None = None
        self._reported: tuple[float, tuple[Condition, ...]] | None = None
        self._socket: socket.socket | None = None
        self._lines = Lines()
        self._tried_s: float | None = None

    def run(self) -> None:
        """Look and report forever."""
        while True:
            self.turn()
            self._wait()

    def turn(self) -> None:
        """Look once, and report if something changed or a report is due."""
        uptime_s = self._uptime_s()
        self._take(self._kernel)
        if self._looked_s is None or uptime_s - self._looked_s >= LOOK_S:
            self._looked_s = uptime_s
            for collector in self._collectors:
                self._take(collector)
        self._connect(uptime_s)
        self._hear()
        conditions = self._ledger.conditions(self._now_s())
        if self._reported is None or self._reported[1] != conditions or uptime_s - self._reported[0] >= REPORT_S:
            self._send(conditions, uptime_s)

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
        self._socket, self._reported, self._lines = None, None, Lines()

    def _take(self, collector: Collector) -> None:
        try:
            look = collector.look()
        except Exception as error:  # noqa: BLE001 - one collector must not end the others
            _log.exception("collector %s raised an error", collector.name)
            look = Look(state=State.FAILED, why=f"{collector.name} raised {type(error).__name__}")
        self._ledger.put(collector.name, look, self._now_s())

    def _wait(self) -> None:
        if self._kernel.more:
            return
        left_s = LOOK_S - (self._uptime_s() - (self._looked_s or 0.0))
        sources = [each for each in (self._kernel.fileno(), self._socket) if each is not None]
        if sources:
            ready, _, _ = select.select(sources, [], [], max(0.0, left_s))
            if ready:
                self._sleep(PAUSE_S)
        else:
            self._sleep(max(0.0, min(left_s, CONNECT_S)))

    def _connect(self, uptime_s: float) -> None:
        if self._socket is not None or (self._tried_s is not None and uptime_s - self._tried_s < CONNECT_S):
            return
        self._tried_s = uptime_s
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(SEND_S)
        try:
            connection.connect(str(self._address))
        except OSError as error:
            connection.close()
            _log.info("the reporter does not listen on %s: %s", self._address, error.strerror)
            return
        self._socket = connection

    def _hear(self) -> None:
        """Take in what the node's conditions said before, which the reporter sends once it knows."""
        if self._socket is None or not select.select([self._socket], [], [], 0.0)[0]:
            return
        try:
            data = self._socket.recv(READ_BYTES)
            for line in self._lines.feed(data):
                for message in read_known(line):
                    self._ledger.restore(decode(message)[0])
            self._reported = None  # it has not kept what it was sent before
        except (OSError, ValueError) as error:
            _log.warning("the reporter's frame is refused: %s", error)
            data = b""
        if not data:
            self.close()

    def _send(self, conditions: tuple[Condition, ...], uptime_s: float) -> None:
        if self._socket is None:
            return
        try:
            self._socket.sendall(report_frame(conditions))
        except OSError as error:
            _log.info("the reporter is gone: %s", error)
            self.close()
        else:
            self._reported = (uptime_s, conditions)
