"""Console for all users of a cluster: every route refuses who has no token of the API server, and foreign pages."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from aiohttp import ClientSession, DummyCookieJar
from aiohttp.test_utils import TestServer

from polyreme.console import live
from polyreme.console.guard import FORM_TOKEN
from polyreme.console.token_guard import LOGIN, READY, TOKEN_CHARACTERS_MAX, Login
from polyreme.plugin.console.served import REVIEWS_WAITING_MAX, served_console
from polyreme_api.errors import InvalidConfigError
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.server import ApiServer
from polyreme_local.api_server.store import Store
from polyreme_local.api_server.tokens import TokenTable
from polyreme_system.clock import SystemClock
from tests.contract.adapters import uids
from tests.contract.run_sources import job_of

URL, HOST = "https://polyreme.example.com", "polyreme.example.com"
COOKIE = "__Host-polyreme-console"


@dataclasses.dataclass
class Served:
    """A console in a cluster, as one who may send anything reaches it."""

    session: ClientSession
    address: str
    tokens: TokenTable
    api: ApiServer
    cluster: EmbeddedCluster
    login: Login
    routes: list[tuple[str, str]]

    def bearing(self, token: str) -> dict[str, str]:
        """Return the headers of a browser's request with a token, in the place where the console expects it."""
        held = {"Cookie": f"{COOKIE}={token}"} if self.login is Login.FORM else {"Authorization": f"Bearer {token}"}
        return {"Host": HOST, "Origin": URL, **held}

    async def ask(
        self, method: str, path: str, headers: Mapping[str, str], form: Mapping[str, str] | None = None
    ) -> tuple[int, str, Mapping[str, str]]:
        async with self.session.request(
            method, self.address + path, headers=headers, data=form, allow_redirects=False
        ) as response:
            return response.status, await response.text(), response.headers

    async def status(
        self, method: str, path: str, headers: Mapping[str, str], form: Mapping[str, str] | None = None
    ) -> int:
        return (await self.ask(method, path, headers, form))[0]


@contextlib.asynccontextmanager
async def served(folder: Path, login: Login = Login.FORM, url: str = URL) -> AsyncIterator[Served]:
    cluster, tokens = EmbeddedCluster(Store(new_uid=uids(), now_s=SystemClock().now_s)), TokenTable()
    api = ApiServer(cluster, tokens=tokens)
    connection = Connection(url=await api.start(), tls=None, authorization=lambda: None)
    console = served_console(connection, folder, SystemClock(), url=url, login=login, namespace="team")
    application = console.application()
    routes = []
    for route in application.router.routes():
        assert route.resource is not None
        path = route.resource.canonical
        for name in ("namespace", "name", "action", "version"):
            path = path.replace(f"{{{name}}}", "x")
        assert "{" not in path, path
        routes.append((route.method, path))
    async with TestServer(application) as server, ClientSession(cookie_jar=DummyCookieJar()) as session:
        address = str(server.make_url("/")).rstrip("/")
        try:
            yield Served(session, address, tokens, api, cluster, login, routes)
        finally:
            await api.close()


def form_token(page: str) -> str:
    """Return the field of a form that a page has."""
    return page.partition(f'name="{FORM_TOKEN}" value="')[2].partition('"')[0]


@pytest.mark.parametrize("login", Login)
def test_every_route_refuses_whoever_has_no_token(tmp_path: Path, login: Login) -> None:
    async def story() -> None:
        async with served(tmp_path, login) as made:
            own = made.bearing(made.tokens.admin)
            form = {FORM_TOKEN: form_token((await made.ask("GET", "/submit", own))[1])}
            assert form[FORM_TOKEN]
            assert len(made.routes) > 20
            open_to_all = {READY, LOGIN, "/assets/x/x"}
            for method, path in made.routes:
                wrong = {"where": (method, path)}
                sent = form if method == "POST" else None
                if path not in open_to_all:
                    nothing = {"Host": HOST, "Origin": URL}
                    elsewhere = served_elsewhere(login, made.tokens.admin)
                    for headers in (nothing, made.bearing("other"), made.bearing("a b"), nothing | elsewhere):
                        assert await made.status(method, path, headers, sent) == 401, wrong
                for origin in ("https://evil.example", "null", URL.replace("https", "http"), f"{URL}:8443"):
                    assert await made.status(method, path, own | {"Origin": origin}, sent) == 403, wrong
                for host in (
                    () if path == READY else ("evil.example", f"{HOST}:8443", f"{HOST}.evil.example", "127.0.0.1")
                ):
                    assert await made.status(method, path, own | {"Host": host}, sent) == 403, wrong
                for other in ("PUT", "DELETE", "PATCH", "OPTIONS"):
                    assert await made.status(other, path, own, form) in {403, 405}, wrong
                if method == "POST":
                    no_origin = {name: value for name, value in own.items() if name != "Origin"}
                    assert await made.status(method, path, no_origin, form) == 403, wrong
                    if path != LOGIN:
                        assert await made.status(method, path, own) == 403, wrong
                        assert await made.status(method, path, own, {FORM_TOKEN: "other"}) == 403, wrong

    asyncio.run(story())


def served_elsewhere(login: Login, token: str) -> dict[str, str]:
    """Return a valid token in the place where this console does not expect one."""
    return {"Authorization": f"Bearer {token}"} if login is Login.FORM else {"Cookie": f"{COOKIE}={token}"}


def test_a_token_opens_a_session_that_scripts_and_other_sites_do_not_get(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as made:
            await made.cluster.create(job_of("team", "big"))
            own = {"Host": HOST, "Origin": URL}
            status, page, _ = await made.ask("GET", "/", own)
            assert status == 401
            assert 'type="password"' in page
            assert await made.status("POST", LOGIN, own, {"token": "wrong"}) == 401
            status, page, _ = await made.ask("POST", LOGIN, own, {"token": "x" * (TOKEN_CHARACTERS_MAX + 1)})
            assert (status, f"expected 1 to {TOKEN_CHARACTERS_MAX}" in page) == (401, True)
            status, _, headers = await made.ask("POST", LOGIN, own, {"token": made.tokens.admin})
            assert (status, headers["Location"]) == (303, "/")
            name, *attributes = headers["Set-Cookie"].split("; ")
            assert name == f"{COOKIE}={made.tokens.admin}"
            assert {"HttpOnly", "Secure", "SameSite=Strict", "Path=/"} <= set(attributes)
            assert "/runs/team/big" in (await made.ask("GET", "/", own | {"Cookie": name}))[1]
            _, page, _ = await made.ask("GET", "/you", own | {"Cookie": name})
            assert "polyreme:admin" in page
            assert made.tokens.admin not in page
            leave = {FORM_TOKEN: form_token(page)}
            status, _, headers = await made.ask("POST", "/logout", own | {"Cookie": name}, leave)
            assert (status, "Max-Age=0" in headers["Set-Cookie"]) == (303, True)

    asyncio.run(story())


def test_a_form_of_one_user_is_refused_with_the_session_of_another(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as made:
            await made.cluster.create(job_of("team", "big"))
            other = made.tokens.for_job(namespace="team", job="big", uid="u")
            page = (await made.ask("GET", "/submit", made.bearing(other)))[1]
            form = {FORM_TOKEN: form_token(page)}
            assert await made.status("POST", "/submit/load", made.bearing(made.tokens.admin), form) == 403
            status, page, _ = await made.ask("POST", "/runs/team/big/actions/delete", made.bearing(other), form)
            assert status == 403, "a job's token may not delete it"
            assert "not allowed" in page
            assert await made.status("GET", "/", made.bearing(other)) == 403

    asyncio.run(story())


def test_a_cluster_that_is_away_is_a_page_that_loads_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as made:
            await made.api.close()
            status, page, headers = await made.ask("GET", "/", made.bearing(made.tokens.admin))
            assert (status, headers["Refresh"]) == (503, "5")
            assert "does not answer" in page
            assert await made.status("GET", READY, {"Host": HOST}) == 200

    asyncio.run(story())


def test_a_token_that_ends_is_a_sentence_on_the_open_page(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as made:
            await made.cluster.create(job_of("team", "big"))
            own, port = made.bearing(made.tokens.admin), int(made.api.url.rpartition(":")[2])
            async with made.session.get(f"{made.address}/live/runs", headers=own) as live:
                assert "/runs/team/big" in (await live.content.readuntil(b"\n\n")).decode()
                await made.api.close()
                after = ApiServer(made.cluster, tokens=TokenTable())
                await after.start(port=port)
                try:
                    while "log in again" not in (await live.content.readuntil(b"\n\n")).decode():
                        pass
                    assert await live.content.read() == b"", "the stream goes on with a token that is spent"
                    status, page, _ = await made.ask("GET", "/", own)
                    assert (status, 'type="password"' in page, "has expired" in page) == (401, True, True)
                finally:
                    await after.close()

    asyncio.run(story())


def test_open_pages_of_one_user_leave_room_for_those_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "STREAMS_EACH_MAX", 2)
    monkeypatch.setattr(live, "STREAMS_MAX", 3)

    async def story() -> None:
        async with served(tmp_path) as made, contextlib.AsyncExitStack() as pages:
            await made.cluster.create(job_of("team", "big"))
            ada = made.bearing(made.tokens.admin)
            bob = made.bearing(made.tokens.for_job(namespace="team", job="big", uid="u"))

            async def opened(headers: Mapping[str, str]) -> int:
                page = await pages.enter_async_context(made.session.get(f"{made.address}/live/queues", headers=headers))
                return page.status

            assert [await opened(ada) for _ in range(3)] == [200, 200, 503]
            assert [await opened(bob) for _ in range(2)] == [200, 503]
            await pages.aclose()
            async with asyncio.timeout(30):
                while await opened(ada) != 200:
                    await asyncio.sleep(0.1)

    asyncio.run(story())


@pytest.mark.parametrize(
    "url", ["", "polyreme", "http://polyreme.example.com", "https://p/x", "ftp://p", "https://p:x"]
)
def test_an_address_that_is_none_or_sends_tokens_in_the_clear_is_refused(tmp_path: Path, url: str) -> None:
    connection = Connection(url="https://api", tls=None, authorization=lambda: None)
    with pytest.raises(InvalidConfigError, match="address"):
        served_console(connection, tmp_path, SystemClock(), url=url, login=Login.FORM, namespace="default")


def test_tokens_that_wait_to_be_checked_are_bounded(tmp_path: Path) -> None:
    async def story() -> None:
        async with served(tmp_path) as made:
            own = {"Host": HOST, "Origin": URL}
            guesses = [made.ask("POST", LOGIN, own, {"token": f"guess-{at}"}) for at in range(2 * REVIEWS_WAITING_MAX)]
            statuses = {status for status, _, _ in await asyncio.gather(*guesses)}
            assert statuses == {401, 503}
            assert await made.status("GET", "/you", made.bearing(made.tokens.admin)) == 200

    asyncio.run(story())
