"""Decode: check that a record's images can be read, and record their sizes.

Raw bytes stay as they came; the output is facts. Coordinates are in display space, which is after the EXIF
orientation: it is applied wherever an image is opened, so no derivative carries the tag.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.index.shapes import check_inside, shapes_of
from polyreme_datahub.operations.declare import RECORD, operation
from polyreme_datahub.operations.open_rules import OpenRules
from polyreme_datahub.operations.values import Blob, Value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeParameters:
    """Which images are accepted."""

    side_px_min: int = 4
    first_frame: bool = False
    """Take the first frame of an animation or of several pages; refused otherwise."""
    scale_deep: bool = False
    """Scale 16-bit images that use 12 bits or fewer by the bits that they use; refused otherwise."""

    @property
    def rules(self) -> OpenRules:
        """How images are opened."""
        return OpenRules(first_frame=self.first_frame, scale_deep=self.scale_deep)


@operation("decode", 3, inputs=(RECORD,), parameters=DecodeParameters, images_only=True, gives="images")
def decode(record: Value, parameters: DecodeParameters) -> Value:
    """Check a record's images and masks."""
    content = record.data
    facts: dict[str, Any] = {"kind": content["kind"]}
    if content["kind"] == "pdf":
        raise BadRecordError("page of a PDF, not an image: a recipe needs the step pdf-pages before decode", rule="pdf")
    if content["kind"] != "images":
        return Value.of(facts | {name: content[name] for name in ("height", "width", "digits")})
    images = []
    for digest, mask in zip(content["images"], content["masks"], strict=True):
        fact = _facts(record.blobs[digest], parameters)
        if mask is not None:
            _check_mask(fact, record.blobs[mask])
        images.append({**fact, "mask": mask})
    shapes = shapes_of(content)
    check_inside(shapes, [(image["width"], image["height"]) for image in images])
    facts |= {"images": images, **shapes}
    return Value.of(facts, kept=record.blobs.values())


def _facts(blob: Blob, parameters: DecodeParameters) -> dict[str, Any]:
    image = blob.pixels(parameters.rules)
    if min(image.size) < parameters.side_px_min:
        raise BadRecordError(
            f"image is too small: {image.width} x {image.height} pixels, expected at least {parameters.side_px_min} "
            "per side",
            rule="image-size",
        )
    facts: dict[str, Any] = {"digest": blob.digest, "width": image.width, "height": image.height}
    if parameters.rules != OpenRules():
        facts["open"] = dataclasses.asdict(parameters.rules)
    return facts


def _check_mask(facts: Mapping[str, Any], blob: Blob) -> None:
    try:
        mask = blob.pixels()
    except BadRecordError as error:
        raise BadRecordError(f"mask: {error.message}", rule="mask") from error
    if mask.size != (facts["width"], facts["height"]):
        raise BadRecordError(
            f"mask is {mask.width} x {mask.height} pixels, its image {facts['width']} x {facts['height']}, "
            "expected the same size",
            rule="mask",
        )
