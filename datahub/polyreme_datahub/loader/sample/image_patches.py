"""Patches of an image that is in no dataset: those that processing and loading make of the same bytes.

An encoded JPEG much larger than its page is decoded at a smaller scale, so its patches follow from its bytes. Those of
an image that was decoded elsewhere differ from them by a few levels then, and else are the same.
"""

from __future__ import annotations

from PIL import Image

from polyreme_datahub.index.format import BY_CONVOLUTION
from polyreme_datahub.loader.sample.pixels import Pixels, least_size, page_patches, unchanged
from polyreme_datahub.operations.fit_pages import ComposeParameters, fitting_size
from polyreme_datahub.operations.images import open_upright, upright
from polyreme_datahub.operations.open_rules import OpenRules


def image_patches(
    image: bytes | Image.Image, parameters: ComposeParameters, *, pixel_version: int = BY_CONVOLUTION
) -> tuple[Pixels, tuple[int, int]]:
    """Return the patches [P, C] of an image, and its rows and columns of patches.

    Args:
        image: Encoded, or decoded and upright.
        parameters: Sizes of patches, and most tokens.
        pixel_version: How it becomes pixels (``index.format.PIXELS``).

    Raises:
        BadRecordError: If it can't be decoded, or is too long.
    """
    decoded = open_upright(image) if isinstance(image, bytes) else upright(image.copy(), 1, OpenRules())
    width, height = fitting_size(*decoded.size, parameters)
    change = unchanged(width, height)
    if isinstance(image, bytes) and pixel_version == BY_CONVOLUTION:
        decoded = open_upright(image, least=least_size(change), accepted=True)
    patches_PC = page_patches(decoded, change, patch_px=parameters.patch_px, pixel_version=pixel_version)
    return patches_PC, (height // parameters.patch_px, width // parameters.patch_px)
