"""Filters by size, shape and sharpness: a sample with an image outside the limits is dropped, which is no error.

A filter's value holds what it measured. Steps after it keep taking their images from ``decode``: a dropped sample does
not reach them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.operations.declare import operation
from polyreme_datahub.operations.open_rules import OpenRules
from polyreme_datahub.operations.values import Dropped, Value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SizeParameters:
    """Limits of an image's size [pixels]; both ends are kept."""

    side_px_min: int = 1
    side_px_max: int = 1_000_000
    pixels_min: int = 1
    pixels_max: int = 100_000_000


@operation("size-filter", 1, inputs=("decode",), blobs=False, parameters=SizeParameters)
def size_filter(decoded: Value, parameters: SizeParameters) -> Value:
    """Drop samples with an image that is too small or too large."""
    for place, image in enumerate(images_of(decoded.data)):
        width, height = image["width"], image["height"]
        good = parameters.side_px_min <= min(width, height) and max(width, height) <= parameters.side_px_max
        if not good or not parameters.pixels_min <= width * height <= parameters.pixels_max:
            raise Dropped(
                f"image {place} is {width} x {height} pixels, kept are sides of {parameters.side_px_min} to "
                f"{parameters.side_px_max} and {parameters.pixels_min} to {parameters.pixels_max} in all"
            )
    return Value.of({"images": len(images_of(decoded.data))})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AspectParameters:
    """Limit of an image's shape."""

    aspect_max: float = 8.0
    """Longer side over shorter side."""

    def __post_init__(self) -> None:
        if self.aspect_max < 1:
            raise InvalidConfigError(f"aspect_max is {self.aspect_max}, expected at least 1", field="aspect_max")


@operation("aspect-filter", 1, inputs=("decode",), blobs=False, parameters=AspectParameters)
def aspect_filter(decoded: Value, parameters: AspectParameters) -> Value:
    """Drop samples with an image that is too long and thin."""
    for place, image in enumerate(images_of(decoded.data)):
        longer, shorter = max(image["width"], image["height"]), min(image["width"], image["height"])
        if longer > parameters.aspect_max * shorter:
            raise Dropped(
                f"image {place} is {image['width']} x {image['height']} pixels, kept are at most "
                f"{parameters.aspect_max:g} to 1"
            )
    return Value.of({"images": len(images_of(decoded.data))})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlurParameters:
    """Least sharpness of an image."""

    sharpness_min: float = 50.0
    """Variance of the Laplacian, of gray values 0 to 255."""
    side_px: int = 512
    """Images with a longer side are shrunk to it first, so that the variance is comparable."""

    def __post_init__(self) -> None:
        if self.side_px < 8:
            raise InvalidConfigError(f"side_px is {self.side_px}, expected at least 8", field="side_px")


@operation("blur-filter", 1, inputs=("decode",), parameters=BlurParameters)
def blur_filter(decoded: Value, parameters: BlurParameters) -> Value:
    """Drop samples with a blurred image."""
    measured = []
    for place, image in enumerate(decoded.data.get("images", ())):
        pixels = decoded.blobs[image["digest"]].pixels(OpenRules(**image.get("open", {})))
        sharpness = round(sharpness_of(pixels, side_px=parameters.side_px), 3)
        if sharpness < parameters.sharpness_min:
            raise Dropped(f"image {place} is blurred: sharpness {sharpness:g}, kept from {parameters.sharpness_min:g}")
        measured.append(sharpness)
    return Value.of({"sharpness": measured})


def sharpness_of(image: Image.Image, *, side_px: int) -> float:
    """Return the variance of the Laplacian of an image's gray values; 0 for one too small to have an inside."""
    gray = image.convert("L")
    if max(gray.size) > side_px:
        scale = side_px / max(gray.size)
        size = (max(1, round(gray.width * scale)), max(1, round(gray.height * scale)))
        gray = gray.resize(size, Image.Resampling.BOX)
    pixels: npt.NDArray[np.int32] = np.asarray(gray).astype(np.int32)
    if min(pixels.shape) < 3:
        return 0.0
    around = pixels[:-2, 1:-1] + pixels[2:, 1:-1] + pixels[1:-1, :-2] + pixels[1:-1, 2:]
    return float((around - 4 * pixels[1:-1, 1:-1]).var())


def images_of(facts: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the images of decode's facts; a drawn page is one."""
    images: Sequence[Mapping[str, Any]] = facts["images"] if facts["kind"] == "images" else [facts]
    return images
