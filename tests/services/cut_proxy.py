"""A proxy between clients and a server that, when asked, cuts connections, takes none, answers 503 or never answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self

READ_BYTES = 1 << 16
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
Address = tuple[str, int] | str
"""Host and port, or the path of a Unix socket."""


class CutProxy:
    """Passes bytes on between ``here`` and ``there``.

    Args:
        here: Where clients connect; port 0: any free one.
        there: The server.
    """

    def __init__(self, here: Address, there: Address) -> None:
        self._there = there
        self._listener = _socket(here)
        self._listener.bind(here)
        self._listener.listen(128)
        self.address = self._listener.getsockname()
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.refusing = False
        """Answer 503 to every request of a new connection."""
        self.away = False
        """End every new connection before a byte of it passed, as after a server's end."""
        self.silent = False
        """Take what a new connection sends, and never answer."""
        self.cuts = self.refusals = self.misses = self.taken = 0

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *args: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Close every connection, in the middle of whatever it does."""
        with self._lock:
            found, self._open = self._open, set()
        self.cuts += len(found) // 2
        for one in found:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if self.away:
                self.misses += 1
                client.close()
                continue
            if self.silent:
                threading.Thread(target=self._swallow, args=(client,), daemon=True).start()
                continue
            if self.refusing:
                threading.Thread(target=self._refuse, args=(client,), daemon=True).start()
                continue
            server = _socket(self._there)
            try:
                server.connect(self._there)
            except OSError:
                client.close()
                server.close()
                continue
            self.taken += 1
            with self._lock:
                self._open |= {client, server}
            threading.Thread(target=self._pass, args=(client, server), daemon=True).start()

    def _swallow(self, client: socket.socket) -> None:
        with self._lock:
            self._open.add(client)
        with contextlib.suppress(OSError), client:
            while client.recv(READ_BYTES):
                pass
        with self._lock:
            self._open.discard(client)

    def _refuse(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            client.recv(READ_BYTES)
            client.sendall(UNAVAILABLE)
            self.refusals += 1

    def _pass(self, client: socket.socket, server: socket.socket) -> None:
        """Pass bytes both ways until both sides have ended."""
        with client, server:
            back = threading.Thread(target=_copy, args=(server, client), daemon=True)
            back.start()
            _copy(client, server)
            back.join()
            with self._lock:
                self._open -= {client, server}


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(READ_BYTES):
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def _socket(address: Address) -> socket.socket:
    made = socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET, socket.SOCK_STREAM)
    if not isinstance(address, str):
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return made
