"""Counts API calls by verb, kind and result code."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from polyreme_cluster.forwarding_port import Call, ForwardingPort
from polyreme_cluster.port import (
    STATUS_SUBRESOURCE,
    AlreadyExistsError,
    ClusterPort,
    ConflictError,
    GoneError,
    InvalidObjectError,
    NotFoundError,
    PortError,
    PortTimeoutError,
    ServerError,
    TooManyRequestsError,
    WatchEvent,
)

_Answer = TypeVar("_Answer")
DONE = "200"
_CODES: tuple[tuple[type[PortError], str], ...] = (
    (AlreadyExistsError, "409"),
    (ConflictError, "409"),
    (NotFoundError, "404"),
    (GoneError, "410"),
    (InvalidObjectError, "422"),
    (TooManyRequestsError, "429"),
    (ServerError, "500"),
    (PortTimeoutError, "timeout"),
)
"""Result codes of port errors: 422 for every refusal of an object, 500 for every failure of the server."""


class RequestCounter(Protocol):
    """Counts API calls."""

    def requested(self, verb: str, kind: str, code: str, *, status: bool = False) -> None:
        """Count a call: ``status`` tells whether it was about a status subresource."""
        ...


class InstrumentedCluster(ForwardingPort):
    """Forwards calls to another ``ClusterPort`` and counts them."""

    def __init__(self, port: ClusterPort, metrics: RequestCounter) -> None:
        super().__init__(port)
        self._metrics = metrics

    async def watch(
        self, kind: str, *, resource_version: str, namespace: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        """Yield events after ``resource_version``; the call is counted when it ends."""
        with self._counts("watch", kind):
            async for event in self._port.watch(kind, resource_version=resource_version, namespace=namespace):
                yield event

    async def _forward(self, call: Call, act: Callable[[], Awaitable[_Answer]]) -> _Answer:
        with self._counts(call.verb, call.ref.kind, status=call.subresource == STATUS_SUBRESOURCE):
            return await act()

    @contextmanager
    def _counts(self, verb: str, kind: str, *, status: bool = False) -> Iterator[None]:
        try:
            yield
        except PortError as error:
            self._metrics.requested(verb, kind, code_of(error), status=status)
            raise
        self._metrics.requested(verb, kind, DONE, status=status)


def code_of(error: PortError) -> str:
    """Return the code under which an error is counted."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), "unknown")
