"""Masks of a step's images as people look at them: each laid over its image as that was augmented.

Ranks never read masks: models here do not train on them, and what a step trains on does not depend on them.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from polyreme_datahub.loader.sample.augment import ImageChange
from polyreme_datahub.loader.sample.augment_pixels import move_labels

if TYPE_CHECKING:
    from PIL import Image

COLORS: npt.NDArray[np.uint8] = np.array(
    [(230, 57, 70), (29, 120, 220), (42, 157, 80), (240, 160, 20), (140, 80, 200), (0, 170, 180)], np.uint8
)
"""Of the values of a gray mask, over and over; 0 is no object and stays clear."""
OPACITY = 120
"""Of 255."""
PNG_LEVEL = 6


def draw_mask(mask: Image.Image, change: ImageChange) -> bytes:
    """Return a mask as a translucent PNG that fits the page of its image, changed as the image was.

    Args:
        mask: Upright, gray or RGB; values and colors are labels, 0 and black are no object.
        change: What was drawn for its image.
    """
    from PIL import Image

    labels = move_labels(mask, change)
    colors = COLORS[(labels.astype(np.int64) - 1) % len(COLORS)] if labels.ndim == 2 else labels
    seen = (labels if labels.ndim == 2 else labels.max(axis=2)) > 0
    buffer = io.BytesIO()
    drawn = np.dstack([colors * seen[..., None], seen * np.uint8(OPACITY)]).astype(np.uint8)
    Image.fromarray(drawn).save(buffer, "PNG", compress_level=PNG_LEVEL)
    return buffer.getvalue()
