"""The loopback API against callers that are strange, slow, greedy or gone."""

import asyncio
import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from polyreme_local.api_server.server import BODY_BYTES_MAX
from tests.contract.manifests import config, lease, ref, uid, version
from tests.unit.local.test_embedded_server import Wire, on_wire

JOBS = "/apis/polyreme.dev/v1alpha1/namespaces/default/trainingjobs"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/default/leases"


@pytest.mark.parametrize("authorization", [None, "", "Bearer", "Bearer ", "Bearer guessed", "Basic Og==", "bearer x"])
def test_a_caller_without_a_token_of_ours_learns_nothing(tmp_path: Path, authorization: str | None) -> None:
    async def story(wire: Wire) -> None:
        headers = {} if authorization is None else {"Authorization": authorization}
        async with aiohttp.ClientSession(headers=headers) as session:
            for method, path in (("GET", f"{JOBS}/toy"), ("GET", f"{JOBS}/none"), ("POST", LEASES), ("DELETE", JOBS)):
                async with session.request(method, wire.url + path, data=b"no JSON") as response:
                    assert response.status == (405 if method == "DELETE" else 401)
                    assert "toy" not in await response.text()

    on_wire(tmp_path, story)


def test_a_continue_token_of_another_list_opens_nothing(tmp_path: Path) -> None:
    async def story(wire: Wire) -> None:
        for name in ("a", "b", "c"):
            await wire.cluster.create(config(name, data={"password": "hidden"}))
        page = await wire.cluster.list("ConfigMap", limit=1)
        assert page.continue_ is not None
        token = wire.tokens.for_job(namespace="default", job="toy", uid=uid(wire.job))
        headers = {"Authorization": f"Bearer {token}"}
        query = {"fieldSelector": "metadata.name=toy", "continue": page.continue_}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(wire.url + JOBS, params=query) as response,
        ):
            assert response.status == 410
            assert "hidden" not in await response.text()

    on_wire(tmp_path, story)


def test_a_page_shows_only_what_its_selector_admits(tmp_path: Path) -> None:
    async def story(wire: Wire) -> None:
        for name in ("other-1", "other-2"):
            await wire.cluster.create({**wire.job, "metadata": {"name": name, "namespace": "default"}})
        page = await wire.cluster.list("TrainingJob", namespace="default", limit=1)
        query = {"fieldSelector": "metadata.name=toy", "continue": str(page.continue_)}
        token = wire.tokens.for_job(namespace="default", job="toy", uid=uid(wire.job))
        headers = {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(wire.url + JOBS, params=query) as response,
        ):
            names = [item["metadata"]["name"] for item in (await response.json())["items"]]
        assert set(names) <= {"toy"}

    on_wire(tmp_path, story)


def test_a_page_that_made_its_own_name_point_here_is_refused(tmp_path: Path) -> None:
    async def story(wire: Wire) -> None:
        headers = {"Authorization": f"Bearer {wire.tokens.admin}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            for host, expected in (("evil.example:80", 421), ("evil.example", 421), ("localhost:1", 200)):
                async with session.get(f"{wire.url}{JOBS}/toy", headers={"Host": host}) as response:
                    assert response.status == expected, host

    on_wire(tmp_path, story)


@pytest.mark.parametrize(
    ("body", "status"), [(b"x" * (BODY_BYTES_MAX + 1), 413), (b"[" * 100_000, 422), (b"[]", 422), (b"\xff", 422)]
)
def test_a_body_that_is_none_is_refused(tmp_path: Path, body: bytes, status: int) -> None:
    async def story(wire: Wire) -> None:
        headers = {"Authorization": f"Bearer {wire.tokens.admin}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.post(wire.url + LEASES, data=io.BytesIO(body)) as response:
                assert response.status == status
            async with session.get(f"{wire.url}{LEASES}?limit=many") as response:
                assert response.status == 422

    on_wire(tmp_path, story)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PATCH", "/toy?dryRun=All", {"spec": {"suspend": True}}),
        ("DELETE", "/toy?dryRun=All", None),
        ("DELETE", "/toy", {"kind": "DeleteOptions", "dryRun": ["All"]}),
        ("POST", "?dryRun=bogus", "a job"),
        ("POST", "?dryRun=", "a job"),
    ],
)
def test_a_dry_run_that_is_not_served_is_refused_and_changes_nothing(
    tmp_path: Path, method: str, path: str, body: object
) -> None:
    async def story(wire: Wire) -> None:
        given = {**wire.job, "metadata": {"name": "other", "namespace": "default"}} if body == "a job" else body
        before = await wire.cluster.list("TrainingJob")
        headers = {"Authorization": f"Bearer {wire.tokens.admin}"}
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.request(method, wire.url + JOBS + path, json=given) as response,
        ):
            assert (response.status, "no dry run" in (await response.json())["message"]) == (422, True)
        assert (await wire.cluster.list("TrainingJob")).items == before.items

    on_wire(tmp_path, story)


def test_names_are_names_and_never_paths(tmp_path: Path) -> None:
    async def story(wire: Wire) -> None:
        for name in ("../up", "..", "a/b", "a\n", "", "A", "a" * 254):
            assert await wire.status("POST", LEASES, token=wire.tokens.admin, body=lease(name)) == 422, name
        for path in (f"{LEASES}/..%2f..%2fsecrets", f"{LEASES}/%2e%2e", f"{LEASES}/a%00"):
            assert await wire.status("GET", path, token=wire.tokens.admin) in {403, 404}

    on_wire(tmp_path, story)


def test_a_watch_ends_when_it_asked_to_and_when_the_server_closes(tmp_path: Path) -> None:
    async def story(wire: Wire) -> None:
        headers = {"Authorization": f"Bearer {wire.tokens.admin}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            async with session.get(f"{wire.url}{JOBS}?watch=1&timeoutSeconds=0") as response:
                assert await response.read() == b""
            async with session.get(f"{wire.url}{JOBS}?watch=1") as response:
                closing = asyncio.create_task(wire.server.close())
                with contextlib.suppress(aiohttp.ClientPayloadError):
                    assert await response.read() == b""
                await closing

    on_wire(tmp_path, story)


def test_a_watch_whose_client_is_gone_is_forgotten(tmp_path: Path) -> None:
    async def story(wire: Wire) -> None:
        history = wire.cluster.store.history("TrainingJob")
        headers = {"Authorization": f"Bearer {wire.tokens.admin}"}
        async with aiohttp.ClientSession(headers=headers) as session:
            response = await session.get(f"{wire.url}{JOBS}?watch=1")
            await until(lambda: len(history._waiting) == 1)
            response.close()
        await until(lambda: len(history._waiting) == 0)

    on_wire(tmp_path, story)


def test_a_watcher_that_does_not_read_blocks_no_other(tmp_path: Path) -> None:
    async def story(wire: Wire) -> None:
        headers = {"Authorization": f"Bearer {wire.tokens.admin}"}
        created = await wire.cluster.create(config("big"))
        async with aiohttp.ClientSession(headers=headers, read_bufsize=1 << 10) as session:
            start = version(created)
            path = f"{wire.url}/api/v1/namespaces/default/configmaps?watch=1&resourceVersion={start}"
            slow = await session.get(path)
            for number in range(60):
                text = str(number % 10) * 100_000
                created = await wire.cluster.patch(ref(created), {"data": {"text": text}})
            assert await wire.status("GET", f"{JOBS}/toy", token=wire.tokens.admin) == 200
            lines: list[bytes] = [b""]
            while len(lines) <= 60:
                *whole, rest = (await slow.content.readany()).split(b"\n")
                for part in whole:
                    lines[-1] += part
                    lines.append(b"")
                lines[-1] += rest
            last = json.loads(lines[-2])
            assert last["object"] == created
            slow.close()

    on_wire(tmp_path, story)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.002)
