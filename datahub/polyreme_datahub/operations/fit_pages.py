"""Compose: draw pages of digits, resize images from files to multiples of a token's square, cut both into patches.

Boxes and masks follow the resize: boxes are scaled, masks take the nearest pixel. A page's blob is its raw patches,
uint8 [patches, channels * side * side]: patches row-major, a patch's values channel-major.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.declare import operation
from polyreme_datahub.operations.open_rules import OpenRules
from polyreme_datahub.operations.values import Blob, Value

SCALE = 3
"""Pixels of a page for one pixel of a scan, each way."""
INK_MAX = 16
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


@operation("compose", 3, inputs=("decode",), parameters=ComposeParameters)
def compose(decoded: Value, parameters: ComposeParameters) -> Value:
    """Make a sample's pages and their patches."""
    facts = decoded.data
    if facts["kind"] == "images":
        return _resize(decoded, parameters)
    _check_page(facts, parameters)
    page, patches = _cut(draw_page(facts), parameters)
    return Value.of({"pages": [{**page, "mask": None}], "boxes": []}, made=[patches])


def _check_page(facts: Mapping[str, Any], parameters: ComposeParameters) -> None:
    side = parameters.token_px
    if facts["height"] % side or facts["width"] % side:
        raise BadRecordError(
            f"page is {facts['width']} x {facts['height']} pixels, expected multiples of {side}",
            rule="page-size",
        )


def _resize(decoded: Value, parameters: ComposeParameters) -> Value:
    pages, made, scales = [], [], []
    for source in decoded.data["images"]:
        size = fitting_size(source["width"], source["height"], parameters)
        pixels = decoded.blobs[source["digest"]].pixels(OpenRules(**source.get("open", {})))
        image = pixels.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)
        page, patches = _cut(np.asarray(image), parameters)
        made.append(patches)
        mask = None
        if source["mask"] is not None:
            nearest = decoded.blobs[source["mask"]].pixels().resize(size, Image.Resampling.NEAREST)
            mask, patches = _cut(np.asarray(nearest), parameters)
            made.append(patches)
        pages.append({**page, "mask": mask})
        scales.append((size[0] / source["width"], size[1] / source["height"]))
    boxes = [_scaled(box, *scales[box["image"]]) for box in decoded.data["boxes"]]
    return Value.of({"pages": pages, "boxes": boxes}, made=made)


def _cut(pixels: npt.NDArray[np.uint8], parameters: ComposeParameters) -> tuple[dict[str, Any], Blob]:
    height, width = pixels.shape[:2]
    channels = 1 if pixels.ndim == 2 else pixels.shape[2]
    blob = Blob(cut_patches(pixels, patch_px=parameters.patch_px).tobytes())
    return {"patches": blob.digest, "channels": channels, "height": height, "width": width}, blob


def cut_patches(pixels: npt.NDArray[np.uint8], *, patch_px: int) -> npt.NDArray[np.uint8]:
    """Cut pixels [height, width] or [height, width, channels] into patches [patches, channels * side * side]."""
    pixels_HWC = pixels.reshape(*pixels.shape[:2], -1)
    height, width, channels = pixels_HWC.shape
    grid = pixels_HWC.reshape(height // patch_px, patch_px, width // patch_px, patch_px, channels)
    return np.ascontiguousarray(grid.transpose(0, 2, 4, 1, 3)).reshape(-1, channels * patch_px * patch_px)


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


def _scaled(box: Mapping[str, Any], right: float, down: float) -> dict[str, Any]:
    left_px, top_px, right_px, bottom_px = box["box"]
    return {**box, "box": [left_px * right, top_px * down, right_px * right, bottom_px * down]}
