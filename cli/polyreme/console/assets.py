"""Files that pages refer to: style sheets, a script of ours, and two of others, vendored as they were published."""

from __future__ import annotations

import dataclasses
from importlib import resources

from aiohttp import web

from polyreme.console.style import STYLE as CONSOLE_STYLE
from polyreme.report.style import STYLE as REPORT_STYLE

YEAR_S = 31_536_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Vendored:
    """A file that others wrote; a test compares it with its digest."""

    name: str
    package: str
    licence: str
    sha256: str


VENDORED = (
    Vendored(
        name="htmx.min.js",
        package="htmx.org 4.0.1 of the npm registry: dist/htmx.min.js its source map not named",
        licence="0BSD",
        sha256="5c57d9ce9972c4c0685c16d92310ad7d42c96a55cae6ce0b9012eda48248a8fe",
    ),
    Vendored(
        name="hx-sse.min.js",
        package="htmx.org 4.0.1 of the npm registry: dist/ext/hx-sse.min.js its source map not named",
        licence="0BSD",
        sha256="3d57e7b714d98610476704c43b4b93b782c3eb5c3994d31761d6e70cb3b5e38a",
    ),
    Vendored(
        name="htmx.LICENSE",
        package="htmx.org 4.0.1 of the npm registry: LICENSE",
        licence="0BSD",
        sha256="d3d2456f76414f2456104660ebd65aff1c04cd7966b942bdabd63f3cdb316a38",
    ),
)
SCRIPT, SCRIPTS = "console.js", ("htmx.min.js", "hx-sse.min.js", "live.js")
"""One file: htmx looks at the page soon after its own script has run, and overlooks an extension that comes later."""
STYLE = "console.css"


def static_bytes(name: str) -> bytes:
    """Read a file of this package."""
    return (resources.files("polyreme.console") / "static" / name).read_bytes()


def static_text(name: str) -> str:
    """Read a text of ours beside the vendored files."""
    return static_bytes(name).decode()


def asset(name: str) -> web.Response:
    """Answer with a file; its path has the version of polyreme, so browsers may keep it.

    Raises:
        HTTPNotFound: If there is no such file.
    """
    if name == STYLE:
        body, kind = (REPORT_STYLE + CONSOLE_STYLE).encode(), "text/css"
    elif name == SCRIPT:
        body, kind = b"\n".join(map(static_bytes, SCRIPTS)), "text/javascript"
    else:
        raise web.HTTPNotFound
    response = web.Response(body=body, content_type=kind, charset="utf-8")
    response.headers["Cache-Control"] = f"private, max-age={YEAR_S}, immutable"
    response.enable_compression()
    return response
