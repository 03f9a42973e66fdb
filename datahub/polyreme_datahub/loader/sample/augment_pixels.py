"""Makes the pixels of a page from its decoded image, by the change that was drawn: one resize, then the colors.

Masks follow the same change without new values: labels are picked, not mixed, and keep their colors.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from polyreme_datahub.index.format import BY_CONVOLUTION, BY_PILLOW
from polyreme_datahub.loader.sample.augment import COLOR_BITS, ColorChange, ImageChange
from polyreme_datahub.loader.sample.resampling import resample

if TYPE_CHECKING:
    from PIL import Image

WHITE = 255
ROWS_AT_ONCE = 128
"""Rows of a page whose colors are changed at once: so many stay in a processor's cache, which halves the time."""
REDUCING_GAP = 3.0
SOURCE_RATIO_MIN = 2.0
"""Pixels of a decoded image for one of the page, each way: decoded at a smaller scale, it still has so many."""


def least_size(change: ImageChange) -> tuple[int, int]:
    """Return the width and height of an image that has enough pixels for a page."""
    left, top, right, bottom = change.window
    width, height = change.inner
    return (
        math.ceil(SOURCE_RATIO_MIN * width * change.width / (right - left)),
        math.ceil(SOURCE_RATIO_MIN * height * change.height / (bottom - top)),
    )


def change_pixels(
    image: Image.Image, change: ImageChange, *, pixel_version: int = BY_CONVOLUTION
) -> npt.NDArray[np.uint8]:
    """Return the page: [height, width], or [height, width, channels].

    The window goes to the resize as its box: an image is resampled once, whatever was drawn.

    Args:
        image: Decoded, perhaps at a smaller scale than its own.
        change: What was drawn.
        pixel_version: How it becomes pixels (``index.format.PIXELS``).
    """
    pixels = _by_pillow(image, change) if pixel_version == BY_PILLOW else _by_convolution(image, change)
    if change.color is not None:
        pixels = _recolored(pixels, change.color)
    return _placed(pixels, change, around=WHITE)


def _by_pillow(image: Image.Image, change: ImageChange) -> npt.NDArray[np.uint8]:
    from PIL import Image

    box = _box(image, change)
    return np.asarray(image.resize(change.inner, Image.Resampling.BICUBIC, box=box, reducing_gap=REDUCING_GAP))


def _by_convolution(image: Image.Image, change: ImageChange) -> npt.NDArray[np.uint8]:
    left, top, right, bottom = _box(image, change)
    return resample(image, change.inner, (left, top, right - left, bottom - top))


def move_labels(mask: Image.Image, change: ImageChange) -> npt.NDArray[np.uint8]:
    """Return a mask on the page of its image: [height, width], or [height, width, channels]; 0 where no image is."""
    from PIL import Image

    resized = mask.resize(change.inner, Image.Resampling.NEAREST, box=_box(mask, change))
    return _placed(np.asarray(resized), change, around=0)


def _box(image: Image.Image, change: ImageChange) -> tuple[float, float, float, float]:
    """Return what is seen of an image, in its own pixels."""
    across, down = image.width / change.width, image.height / change.height
    left, top, right, bottom = change.window
    return left * across, top * down, min(image.width, right * across), min(image.height, bottom * down)


def _placed(pixels: npt.NDArray[np.uint8], change: ImageChange, *, around: int) -> npt.NDArray[np.uint8]:
    """Mirror what was resized and lay it on the page."""
    if change.mirrored:
        pixels = pixels[:, ::-1]
    if change.inner == (change.width, change.height):
        return pixels
    page = np.full((change.height, change.width, *pixels.shape[2:]), around, np.uint8)
    x, y = change.offset
    page[y : y + pixels.shape[0], x : x + pixels.shape[1]] = pixels
    return page


def _recolored(pixels: npt.NDArray[np.uint8], color: ColorChange) -> npt.NDArray[np.uint8]:
    """Apply a change of colors in whole numbers, so that every machine makes the same pixels."""
    made = np.empty_like(pixels)
    for first in range(0, len(pixels), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        _recolor(pixels[rows], color, made[rows])
    return made


def _recolor(pixels: npt.NDArray[np.uint8], color: ColorChange, made: npt.NDArray[np.uint8]) -> None:
    rows, offset = color.fixed
    half = 1 << (COLOR_BITS - 1)
    planes = [pixels.astype(np.int32)] if pixels.ndim == 2 else [pixels[..., at].astype(np.int32) for at in range(3)]
    for at, row in enumerate(rows[: len(planes)]):
        # Gray has one plane: what the row takes of all three is its gain.
        factors = row if len(planes) == len(row) else [sum(row)]
        value = planes[0] * factors[0]
        for plane, factor in zip(planes[1:], factors[1:], strict=True):
            value += plane * factor
        value += offset + half
        value >>= COLOR_BITS
        np.clip(value, 0, WHITE, out=value)
        if pixels.ndim == 2:
            made[:] = value
        else:
            made[..., at] = value
