"""Drawn pages of digits, and the patches of any page. ``loader.sample.augment_pixels`` resizes images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

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


def colored(patches_PC: npt.NDArray[np.uint8], *, patch_px: int) -> npt.NDArray[np.uint8]:
    """Return patches [P, C] in colour: gray ones are repeated over the channels."""
    return np.tile(patches_PC, (1, CHANNELS)) if patches_PC.shape[1] == patch_px**2 else patches_PC
