"""Console of a cluster by a kubeconfig: its pages, a cluster that goes away and comes back, refused credentials."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml
from aiohttp import ClientSession, CookieJar, DummyCookieJar
from aiohttp.test_utils import TestServer

from polyreme.console.guard import FORM_TOKEN, LinkGuard
from polyreme.console.server import ConsoleServer
from polyreme.plugin.console.backend import KubeconfigBackend
from polyreme.plugin.target import Target
from polyreme_api import labels
from polyreme_cluster.port import Manifest, NotFoundError, ObjectRef
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.server import ApiServer
from polyreme_local.api_server.store import Store
from polyreme_local.api_server.tokens import TokenTable
from polyreme_system.clock import SystemClock
from tests.contract.adapters import uids
from tests.contract.run_sources import job_of
from tests.live_page import until_back
from tests.unit.plugin.plugin_scenes import node, queue, runs, waits

HOSTILE = "<img src=x onerror=alert(1)>"


@dataclasses.dataclass
class Stage:
    """A cluster, and a browser with a session of a console of it."""

    cluster: EmbeddedCluster
    kubeconfig: Path
    guard: LinkGuard
    url: str
    session: ClientSession
    api: ApiServer
    tokens: TokenTable

    async def get(self, path: str, *, status: int = 200) -> str:
        async with self.session.get(self.url + path) as response:
            text = await response.text()
            assert response.status == status, text
            return text

    async def post(self, path: str, *, status: int, **fields: str) -> str:
        form = {FORM_TOKEN: self.guard.form_token, **fields}
        headers = {"Origin": self.url}
        async with self.session.post(self.url + path, data=form, headers=headers, allow_redirects=False) as response:
            text = await response.text()
            assert response.status == status, text
            return response.headers.get("Location", text)

    async def add(self, manifest: Manifest) -> None:
        """Put an object there, with its status."""
        status = manifest.pop("status", None)
        made = await self.cluster.create(manifest)
        if status:
            await self.cluster.patch(ObjectRef.of(made), {"status": status}, subresource="status")

    async def restart(self, *, tokens: TokenTable | None = None) -> None:
        """Start the API server again at its address, perhaps with other tokens."""
        port = int(self.api.url.rpartition(":")[2])
        self.tokens = tokens or self.tokens
        self.api = ApiServer(self.cluster, tokens=self.tokens)
        await self.api.start(port=port)


def write_kubeconfig(path: Path, url: str, token: str) -> None:
    path.write_text(
        yaml.safe_dump(
            {
                "clusters": [{"name": "c", "cluster": {"server": url}}],
                "users": [{"name": "u", "user": {"token": token}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
                "current-context": "x",
            }
        )
    )


@contextlib.asynccontextmanager
async def stage(folder: Path, *past: str) -> AsyncIterator[Stage]:
    cluster = EmbeddedCluster(Store(new_uid=uids(), now_s=SystemClock().now_s))
    tokens = TokenTable()
    api = ApiServer(cluster, tokens=tokens)
    path = folder / "kubeconfig"
    write_kubeconfig(path, await api.start(), tokens.admin)
    guard = LinkGuard()
    backend = KubeconfigBackend(Target(kubeconfig=path), SystemClock(), past)
    async with (
        TestServer(ConsoleServer(backend, guard).application()) as server,
        ClientSession(cookie_jar=DummyCookieJar()) as opener,
    ):
        async with opener.get(server.make_url(guard.start_path()), allow_redirects=False) as response:
            cookie = response.headers["Set-Cookie"].partition(";")[0]
        async with ClientSession(cookie_jar=DummyCookieJar(), headers={"Cookie": cookie}) as session:
            url = str(server.make_url("/")).rstrip("/")
            made = Stage(cluster, path, guard, url, session, api, tokens)
            try:
                yield made
            finally:
                await made.api.close()


async def fill(made: Stage) -> None:
    """Put a running job, two that wait, their queue and their node into the cluster."""
    workers = {"replicas": 1, "devices": 4, "deviceResource": "nvidia.com/gpu"}
    for name, status in (
        ("big", runs("n0")),
        ("next", waits("ExceedsQuota", "queue a is full")),
        ("last", waits("BehindOthers", HOSTILE)),
    ):
        job = job_of("team", name, seed=len(name))
        await made.add({**job, "spec": {**job["spec"], "queueName": "a", "workers": workers}, "status": status})
    await made.add({"apiVersion": labels.API_VERSION, "kind": "TrainingQueue", **bare(queue("a", gpus=4))})
    await made.add({"apiVersion": "v1", "kind": "Node", **bare(node("n0"))})


def bare(manifest: Manifest) -> Manifest:
    """Return an object without what the server sets."""
    known: dict[str, Any] = manifest["metadata"]
    return {**manifest, "metadata": {key: known[key] for key in ("name", "labels") if key in known}}


def test_pages_show_jobs_queues_and_nodes(tmp_path: Path) -> None:
    async def story() -> None:
        async with stage(tmp_path) as made:
            await fill(made)
            table = await made.get("/")
            assert "/runs/team/big" in table
            assert "training.seed" in table
            assert HOSTILE not in table
            assert "There is no run here" in await made.get("/?namespace=other")
            page = await made.get("/runs/team/last")
            assert "Place 2 of 2 in queue a" in page
            assert "team/next" in page.partition("Ahead of it")[2]
            assert "&lt;img" in page
            assert "kubectl polyreme suspend last -n team" in page
            assert "did you mean" in await made.get("/runs/team/bgi", status=404)
            queues = await made.get("/queues")
            assert "Waiting in a" in queues
            assert queues.index("/runs/team/next") < queues.index("/runs/team/last")
            assert "host n0" in queues
            assert "training.seed" in await made.get("/compare?run=team/big&run=team/last")
            assert "no attempt" in await made.get("/runs/team/next/logs")

    asyncio.run(story())


def test_actions_change_the_job(tmp_path: Path) -> None:
    async def story() -> None:
        async with stage(tmp_path) as made:
            await fill(made)
            ref = ObjectRef(kind=labels.KIND_JOB, namespace="team", name="next")
            assert await made.post("/runs/team/next/actions/scale", status=303, number="3") == "/runs/team/next"
            assert (await made.cluster.get(ref))["spec"]["workers"]["replicas"] == 3
            await made.post("/runs/team/next/actions/scale", status=422, number="x")
            await made.post("/runs/team/next/actions/scale", status=422)
            await made.post("/runs/team/next/actions/suspend", status=303)
            assert (await made.cluster.get(ref))["spec"]["suspend"] is True
            assert "kubectl polyreme resume next -n team" in await made.get("/runs/team/next")
            await made.post("/runs/team/next/actions/delete", status=303)
            with contextlib.suppress(NotFoundError):
                raise AssertionError(await made.cluster.get(ref))

    asyncio.run(story())


def test_a_cluster_that_goes_away_is_a_sentence_until_it_is_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with stage(tmp_path) as made:
            await fill(made)
            async with made.session.get(f"{made.url}/live/runs") as live:
                assert "/runs/team/big" in (await live.content.readuntil(b"\n\n")).decode()
                await made.api.close()
                assert "does not answer; this page looks again" in (await live.content.readuntil(b"\n\n")).decode()
                assert "does not answer" in await made.get("/")
                assert "does not answer" in await made.get("/runs/team/big")
                await made.restart()
                await until_back(live.content, "/runs/team/big")

    asyncio.run(story())


def test_refused_credentials_are_a_sentence_until_the_kubeconfig_has_others(tmp_path: Path) -> None:
    async def story() -> None:
        async with stage(tmp_path) as made:
            await fill(made)
            assert "/runs/team/big" in await made.get("/")
            await made.api.close()
            await made.restart(tokens=TokenTable())
            assert "log in again as you do for kubectl" in await made.get("/")
            write_kubeconfig(made.kubeconfig, made.api.url, made.tokens.admin)
            assert "/runs/team/big" in await made.get("/")

    asyncio.run(story())


def test_the_command_prints_a_link_to_the_jobs_of_the_kubeconfig(tmp_path: Path) -> None:
    async def story() -> None:
        async with stage(tmp_path) as made:
            await fill(made)
            words = [sys.executable, "-m", "polyreme.plugin", "console", "--kubeconfig", str(made.kubeconfig)]
            process = await asyncio.create_subprocess_exec(*words, "--port", "0", stdout=subprocess.PIPE)
            assert process.stdout is not None
            try:
                assert f"console of {made.api.url}, namespace team" in (await process.stdout.readline()).decode()
                link = (await process.stdout.readline()).decode().strip()
                async with ClientSession(cookie_jar=CookieJar(unsafe=True)) as browser, browser.get(link) as response:
                    assert "/runs/team/big" in await response.text()
            finally:
                process.terminate()
                assert await process.wait() == 0

    asyncio.run(story())
