"""Addresses of IPv4 and IPv6 are read alike, and a server without a host is reached by both."""

import socket

import pytest

from polyreme_system.addresses import is_loopback, listen, split_address

HAS_IPV6 = socket.has_dualstack_ipv6()
ADDRESSES = ["127.0.0.1", *(["::1"] if HAS_IPV6 else [])]
"""A kernel without IPv6 has no other one."""
CONNECTED_S_MAX = 20.0


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("host.namespace.svc:8080", ("host.namespace.svc", 8080)),
        ("10.0.0.1:1", ("10.0.0.1", 1)),
        ("[2001:db8::1]:443", ("2001:db8::1", 443)),
        ("[::]:8080", ("::", 8080)),
        (":8080", ("", 8080)),
    ],
)
def test_host_and_port_are_read(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize("text", ["8080", "host:", "host:http", "host:99999", "2001:db8::1:443", "::1", ""])
def test_what_is_no_address_is_refused_with_the_form_that_it_should_have(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected HOST:PORT, and \[HOST\]:PORT for an IPv6 address"):
        split_address(text)


def test_loopback_is_known_in_both_families() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1"))
    assert not any(is_loopback(host) for host in ("10.0.0.1", "2001:db8::1", "localhost", "x.default.svc", ""))


@pytest.mark.parametrize("host", ADDRESSES)
def test_without_a_host_a_socket_is_reached_by_either_family(host: str) -> None:
    with listen("", 0, backlog=1) as listener:
        socket.create_connection((host, listener.getsockname()[1]), timeout=CONNECTED_S_MAX).close()


@pytest.mark.parametrize("host", ADDRESSES)
def test_a_socket_of_one_address_is_reached_there_alone(host: str) -> None:
    with listen(host, 0, backlog=1) as listener:
        address, port = listener.getsockname()[:2]
        assert address == host
        socket.create_connection((host, port), timeout=CONNECTED_S_MAX).close()
        for other in set(ADDRESSES) - {host}:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((other, port), timeout=CONNECTED_S_MAX)
