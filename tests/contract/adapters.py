"""The adapters of ``ClusterPort`` that the contract suite holds to one behaviour."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_cluster.forwarding_port import ForwardingPort
from polyreme_cluster.port import KINDS, ClusterPort
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.journal import open_store
from polyreme_local.api_server.server import ApiServer
from polyreme_local.api_server.store import Store
from polyreme_local.api_server.tokens import TokenTable


class Harness(Protocol):
    """One adapter under test, with what no port offers: a server that forgets."""

    cluster: ClusterPort

    async def forget_history(self) -> None:
        """Compact: watches and continue tokens from before are gone."""
        ...


Opener = Callable[[Path], AbstractAsyncContextManager[Harness]]


class ManualClock:
    """A clock that does not move."""

    def now_s(self) -> float:
        return 1_000_000.0

    def steady_s(self) -> float:
        return 0.0

    async def sleep(self, delay_s: float) -> None:
        raise AssertionError("nothing here sleeps")


class EmbeddedHarness:
    def __init__(self, store: Store, cluster: ClusterPort) -> None:
        self.store = store
        self.cluster: ClusterPort = cluster

    async def forget_history(self) -> None:
        for kind in KINDS:
            self.store.history(kind).forget(self.store.version)
        self.store.expire_continue_tokens()


@contextlib.asynccontextmanager
async def open_in_memory(folder: Path) -> AsyncIterator[Harness]:
    store = Store(new_uid=uids(), now_s=lambda: 1_000_000.0)
    yield EmbeddedHarness(store, EmbeddedCluster(store))


@contextlib.asynccontextmanager
async def open_forwarded(folder: Path) -> AsyncIterator[Harness]:
    """The base of every port that wraps another one."""
    store = Store(new_uid=uids(), now_s=lambda: 1_000_000.0)
    yield EmbeddedHarness(store, ForwardingPort(EmbeddedCluster(store)))


@contextlib.asynccontextmanager
async def open_with_journal(folder: Path) -> AsyncIterator[Harness]:
    opened = open_store(folder / "cluster.journal", clock=ManualClock(), run_token="t", new_uid=uids(), validators={})
    async with opened as (store, durable):
        yield EmbeddedHarness(store, EmbeddedCluster(store, durable=durable))


@contextlib.asynccontextmanager
async def open_over_http(folder: Path) -> AsyncIterator[Harness]:
    """The adapter of the Kubernetes API, against the embedded store's own service of the same paths."""
    store = Store(new_uid=uids(), now_s=lambda: 1_000_000.0)
    tokens = TokenTable()
    server = ApiServer(EmbeddedCluster(store), tokens=tokens)
    connection = Connection(url=await server.start(), tls=None, authorization=lambda: f"Bearer {tokens.admin}")
    try:
        async with KubernetesCluster(connection) as cluster:
            yield EmbeddedHarness(store, cluster)
    finally:
        await server.close()


ADAPTERS: dict[str, Opener] = {
    "embedded": open_in_memory,
    "embedded-forwarded": open_forwarded,
    "embedded-journal": open_with_journal,
    "embedded-http": open_over_http,
}
"""A real API server is held to the same by ``tests/cluster``."""


def uids() -> Callable[[], str]:
    counter = itertools.count(1)
    return lambda: f"00000000-0000-4000-8000-{next(counter):012d}"


def run(opener: Opener, folder: Path, story: Callable[[Harness], Coroutine[Any, Any, None]]) -> None:
    """Tell a story against one adapter."""

    async def told() -> None:
        async with opener(folder) as harness, asyncio.timeout(60):
            await story(harness)

    asyncio.run(told())
