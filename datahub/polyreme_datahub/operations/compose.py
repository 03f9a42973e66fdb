"""Compose: pages of digits are drawn, images from files are resized to multiples of a token's square; both become PNG.

Boxes and masks follow the resize: boxes are scaled, masks take the nearest pixel.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from polyreme_datahub.digests import action_prefix, canonical_json, digest_bytes
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.decode import open_upright
from polyreme_datahub.operations.types import COMPOSE, ImageParameters, Result, Work

VERSION = 2
SCALE = 3
"""Pixels of a page for one pixel of a scan, each way."""
INK_MAX = 16
PNG_LEVEL = 1
ASPECT_MAX = 200.0


class Compose:
    """Facts -> pages, as PNG, and their geometry."""

    def __init__(self, parameters: ImageParameters) -> None:
        self._parameters = parameters
        values = {"token_px": parameters.token_px, "image_tokens_max": parameters.image_tokens_max}
        self.prefix = action_prefix(COMPOSE, VERSION, values)

    def needs(self, inputs: Sequence[bytes]) -> Iterable[str]:
        """Name the raw images and masks that the facts tell of."""
        for image in json.loads(inputs[0]).get("images", ()):
            yield image["digest"]
            if image["mask"] is not None:
                yield image["mask"]

    def compute(self, work: Work, read: Mapping[str, bytes]) -> Result:
        """Make a sample's pages."""
        facts = json.loads(read[work.inputs[0]])
        if facts["kind"] == "images":
            return self._resize(facts, read)
        self._check_page(facts)
        png = encode_png(Image.fromarray(draw_page(facts)))
        page = {"png": digest_bytes(png), "height": facts["height"], "width": facts["width"], "mask": None}
        return Result(output=canonical_json({"pages": [page], "boxes": []}), parts=[png])

    def _check_page(self, facts: Mapping[str, Any]) -> None:
        side = self._parameters.token_px
        if facts["height"] % side or facts["width"] % side:
            raise BadRecordError(
                f"page is {facts['width']} x {facts['height']} pixels, expected multiples of {side}",
                rule="page-size",
            )

    def _resize(self, facts: Mapping[str, Any], read: Mapping[str, bytes]) -> Result:
        pages, parts, scales = [], [], []
        for source in facts["images"]:
            width, height = fitting_size(source["width"], source["height"], self._parameters)
            image = open_upright(read[source["digest"]]).resize(
                (width, height), Image.Resampling.BICUBIC, reducing_gap=3.0
            )
            parts.append(encode_png(image))
            page = {"png": digest_bytes(parts[-1]), "height": height, "width": width, "mask": None}
            if source["mask"] is not None:
                mask = open_upright(read[source["mask"]]).resize((width, height), Image.Resampling.NEAREST)
                parts.append(encode_png(mask))
                page["mask"] = digest_bytes(parts[-1])
            pages.append(page)
            scales.append((width / source["width"], height / source["height"]))
        boxes = [_scaled(box, *scales[box["image"]]) for box in facts["boxes"]]
        return Result(output=canonical_json({"pages": pages, "boxes": boxes}), parts=parts)


def draw_page(facts: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
    """Draw a page: dark ink on white paper, gray [height, width]."""
    page_HW = np.full((facts["height"], facts["width"]), 255, dtype=np.uint8)
    for digit in facts["digits"]:
        ink = np.frombuffer(bytes.fromhex(digit["pixels"]), dtype=np.uint8)
        side = math.isqrt(ink.size)
        shade = (255 - ink.astype(np.uint16) * 255 // INK_MAX).astype(np.uint8).reshape(side, side)
        tall = np.repeat(np.repeat(shade, SCALE, axis=0), SCALE, axis=1)
        top, left = digit["top"], digit["left"]
        page_HW[top : top + side * SCALE, left : left + side * SCALE] = tall
    return page_HW


def fitting_size(width: int, height: int, parameters: ImageParameters) -> tuple[int, int]:
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


def encode_png(image: Image.Image) -> bytes:
    """Encode losslessly; the same pixels give the same bytes."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=PNG_LEVEL)
    return buffer.getvalue()


def _scaled(box: Mapping[str, Any], right: float, down: float) -> dict[str, Any]:
    left_px, top_px, right_px, bottom_px = box["box"]
    return {**box, "box": [left_px * right, top_px * down, right_px * right, bottom_px * down]}
