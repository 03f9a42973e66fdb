"""The sources of runs that the contract suite of the console holds to one behaviour."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import yaml

from polyreme.console.commands import Commands
from polyreme.console.home.source import HomeSource
from polyreme.console.run_source import RunSource
from polyreme.plugin.console.bucket_reader import BucketReader
from polyreme.plugin.console.past_records import PastRecords
from polyreme.plugin.console.past_source import SourceWithPast
from polyreme.plugin.console.source import ClusterSource
from polyreme.run_files.paths import Home
from polyreme_api.labels import API_VERSION, KIND_JOB
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_cluster.port import ClusterPort
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.schema import SCHEMAS
from polyreme_local.api_server.server import ApiServer
from polyreme_local.api_server.store import Store
from polyreme_local.api_server.tokens import TokenTable
from polyreme_system.clock import SystemClock
from tests.contract.adapters import uids

STORY_S = 120


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunHarness:
    """A source under test, with two namespaces."""

    source: RunSource
    own: str
    other: str
    add: Callable[[dict[str, Any]], Awaitable[None]]
    """Puts a job there, past the source."""
    settle: Callable[[], Awaitable[None]]
    """Lets the source see what changed past it."""


RunOpener = Callable[[Path], AbstractAsyncContextManager[RunHarness]]


def job_of(namespace: str, name: str, **training: Any) -> dict[str, Any]:
    """Return a job that any source accepts."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND_JOB,
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sequenceTokens": 64, "sources": [{"name": "one", "dataset": "sample/digits-1"}]},
            "training": {"steps": 10, "packsPerStep": 4, **training},
        },
    }


@contextlib.asynccontextmanager
async def open_home(folder: Path) -> AsyncIterator[RunHarness]:
    """Open a home whose runs were not trained: they have a job and a state."""
    source = HomeSource(Home(path=folder), SystemClock())

    async def add(job: dict[str, Any]) -> None:
        name, space = job["metadata"]["name"], job["metadata"]["namespace"]
        run = source.home.run(space, name)
        run.path.mkdir(parents=True)
        run.job_file.write_text(yaml.safe_dump(job))
        run.identity_file.write_text(json.dumps({"namespace": space, "name": name, "uid": f"{space}-{name}"}))
        run.state_file.write_text(json.dumps({"state": "Succeeded", "finished": True, "step": 10, "steps": 10}))

    async def settle() -> None:
        await source.commands.ended()
        await asyncio.to_thread(source.index.refresh)

    try:
        yield RunHarness(source=source, own="default", other="team", add=add, settle=settle)
    finally:
        source.close()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A cluster and how it was reached."""

    cluster: ClusterPort
    connection: Connection
    unauthorized: tuple[int, str] = (503, "the credentials are refused")


def cluster_harness(reach: Reached, folder: Path, *, own: str, other: str) -> RunHarness:
    """Return the source of a cluster."""
    clock = SystemClock()
    source = ClusterSource(reach, Commands(folder, clock), clock, namespace=own)

    async def add(job: dict[str, Any]) -> None:
        await reach.cluster.create(job)

    async def settle() -> None:
        return None

    return RunHarness(source=source, own=own, other=other, add=add, settle=settle)


@contextlib.asynccontextmanager
async def reach_embedded_cluster() -> AsyncIterator[Reached]:
    """Open the embedded API server, by the adapter of the Kubernetes API."""
    store = Store(new_uid=uids(), now_s=SystemClock().now_s, validators=SCHEMAS)
    tokens = TokenTable()
    server = ApiServer(EmbeddedCluster(store), tokens=tokens)
    connection = Connection(url=await server.start(), tls=None, authorization=lambda: f"Bearer {tokens.admin}")
    try:
        async with KubernetesCluster(connection) as cluster:
            yield Reached(cluster=cluster, connection=connection)
    finally:
        await server.close()


@contextlib.asynccontextmanager
async def open_embedded_cluster(folder: Path) -> AsyncIterator[RunHarness]:
    """Open the jobs of an embedded API server."""
    async with reach_embedded_cluster() as reach:
        yield cluster_harness(reach, folder, own="default", other="team")


@contextlib.asynccontextmanager
async def open_cluster_with_past(folder: Path) -> AsyncIterator[RunHarness]:
    """Open the same, with a location of deleted jobs that has none."""
    clock, place = SystemClock(), [(folder / "checkpoints").as_uri()]
    buckets = BucketReader({}, clock, place)
    past = PastRecords(place, buckets, clock)
    async with reach_embedded_cluster() as reach:
        live = cluster_harness(reach, folder, own="default", other="team")
        commands = Commands(folder, clock)
        source = SourceWithPast(reach, commands, clock, namespace=live.own, buckets=buckets, past=past)
        yield dataclasses.replace(live, source=source)


RUN_SOURCES: dict[str, RunOpener] = {
    "home": open_home,
    "embedded-cluster": open_embedded_cluster,
    "embedded-cluster-past": open_cluster_with_past,
}
"""A real API server is held to the same by ``tests/cluster``."""


def run_story(opener: RunOpener, folder: Path, story: Callable[[RunHarness], Coroutine[Any, Any, None]]) -> None:
    """Tell a story against one source."""

    async def told() -> None:
        async with opener(folder) as harness, asyncio.timeout(STORY_S):
            await story(harness)

    asyncio.run(told())
