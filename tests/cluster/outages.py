"""What can befall the way to an API server, and the server itself."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from tests.cluster.kube import apply_crds, kubectl, until
from tools.cluster.cluster import down, up
from tools.cluster.servers import Server, Servers

HOST = "127.0.0.1"
ANSWER_S = 30.0
READY_S = 240.0
OWN_TASKS = 2
"""Of a line that is being cut: the task that cuts, and the runner's."""


class Line:
    """A connection to an API server that can be cut: what goes through it is not looked at."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self._loop = asyncio.new_event_loop()
        self._carried: set[asyncio.Task[None]] = set()
        self._closed = asyncio.Event()
        self._passes = asyncio.Event()
        self._passes.set()
        self._is_cut = True
        self._server: asyncio.Server | None = None
        self._port = 0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.mend()

    @property
    def url(self) -> str:
        """Where to call instead of the API server."""
        return f"https://{HOST}:{self._port}"

    def mend(self) -> None:
        """Let calls through."""
        self._do(self._mend())

    def cut(self) -> None:
        """Break every connection, and refuse new ones."""
        self._do(self._cut())

    def hold(self) -> None:
        """Keep every connection, and let nothing through until it is cut."""
        self._loop.call_soon_threadsafe(self._passes.clear)

    def close(self) -> None:
        """Cut it for good."""
        self.cut()
        self._loop.call_soon_threadsafe(self._closed.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._closed.wait())

    def _do(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(ANSWER_S)

    async def _mend(self) -> None:
        self._is_cut = False
        self._server = await asyncio.start_server(self._accept, HOST, self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def _cut(self) -> None:
        self._is_cut = True
        for task in list(self._carried):
            task.cancel()
        # CPython 3.11 leaves the socket of a connection open that is accepted while its server closes.
        while len(asyncio.all_tasks()) > OWN_TASKS:
            await asyncio.sleep(0)
        if self._server is not None:
            self._server.close()
        self._passes.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_cut:
            writer.transport.abort()
            return
        task = asyncio.ensure_future(self._carry(reader, writer))
        self._carried.add(task)
        task.add_done_callback(self._carried.discard)
        # Also where the task was cancelled before its first line.
        task.add_done_callback(lambda _: writer.transport.abort())

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(self._target.hostname, self._target.port)
            try:
                await asyncio.gather(self._copy(reader, far_writer), self._copy(far_reader, writer))
            finally:
                far_writer.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


@contextlib.contextmanager
def line_to(kubeconfig: Path) -> Iterator[Line]:
    """Have every user of this kubeconfig call through a line that can be cut."""
    content: dict[str, Any] = yaml.safe_load(kubeconfig.read_text())
    line = Line(content["clusters"][0]["cluster"]["server"])
    content["clusters"][0]["cluster"]["server"] = line.url
    kubeconfig.write_text(yaml.safe_dump(content))
    try:
        yield line
    finally:
        line.close()


class OwnCluster:
    """A control plane that tests may hurt. Its API server keeps no watch cache: what etcd forgot, it has forgotten."""

    def __init__(self, folder: Path, kubeconfig: str) -> None:
        self.kubeconfig = kubeconfig
        self._folder = folder

    def forget_history(self) -> None:
        """Have etcd compact: no watch resumes from a version before now."""
        address = next(part for part in _command(self._api_server()) if part.startswith("--etcd-servers="))
        url = address.partition("=")[2]
        key = base64.b64encode(b"any").decode()
        revision = _post(f"{url}/v3/kv/range", {"key": key})["header"]["revision"]
        _post(f"{url}/v3/kv/compaction", {"revision": revision, "physical": True})

    def kill_api_server(self) -> list[str]:
        """End the API server by SIGKILL, and return how it was started."""
        server = self._api_server()
        command = _command(server)
        os.kill(server.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(server.pid, 0)
        return command

    def start_api_server(self, command: list[str]) -> None:
        """Start it as it was, and wait until it answers."""
        Servers(self._folder).start("kube-apiserver", command)
        until(self._answers, "the API server is back", timeout_s=READY_S)

    def _api_server(self) -> Server:
        return next(each for each in Servers(self._folder).all if each.name == "kube-apiserver" and each.lives)

    def _answers(self) -> bool:
        try:
            return kubectl(self.kubeconfig, "get", "--raw", "/readyz") == "ok"
        except AssertionError:
            return False


@contextlib.contextmanager
def own_cluster(folder: Path) -> Iterator[OwnCluster]:
    """Have a cluster of one's own, whatever other there is."""
    elsewhere = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    try:
        kubeconfig = up(folder, elsewhere, api_options=("--watch-cache=false",))
        apply_crds(kubeconfig)
        yield OwnCluster(folder, kubeconfig)
    finally:
        down(folder)


def _command(server: Server) -> list[str]:
    return Path(f"/proc/{server.pid}/cmdline").read_text().rstrip("\0").split("\0")


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, data=json.dumps(body).encode())
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=ANSWER_S) as response:
        answer: dict[str, Any] = json.loads(response.read())
    return answer
