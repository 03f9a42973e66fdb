"""The pixels of a page: how it is made of its decoded image, one resize, then the colors, then its patches.

Resampling is Catmull-Rom (bicubic) convolution in whole numbers, the same bits on every machine: one pass along
columns, then one along rows; weights are 16-bit whole numbers, and each pass rounds to bytes. cykooz-resizer does it
where it has a wheel; elsewhere (Linux on aarch64) NumPy does the same steps, ten to fifty times slower. Masks follow
the change of their image without new values: labels are picked, not mixed, and keep their colors.

Legend: N pixels along an axis of the source, M of the result, K weights of one of these, C channels.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from polyreme_datahub.index.format import BY_CONVOLUTION, BY_PILLOW

if TYPE_CHECKING:
    from PIL import Image

CHANNELS = 3
MIDDLE_GRAY = 128.0
GRAY_WEIGHTS = (0.299, 0.587, 0.114)
COLOR_BITS = 14
"""Colors are computed in whole numbers of 2**-14."""
WHITE = 255
ROWS_AT_ONCE = 128
"""Rows of a page whose colors are changed at once: so many stay in a processor's cache, which halves the time."""
REDUCING_GAP = 3.0
SOURCE_RATIO_MIN = 2.0
"""Pixels of a decoded image for one of the page, each way: decoded at a smaller scale, it still has so many."""
SUPPORT = 2.0
"""Pixels to each side that the filter reaches, at the scale of the coarser image."""
WEIGHT_BITS, SHIFT_MAX = 15, 22
"""Bits of a weight, a signed number, and most bits after its binary point."""

Pixels = npt.NDArray[np.uint8]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels of a page."""
Area = tuple[float, float, float, float]
"""Left, top, width, height, in pixels of the source."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ColorChange:
    """Factors of a change of colors, applied in this order."""

    brightness: float
    contrast: float
    saturation: float

    @property
    def fixed(self) -> tuple[list[list[int]], int]:
        """Return matrix [out][in] and offset, in units of 2**-14: all three factors in one step."""
        gain, one = self.contrast * self.brightness, 1 << COLOR_BITS
        rows = [
            [
                round(gain * ((1.0 - self.saturation) * weight + (self.saturation if to == of else 0.0)) * one)
                for of, weight in enumerate(GRAY_WEIGHTS)
            ]
            for to in range(len(GRAY_WEIGHTS))
        ]
        return rows, round(MIDDLE_GRAY * (1.0 - self.contrast) * one)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageChange:
    """How a page is made of its image: a window of it is resized, mirrored, recolored, and laid on the page."""

    width: int
    """Of the page, as ``height`` [pixels]."""
    height: int
    window: Box
    """What is seen, in pixels of the unchanged page."""
    inner: tuple[int, int]
    """Width and height of the window on the page [pixels]."""
    offset: tuple[int, int] = (0, 0)
    """Where the window lies on the page [pixels]."""
    mirrored: bool = False
    color: ColorChange | None = None

    @cached_property
    def affine(self) -> tuple[float, float, float, float]:
        """Return (a, b, c, d): a point (x, y) of the unchanged page is at (a x + b, c y + d)."""
        left, top, right, bottom = self.window
        across, down = self.inner[0] / (right - left), self.inner[1] / (bottom - top)
        if self.mirrored:
            return -across, self.offset[0] + self.inner[0] + left * across, down, self.offset[1] - top * down
        return across, self.offset[0] - left * across, down, self.offset[1] - top * down

    def move(self, vertex: tuple[float, float]) -> tuple[float, float]:
        """Return where a point of the unchanged page is."""
        a, b, c, d = self.affine
        return a * vertex[0] + b, c * vertex[1] + d

    @property
    def words(self) -> str:
        """Say what changed, for people; empty: nothing."""
        left, top, right, bottom = self.window
        said = []
        if self.window != (0.0, 0.0, float(self.width), float(self.height)):
            said.append(f"window {right - left:.0f} x {bottom - top:.0f} at {left:.0f}, {top:.0f}")
        if self.inner != (self.width, self.height):
            said.append(f"scaled to {self.inner[0]} x {self.inner[1]} at {self.offset[0]}, {self.offset[1]}")
        if self.mirrored:
            said.append("mirrored")
        if self.color is not None:
            color = self.color
            said.append(
                f"brightness {color.brightness:.2f}, contrast {color.contrast:.2f}, saturation {color.saturation:.2f}"
            )
        return "; ".join(said)


def unchanged(width: int, height: int) -> ImageChange:
    """Return the change that changes nothing."""
    window = (0.0, 0.0, float(width), float(height))
    return ImageChange(width=width, height=height, window=window, inner=(width, height))


def least_size(change: ImageChange) -> tuple[int, int]:
    """Return the width and height of an image that has enough pixels for a page."""
    left, top, right, bottom = change.window
    width, height = change.inner
    return (
        math.ceil(SOURCE_RATIO_MIN * width * change.width / (right - left)),
        math.ceil(SOURCE_RATIO_MIN * height * change.height / (bottom - top)),
    )


def change_pixels(image: Image.Image, change: ImageChange, *, pixel_version: int = BY_CONVOLUTION) -> Pixels:
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
    return _laid_on_page(pixels, change, around=WHITE)


def _by_pillow(image: Image.Image, change: ImageChange) -> Pixels:
    from PIL import Image

    box = _box(image, change)
    return np.asarray(image.resize(change.inner, Image.Resampling.BICUBIC, box=box, reducing_gap=REDUCING_GAP))


def _by_convolution(image: Image.Image, change: ImageChange) -> Pixels:
    left, top, right, bottom = _box(image, change)
    return resample(image, change.inner, (left, top, right - left, bottom - top))


def move_labels(mask: Image.Image, change: ImageChange) -> Pixels:
    """Return a mask on the page of its image: [height, width], or [height, width, channels]; 0 where no image is."""
    from PIL import Image

    resized = mask.resize(change.inner, Image.Resampling.NEAREST, box=_box(mask, change))
    return _laid_on_page(np.asarray(resized), change, around=0)


def _box(image: Image.Image, change: ImageChange) -> tuple[float, float, float, float]:
    """Return what is seen of an image, in its own pixels."""
    across, down = image.width / change.width, image.height / change.height
    left, top, right, bottom = change.window
    return left * across, top * down, min(image.width, right * across), min(image.height, bottom * down)


def _laid_on_page(pixels: Pixels, change: ImageChange, *, around: int) -> Pixels:
    """Mirror what was resized and lay it on the page."""
    if change.mirrored:
        pixels = pixels[:, ::-1]
    if change.inner == (change.width, change.height):
        return pixels
    page = np.full((change.height, change.width, *pixels.shape[2:]), around, np.uint8)
    x, y = change.offset
    page[y : y + pixels.shape[0], x : x + pixels.shape[1]] = pixels
    return page


def _recolored(pixels: Pixels, color: ColorChange) -> Pixels:
    """Apply a change of colors in whole numbers, so that every machine makes the same pixels."""
    made = np.empty_like(pixels)
    for first in range(0, len(pixels), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        _recolor(pixels[rows], color, made[rows])
    return made


def _recolor(pixels: Pixels, color: ColorChange, made: Pixels) -> None:
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


def cut_patches(pixels: Pixels, *, patch_px: int) -> Pixels:
    """Cut pixels [height, width] or [height, width, channels] into patches [patches, channels * side * side]."""
    pixels_HWC = pixels.reshape(*pixels.shape[:2], -1)
    height, width, channels = pixels_HWC.shape
    grid = pixels_HWC.reshape(height // patch_px, patch_px, width // patch_px, patch_px, channels)
    return np.ascontiguousarray(grid.transpose(0, 2, 4, 1, 3)).reshape(-1, channels * patch_px * patch_px)


def page_patches(image: Image.Image, change: ImageChange, *, patch_px: int, pixel_version: int) -> Pixels:
    """Return the patches [P, C] of a page, in color; see ``change_pixels``."""
    pixels = change_pixels(image, change, pixel_version=pixel_version)
    return colored(cut_patches(pixels, patch_px=patch_px), patch_px=patch_px)


def colored(patches_PC: Pixels, *, patch_px: int) -> Pixels:
    """Return patches [P, C] in colour: gray ones are repeated over the channels."""
    return np.tile(patches_PC, (1, CHANNELS)) if patches_PC.shape[1] == patch_px**2 else patches_PC


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
    """Return the number of bits after the binary point, the most that let the largest weight fit."""
    fitting = (bits for bits in range(SHIFT_MAX - 1) if _rounded(largest * (1 << (bits + 1))) >= 1 << WEIGHT_BITS)
    return next(fitting, SHIFT_MAX - 1)


def _rounded(value: float) -> int:
    """Round halves away from zero."""
    return math.floor(value + 0.5) if value >= 0 else math.ceil(value - 0.5)
