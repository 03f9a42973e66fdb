"""Rules for every request to the console: a name of this machine, a session, and an origin for what changes something.

They apply by default. Only the start link and nothing else is answered without a session.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable
from http.cookies import CookieError, SimpleCookie

from aiohttp import web

from polyreme.serving.access import Access

START = "/start"
SAFE_METHODS = frozenset({"GET", "HEAD"})
FORM_TOKEN = "form_token"
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


class RefusedRequestError(Exception):
    """A request that is not answered."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.message = status, message


class Guard:
    """The sessions of one console.

    Args:
        on_started: Is called when a start link was used, since it is good for one browser: the next one is printed.
    """

    def __init__(self, on_started: Callable[[], object] = lambda: None) -> None:
        self._access = Access(None)
        self._start_token = secrets.token_urlsafe(32)
        self._session = secrets.token_urlsafe(32)
        self._on_started = on_started
        self.form_token = secrets.token_urlsafe(32)
        """Field of each form; a page of another origin can't read it."""

    def start_path(self) -> str:
        """Return path and query of the link that opens a session, once."""
        return f"{START}?token={self._start_token}"

    async def check(self, request: web.Request) -> None:
        """Refuse what is not allowed.

        Raises:
            RefusedRequestError: With status and reason.
        """
        refusal = self._access.refusal(authorization="", host=request.headers.get("Host", ""))
        if refusal is not None:
            raise RefusedRequestError(*refusal)
        origin, own = request.headers.get("Origin"), f"{request.scheme}://{request.headers.get('Host', '')}"
        if origin is not None and origin != own:
            raise RefusedRequestError(
                403, f"forbidden: the request comes from {origin[:64]!r}, expected this console's pages"
            )
        if request.path == START and request.method in SAFE_METHODS:
            return
        if not _same(_cookie(request), self._session):
            raise RefusedRequestError(
                401, "no session: open the link that the command has printed; it is good for one browser"
            )
        if request.method in SAFE_METHODS:
            return
        if origin is None:
            raise RefusedRequestError(
                403, f"forbidden: {request.method} without an Origin, expected one of this console's pages"
            )
        given = (await request.post()).get(FORM_TOKEN, "")
        if not isinstance(given, str) or not _same(given, self.form_token):
            raise RefusedRequestError(403, "forbidden: the form is not of this session; reload the page and try again")

    def start(self, request: web.Request) -> web.Response:
        """Open a session for the browser that brings the start link.

        Raises:
            RefusedRequestError: If the link was used before, or is not of this console.
        """
        if not _same(request.query.get("token", ""), self._start_token):
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


def _cookie_name(request: web.Request) -> str:
    """Return the name of the cookie: ports of one host share cookies, and a machine may run several consoles."""
    return f"polyreme-console-{request.url.port}"


def _cookie(request: web.Request) -> str:
    try:
        cookies = SimpleCookie(request.headers.get("Cookie", ""))
    except CookieError:
        return ""
    found = cookies.get(_cookie_name(request))
    return "" if found is None else found.value


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())
