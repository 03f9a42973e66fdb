"""Draws how the images of a sample change at one visit: settings, counter-based random numbers, the change of an image.

A draw is a function of (seed, source, sample, visit, image, operation) and of nothing else. All arithmetic is of single
IEEE operations and square roots, so that every machine draws the same. ``augment_pixels`` makes the pixels.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from polyreme_api.job.data import Augment

AUGMENT_VERSION = 1
"""Goes up when the same settings give other pixels or tokens: loader states of another version are refused."""
CROP, SCALE, MIRROR, COLOR = range(4)
"""Operations, as the counter names them."""
DRAWS = 4
"""Numbers of one operation."""
MIDDLE_GRAY = 128.0
GRAY_WEIGHTS = (0.299, 0.587, 0.114)
COLOR_BITS = 14
"""Colors are computed in whole numbers of 2**-14."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom, in pixels of a page."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AugmentSettings:
    """What may change, as shares; None: this operation is off."""

    crop_area_min: float | None = None
    crop_stretch_max: float = 0.0
    scale_min: float | None = None
    mirror_probability: float | None = None
    color: tuple[float, float, float] | None = None
    """Brightness, contrast, saturation: most that a factor differs from 1."""

    @property
    def moves(self) -> bool:
        """Whether anything on an image may get another place."""
        return (self.crop_area_min, self.scale_min, self.mirror_probability) != (None, None, None)


def settings_of(augment: Augment | None) -> AugmentSettings | None:
    """Read the settings of a source; None where nothing changes."""
    if augment is None:
        return None
    crop, scale, mirror, color = augment.crop, augment.scale, augment.mirror, augment.color
    found = AugmentSettings(
        crop_area_min=None if crop is None else crop.min_area_percent / 100,
        crop_stretch_max=0.0 if crop is None else crop.max_stretch_percent / 100,
        scale_min=None if scale is None else scale.min_percent / 100,
        mirror_probability=None if mirror is None else float(mirror.probability),
        color=None
        if color is None
        else (color.brightness_percent / 100, color.contrast_percent / 100, color.saturation_percent / 100),
    )
    return None if found == AugmentSettings() else found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One visit of a sample by a run."""

    settings: AugmentSettings
    seed: int
    source: str
    sample_id: str
    number: int
    """How often the source has come round before; counts from 0."""

    def draw(self, image: int, operation: int) -> tuple[float, ...]:
        """Return numbers of [0, 1): Philox 4x64, whose streams NumPy keeps (NEP 19)."""
        name = f"{self.seed}:{self.source}:{self.sample_id}".encode()
        digest = hashlib.blake2b(name, digest_size=16, person=b"augment").digest()
        key = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        counter = np.array([0, self.number, image, operation], dtype=np.uint64)
        words = np.random.Philox(key=key, counter=counter).random_raw(DRAWS)
        return tuple((int(word) >> 11) * 2.0**-53 for word in words)


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


def draw_change(
    visit: Visit, image: int, size: tuple[int, int], kept: Box | None, *, geometry: bool, mirror: bool
) -> ImageChange:
    """Draw how an image changes.

    Args:
        visit: Whose.
        image: Number of the image in its sample.
        size: Width and height of its page.
        kept: What every window must contain; None: nothing in particular.
        geometry: Whether it may be cropped, scaled and mirrored.
        mirror: Whether it may be mirrored.
    """
    settings, change = visit.settings, unchanged(*size)
    if geometry and settings.crop_area_min is not None:
        window = _window(settings, visit.draw(image, CROP), size, kept)
        change = dataclasses.replace(change, window=window)
    if geometry and settings.scale_min is not None:
        inner, offset = _placed(settings.scale_min, visit.draw(image, SCALE), size)
        change = dataclasses.replace(change, inner=inner, offset=offset)
    if geometry and mirror and settings.mirror_probability is not None:
        mirrored = visit.draw(image, MIRROR)[0] < settings.mirror_probability
        change = dataclasses.replace(change, mirrored=mirrored)
    if settings.color is not None:
        brightness, contrast, saturation = (
            1.0 + most * (2.0 * drawn - 1.0)
            for most, drawn in zip(settings.color, visit.draw(image, COLOR), strict=False)
        )
        color = ColorChange(brightness=brightness, contrast=contrast, saturation=saturation)
        change = dataclasses.replace(change, color=color)
    return change


def _window(settings: AugmentSettings, draws: Sequence[float], size: tuple[int, int], kept: Box | None) -> Box:
    """Draw area, shape and place of a window that contains what is kept."""
    area = 1.0 - draws[0] * (1.0 - (settings.crop_area_min or 1.0))
    lean = settings.crop_stretch_max * (2.0 * draws[1] - 1.0)
    stretch = 1.0 + lean if lean >= 0.0 else 1.0 / (1.0 - lean)
    wanted = (size[0] * math.sqrt(area * stretch), size[1] * math.sqrt(area / stretch))
    spans = [(0.0, 0.0), (0.0, 0.0)]
    if kept is not None:
        spans = [(_inside(kept[at], size[at]), _inside(kept[at + 2], size[at])) for at in (0, 1)]
        larger = [(high - low) / side for (low, high), side in zip(spans, wanted, strict=True)]
        wanted = (wanted[0] * max(1.0, *larger), wanted[1] * max(1.0, *larger))
    else:
        spans = [(float(side), 0.0) for side in size]
    begins, ends = [], []
    for side, want, (low, high), drawn in zip(size, wanted, spans, draws[2:], strict=True):
        length = min(float(side), want)
        first, last = max(0.0, high - length), min(low, side - length)
        begin = first + drawn * max(0.0, last - first)
        begins.append(begin)
        ends.append(min(float(side), begin + length))
    return begins[0], begins[1], ends[0], ends[1]


def _inside(value: float, side: int) -> float:
    return min(float(side), max(0.0, float(value)))


def _placed(scale_min: float, draws: Sequence[float], size: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """Draw the size and place of the window on its page."""
    scale = 1.0 - draws[0] * (1.0 - scale_min)
    width, height = (max(1, round(side * scale)) for side in size)
    across, down = int(draws[1] * (size[0] - width + 1)), int(draws[2] * (size[1] - height + 1))
    return (width, height), (across, down)
