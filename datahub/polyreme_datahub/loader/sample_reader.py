"""Makes of a sample's encoded bytes what a model takes: tokens, which of them are learned, patches.

It repeats what processing planned: an image is decoded by the same rules, resized to the size of its grid and cut; the
conversation is encoded with the plan's tokenizer. The same bytes give the same arrays, on every rank and at every
visit. Decoders and the tokenizer are imported with the first sample that needs them, after the fork of a rank.
"""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_datahub.index.sample_bytes import RECORD_FILE, member_files
from polyreme_datahub.operations.values import Blob

BYTES_PER_PIXEL = 8
"""Bytes that a decoded pixel takes: what the decoder wrote, and Pillow's copy of it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """What one sample's checked bytes hold."""

    tokens_T: npt.NDArray[np.uint32]
    learned_T: npt.NDArray[np.uint8]
    patches_P: npt.NDArray[np.uint8]
    """[P, 3 * side * side]: patches row-major, a patch's values channel-major."""
    grids_I2: npt.NDArray[np.int32]


class SampleReader:
    """Reads samples of one index; several threads may.

    Args:
        patch_px: Side of a patch [pixels].
        merge: Patches per token, each way.
        tokenizer: ``tokenizer.json``, which all indexes of a process share; opened with the first sample.
    """

    def __init__(self, *, patch_px: int, merge: int, tokenizer: Blob) -> None:
        self._patch_px, self._merge, self._tokenizer = patch_px, merge, tokenizer

    def read(self, data: bytes, grids_I2: npt.NDArray[np.int32]) -> StoredSample:
        """Make a sample of its encoded bytes.

        Args:
            data: Its range of a sample shard, checked against its digest.
            grids_I2: Grids of its images.

        Raises:
            BadRecordError: If an image can't be decoded.
        """
        from polyreme_datahub.operations.encode_text import encode_conversation, open_tokenizer, token_arrays

        files = member_files(data)
        record = json.loads(bytes(files[RECORD_FILE]))
        cells = [int(rows) * int(columns) // self._merge**2 for rows, columns in grids_I2]
        encoded = encode_conversation(open_tokenizer(self._tokenizer), record["conversations"], cells)
        tokens_T, learned_T = token_arrays(encoded)
        return StoredSample(
            tokens_T=tokens_T, learned_T=learned_T, patches_P=self._patches(files, record, grids_I2), grids_I2=grids_I2
        )

    def _patches(
        self, files: Mapping[str, memoryview], record: Mapping[str, Any], grids_I2: npt.NDArray[np.int32]
    ) -> npt.NDArray[np.uint8]:
        from polyreme_datahub.operations.page_patches import CHANNELS, colored, cut_patches

        side = self._patch_px
        cut = [
            colored(cut_patches(page_pixels(files, page, rows * side, columns * side), patch_px=side), patch_px=side)
            for page, (rows, columns) in zip(record["pages"], grids_I2.tolist(), strict=True)
        ]
        return np.concatenate(cut) if cut else np.zeros((0, CHANNELS * side**2), np.uint8)


def page_pixels(
    files: Mapping[str, memoryview], page: Mapping[str, Any], height: int, width: int
) -> npt.NDArray[np.uint8]:
    """Return the pixels of a page in the size that the plan gives it: [height, width], perhaps with channels.

    Raises:
        BadRecordError: If its image can't be decoded.
    """
    from polyreme_datahub.operations.page_patches import draw_page, fitted_page

    if "file" not in page:
        return draw_page(page)
    return fitted_page(bytes(files[page["file"]]), page["open"], height=height, width=width)


def decoded_bytes(data: bytes) -> int:
    """Estimate the memory that decoding a sample takes: that of its largest image, by its header.

    Whether an image can be decoded is not decided here.
    """
    largest = 0
    for name, encoded in member_files(data).items():
        if name != RECORD_FILE:
            largest = max(largest, _pixels_in(encoded))
    return largest * BYTES_PER_PIXEL


def _pixels_in(encoded: memoryview) -> int:
    from PIL import Image

    from polyreme_datahub.operations.images import FORMATS, UNREADABLE

    try:
        with Image.open(io.BytesIO(encoded), formats=FORMATS) as image:
            return image.width * image.height
    except UNREADABLE:
        return 0
