"""Files that pages refer to: the style sheets, and two scripts of others, vendored as they were published."""

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
        package="htmx.org 4.0.1 of the npm registry: dist/htmx.min.js without the line that names its source map",
        licence="0BSD",
        sha256="a0abb04f2f45a1f89d1d4844023245537e5e6014c87b144553e0607b4cc32130",
    ),
    Vendored(
        name="hx-sse.min.js",
        package="htmx.org 4.0.1 of the npm registry: dist/ext/hx-sse.min.js without the line that names its source map",
        licence="0BSD",
        sha256="18ef2761356ec1fe0bb6d92612315b37517a7c1e9856b661c5ae81fef239d103",
    ),
    Vendored(
        name="htmx.LICENSE",
        package="htmx.org 4.0.1 of the npm registry: LICENSE",
        licence="0BSD",
        sha256="d3d2456f76414f2456104660ebd65aff1c04cd7966b942bdabd63f3cdb316a38",
    ),
)
SCRIPTS = ("htmx.min.js", "hx-sse.min.js")
STYLE = "console.css"


def vendored_bytes(name: str) -> bytes:
    """Read a vendored file."""
    return (resources.files("polyreme.console") / "static" / name).read_bytes()


def asset(name: str) -> web.Response:
    """Answer with a file; its path has the version of polyreme, so browsers may keep it.

    Raises:
        HTTPNotFound: If there is no such file.
    """
    if name == STYLE:
        body, kind = (REPORT_STYLE + CONSOLE_STYLE).encode(), "text/css"
    elif name in SCRIPTS:
        body, kind = vendored_bytes(name), "text/javascript"
    else:
        raise web.HTTPNotFound
    response = web.Response(body=body, content_type=kind, charset="utf-8")
    response.headers["Cache-Control"] = f"private, max-age={YEAR_S}, immutable"
    response.enable_compression()
    return response
