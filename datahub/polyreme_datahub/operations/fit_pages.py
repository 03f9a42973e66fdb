"""Compose: the size of each page in whole tokens, and boxes, points and polygons that follow it. No pixel is touched.

The pixels are resized and cut where a document is made of a sample (``loader.sample.reader``), by the sizes of here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.index.shapes import scaled_shapes, shapes_of
from polyreme_datahub.operations.declare import operation
from polyreme_datahub.operations.values import Value

ASPECT_MAX = 200.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComposeParameters:
    """How images become patches."""

    patch_px: int
    merge: int
    """Patches per token, each way."""
    image_tokens_max: int
    """Most language-model tokens of one image from files; larger images are shrunk."""

    @property
    def token_px(self) -> int:
        """Side of the square that becomes one token [pixels]."""
        return self.patch_px * self.merge


@operation("compose", 4, inputs=("decode",), blobs=False, parameters=ComposeParameters, gives="pages")
def compose(decoded: Value, parameters: ComposeParameters) -> Value:
    """Choose the sizes of a sample's pages."""
    facts = decoded.data
    if facts["kind"] != "images":
        _check_page(facts, parameters)
        return Value.of({"pages": [{"height": facts["height"], "width": facts["width"]}], "boxes": []})
    pages, scales = [], []
    for source in facts["images"]:
        width, height = fitting_size(source["width"], source["height"], parameters)
        pages.append({"image": source["digest"], "open": source.get("open", {}), "height": height, "width": width})
        scales.append((width / source["width"], height / source["height"]))
    return Value.of({"pages": pages, **scaled_shapes(shapes_of(facts), scales)})


def _check_page(facts: Mapping[str, Any], parameters: ComposeParameters) -> None:
    side = parameters.token_px
    if facts["height"] % side or facts["width"] % side:
        raise BadRecordError(
            f"page is {facts['width']} x {facts['height']} pixels, expected multiples of {side}",
            rule="page-size",
        )


def fitting_size(width: int, height: int, parameters: ComposeParameters) -> tuple[int, int]:
    """Return the width and height nearest to the image's: multiples of a token's side, with few enough tokens.

    Raises:
        BadRecordError: If the image is so long that no such size keeps its shape.
    """
    side, most = parameters.token_px, parameters.image_tokens_max
    if max(width, height) / min(width, height) > min(ASPECT_MAX, most):
        raise BadRecordError(
            f"image is too long: {width} x {height} pixels, expected at most {min(ASPECT_MAX, most):.0f} to 1",
            rule="image-shape",
        )
    columns, rows = max(1, round(width / side)), max(1, round(height / side))
    if columns * rows > most:
        shrink = math.sqrt(most * side * side / (width * height))
        columns = min(most, max(1, math.floor(width * shrink / side)))
        rows = min(most // columns, max(1, math.floor(height * shrink / side)))
    return columns * side, rows * side
