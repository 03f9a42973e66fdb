"""The loopback API: paths, rights, watches over the wire, and the launcher's client against it."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from polyreme_api.errors import NotFoundError
from polyreme_api.labels import job_object_name
from polyreme_cluster.port import Manifest
from polyreme_launcher.api_client import ApiClient, ApiConflictError, ApiGoneError, ApiRefusedError
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.server import ApiServer
from polyreme_local.api_server.store import Store
from polyreme_local.api_server.tokens import TokenTable
from tests.contract.adapters import uids
from tests.contract.manifests import lease, ref, uid, version

JOB: Manifest = {
    "apiVersion": "polyreme.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "toy", "namespace": "default"},
    "spec": {},
}


class Wire:
    def __init__(
        self, server: ApiServer, cluster: EmbeddedCluster, tokens: TokenTable, folder: Path, job: Manifest
    ) -> None:
        self.server, self.cluster, self.tokens, self.folder, self.job = server, cluster, tokens, folder, job
        self.url = server.url
        self.lease = job_object_name("toy", uid(job))

    def client(self, token: str | None = None) -> ApiClient:
        path = self.folder / "token"
        path.write_text(token or self.tokens.for_job(namespace="default", job="toy", uid=uid(self.job)))
        return ApiClient(url=self.url, token_file=path, namespace="default")

    async def status(self, method: str, path: str, *, token: str, body: Any = None) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.url + path, json=body, headers=headers) as response,
        ):
            return response.status


def on_wire(folder: Path, story: Callable[[Wire], Coroutine[Any, Any, None]]) -> None:
    async def told() -> None:
        store = Store(new_uid=uids(), now_s=lambda: 0.0)
        cluster = EmbeddedCluster(store)
        tokens = TokenTable()
        server = ApiServer(cluster, tokens=tokens)
        await server.start()
        job = await cluster.create(JOB)
        try:
            async with asyncio.timeout(20):
                await story(Wire(server, cluster, tokens, folder, job))
        finally:
            await server.close()

    asyncio.run(told())


def test_a_launcher_reads_its_job_and_keeps_its_lease(tmp_path: Path) -> None:
    async def story(wire: Wire) -> None:
        client = wire.client()
        await client.open()
        try:
            assert await client.job("toy") == wire.job
            with pytest.raises(NotFoundError):
                await client.lease(wire.lease)
            created = await client.create_lease(lease(wire.lease))
            with pytest.raises(ApiConflictError):
                await client.create_lease(lease(wire.lease))
            patch = {"metadata": {"resourceVersion": version(created)}, "spec": {"holderIdentity": "b"}}
            assert (await client.patch_lease(wire.lease, patch))["spec"]["holderIdentity"] == "b"
            with pytest.raises(ApiConflictError):
                await client.patch_lease(wire.lease, patch)
        finally:
            await client.close()

    on_wire(tmp_path, story)


def test_a_launcher_sees_its_job_change_and_go(tmp_path: Path) -> None:
    async def story(wire: Wire) -> None:
        client = wire.client()
        await client.open()
        try:
            states = client.watch_job("toy", resource_version=version(wire.job))
            changed = await wire.cluster.patch(ref(wire.job), {"spec": {"suspend": True}})
            assert await anext(states) == changed
            await wire.cluster.create({**JOB, "metadata": {"name": "other", "namespace": "default"}})
            await wire.cluster.delete(ref(wire.job), uid=uid(wire.job))
            with pytest.raises(NotFoundError):
                await anext(states)
        finally:
            await client.close()

    on_wire(tmp_path, story)


def test_a_watch_from_forgotten_history_is_gone_over_the_wire(tmp_path: Path) -> None:
    async def story(wire: Wire) -> None:
        client = wire.client()
        await client.open()
        try:
            wire.cluster.store.history("TrainingJob").forget(wire.cluster.store.version)
            with pytest.raises(ApiGoneError):
                await anext(client.watch_job("toy", resource_version="0"))
        finally:
            await client.close()

    on_wire(tmp_path, story)


def test_a_jobs_token_opens_its_job_and_its_lease_and_nothing_else(tmp_path: Path) -> None:
    async def story(wire: Wire) -> None:
        other = await wire.cluster.create({**JOB, "metadata": {"name": "other", "namespace": "default"}})
        await wire.cluster.create(lease("foreign"))
        token = wire.tokens.for_job(namespace="default", job="toy", uid=uid(wire.job))
        jobs = "/apis/polyreme.dev/v1alpha1/namespaces/default/trainingjobs"
        leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
        forbidden: list[tuple[str, str, Manifest | None]] = [
            ("GET", f"{jobs}/{other['metadata']['name']}", None),
            ("GET", jobs, None),
            ("GET", f"{jobs}?watch=1", None),
            ("GET", f"{jobs}?watch=1&fieldSelector=metadata.name=other", None),
            ("PATCH", f"{jobs}/toy", {"spec": {"suspend": True}}),
            ("PATCH", f"{jobs}/toy/status", {"status": {}}),
            ("DELETE", f"{jobs}/toy", None),
            ("GET", f"{leases}/foreign", None),
            ("PATCH", f"{leases}/foreign", {"spec": {}}),
            ("POST", leases, lease("another")),
            ("GET", "/api/v1/namespaces/default/secrets", None),
            ("GET", "/api/v1/nodes", None),
        ]
        for method, path, body in forbidden:
            assert await wire.status(method, path, token=token, body=body) == 403, (method, path)
        assert await wire.status("GET", f"{jobs}/toy", token=token) == 200
        assert await wire.status("GET", f"{jobs}?fieldSelector=metadata.name=toy", token=token) == 200
        assert await wire.status("POST", leases, token=token, body=lease(wire.lease)) == 201

    on_wire(tmp_path, story)


def test_an_unknown_token_opens_nothing(tmp_path: Path) -> None:
    async def story(wire: Wire) -> None:
        client = wire.client("guessed")
        await client.open()
        try:
            with pytest.raises(ApiRefusedError, match="401"):
                await client.job("toy")
        finally:
            await client.close()

    on_wire(tmp_path, story)


def test_the_commands_token_lists_pages_and_deletes(tmp_path: Path) -> None:
    async def story(wire: Wire) -> None:
        for name in ("a", "b", "c"):
            await wire.cluster.create(lease(name))
        leases = "/apis/coordination.k8s.io/v1/leases"
        headers = {"Authorization": f"Bearer {wire.tokens.admin}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.get(f"{wire.url}{leases}?limit=2") as response:
                first = await response.json()
            async with session.get(
                f"{wire.url}{leases}", params={"continue": first["metadata"]["continue"]}
            ) as response:
                second = await response.json()
        names = [item["metadata"]["name"] for page in (first, second) for item in page["items"]]
        assert names == ["a", "b", "c"]
        path = "/apis/coordination.k8s.io/v1/namespaces/default/leases/a"
        wrong = {"preconditions": {"uid": "other"}}
        assert await wire.status("DELETE", path, token=wire.tokens.admin, body=wrong) == 409
        assert await wire.status("DELETE", path, token=wire.tokens.admin) == 200
        assert await wire.status("DELETE", path, token=wire.tokens.admin) == 404

    on_wire(tmp_path, story)
