"""Resize: images are shrunk to fit a square, and encoded again; boxes, points, polygons and masks follow."""

from __future__ import annotations

import dataclasses
import io
from typing import Any, Literal

from PIL import Image

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.index.shapes import scaled_shapes, shapes_of
from polyreme_datahub.operations.declare import operation
from polyreme_datahub.operations.open_rules import OpenRules
from polyreme_datahub.operations.values import Blob, Value

PNG_LEVEL = 6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResizeParameters:
    """Size and form of the images that are made."""

    side_px_max: int
    """Longest side; smaller images keep their size."""
    encoding: Literal["jpeg", "png", "webp"] = "jpeg"
    quality: int = 90
    """Of JPEG and WebP, 1 to 100."""

    def __post_init__(self) -> None:
        if self.side_px_max < 1:
            raise InvalidConfigError(f"side_px_max is {self.side_px_max}, expected at least 1", field="side_px_max")
        if not 1 <= self.quality <= 100:
            raise InvalidConfigError(f"quality is {self.quality}, expected 1 to 100", field="quality")


@operation("resize", 1, inputs=("decode",), parameters=ResizeParameters)
def resize(decoded: Value, parameters: ResizeParameters) -> Value:
    """Make smaller images; the value has the form of decode's, so that steps after it can take either."""
    facts = decoded.data
    if facts["kind"] != "images":
        return Value.of(facts)
    images, made, scales = [], [], []
    for source in facts["images"]:
        size = fit_within(source["width"], source["height"], parameters.side_px_max)
        pixels = decoded.blobs[source["digest"]].pixels(OpenRules(**source.get("open", {})))
        blob = Blob(encode_image(_resized(pixels, size, Image.Resampling.BICUBIC), parameters))
        made.append(blob)
        mask = None
        if source["mask"] is not None:
            nearest = _resized(decoded.blobs[source["mask"]].pixels(), size, Image.Resampling.NEAREST)
            made.append(Blob(encode_image(nearest, dataclasses.replace(parameters, encoding="png"))))
            mask = made[-1].digest
        images.append({"digest": blob.digest, "width": size[0], "height": size[1], "mask": mask})
        scales.append((size[0] / source["width"], size[1] / source["height"]))
    shapes = scaled_shapes(shapes_of(facts), scales)
    return Value.of({"kind": "images", "images": images, **shapes}, made=made)


def fit_within(width: int, height: int, side_px_max: int) -> tuple[int, int]:
    """Return the size with the same shape whose longer side is at most the limit; never larger than it was."""
    longer = max(width, height)
    if longer <= side_px_max:
        return width, height
    return max(1, round(width * side_px_max / longer)), max(1, round(height * side_px_max / longer))


def encode_image(image: Image.Image, parameters: ResizeParameters) -> bytes:
    """Encode an image without metadata; the same pixels give the same bytes."""
    buffer = io.BytesIO()
    options: dict[str, Any] = {
        "jpeg": {"quality": parameters.quality},
        "png": {"compress_level": PNG_LEVEL},
        "webp": {"quality": parameters.quality, "method": 4},
    }[parameters.encoding]
    image.save(buffer, parameters.encoding.upper(), **options)
    return buffer.getvalue()


def _resized(image: Image.Image, size: tuple[int, int], resampling: Image.Resampling) -> Image.Image:
    if image.size == size:
        return image
    gap = 3.0 if resampling != Image.Resampling.NEAREST else None
    return image.resize(size, resampling, reducing_gap=gap)
