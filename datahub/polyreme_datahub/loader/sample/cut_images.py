"""Patches of a question's images, as an operation: what anyone may send is decoded in a sandbox."""

from __future__ import annotations

import dataclasses

from polyreme_datahub.loader.sample.image_patches import image_patches
from polyreme_datahub.operations.declare import RECORD, operation
from polyreme_datahub.operations.fit_pages import ComposeParameters
from polyreme_datahub.operations.values import Blob, Value

NAME = f"{__name__}:cut_images"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CutParameters(ComposeParameters):
    """How images become patches."""

    pixel_version: int
    """How images become pixels (``index.format.PIXELS``)."""


@operation("cut-images", 1, inputs=(RECORD,), parameters=CutParameters)
def cut_images(record: Value, parameters: CutParameters) -> Value:
    """Cut the images of a record into patches, as a rank does when it reads a sample."""
    grids, made = [], []
    for digest in record.data["images"]:
        patches_PC, grid = image_patches(record.blobs[digest].data, parameters, pixel_version=parameters.pixel_version)
        made.append(Blob(patches_PC.tobytes()))
        grids.append(grid)
    return Value.of({"grids": grids, "patches": [blob.digest for blob in made]}, made=made)
