"""Resamples decoded images: Catmull-Rom (bicubic) convolution in whole numbers, the same bits on every machine.

cykooz-resizer does it where it has a wheel; elsewhere (Linux on aarch64) NumPy does the same steps, ten to fifty times
slower. One pass along columns, then one along rows; weights are 16-bit whole numbers, and each pass rounds to bytes.

Legend: N pixels along an axis of the source, M of the result, K weights of one of these, C channels.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL import Image

Pixels = npt.NDArray[np.uint8]
Area = tuple[float, float, float, float]
"""Left, top, width, height, in pixels of the source."""

SUPPORT = 2.0
"""Pixels to each side that the filter reaches, at the scale of the coarser image."""
WEIGHT_BITS, SHIFT_MAX = 15, 22
"""A weight is a signed number of so many bits; most bits behind its point."""
_log = logging.getLogger(__name__)


def resample(image: Image.Image, size: tuple[int, int], area: Area) -> Pixels:
    """Resample an area of a gray or RGB image: [height, width], or [height, width, channels].

    Args:
        image: Source.
        size: Width and height of the result.
        area: What is seen; it lies inside the image.
    """
    return _resampler()(image, size, area)


@functools.cache
def _resampler() -> Callable[[Image.Image, tuple[int, int], Area], Pixels]:
    try:
        import cykooz_resizer  # noqa: F401
    except ImportError:
        _log.warning("cykooz-resizer is not installed: images are resampled by NumPy, to the same pixels but slowly")
        return resample_by_numpy
    return resample_by_library


def resample_by_library(image: Image.Image, size: tuple[int, int], area: Area) -> Pixels:
    """Resample by cykooz-resizer; see ``resample``."""
    from cykooz_resizer import CropBox, FilterType, ResizeAlg, ResizeOptions, Resizer
    from PIL import Image

    resized = Image.new(image.mode, size)
    algorithm = ResizeAlg.convolution(FilterType.catmull_rom)
    # A resizer keeps a buffer and serves one thread.
    Resizer().resize_pil(image, resized, ResizeOptions(resize_alg=algorithm, crop_box=CropBox(*area)))
    return np.asarray(resized)


def resample_by_numpy(image: Image.Image, size: tuple[int, int], area: Area) -> Pixels:
    """Resample by NumPy; see ``resample``."""
    left, top, width, height = area
    pixels = np.asarray(image)
    rows = _convolved(pixels, size[1], top, height)
    return _convolved(rows.swapaxes(0, 1), size[0], left, width).swapaxes(0, 1)


def _convolved(pixels_NXC: Pixels, count: int, start: float, length: float) -> Pixels:
    """Resample the first axis: ``count`` pixels of the part that begins at ``start``."""
    size = pixels_NXC.shape[0]
    scale = length / count
    reach = SUPPORT * max(scale, 1.0)
    centers = [start + (at + 0.5) * scale for at in range(count)]
    firsts = [max(0, math.floor(center - reach)) for center in centers]
    ends = [min(size, math.ceil(center + reach)) for center in centers]
    weights = [
        _weights(first, end, center, max(scale, 1.0)) for first, end, center in zip(firsts, ends, centers, strict=True)
    ]
    shift = _shift(max(map(max, weights)))
    fixed_MK = np.zeros((count, max(map(len, weights))), np.int32)
    for at, row in enumerate(weights):
        fixed_MK[at, : len(row)] = [_rounded(weight * (1 << shift)) for weight in row]
    each = (count, *[1] * (pixels_NXC.ndim - 1))
    sums_MXC = np.full((count, *pixels_NXC.shape[1:]), 1 << (shift - 1), np.int32)
    for number, weight_M in enumerate(fixed_MK.T):
        taken_M = np.minimum(np.array(firsts) + number, size - 1)
        sums_MXC += pixels_NXC[taken_M] * weight_M.reshape(each)
    rounded_MXC: Pixels = np.clip(sums_MXC >> shift, 0, 255).astype(np.uint8)
    return rounded_MXC


def _weights(first: int, end: int, center: float, widening: float) -> list[float]:
    found = [_catmull_rom((at - (center - 0.5)) / widening) for at in range(first, end)]
    total = sum(found)
    return [weight / total for weight in found]


def _catmull_rom(x: float) -> float:
    """Cubic convolution with a = -0.5 (Keys, 1981, equation 15)."""
    x = abs(x)
    if x < 1.0:
        return (1.5 * x - 2.5) * x * x + 1.0
    return (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5 if x < SUPPORT else 0.0


def _shift(largest: float) -> int:
    """Return the bits behind the point, as many as let the largest weight fit."""
    fitting = (bits for bits in range(SHIFT_MAX - 1) if _rounded(largest * (1 << (bits + 1))) >= 1 << WEIGHT_BITS)
    return next(fitting, SHIFT_MAX - 1)


def _rounded(value: float) -> int:
    """Round halves away from zero."""
    return math.floor(value + 0.5) if value >= 0 else math.ceil(value - 0.5)
