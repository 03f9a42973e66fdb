"""Drawn pages of digits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

SCALE = 3
"""Pixels of a page for one pixel of a scan, each way."""
INK_MAX = 16


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
