"""A console for all users on a real API server: with real tokens each user sees and does what RBAC allows, no more."""

import asyncio
import contextlib
import dataclasses
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from aiohttp import ClientSession, DummyCookieJar
from aiohttp.test_utils import TestServer

from polyreme.console.guard import FORM_TOKEN
from polyreme.console.job_form import as_yaml
from polyreme.console.token_guard import LOGIN, Login
from polyreme.plugin.console.served import served_console
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import Connection, from_kubeconfig
from polyreme_cluster.port import ClusterPort, ObjectRef
from polyreme_system.clock import SystemClock
from tests.cluster.kube import api_client, authority, kubectl, new_namespace
from tests.cluster.outages import Line
from tests.contract.run_sources import job_of
from tests.live_page import until_back, until_ready
from tools.cluster.servers import free_ports

URL = "https://polyreme.example.com"
STORY_S, WITHDRAWN_S = 120, 60
SEED = 987_654
"""Of a job, by which its spec is found in a page."""
READS = "--verb=get,list"
SHOWN = "--resource=trainingjobs.polyreme.dev,pods,events,leases.coordination.k8s.io"


@dataclasses.dataclass(frozen=True)
class User:
    """A browser with a session."""

    session: ClientSession
    address: str
    headers: Mapping[str, str]

    async def ask(self, method: str, path: str, **form: str) -> tuple[int, str]:
        """Send a request, with what a form of this session has; return status and answer, or where it leads."""
        data = form or None
        async with self.session.request(
            method, self.address + path, headers=self.headers, data=data, allow_redirects=False
        ) as response:
            return response.status, response.headers.get("Location") or await response.text()

    async def get(self, path: str) -> str:
        status, page = await self.ask("GET", path)
        assert status == 200, page
        return page

    async def form(self) -> dict[str, str]:
        page = await self.get("/submit")
        return {FORM_TOKEN: page.partition(f'name="{FORM_TOKEN}" value="')[2].partition('"')[0]}


class Office:
    """A console, and users with tokens of their own."""

    def __init__(self, kubeconfig: str, address: str, session: ClientSession, *, origin: str = URL) -> None:
        self._kubeconfig = kubeconfig
        self._address, self._session, self._origin = address, session, origin
        self.routes: list[tuple[str, str]] = []

    def account(self, namespace: str, name: str, *rules: str) -> str:
        """Make an account that may do something in a namespace, and return its token."""
        kubectl(self._kubeconfig, "create", "serviceaccount", name, "-n", namespace)
        kubectl(self._kubeconfig, "create", "role", name, "-n", namespace, *rules)
        subject = f"--serviceaccount={namespace}:{name}"
        kubectl(self._kubeconfig, "create", "rolebinding", name, "-n", namespace, f"--role={name}", subject)
        return kubectl(self._kubeconfig, "create", "token", name, "-n", namespace).strip()

    def dismiss(self, namespace: str, name: str) -> None:
        """Withdraw an account's tokens."""
        kubectl(self._kubeconfig, "delete", "serviceaccount", name, "-n", namespace)

    async def log_in(self, token: str) -> User:
        own = {"Host": self._origin.partition("//")[2], "Origin": self._origin}
        async with self._session.post(
            self._address + LOGIN, headers=own, data={"token": token}, allow_redirects=False
        ) as response:
            assert response.status == 303, await response.text()
            cookie = response.headers["Set-Cookie"].partition(";")[0]
        return User(self._session, self._address, own | {"Cookie": cookie})


@contextlib.asynccontextmanager
async def office(
    kubeconfig: str, folder: Path, namespace: str, *, url: str = ""
) -> AsyncIterator[tuple[Office, ClusterPort]]:
    with_account = from_kubeconfig(kubeconfig)
    # The certificate of the cluster's authority, and no account, as in a pod of the chart.
    tls = ssl.create_default_context(cadata=authority(kubeconfig))
    connection = Connection(url=url or with_account.url, tls=tls, authorization=lambda: None)
    console = served_console(connection, folder, SystemClock(), url=URL, login=Login.FORM, namespace=namespace)
    application = console.application()
    async with (
        KubernetesCluster(with_account) as cluster,
        TestServer(application) as server,
        ClientSession(cookie_jar=DummyCookieJar()) as session,
        asyncio.timeout(STORY_S),
    ):
        made = Office(kubeconfig, str(server.make_url("/")).rstrip("/"), session)
        made.routes = [
            (route.method, route.resource.canonical) for route in application.router.routes() if route.resource
        ]
        yield made, cluster


@pytest.fixture
def namespaces(kubeconfig: str) -> Iterator[tuple[str, str]]:
    with api_client(kubeconfig) as api, new_namespace(api) as own, new_namespace(api) as other:
        yield own, other


def test_two_users_see_and_do_theirs_alone(kubeconfig: str, namespaces: tuple[str, str], tmp_path: Path) -> None:
    own, other = namespaces

    async def story() -> None:
        async with office(kubeconfig, tmp_path, own) as (made, cluster):
            for namespace in (own, other):
                await cluster.create(job_of(namespace, f"big-{namespace[-4:]}"))
            writes = ("--verb=get,list,create,patch,delete", SHOWN)
            ada = await made.log_in(await asyncio.to_thread(made.account, own, "ada", *writes))
            bob = await made.log_in(await asyncio.to_thread(made.account, other, "bob", *writes))
            eve = await made.log_in(await asyncio.to_thread(made.account, own, "eve", READS, SHOWN))
            mine, theirs = f"/runs/{own}/big-{own[-4:]}", f"/runs/{other}/big-{other[-4:]}"
            assert f"system:serviceaccount:{own}:ada" in await ada.get("/you")
            for user, path, foreign in ((ada, mine, other), (bob, theirs, own), (eve, mine, other)):
                namespace = path.split("/")[2]
                page = await user.get(f"/?namespace={namespace}")
                assert path in page
                status, refusal = await user.ask("GET", f"/?namespace={foreign}")
                assert status == 403
                assert "you may not list trainingjobs" in refusal
                assert 'name="namespace"' in refusal, "another one can be chosen"
            form = await eve.form()
            status, refusal = await eve.ask("POST", f"{mine}/actions/delete", **form)
            assert status == 403, refusal
            assert "cannot delete resource" in refusal
            job = {"base": as_yaml(job_of(own, "new"))}
            status, refusal = await eve.ask("POST", "/submit/check", **form, **job)
            assert "cannot create resource" in refusal
            assert (await eve.ask("POST", "/submit", **form, **job))[0] == 403
            assert (await eve.ask("POST", f"{mine}/actions/suspend", **await ada.form()))[0] == 403
            assert (await ada.ask("POST", "/submit", **await ada.form(), **job)) == (303, f"/runs/{own}/new")
            assert (await ada.ask("POST", f"{mine}/actions/suspend", **await ada.form()))[0] == 303
            found = await cluster.get(ObjectRef(kind="TrainingJob", namespace=own, name=f"big-{own[-4:]}"))
            assert found["spec"]["suspend"] is True
            assert "may not list" in await ada.get("/queues")

    asyncio.run(story())


def test_each_route_refuses_a_foreign_namespace(kubeconfig: str, namespaces: tuple[str, str], tmp_path: Path) -> None:
    own, other = namespaces

    async def story() -> None:
        async with office(kubeconfig, tmp_path, own) as (made, cluster):
            job = await cluster.create(job_of(other, "big", seed=SEED))
            rules = ("--verb=get,list,create,patch,delete", SHOWN)
            ada = await made.log_in(await asyncio.to_thread(made.account, own, "ada", *rules))
            form, tried = await ada.form(), 0
            for method, path in made.routes:
                if "{namespace}" not in path:
                    continue
                for action in ("suspend", "scale", "delete") if "{action}" in path else ("",):
                    named = path.format(namespace=other, name="big", action=action)
                    sent = form | {"number": "2"} if method == "POST" else {}
                    status, refusal = await ada.ask(method, named, **sent)
                    assert status == 403, (method, named, status, refusal)
                    tried += 1
            assert tried >= 7
            for path in (f"/live/runs?namespace={other}", f"/submit?from={other}/big", f"/?namespace={other}"):
                assert (await ada.ask("GET", path))[0] == 403, path
            compared = await ada.get(f"/compare?run={other}/big&run={other}/big-2")
            assert compared.count("is left out") == 2
            assert str(SEED) not in compared
            foreign = {"base": as_yaml(job_of(other, "new"))}
            assert (await ada.ask("POST", "/submit", **form, **foreign))[0] == 403
            assert await cluster.get(ObjectRef.of(job)) == job

    asyncio.run(story())


def test_a_withdrawn_token_is_asked_for_again(kubeconfig: str, namespaces: tuple[str, str], tmp_path: Path) -> None:
    own, _ = namespaces

    async def story() -> None:
        async with office(kubeconfig, tmp_path, own) as (made, cluster):
            await cluster.create(job_of(own, "big"))
            ada = await made.log_in(await asyncio.to_thread(made.account, own, "ada", READS, SHOWN))
            async with ada.session.get(f"{ada.address}/live/runs", headers=ada.headers) as live:
                assert f"/runs/{own}/big" in (await live.content.readuntil(b"\n\n")).decode()
                await asyncio.to_thread(made.dismiss, own, "ada")
                async with asyncio.timeout(WITHDRAWN_S):
                    while "log in again" not in (await live.content.readuntil(b"\n\n")).decode():
                        pass
            status, page = await ada.ask("GET", "/")
            assert (status, 'type="password"' in page) == (401, True)

    asyncio.run(story())


def test_a_cluster_that_goes_away_comes_back_to_the_open_page(
    kubeconfig: str, namespaces: tuple[str, str], tmp_path: Path
) -> None:
    own, _ = namespaces

    async def story() -> None:
        line = Line(from_kubeconfig(kubeconfig).url)
        try:
            async with office(kubeconfig, tmp_path, own, url=line.url) as (made, cluster):
                await cluster.create(job_of(own, "big"))
                ada = await made.log_in(await asyncio.to_thread(made.account, own, "ada", READS, SHOWN))
                async with ada.session.get(f"{ada.address}/live/runs", headers=ada.headers) as live:
                    assert f"/runs/{own}/big" in (await live.content.readuntil(b"\n\n")).decode()
                    await asyncio.to_thread(line.cut)
                    assert "does not answer" in (await live.content.readuntil(b"\n\n")).decode()
                    await asyncio.to_thread(line.mend)
                    await until_back(live.content, f"/runs/{own}/big")
        finally:
            await asyncio.to_thread(line.close)

    asyncio.run(story())


def test_the_process_of_the_chart_answers_and_ends(
    kubeconfig: str, namespaces: tuple[str, str], tmp_path: Path
) -> None:
    own, _ = namespaces
    (port,) = free_ports(1)
    server = urlsplit(from_kubeconfig(kubeconfig).url)
    (tmp_path / "ca.crt").write_text(authority(kubeconfig))
    variables = {"KUBERNETES_SERVICE_HOST": str(server.hostname), "KUBERNETES_SERVICE_PORT": str(server.port)}
    words = [f"--url=http://localhost:{port}", f"--listen=127.0.0.1:{port}", f"--authority={tmp_path / 'ca.crt'}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "polyreme.plugin.console", *words, f"--namespace={own}"],
        env={**os.environ, **variables, "HOME": str(tmp_path)},
        stderr=subprocess.PIPE,
    )

    async def story() -> None:
        async with ClientSession(cookie_jar=DummyCookieJar()) as session, asyncio.timeout(STORY_S):
            await until_ready(session, f"http://127.0.0.1:{port}/ready")
            rules = ("--verb=get,list,create", SHOWN)
            made = Office(kubeconfig, f"http://localhost:{port}", session, origin=f"http://localhost:{port}")
            ada = await made.log_in(await asyncio.to_thread(made.account, own, "ada", *rules))
            checked = await ada.ask("POST", "/submit/check", **await ada.form(), base=as_yaml(job_of(own, "new")))
            assert "The API server accepts it (dry run)" in checked[1]
            assert "no run here yet" in await ada.get("/")

    try:
        asyncio.run(story())
    finally:
        process.terminate()
        _, said = process.communicate(timeout=STORY_S)
    assert process.returncode == 0, said
    assert b"eyJ" not in said, "no token is in the log"
