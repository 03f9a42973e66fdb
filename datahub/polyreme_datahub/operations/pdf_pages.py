"""PDF as a second kind of document: count its pages, render one of them as an image.

Both run in a sandbox, as any operation. Fonts that a document does not embed are taken from the machine, so only
documents with embedded fonts give the same pixels everywhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pypdfium2
from PIL import Image

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.declare import RECORD, operation
from polyreme_datahub.operations.values import Blob, Value

POINTS_PER_INCH = 72
DPI_MIN, DPI_MAX = 18, 1200
PIXELS_MAX = 100_000_000
PAGES_MAX = 100_000
PASSWORD = 4
"""PDFium's code for a password that is missing."""
PNG_LEVEL = 1
OF_A_PAGE = frozenset({"kind", "document", "documents", "page"})
"""Fields of a record of a page that one of an image has not."""
HEADER_BYTES = 1024
"""The header may come as late as this; readers accept bytes before it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PdfPagesParameters:
    """How pages are rendered."""

    dpi: int = 150

    def __post_init__(self) -> None:
        if not DPI_MIN <= self.dpi <= DPI_MAX:
            raise InvalidConfigError(f"dpi is {self.dpi}, expected {DPI_MIN} to {DPI_MAX}", field="dpi")


@operation("pdf-pages", 1, inputs=(RECORD,), parameters=PdfPagesParameters, replaces=RECORD)
def pdf_pages(record: Value, parameters: PdfPagesParameters) -> Value:
    """Render the page that a record names; a record of images is passed through.

    The record is ``{"kind": "pdf", "document": digest, "documents": [digest], "page": number from 0, ...}``.

    The value has the form of a record with one image and all other fields of this one, so that ``decode`` takes it.
    """
    content = record.data
    if content["kind"] == "images":
        return Value.of(content, kept=record.blobs.values())
    with _open(record.blobs[content["document"]].data) as document:
        image = _render(document, content["page"], parameters.dpi)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=PNG_LEVEL)
    blob = Blob(buffer.getvalue())
    blob.keep_pixels(image)
    rest = {name: value for name, value in content.items() if name not in OF_A_PAGE}
    made = {**rest, "kind": "images", "images": [blob.digest], "masks": [None], "boxes": []}
    return Value.of(made, made=[blob])


@operation("count-pdf-pages", 1, inputs=(RECORD,))
def count_pdf_pages(record: Value) -> Value:
    """Count the pages of the document that a record names."""
    with _open(record.blobs[record.data["document"]].data) as document:
        return Value.of({"pages": len(document)})


@contextlib.contextmanager
def _open(data: bytes) -> Iterator[Any]:
    if not data:
        raise BadRecordError("document is empty: 0 bytes", rule="empty")
    if b"%PDF-" not in data[:HEADER_BYTES]:
        raise BadRecordError(f"not a PDF: begins with {data[:8]!r}", rule="pdf")
    try:
        document = pypdfium2.PdfDocument(data)
        pages = len(document)
    except pypdfium2.PdfiumError as error:
        if getattr(error, "err_code", None) == PASSWORD:
            raise BadRecordError(
                "PDF needs a password; remove it and register the document again", rule="pdf-password"
            ) from error
        raise BadRecordError(f"PDF can't be read: {error}", rule="pdf") from error
    try:
        if not 1 <= pages <= PAGES_MAX:
            raise BadRecordError(f"PDF has {pages} pages, expected 1 to {PAGES_MAX}", rule="pdf")
        yield document
    finally:
        document.close()


def _render(document: Any, number: int, dpi: int) -> Image.Image:
    """Render a page; gray pages have one channel."""
    if type(number) is not int or not 0 <= number < len(document):
        raise BadRecordError(f"PDF has no page {number!r}, expected 0 to {len(document) - 1}", rule="pdf-page")
    try:
        page = document[number]
        sides = [float(side) * dpi / POINTS_PER_INCH for side in page.get_size()]
        if min(sides) < 1 or sides[0] * sides[1] > PIXELS_MAX:
            raise BadRecordError(
                f"page {number} is {sides[0]:.0f} x {sides[1]:.0f} pixels at {dpi} dpi, expected at most {PIXELS_MAX} "
                "in all; lower the parameter dpi",
                rule="image-size",
            )
        bitmap = page.render(scale=dpi / POINTS_PER_INCH, rev_byteorder=True)
        pixels = bitmap.to_numpy()
    except pypdfium2.PdfiumError as error:
        raise BadRecordError(f"page {number} can't be rendered: {error}", rule="pdf") from error
    gray = bool((pixels[:, :, 0] == pixels[:, :, 1]).all() and (pixels[:, :, 0] == pixels[:, :, 2]).all())
    return Image.fromarray(np.ascontiguousarray(pixels[:, :, 0] if gray else pixels))
