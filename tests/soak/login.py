"""``make soak-login``: single sign-on as the how-to says: an OpenID issuer, oauth2-proxy, a console, a real API server.

Users whom the issuer knows see and do what RBAC lets them, and a spent token is a sentence on the open page. Go builds
oauth2-proxy; the issuer is ``oidc-provider-mock`` in an environment of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import urljoin, urlsplit

sys.path.insert(0, str(Path(__file__).parents[2]))

from aiohttp import ClientSession, CookieJar, TCPConnector

from polyreme.console.guard import FORM_TOKEN
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.port import ObjectRef
from tests.cluster.kube import apply_crds, authority, kubectl
from tests.contract.run_sources import job_of
from tests.live_page import until_ready
from tests.private_authority import issue
from tools.build_cache import built, cache_folder
from tools.cluster.cluster import down, up
from tools.cluster.servers import free_ports
from tools.environments import environment

ISSUER = ["oidc-provider-mock==0.3.4"]
PROXY = "github.com/oauth2-proxy/oauth2-proxy/v7@v7.15.6"
HOW_TO = Path(__file__).parents[2] / "docs/how-to/console.md"
HOST, CLIENT = "127.0.0.1", "polyreme"
TOKEN_S = 60
READY_S, STORY_S = 60.0, 300.0
RULES = ("--verb=get,list,create,patch", "--resource=trainingjobs.polyreme.dev,pods,events,leases.coordination.k8s.io")
SERVE = """
import datetime, ssl, sys
from oidc_provider_mock import User, app
from werkzeug.serving import make_server
claims = lambda name: {"email": f"{name}@example.com", "email_verified": True}
users = [User(sub=name, claims=claims(name)) for name in ("ada", "eve")]
app = app(access_token_max_age=datetime.timedelta(seconds=int(sys.argv[4])), user_claims=users)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain(sys.argv[2], sys.argv[3])
make_server("127.0.0.1", int(sys.argv[1]), app, threaded=True, ssl_context=context).serve_forever()
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Place:
    """Where everything listens."""

    folder: Path
    issuer: str
    authority: Path
    proxy: str
    console: str


def main() -> int:
    """Run the story; 0 when each user has seen and done what is theirs."""
    if "KUBECONFIG" in os.environ:
        print("unset KUBECONFIG: the API server needs options of its own", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        issuer_port, proxy_port, console_port = free_ports(3)
        issuer_authority, certificate = issue(folder / "keys", HOST)
        place = Place(
            folder=folder,
            issuer=f"https://{HOST}:{issuer_port}",
            authority=issuer_authority,
            proxy=f"http://localhost:{proxy_port}",
            console=f"http://{HOST}:{console_port}",
        )
        served = [str(issuer_port), str(certificate.path), str(certificate.key), str(TOKEN_S)]
        with running("issuer", [str(environment("login", ISSUER)), "-c", SERVE, *served], folder):
            options = [f"--oidc-issuer-url={place.issuer}", f"--oidc-client-id={CLIENT}", "--oidc-username-claim=email"]
            try:
                kubeconfig = up(
                    folder / "cluster", os.environ, api_options=[*options, f"--oidc-ca-file={place.authority}"]
                )
                apply_crds(kubeconfig)
                asyncio.run(story(place, kubeconfig))
            finally:
                down(folder / "cluster")
    return 0


async def story(place: Place, kubeconfig: str) -> None:
    """Ada may; Eve may nothing."""
    kubectl(kubeconfig, "create", "role", "ada", "-n", "default", *RULES)
    kubectl(kubeconfig, "create", "rolebinding", "ada", "-n", "default", "--role=ada", "--user=ada@example.com")
    async with KubernetesCluster(from_kubeconfig(kubeconfig)) as cluster:
        job = ObjectRef.of(await cluster.create(job_of("default", "big")))
        with console(place, kubeconfig), oauth2_proxy(place):
            async with (
                asyncio.timeout(STORY_S),
                browser(place) as ada,
                browser(place) as eve,
                browser(place) as anonymous,
            ):
                await until_ready(anonymous, f"{place.console}/ready")
                await until_ready(anonymous, f"{place.proxy}/ping")
                own_host = {"Host": urlsplit(place.proxy).netloc}
                async with anonymous.get(place.console, headers=own_host) as page:
                    assert page.status == 401, "a request that did not come through the proxy has no token"
                status, seen = await log_in(ada, place, "ada")
                assert status == 200
                assert "/runs/default/big" in seen
                status, seen = await log_in(eve, place, "eve")
                assert status == 403
                assert "may not list" in seen
                assert "/runs/default/big" not in seen
                await suspend(ada, place, refused=False)
                assert (await cluster.get(job))["spec"]["suspend"] is True
                await suspend(eve, place, refused=True)
                async with ada.get(f"{place.proxy}/live/runs") as live:
                    assert "/runs/default/big" in (await live.content.readuntil(b"\n\n")).decode()
                    while "log in again" not in (said := (await live.content.readuntil(b"\n\n")).decode()):
                        pass
                    print(f"after {TOKEN_S} s: {re.sub('<[^>]*>|data:|event:', ' ', said).split()[:24]}")


async def log_in(session: ClientSession, place: Place, name: str) -> tuple[int, str]:
    """Follow the proxy to the issuer, say who one is, and return the page that one comes back to."""
    async with session.get(f"{place.proxy}/oauth2/start?rd=/") as form:
        assert str(form.url).startswith(place.issuer), form.url
        target, content = form.url, await form.text()
    assert "<form" in content, content
    async with session.post(target, data={"sub": name, "action": "authorize"}) as page:
        assert str(page.url) == f"{place.proxy}/", (page.url, await page.text())
        return page.status, await page.text()


async def suspend(session: ClientSession, place: Place, *, refused: bool) -> None:
    """Ask for it as the page's form does."""
    async with session.get(f"{place.proxy}/submit") as page:
        token = (await page.text()).partition(f'name="{FORM_TOKEN}" value="')[2].partition('"')[0]
    sent = {FORM_TOKEN: token}
    url = urljoin(place.proxy, "/runs/default/big/actions/suspend")
    async with session.post(url, data=sent, headers={"Origin": place.proxy}, allow_redirects=False) as answer:
        assert answer.status == (403 if refused else 303), await answer.text()


def browser(place: Place) -> ClientSession:
    """A client that keeps cookies, and trusts the issuer's authority."""
    tls = ssl.create_default_context(cafile=place.authority)
    return ClientSession(cookie_jar=CookieJar(unsafe=True), connector=TCPConnector(ssl=tls))


@contextlib.contextmanager
def console(place: Place, kubeconfig: str) -> Iterator[None]:
    """The console of the chart, with a proxy in front."""
    server, listen = urlsplit(from_kubeconfig(kubeconfig).url), urlsplit(place.console)
    certificate = place.folder / "cluster.crt"
    certificate.write_text(authority(kubeconfig))
    words = [f"--url={place.proxy}", f"--listen={listen.netloc}", f"--authority={certificate}", "--login=proxy"]
    variables = {"KUBERNETES_SERVICE_HOST": str(server.hostname), "KUBERNETES_SERVICE_PORT": str(server.port)}
    with running("console", [sys.executable, "-m", "polyreme.plugin.console", *words], place.folder, variables):
        yield


@contextlib.contextmanager
def oauth2_proxy(place: Place) -> Iterator[None]:
    """oauth2-proxy with the how-to's flags, and those that every installation gives."""
    (shown,) = re.findall(r"^    (--provider=oidc .*)$", HOW_TO.read_text(), re.MULTILINE)
    flags = shown.replace("https://issuer.example", place.issuer)
    flags = re.sub(r"--upstream=\S+", f"--upstream={place.console}", flags)
    own = [
        f"--http-address={HOST}:{urlsplit(place.proxy).port}",
        f"--redirect-url={place.proxy}/oauth2/callback",
        f"--provider-ca-file={place.authority}",
        f"--client-id={CLIENT}",
        "--client-secret=of-the-soak",
        f"--cookie-secret={os.urandom(16).hex()}",
        "--cookie-secure=false",
        "--email-domain=*",
    ]
    with running("oauth2-proxy", [str(proxy_program()), *flags.split(), *own], place.folder):
        yield


def proxy_program() -> Path:
    """Build oauth2-proxy, once for all checkouts."""
    folder = cache_folder(os.environ, "oauth2-proxy", [PROXY.encode()])
    program = folder / "oauth2-proxy"

    def make() -> None:
        subprocess.run(["go", "install", PROXY], env={**os.environ, "GOBIN": str(folder)}, check=True)

    built(program, make)
    return program


@contextlib.contextmanager
def running(name: str, command: list[str], folder: Path, variables: Mapping[str, str] | None = None) -> Iterator[None]:
    """Run a server; a block that fails shows the end of what it said."""
    log = folder / f"{name}.log"
    with log.open("w") as said:
        given = {**os.environ, **(variables or {})}
        process = subprocess.Popen(command, env=given, stdout=said, stderr=subprocess.STDOUT)
    try:
        yield
    except BaseException:
        print(f"--- {name}\n{log.read_text()[-4000:]}", file=sys.stderr)
        raise
    finally:
        process.terminate()
        process.wait(READY_S)


if __name__ == "__main__":
    raise SystemExit(main())
