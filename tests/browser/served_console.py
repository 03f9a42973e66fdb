"""A console of all users, over a cluster in this process: both are in a thread, since Playwright holds the test's."""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from polyreme.console.loopback import HOST, listen
from polyreme.console.token_guard import Login
from polyreme.plugin.change import change, scale_to
from polyreme.plugin.console.served import served_console
from polyreme_api.labels import KIND_JOB
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_cluster.port import ObjectRef
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.server import ApiServer
from polyreme_local.api_server.store import Store
from polyreme_local.api_server.tokens import TokenTable
from polyreme_system.clock import SystemClock
from tests.contract.adapters import uids
from tests.contract.run_sources import job_of
from tools.cluster.servers import free_ports

SPACE, WAIT_S = "team", 60
_Answer = TypeVar("_Answer")


class ServedConsole:
    """A cluster with one namespace, and its console."""

    def __init__(self, loop: asyncio.AbstractEventLoop, folder: Path) -> None:
        self._loop, self._folder = loop, folder
        (port,) = free_ports(1)
        self.origin = f"http://localhost:{port}"
        self._cluster = EmbeddedCluster(Store(new_uid=uids(), now_s=SystemClock().now_s))
        self._tokens = TokenTable()
        self._api = ApiServer(self._cluster, tokens=self._tokens)
        self._runner: web.AppRunner | None = None

    @property
    def token(self) -> str:
        """The token of a user who may do everything."""
        return self._tokens.admin

    def add(self, name: str) -> None:
        """Create a job, past the console."""
        self._wait(self._cluster.create(job_of(SPACE, name)))

    def workers(self, name: str) -> int:
        """Return how many workers a job asks for."""
        found = self._wait(self._cluster.get(ObjectRef(kind=KIND_JOB, namespace=SPACE, name=name)))
        return int(found["spec"].get("workers", {}).get("replicas", 1))

    def scale(self, name: str, workers: int) -> None:
        """Ask for another number of them, past the console."""
        self._wait(change(self._cluster, SPACE, name, scale_to(workers)))

    def open(self) -> None:
        """Let both answer."""
        self._wait(self._open())

    def go_away(self) -> None:
        """Let the cluster answer no longer."""
        self._wait(self._api.close())

    def come_back(self) -> None:
        """Let it answer again, at its address, with the same objects and tokens."""
        port = int(self._api.url.rpartition(":")[2])
        self._api = ApiServer(self._cluster, tokens=self._tokens)
        self._wait(self._api.start(port=port))

    def spend_tokens(self) -> None:
        """Let the cluster accept other tokens than before."""
        self.go_away()
        self._tokens = TokenTable()
        self.come_back()

    def close(self) -> None:
        """Stop both."""
        if self._runner is not None:
            self._wait(self._runner.cleanup())
        self._wait(self._api.close())

    async def _open(self) -> None:
        connection = Connection(url=await self._api.start(), tls=None, authorization=lambda: None)
        server = served_console(
            connection, self._folder, SystemClock(), url=self.origin, login=Login.FORM, namespace=SPACE
        )
        self._runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await listen(self._runner, HOST, int(self.origin.rpartition(":")[2]))

    def _wait(self, act: Coroutine[Any, Any, _Answer]) -> _Answer:
        return asyncio.run_coroutine_threadsafe(act, self._loop).result(WAIT_S)


@contextmanager
def console_of_all_users() -> Iterator[ServedConsole]:
    """Serve it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            console = ServedConsole(loop, Path(folder))
            try:
                console.open()
                yield console
            finally:
                console.close()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
