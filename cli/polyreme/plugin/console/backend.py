"""A console of the user's own kubeconfig: every call is made with its credentials."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from aiohttp import web

from polyreme.console import pages
from polyreme.console.commands import Commands
from polyreme.plugin.console import pages as cluster_pages
from polyreme.plugin.console.bucket_reader import BucketReader
from polyreme.plugin.console.past_records import PastRecords, location_urls
from polyreme.plugin.console.past_source import SourceWithPast
from polyreme.plugin.console.source import ClusterSource
from polyreme.plugin.target import Target
from polyreme_api.clock import Clock
from polyreme_api.labels import LABEL_JOB_UID
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_cluster.forwarding_port import Call, ForwardingPort
from polyreme_cluster.port import ClusterPort, UnauthorizedError

_Answer = TypeVar("_Answer")
SELECTORS = {"Lease": LABEL_JOB_UID}
"""Of Leases only those of jobs: nodes have one each."""
REQUEST_S = 10.0
"""Time that a call of a page has: a page says sooner than a command that the cluster is away."""
REFUSED = (
    "the cluster no longer accepts the credentials of your kubeconfig (401): log in again as you do for kubectl; this "
    "page looks again by itself"
)


class KubeconfigCluster(ForwardingPort):
    """The cluster of a kubeconfig: it is read again when the API server refuses its credentials.

    Args:
        target: Which kubeconfig, and which of its contexts.
    """

    unauthorized = (503, REFUSED)

    def __init__(self, target: Target) -> None:
        self._target = target
        self.connection, self._adapter = self._read()
        super().__init__(self._adapter)
        self._renewing = asyncio.Lock()

    @property
    def cluster(self) -> ClusterPort:
        """Itself."""
        return self

    async def open(self) -> None:
        """Make connections."""
        await self._adapter.__aenter__()

    async def close(self) -> None:
        """Close them."""
        await self._adapter.__aexit__(None, None, None)

    def _read(self) -> tuple[Connection, KubernetesCluster]:
        connection = self._target.connection()
        return connection, KubernetesCluster(connection, request_s=REQUEST_S, selectors=SELECTORS)

    async def _forward(self, call: Call, act: Callable[[], Awaitable[_Answer]]) -> _Answer:
        del call
        used = self._adapter
        try:
            return await act()
        except UnauthorizedError:
            async with self._renewing:
                if used is self._adapter:
                    self.connection, self._adapter = self._read()
                    await self._adapter.__aenter__()
                    self._port = self._adapter
                    await used.__aexit__(None, None, None)
            return await act()


class KubeconfigBackend:
    """The jobs of a kubeconfig's cluster, and the pages that show them.

    Args:
        target: Which kubeconfig, context and namespace.
        clock: Of this machine.
        past: Locations with records of jobs that may be deleted, as the user typed them.

    Raises:
        InvalidConfigError: If a location is none.
    """

    pages = (pages, cluster_pages)

    def __init__(self, target: Target, clock: Clock, past: Sequence[str] = ()) -> None:
        locations = location_urls(past)
        self._folder = tempfile.TemporaryDirectory(prefix="polyreme-console-")
        self._cluster = KubeconfigCluster(target)
        commands = Commands(Path(self._folder.name), clock)
        buckets = BucketReader(os.environ, clock, locations)
        self._past = PastRecords(locations, buckets, clock)
        space = target.in_namespace
        self._source = (
            SourceWithPast(self._cluster, commands, clock, namespace=space, buckets=buckets, past=self._past)
            if locations
            else ClusterSource(self._cluster, commands, clock, namespace=space, buckets=buckets)
        )

    def source(self, request: web.Request) -> ClusterSource:
        """Return the jobs as the kubeconfig's user sees them: the guard knows one user alone."""
        del request
        return self._source

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hold the connections open."""
        await self._cluster.open()
        try:
            yield
        finally:
            self._past.close()
            await self._cluster.close()
            self._folder.cleanup()
