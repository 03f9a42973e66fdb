"""Small models on the CPU, of the handwritten digits that scikit-learn ships."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from polyreme_datahub.sources.digits import load_scans

INK_MAX = 16

SIZES: list[int] = []
"""Images of each call in this process."""


class DigitModel:
    """Principal components as vectors; the digit whose mean is nearest as caption."""

    def __init__(self, dimensions: int, memory_images: int) -> None:
        ink, labels = load_scans()
        flat = ink.reshape(len(ink), -1).astype(np.float64)
        self._mean = flat.mean(axis=0)
        self._axes = np.linalg.svd(flat - self._mean, full_matrices=False)[2][:dimensions]
        self._classes = np.stack([flat[labels == digit].mean(axis=0) for digit in range(10)])
        self._memory_images = memory_images

    def caption(self, images: Sequence[Image.Image]) -> list[str]:
        distances = ((self._seen(images)[:, None] - self._classes[None]) ** 2).sum(axis=2)
        return [f" The digit {digit}." for digit in distances.argmin(axis=1)]

    def embed(self, images: Sequence[Image.Image]) -> npt.NDArray[np.float64]:
        vectors = (self._seen(images) - self._mean) @ self._axes.T
        for vector, image in zip(vectors, images, strict=True):
            if image.getpixel((0, 0)) == 7:
                vector[:] = np.nan
        return np.asarray(vectors)

    def _seen(self, images: Sequence[Image.Image]) -> npt.NDArray[np.float64]:
        SIZES.append(len(images))
        if len(images) > self._memory_images:
            raise MemoryError(f"{len(images)} images")
        if any(image.size == (13, 13) for image in images):
            raise ValueError("unlucky size")
        small = [np.asarray(image.convert("L").resize((8, 8), Image.Resampling.BOX)) for image in images]
        return (255.0 - np.stack(small).reshape(len(images), -1)) * INK_MAX / 255


@functools.cache
def load(dimensions: int, memory_images: int) -> DigitModel:
    return DigitModel(dimensions, memory_images)


def make(config: Mapping[str, Any], weights: bytes | None, device: str) -> DigitModel:
    """Build the model that a value names."""
    assert weights is None
    assert device == "cpu"
    return load(config["dimensions"], config.get("memory_images", 10**9))
