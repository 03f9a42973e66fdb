"""Rules of a console that several users reach under one address: a session is a user's own token, of the API server.

Nothing is kept here but which tokens were accepted lately: the token is in a cookie that no script can read, or in the
header that a proxy adds after it has logged the user in.
"""

from __future__ import annotations

import collections
import hashlib
import hmac
import re
from collections.abc import Awaitable, Callable, Sequence
from enum import StrEnum
from urllib.parse import urlsplit

from aiohttp import web

from polyreme.console.guard import FORM_TOKEN, SAFE_METHODS, Guard, Handler, RefusedRequestError, cookie_of
from polyreme.report.svg import safe
from polyreme_api.clock import Clock
from polyreme_api.errors import InvalidConfigError
from polyreme_system.addresses import is_loopback

LOGIN, LOGOUT, READY = "/login", "/logout", "/ready"
TOKEN = "token"
KNOWN_S = 60.0
"""How long an accepted token is not asked about again; each read and write is checked by the API server anyway."""
KNOWN_MAX = 4096
TOKEN_CHARACTERS_MAX = 3800
"""Browsers keep cookies of 4,096 bytes, with name and attributes."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")
Review = Callable[[str], Awaitable[str]]
"""Returns the user of a token, or raises a RefusedRequestError."""


class Login(StrEnum):
    """How users show who they are."""

    FORM = "form"
    """They give a token to a form."""
    PROXY = "proxy"
    """A proxy logs them in, and adds their token to each request."""


class ConsoleAddress:
    """Where browsers reach a console, and where their requests hold the user's token.

    Args:
        url: Address of the console in browsers; https, but for this machine's loopback.
        login: How users show who they are.

    Raises:
        InvalidConfigError: If the address is none, or would send tokens in the clear.
    """

    def __init__(self, url: str, login: Login) -> None:
        self.host, self.origin = _own_address(url)
        self.has_form = login is Login.FORM
        self.secure = self.origin.startswith("https:")
        # Browsers accept a cookie with this prefix only from the host itself, over https.
        self.cookie = "__Host-polyreme-console" if self.secure else "polyreme-console"

    def token(self, request: web.Request) -> str:
        """Return the user's token, from the one place where this console expects it; empty: there is none."""
        if self.has_form:
            given = cookie_of(request, self.cookie)
        else:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            given = given.strip() if scheme.lower() == "bearer" else ""
        return given if _TOKEN.fullmatch(given) else ""


class TokenGuard(Guard):
    """Sessions of users.

    Args:
        own: The console's address.
        review: Asks the API server whose token it is.
        clock: Of this machine.
    """

    def __init__(self, own: ConsoleAddress, *, review: Review, clock: Clock) -> None:
        self._own, self._review, self._clock = own, review, clock
        self._known: collections.OrderedDict[bytes, float] = collections.OrderedDict()

    def check_host(self, request: web.Request) -> None:
        """Refuse a request for another name; a probe of the kubelet names the pod's address."""
        if request.path == READY:
            return
        host = request.headers.get("Host", "")
        if host.lower() != self._own.host:
            raise RefusedRequestError(
                403, f"forbidden: the request names host {host[:64]!r}, expected {self._own.host}"
            )

    def origin(self, request: web.Request) -> str:
        """Return the console's own, whatever a proxy in front made of the request."""
        del request
        return self._own.origin

    def is_open(self, request: web.Request) -> bool:
        """The way in is, and what its page needs: files that are the same for all."""
        if request.method in SAFE_METHODS:
            return request.path == READY or request.path.startswith("/assets/")
        return request.path == LOGIN and request.method == "POST" and self._own.has_form

    async def check_session(self, request: web.Request) -> None:
        """Refuse a request without a token that the API server accepts."""
        token = self._own.token(request)
        if not token:
            words = "log in" if self._own.has_form else "the proxy in front has added no token"
            raise RefusedRequestError(401, f"no session: {words}")
        key, now_s = hashlib.sha256(token.encode()).digest(), self._clock.steady_s()
        if self._known.get(key, now_s) > now_s:
            return
        await self._review(token)
        self._known[key] = now_s + KNOWN_S
        self._known.move_to_end(key)
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)

    def form_token_of(self, request: web.Request) -> str:
        """Return what only the holder of the token can know."""
        return hmac.new(self._own.token(request).encode(), b"form of polyreme's console", hashlib.sha256).hexdigest()

    def routes(self) -> Sequence[tuple[str, str, Handler]]:
        """Return the form's target, the way out, and what a probe asks."""
        ready = ("GET", READY, _ready)
        return (("POST", LOGIN, self._log_in), ("POST", LOGOUT, self._log_out), ready)

    def way_in(self) -> str:
        """Return the form that takes a token."""
        if not self._own.has_form:
            return ""
        return (
            f'<form method="post" action="{LOGIN}" class="card"><p><label>Token of the Kubernetes API '
            f'<input type="password" name="{TOKEN}" required autocomplete="off" size="48"></label></p>'
            "<p class='soft'>For example of <code>kubectl create token NAME -n NAMESPACE</code>. It stays in a cookie "
            "of this browser until you log out, and each page is read with it.</p><button class='main'>Log in</button>"
            "</form>"
        )

    def way_out(self, request: web.Request) -> str:
        """Return the button that ends a session."""
        if not self._own.has_form:
            return ""
        hidden = f'<input type="hidden" name="{FORM_TOKEN}" value="{safe(self.form_token_of(request))}">'
        return f'<form method="post" action="{LOGOUT}">{hidden}<button class="main">Log out</button></form>'

    async def _log_in(self, request: web.Request) -> web.Response:
        if not self._own.has_form:
            raise RefusedRequestError(404, "this console has no form to log in: its proxy does that")
        given = str((await request.post()).get(TOKEN, "")).strip()
        if not _TOKEN.fullmatch(given) or len(given) > TOKEN_CHARACTERS_MAX:
            raise RefusedRequestError(
                401, f"that is no token: {len(given)} characters, expected 1 to {TOKEN_CHARACTERS_MAX} without spaces"
            )
        await self._review(given)
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(
            self._own.cookie, given, httponly=True, samesite="Strict", secure=self._own.secure, path="/"
        )
        return response

    async def _log_out(self, request: web.Request) -> web.Response:
        del request
        response = web.Response(status=303, headers={"Location": "/"})
        response.del_cookie(self._own.cookie, httponly=True, samesite="Strict", secure=self._own.secure, path="/")
        return response


async def _ready(request: web.Request) -> web.Response:
    del request
    return web.Response(text="ok\n")


def _own_address(url: str) -> tuple[str, str]:
    """Return the Host and the Origin that browsers send for an address."""
    try:
        parts = urlsplit(url.lower())
        named, port = parts.hostname or "", parts.port
    except ValueError:
        named, port, parts = "", None, urlsplit("")
    if (
        not named
        or parts.scheme not in {"https", "http"}
        or parts.path not in {"", "/"}
        or parts.query
        or parts.fragment
    ):
        raise InvalidConfigError(
            f"address {url!r} is none of a console, expected one such as https://polyreme.example.com"
        )
    if parts.scheme == "http" and named != "localhost" and not is_loopback(named):
        raise InvalidConfigError(f"address {url!r} would send tokens in the clear, expected https", field="--url")
    host = f"[{named}]" if ":" in named else named
    is_default = port in {None, 443 if parts.scheme == "https" else 80}
    both = host if is_default else f"{host}:{port}"
    return both, f"{parts.scheme}://{both}"
