"""Addresses of both families, IPv4 and IPv6: how they are written, and sockets that listen on them."""

from __future__ import annotations

import ipaddress
import socket

PORT_MAX = 65_535


def split_address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``, where an IPv6 address is in brackets and the host may be empty.

    Raises:
        ValueError: If it is something else.
    """
    host, colon, port = text.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > PORT_MAX or (":" in host and not bracketed):
        raise ValueError(f"not an address: {text!r}, expected HOST:PORT, and [HOST]:PORT for an IPv6 address")
    return host[1:-1] if bracketed else host, int(port)


def is_loopback(host: str) -> bool:
    """Tell whether a host is an address of this machine alone; a name is not."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int, *, backlog: int) -> socket.socket:
    """Listen on an address; where the host is empty, on all of both families, or of IPv4 on a kernel without IPv6.

    Raises:
        OSError: If it is not available.
    """
    if host:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)
