"""Rules by which bytes become an image: which formats and sizes are read, and how pixels are brought into one form."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps

from polyreme_datahub.errors import BadRecordError

PIXELS_MAX = 100_000_000
Image.MAX_IMAGE_PIXELS = None
"""Pillow warns and raises at limits of its own; ours is checked right after the header, before any pixel."""
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF")
"""Pillow knows more, and starts programs for some of them."""
DEEP_MAX = 65_535
ORIENTATION = 0x0112
"""The EXIF tag."""
UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    OverflowError,
    zlib.error,
    struct.error,
)
"""What Pillow's decoders raise on bad bytes."""


def open_upright(data: bytes, *, first_frame: bool = False) -> Image.Image:
    """Decode an image as RGB or gray, turned upright; transparent parts lie on white.

    Raises:
        BadRecordError: If the bytes are no whole image, or too large a one.
    """
    del first_frame
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
    except UNREADABLE as error:
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
