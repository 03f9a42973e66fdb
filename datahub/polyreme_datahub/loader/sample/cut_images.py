"""Patches of images that belong to no dataset, as an operation: what a person asks about is decoded in a sandbox."""

from __future__ import annotations

import dataclasses

from polyreme_datahub.index.format import BY_CONVOLUTION
from polyreme_datahub.loader.sample.pixels import change_pixels, colored, cut_patches, least_size, unchanged
from polyreme_datahub.loader.sample.reader import page_image
from polyreme_datahub.operations.declare import RECORD, operation
from polyreme_datahub.operations.values import Blob, Value

NAME = f"{__name__}:cut_images"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CutParameters:
    """How pages become patches."""

    patch_px: int
    pixel_version: int
    """How images become pixels (``index.format.PIXELS``)."""


@operation("cut-images", 1, inputs=(RECORD, "compose"), parameters=CutParameters)
def cut_images(record: Value, composed: Value, parameters: CutParameters) -> Value:
    """Cut the pages of a record into patches, as a rank does when it reads a sample."""
    grids, made = [], []
    for page in composed.data["pages"]:
        change = unchanged(page["width"], page["height"])
        least = least_size(change) if parameters.pixel_version == BY_CONVOLUTION else None
        files = {page["image"]: memoryview(record.blobs[page["image"]].data)}
        image = page_image(files, {"file": page["image"], "open": page["open"]}, least)
        pixels = change_pixels(image, change, pixel_version=parameters.pixel_version)
        side = parameters.patch_px
        made.append(Blob(colored(cut_patches(pixels, patch_px=side), patch_px=side).tobytes()))
        grids.append([page["height"] // side, page["width"] // side])
    return Value.of({"grids": grids, "patches": [blob.digest for blob in made]}, made=made)
