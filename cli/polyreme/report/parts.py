"""Tables, bars and names of the report's pages, and of the console's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polyreme.report.style import STYLE
from polyreme.report.svg import safe

ROWS_MAX = 200
"""Rows of one table; a sentence counts the others."""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def document(title: str, body: str, *, style: str = "") -> str:
    """Write an HTML file without scripts and without references to anything outside it.

    Args:
        title: Of the window, as text.
        body: HTML.
        style: Rules beyond those of all pages.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{safe(_POLICY)}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{safe(title)}</title><style>{STYLE}{style}</style></head>\n<body><main>{body}</main></body></html>\n"
    )


def table(heads: Sequence[str], rows: Sequence[Iterable[str]]) -> str:
    """Write a table of cells that are HTML already; heads that begin with ``#`` are of columns of numbers.

    A column without a head holds pictures of the numbers beside it. What may scroll can be reached by the keyboard.
    """
    classes = [' class="n"' if len(head) > 1 and head.startswith("#") else "" for head in heads]
    names = [head[1:] if style else head for head, style in zip(heads, classes, strict=True)]
    top = "".join(
        f"<th{style}>{safe(name)}</th>" if name else "<td></td>" for name, style in zip(names, classes, strict=True)
    )
    body = "".join(
        f"<tr>{''.join(f'<td{style}>{cell}</td>' for cell, style in zip(row, classes, strict=True))}</tr>"
        for row in rows[:ROWS_MAX]
    )
    more = f'<p class="soft">and {len(rows) - ROWS_MAX:,} more</p>' if len(rows) > ROWS_MAX else ""
    said = safe(", ".join(filter(None, names)))
    return (
        f'<div class="card table" tabindex="0" role="region" aria-label="table of {said}"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>{more}</div>"
    )


def meter(ratio: float, kind: str) -> str:
    """Draw a share, 0 to 1, as a bar; its number is beside it."""
    width = min(max(ratio, 0.0), 1.0) * 100
    return (
        '<svg class="meter" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect class="{safe(kind)}" width="{width:.1f}" height="8"/></svg>'
    )


def code(text: str) -> str:
    """Write a name as code."""
    return f"<code>{safe(text)}</code>"
