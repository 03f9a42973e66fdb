"""The adapters of ``ClusterPort`` that the contract suite holds to one behaviour."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from polyreme_operator.adapters.embedded.cluster import EmbeddedCluster
from polyreme_operator.adapters.embedded.journal import open_store
from polyreme_operator.adapters.embedded.store import Store
from polyreme_operator.port import KINDS, ClusterPort


class Harness(Protocol):
    """One adapter under test, with what no port offers: a server that forgets."""

    cluster: ClusterPort

    async def forget_history(self) -> None:
        """Compact: watches and continue tokens from before are gone."""
        ...


Opener = Callable[[Path], AbstractAsyncContextManager[Harness]]


class ManualClock:
    """A clock that stands."""

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
async def open_with_journal(folder: Path) -> AsyncIterator[Harness]:
    opened = open_store(folder / "cluster.journal", clock=ManualClock(), run_token="t", new_uid=uids(), validators={})
    async with opened as (store, durable):
        yield EmbeddedHarness(store, EmbeddedCluster(store, durable=durable))


ADAPTERS: dict[str, Opener] = {"embedded": open_in_memory, "embedded-journal": open_with_journal}


def uids() -> Callable[[], str]:
    counter = itertools.count(1)
    return lambda: f"00000000-0000-4000-8000-{next(counter):012d}"


def run(opener: Opener, folder: Path, story: Callable[[Harness], Coroutine[Any, Any, None]]) -> None:
    """Tell a story against one adapter."""

    async def told() -> None:
        async with opener(folder) as harness, asyncio.timeout(60):
            await story(harness)

    asyncio.run(told())
