"""Pixels of a page, and the patches that a model takes of them: drawn, resized, cut.

Light to import: Pillow is imported with the first image from a file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_datahub.operations.open_rules import OpenRules
from polyreme_datahub.operations.values import Blob

SCALE = 3
"""Pixels of a page for one pixel of a scan, each way."""
INK_MAX = 16
CHANNELS = 3


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


def fitted_page(data: bytes, open_rules: Mapping[str, Any], *, height: int, width: int) -> npt.NDArray[np.uint8]:
    """Decode an image and resize it: [height, width], or [height, width, channels].

    Raises:
        BadRecordError: If the bytes break a rule of ``operations.images``.
    """
    from PIL import Image

    pixels = Blob(data, digest="").pixels(OpenRules(**open_rules))
    return np.asarray(pixels.resize((width, height), Image.Resampling.BICUBIC, reducing_gap=3.0))


def colored(patches_PC: npt.NDArray[np.uint8], *, patch_px: int) -> npt.NDArray[np.uint8]:
    """Return patches [P, C] in colour: gray ones are repeated over the channels."""
    return np.tile(patches_PC, (1, CHANNELS)) if patches_PC.shape[1] == patch_px**2 else patches_PC
