"""Pictures of pages: a page is named by the bytes of its sample, and drawn again when a person wants to see it.

Reports of earlier releases name a page's raw patches, or a PNG; both are still drawn where they are still stored.
"""

from __future__ import annotations

import io
import json

import numpy as np

from polyreme_datahub.index.sample_bytes import RECORD_FILE, member_files
from polyreme_datahub.lakehouse import Artifact
from polyreme_datahub.loader.sample.reader import page_pixels

PNG_LEVEL = 1
SAMPLE = "sample"


def sample_reference(shard: str, start: int, size: int, digest: str, *, image: int, height: int, width: int) -> str:
    """Name an image of a sample, and its size on the page, so that it can be drawn."""
    return "/".join(map(str, (SAMPLE, digest, shard, start, size, image, height, width)))


def place_of(reference: str) -> Artifact | None:
    """Return where the bytes of a page's sample lie; None: a reference of an earlier release."""
    kind, *facts = reference.split("/")
    if kind != SAMPLE:
        return None
    return Artifact(digest=facts[0], blob=facts[1], start=int(facts[2]), length=int(facts[3]))


def digest_of(reference: str) -> str:
    """Return the digest of the bytes that a page is drawn from."""
    place = place_of(reference)
    return place.digest if place is not None else reference.partition("/")[0]


def draw_png(reference: str, data: bytes) -> bytes:
    """Draw a page as PNG, from the bytes that its reference names."""
    from PIL import Image

    if place_of(reference) is not None:
        image, height, width = map(int, reference.split("/")[-3:])
        files = member_files(data)
        pixels = page_pixels(files, json.loads(bytes(files[RECORD_FILE]))["pages"][image], height, width)
    else:
        _, slash, shape = reference.partition("/")
        if not slash:
            return data
        height, width, channels, side = map(int, shape.split("/"))
        grid = np.frombuffer(data, dtype=np.uint8).reshape(height // side, width // side, channels, side, side)
        pixels = grid.transpose(0, 3, 1, 4, 2).reshape(height, width, channels)
        pixels = pixels[:, :, 0] if channels == 1 else pixels
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=PNG_LEVEL)
    return buffer.getvalue()
