"""Decode: prove that a record's images can be read, and say in which space its coordinates are.

Raw bytes stay as they came and pixels are not stored twice: the output is facts. Display space is after the EXIF
orientation, which is applied here and wherever the image is read again, so no derivative carries a tag.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from PIL import Image, ImageOps

from polyreme_datahub.digests import action_prefix, canonical_json
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.types import DECODE, Result, Work

VERSION = 2
PIXELS_MAX = 100_000_000
Image.MAX_IMAGE_PIXELS = None
"""Pillow warns and raises at bounds of its own; ours is held right after the header, before any pixel."""
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
"""Pillow knows more, and starts programs for some of them."""
SIDE_PX_MIN = 4
DEEP_MAX = 65_535
ORIENTATION = 0x0112
"""The EXIF tag."""
_UNREADABLE = (OSError, ValueError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError)
"""What Pillow's decoders raise on bad bytes."""


class Decode:
    """Record -> facts of its images."""

    def __init__(self) -> None:
        self.prefix = action_prefix(DECODE, VERSION, {"pixels_max": PIXELS_MAX, "side_px_min": SIDE_PX_MIN})

    def needs(self, inputs: Sequence[bytes]) -> Iterable[str]:
        """Name the raw images and masks of a record."""
        record = json.loads(inputs[0])
        yield from record.get("images", ())
        yield from (mask for mask in record.get("masks", ()) if mask is not None)

    def compute(self, work: Work, read: Mapping[str, bytes]) -> Result:
        """Check a record's images and masks."""
        record = json.loads(read[work.inputs[0]])
        facts = {"kind": record["kind"]}
        if record["kind"] == "images":
            facts["images"] = [_facts(digest, read[digest]) for digest in record["images"]]
            for facts_of_image, mask in zip(facts["images"], record["masks"], strict=True):
                if mask is not None:
                    _check_mask(facts_of_image, read[mask])
                facts_of_image["mask"] = mask
            facts["boxes"] = record["boxes"]
        else:
            facts |= {name: record[name] for name in ("height", "width", "digits")}
        return Result(output=canonical_json(facts))


def open_upright(data: bytes) -> Image.Image:
    """Decode an image as RGB or gray, turned upright; transparent parts lie on white.

    Raises:
        BadRecordError: If the bytes are no whole image, or too large a one.
    """
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > PIXELS_MAX:
                raise BadRecordError(
                    f"image is too large: {image.width} x {image.height} pixels, expected at most {PIXELS_MAX}",
                    rule="image-size",
                )
            image.load()
            upright = ImageOps.exif_transpose(_in_bytes(image))
            if upright.mode in {"RGBA", "LA", "PA"} or "transparency" in upright.info:
                upright = upright.convert("RGBA")
                paper = Image.new("RGBA", upright.size, "white")
                upright = Image.alpha_composite(paper, upright).convert("RGB")
            plain = upright.convert("L" if upright.mode in {"1", "L"} else "RGB")
            plain.info.clear()
            return plain
    except (*_UNREADABLE, zlib.error, struct.error) as error:
        raise BadRecordError(f"image can't be decoded: {error}", rule="image") from error


def _in_bytes(image: Image.Image) -> Image.Image:
    """Scale 16-bit gray to 8 bits: Pillow's own conversion clips it to white.

    Raises:
        BadRecordError: If the range of the pixels is not known.
    """
    if image.mode == "F":
        raise BadRecordError("image has floating-point pixels, expected 1, 8 or 16 bits per channel", rule="image")
    if image.mode != "I" and not image.mode.startswith("I;16"):
        return image
    deep_HW = np.asarray(image).astype(np.int64)
    if deep_HW.min() < 0 or deep_HW.max() > DEEP_MAX:
        raise BadRecordError(f"image has pixels outside 0..{DEEP_MAX}, expected 1, 8 or 16 bits", rule="image")
    plain = Image.fromarray(((deep_HW * 255 + DEEP_MAX // 2) // DEEP_MAX).astype(np.uint8))
    if (orientation := image.getexif().get(ORIENTATION)) is not None:
        plain.getexif()[ORIENTATION] = orientation
    return plain


def _facts(digest: str, data: bytes) -> dict[str, object]:
    image = open_upright(data)
    if min(image.size) < SIDE_PX_MIN:
        raise BadRecordError(
            f"image is too small: {image.width} x {image.height} pixels, expected at least {SIDE_PX_MIN} per side",
            rule="image-size",
        )
    return {"digest": digest, "width": image.width, "height": image.height}


def _check_mask(facts: Mapping[str, object], data: bytes) -> None:
    try:
        mask = open_upright(data)
    except BadRecordError as error:
        raise BadRecordError(f"mask: {error.message}", rule="mask") from error
    if mask.size != (facts["width"], facts["height"]):
        raise BadRecordError(
            f"mask is {mask.width} x {mask.height} pixels, its image {facts['width']} x {facts['height']}, "
            "expected the same size",
            rule="mask",
        )
