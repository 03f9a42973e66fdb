"""A line to an API server that is cut while clients connect leaves no socket open."""

from __future__ import annotations

import gc
import socket
import threading
import time

from tests.cluster.outages import HOST, Line

CUTS, CLIENTS = 40, 3


def test_a_line_that_is_cut_while_clients_connect_leaves_no_socket_open() -> None:
    """An open one is a warning of the collector, which fails a test."""
    with socket.create_server((HOST, 0), backlog=CUTS * CLIENTS) as server:
        threading.Thread(target=_accept_all, args=(server,), daemon=True).start()
        for number in range(CUTS):
            line = Line(f"https://{HOST}:{server.getsockname()[1]}")
            port = int(line.url.rpartition(":")[2])
            clients = [socket.create_connection((HOST, port)) for _ in range(CLIENTS)]
            time.sleep(number % 7 * 0.0003)
            line.close()
            for client in clients:
                client.close()
    gc.collect()


def _accept_all(server: socket.socket) -> None:
    try:
        while True:
            server.accept()[0].close()
    except OSError:
        pass
