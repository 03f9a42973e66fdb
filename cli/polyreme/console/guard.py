"""Rules for every request to a console: its host, its origin, a session, and a form of that session for a change.

They apply by default. Only what a guard names in ``is_open`` is answered without a session.
"""

from __future__ import annotations

import abc
import hmac
import secrets
from collections.abc import Awaitable, Callable, Sequence
from http.cookies import CookieError, SimpleCookie

from aiohttp import web

from polyreme.serving.access import Access
from polyreme_api.errors import RefusedError

START = "/start"
SAFE_METHODS = frozenset({"GET", "HEAD"})
FORM_TOKEN = "form_token"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class RefusedRequestError(RefusedError):
    """A request that is not answered."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Guard(abc.ABC):
    """The rules, but for what a session is."""

    async def check(self, request: web.Request) -> None:
        """Refuse what is not allowed.

        Raises:
            RefusedRequestError: With status and reason.
        """
        self.check_host(request)
        origin, safe = request.headers.get("Origin"), request.method in SAFE_METHODS
        if origin is not None and origin != self.origin(request):
            raise RefusedRequestError(
                403, f"forbidden: the request comes from {origin[:64]!r}, expected this console's pages"
            )
        if origin is None and not safe:
            raise RefusedRequestError(
                403, f"forbidden: {request.method} without an Origin, expected one of this console's pages"
            )
        if self.is_open(request):
            return
        await self.check_session(request)
        if safe:
            return
        given = (await request.post()).get(FORM_TOKEN, "")
        if not isinstance(given, str) or not is_same(given, self.form_token_of(request)):
            raise RefusedRequestError(403, "forbidden: the form is not of this session; reload the page and try again")

    @abc.abstractmethod
    def check_host(self, request: web.Request) -> None:
        """Refuse a request that names another host: a page of another name must not reach this console."""

    @abc.abstractmethod
    def origin(self, request: web.Request) -> str:
        """Return the origin of the console's own pages."""

    @abc.abstractmethod
    def is_open(self, request: web.Request) -> bool:
        """Tell whether a request is answered without a session."""

    @abc.abstractmethod
    async def check_session(self, request: web.Request) -> None:
        """Refuse a request without a session."""

    @abc.abstractmethod
    def form_token_of(self, request: web.Request) -> str:
        """Return the field of each form of a session; a page of another origin can't read it."""

    @abc.abstractmethod
    def routes(self) -> Sequence[tuple[str, str, Handler]]:
        """Return method, path and handler of what opens and ends a session."""

    def way_in(self) -> str:
        """Return what a page without a session offers, as HTML."""
        return ""

    def way_out(self, request: web.Request) -> str:
        """Return what ends a session, as HTML."""
        del request
        return ""


class LinkGuard(Guard):
    """One session of the user of this machine, which a link opens.

    Args:
        on_started: Is called when a start link was used, since it is good for one browser: the next one is printed.
    """

    def __init__(self, on_started: Callable[[], object] = lambda: None) -> None:
        self._access = Access(None)
        self._start_token = secrets.token_urlsafe(32)
        self._session = secrets.token_urlsafe(32)
        self._on_started = on_started
        self.form_token = secrets.token_urlsafe(32)

    def start_path(self) -> str:
        """Return path and query of the link that opens a session, once."""
        return f"{START}?token={self._start_token}"

    def check_host(self, request: web.Request) -> None:
        """Refuse what does not name this machine's loopback."""
        refusal = self._access.refusal(authorization="", host=request.headers.get("Host", ""))
        if refusal is not None:
            raise RefusedRequestError(*refusal)

    def origin(self, request: web.Request) -> str:
        """Return the origin under which the browser reached the console."""
        return f"{request.scheme}://{request.headers.get('Host', '')}"

    def is_open(self, request: web.Request) -> bool:
        """Only the start link is."""
        return request.path == START and request.method in SAFE_METHODS

    async def check_session(self, request: web.Request) -> None:
        """Refuse a request without the session's cookie."""
        if not is_same(cookie_of(request, _cookie_name(request)), self._session):
            raise RefusedRequestError(
                401, "no session: open the link that the command has printed; it is good for one browser"
            )

    def form_token_of(self, request: web.Request) -> str:
        """Return the same for all requests: there is one session."""
        del request
        return self.form_token

    def routes(self) -> Sequence[tuple[str, str, Handler]]:
        """Return the start link."""
        return (("GET", START, self._start),)

    async def _start(self, request: web.Request) -> web.Response:
        """Open a session for the browser that brings the start link."""
        if not is_same(request.query.get("token", ""), self._start_token):
            raise RefusedRequestError(
                401, "this link was used, or is of another console; use the newest one that was printed"
            )
        response = web.Response(status=303, headers={"Location": "/"})
        if request.method == "GET":
            self._start_token = secrets.token_urlsafe(32)
            self._on_started()
            response.set_cookie(_cookie_name(request), self._session, httponly=True, samesite="Strict", path="/")
        return response


def harden(response: web.StreamResponse) -> None:
    """Add the headers of a response that keep other pages and scripts out, unless it has its own."""
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)


def cookie_of(request: web.Request, name: str) -> str:
    """Return the value of a cookie; empty: there is none."""
    try:
        cookies = SimpleCookie(request.headers.get("Cookie", ""))
    except CookieError:
        return ""
    found = cookies.get(name)
    return "" if found is None else found.value


def is_same(given: str, expected: str) -> bool:
    """Compare secrets in constant time."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


def _cookie_name(request: web.Request) -> str:
    """Return the name of the cookie: ports of one host share cookies, and a machine may run several consoles."""
    return f"polyreme-console-{request.url.port}"
