"""Pictures of pages: a page is stored as its patches, and drawn again when a person wants to see it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

PNG_LEVEL = 1


def page_reference(page: Mapping[str, Any], *, patch_px: int) -> str:
    """Name a page so that it can be drawn: ``digest/height/width/channels/patch``."""
    return f"{page['patches']}/{page['height']}/{page['width']}/{page['channels']}/{patch_px}"


def digest_of(reference: str) -> str:
    """Return the digest of a page's bytes."""
    return reference.partition("/")[0]


def draw_png(reference: str, data: bytes) -> bytes:
    """Draw a page as PNG. A reference that is a digest alone is of an earlier release, which stored the PNG itself."""
    _, slash, shape = reference.partition("/")
    if not slash:
        return data
    height, width, channels, side = map(int, shape.split("/"))
    grid = np.frombuffer(data, dtype=np.uint8).reshape(height // side, width // side, channels, side, side)
    pixels_HWC = grid.transpose(0, 3, 1, 4, 2).reshape(height, width, channels)
    image = Image.fromarray(pixels_HWC[:, :, 0] if channels == 1 else pixels_HWC)
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=PNG_LEVEL)
    return buffer.getvalue()
