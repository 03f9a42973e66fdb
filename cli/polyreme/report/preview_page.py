"""The packs of a step as one HTML file that needs nothing else: images as the model sees them, and what it learns."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme.report.parts import document
from polyreme.report.svg import CHARACTERS_MAX, safe
from polyreme_datahub.loader.inspect.preview import Picture, PreviewDocument, PreviewPack, Span

PICTURE_BYTES_MAX = 32 * 2**20
"""All images of a page; of later ones the page says their size alone."""
POINT_PX = 3
"""Radius of a point on the page."""
STYLE = """
.document { margin: 10px 0; } .document p { white-space: pre-wrap; }
.document img { display: block; max-width: 100%; max-height: 420px; margin: 8px 0; border: 1px solid var(--line); }
.image { position: relative; display: table; margin: 8px 0; } .document .image img { margin: 0; max-height: none; }
.image svg, .document .image .mask { position: absolute; left: 0; top: 0; width: 100%; height: 100%; border: 0; }
.image svg { fill: none; stroke: var(--bad); }
.image svg * { stroke-width: 2; vector-effect: non-scaling-stroke; }
mark.rejected { background: var(--bad-bg); color: var(--bad); } .answer { display: block; margin-top: 6px; }
mark { background: var(--good-bg); color: var(--good); border-radius: 3px; padding: 1px 2px; }
.bar { height: 6px; border-radius: 3px; background: var(--lost); overflow: hidden; }
.bar i { display: block; height: 100%; background: var(--accent); }
"""


def build_preview(title: str, packs: Sequence[PreviewPack], *, of_packs: int) -> str:
    """Return the page.

    Args:
        title: Names job and step.
        packs: What is shown.
        of_packs: Packs of the whole step.
    """
    left = [PICTURE_BYTES_MAX]
    shown = f"{len(packs)} of {of_packs} packs"
    lead = (
        f'<p class="lead">{shown}, as ranks get them. The model reads everything and learns to write '
        "<mark>what is marked</mark>.</p>"
    )
    body = f"<h1>{safe(title)}</h1>{lead}{''.join(pack_section(pack, left) for pack in packs)}"
    return document(title, body, style=STYLE)


def pack_section(pack: PreviewPack, left: list[int], *, heading: str = "h2") -> str:
    """Show a pack.

    Args:
        pack: With its pictures.
        left: Bytes of pictures that the page still has room for; what the pack takes is subtracted.
        heading: Element of its heading.
    """
    filled = 100.0 * pack.tokens / pack.tokens_max
    return (
        f"<{heading}>Pack {pack.number}</{heading}><p class='soft'>{len(pack.documents)} samples, {pack.tokens:,} of "
        f'{pack.tokens_max:,} tokens ({filled:.1f} %)</p><div class="bar"><i style="width:{filled:.1f}%"></i></div>'
        f"{''.join(_document(document, left) for document in pack.documents)}"
    )


def _document(document: PreviewDocument, left: list[int]) -> str:
    parts = "".join(_span(part) if isinstance(part, Span) else _picture(part, left) for part in document.parts)
    return (
        f'<div class="card document"><b>{safe(document.sample_id)}</b> <small>{document.tokens:,} tokens, '
        f"{document.learned:,} learned{_same(document)}</small><p>{parts}</p></div>"
    )


def _span(span: Span) -> str:
    text = "".join(safe(span.text[at : at + CHARACTERS_MAX]) for at in range(0, len(span.text), CHARACTERS_MAX))
    if span.answer:
        title = f"<small>{span.answer}, {span.tokens:,} tokens</small>"
        return f'<span class="answer">{title} <mark class="{span.answer}">{text}</mark></span>'
    return f"<mark>{text}</mark>" if span.learned and text else text


def _same(document: PreviewDocument) -> str:
    """Say with how many tokens the answers of a pair begin alike."""
    answers = [part for part in document.parts if isinstance(part, Span) and part.answer]
    return f", both answers begin with the same {document.same:,}" if answers else ""


def _picture(picture: Picture, left: list[int]) -> str:
    size = f"{picture.width} x {picture.height} pixels, {picture.tokens:,} tokens"
    left[0] -= len(picture.png) + len(picture.mask)
    if left[0] < 0:
        return f"<small>[image of {size}: more than {PICTURE_BYTES_MAX // 2**20} MiB of images are not shown]</small>"
    image = f'<img alt="image of {size}" title="{size}" src="{_source(picture.png)}">'
    if picture.mask:
        image += f'<img class="mask" alt="its mask" src="{_source(picture.mask)}">'
    if picture.shapes:
        drawn = "".join(_shape(item) for item in picture.shapes)
        image += f'<svg viewBox="0 0 {picture.width} {picture.height}" preserveAspectRatio="none">{drawn}</svg>'
    change = f"<small>{safe(picture.change)}</small>" if picture.change else ""
    return (f'<span class="image">{image}</span>' if picture.mask or picture.shapes else image) + change


def _source(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def _shape(item: Mapping[str, Any]) -> str:
    """Draw a box or polygon by its outline, and a point by a circle; the label is its title."""
    title = f"<title>{safe(str(item.get('label', ''))[:CHARACTERS_MAX])}</title>"
    if "point" in item:
        x, y = item["point"]
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{POINT_PX}">{title}</circle>'
    if "box" in item:
        left, top, right, bottom = item["box"]
        corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
    else:
        corners = item["polygon"]
    return f'<polygon points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in corners)}">{title}</polygon>'
