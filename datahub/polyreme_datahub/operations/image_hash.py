"""Hashes of images: exact, of the pixels as they are shown, and perceptual, which near copies nearly share."""

from __future__ import annotations

import functools
import hashlib

import numpy as np
import numpy.typing as npt
from PIL import Image

from polyreme_datahub.operations.declare import operation
from polyreme_datahub.operations.open_rules import OpenRules
from polyreme_datahub.operations.values import Value

SIDE_PX = 32
WAVES = 8
"""Waves each way whose strengths make the perceptual hash: 64 bits."""
CELLS = 4
"""Parts each way whose mean colors are compared, since the perceptual hash sees brightness only."""


@operation("image-hash", 2, inputs=("decode",))
def image_hash(decoded: Value) -> Value:
    """Hash a sample's images: ``exact`` is a sha256, ``perceptual`` has 16 hexadecimal digits, ``colors`` 96."""
    hashes = []
    for image in decoded.data.get("images", ()):
        pixels = decoded.blobs[image["digest"]].pixels(OpenRules(**image.get("open", {})))
        hashes.append(
            {
                "exact": exact_hash(pixels),
                "perceptual": f"{perceptual_hash(pixels):016x}",
                "colors": mean_colors(pixels).hex(),
            }
        )
    return Value.of({"images": hashes})


def exact_hash(image: Image.Image) -> str:
    """Hash size, mode and pixels: the same for two files that show the same, whatever their format."""
    digest = hashlib.sha256(f"{image.mode}:{image.width}:{image.height}:".encode())
    digest.update(np.asarray(image).tobytes())
    return digest.hexdigest()


def perceptual_hash(image: Image.Image) -> int:
    """Return 64 bits: which of the lowest waves of the small gray image are stronger than their median (pHash)."""
    small = image.convert("L").resize((SIDE_PX, SIDE_PX), Image.Resampling.BOX)
    pixels: npt.NDArray[np.float64] = np.asarray(small).astype(np.float64)
    waves = _cosines()
    # The first wave each way is the mean and the slopes of the whole image; the mean says nothing of its content.
    strengths = (waves @ pixels @ waves.T).round(3)
    median = np.median(strengths.ravel()[1:])
    bits = (strengths > median).ravel()
    return int.from_bytes(np.packbits(bits).tobytes(), "big")


def mean_colors(image: Image.Image) -> bytes:
    """Return the mean color of each of ``CELLS`` x ``CELLS`` parts, row by row: red, green, blue."""
    return image.convert("RGB").resize((CELLS, CELLS), Image.Resampling.BOX).tobytes()


@functools.cache
def _cosines() -> npt.NDArray[np.float64]:
    """The cosine transform of ``SIDE_PX`` values, its first ``WAVES`` rows."""
    rows = np.arange(WAVES)[:, None]
    columns = 2 * np.arange(SIDE_PX)[None, :] + 1
    return np.asarray(np.cos(np.pi * rows * columns / (2 * SIDE_PX)), dtype=np.float64)
