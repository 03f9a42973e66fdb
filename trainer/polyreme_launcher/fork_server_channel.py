"""The launcher's end of the fork server's socket: commands with descriptors out, messages in, without blocking."""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from polyreme_launcher.fork_server import MESSAGE_BYTES_MAX

OUTBOX_MAX = 4096
"""Commands that may wait while a fork server warms; ranks of a pod are far fewer."""


class ForkServerChannel:
    """The connection to one fork server.

    Args:
        own_end: This process' end of the socket pair; the channel closes it.
        on_message: Called for every message.
        on_end: Called when the fork server has closed its end; the channel is closed then.
    """

    def __init__(
        self, own_end: socket.socket, *, on_message: Callable[[dict[str, Any]], None], on_end: Callable[[], None]
    ) -> None:
        self._socket: socket.socket | None = own_end
        self._on_message = on_message
        self._on_end = on_end
        self._outbox: deque[tuple[bytes, list[int]]] = deque()
        """Commands that the socket did not take yet, with descriptors of their own."""
        own_end.setblocking(False)
        asyncio.get_running_loop().add_reader(own_end, self._on_readable)

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> bool:
        """Send a command once the socket takes it; False if too many commands wait."""
        if len(self._outbox) >= OUTBOX_MAX:
            return False
        # Copies, since the caller closes its own while these may have to wait.
        self._outbox.append((json.dumps(message).encode(), [os.dup(descriptor) for descriptor in descriptors]))
        self._send_outbox()
        return True

    def close(self) -> None:
        """Close the socket and drop what is not sent."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            asyncio.get_running_loop().remove_writer(self._socket)
            self._socket.close()
            self._socket = None
        while self._outbox:
            _close(self._outbox.popleft()[1])

    def _send_outbox(self) -> None:
        """Send what the socket takes now; the rest when it takes more."""
        while self._outbox and self._socket is not None:
            data, descriptors = self._outbox[0]
            rights = array.array("i", descriptors)
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
            try:
                self._socket.sendmsg([data], ancillary)
            except BlockingIOError:
                asyncio.get_running_loop().add_writer(self._socket, self._send_outbox)
                return
            except (BrokenPipeError, ConnectionResetError):
                # A dead fork server is noticed by the end of its socket.
                return
            self._outbox.popleft()
            _close(descriptors)
        if self._socket is not None:
            asyncio.get_running_loop().remove_writer(self._socket)

    def _on_readable(self) -> None:
        while self._socket is not None:
            try:
                data = self._socket.recv(MESSAGE_BYTES_MAX)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # Raised once, when the fork server dies with unread commands; its last messages still follow.
                continue
            if not data:
                self.close()
                self._on_end()
                return
            self._on_message(json.loads(data))


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
