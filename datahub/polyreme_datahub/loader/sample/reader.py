"""Makes of a sample's encoded bytes what a model takes: tokens, which of them are learned, patches.

It repeats what processing planned: an image is decoded by the same rules, resized to the size of its grid and cut; the
conversation is encoded with the plan's tokenizer. The same bytes give the same arrays on every rank, and at every visit
unless the source is augmented: then at the same visit. Decoders and the tokenizer are imported with the first sample
that needs them, after the fork of a rank.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from polyreme_datahub.index.format import BY_CONVOLUTION
from polyreme_datahub.index.pieces import piece_at
from polyreme_datahub.index.sample_bytes import GRIDS, RECORD_FILE, check_of, member_files
from polyreme_datahub.index.shapes import FIELDS, moved_shapes, shapes_of
from polyreme_datahub.loader.sample.augment import NOTHING_FORBIDDEN, TextRules, Visit, change_at, text_rules
from polyreme_datahub.loader.sample.pixels import (
    CHANNELS,
    ImageChange,
    change_pixels,
    least_size,
    page_patches,
    unchanged,
)
from polyreme_datahub.operations.values import Blob

if TYPE_CHECKING:
    from PIL import Image

JOINS_DIGITS = "its tokenizer writes other coordinates in another number of tokens"
BYTES_PER_PIXEL = 8
"""Bytes that a decoded pixel takes: what the decoder wrote, and Pillow's copy of it."""
DECODED_BYTES_MAX = 512 * 2**20
"""Most bytes of images that are decoded at once; a larger image is decoded alone."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageNote:
    """What a person may want to see with an image."""

    shapes: Sequence[Mapping[str, Any]]
    """Boxes, points and polygons, in pixels of the image as the model sees it."""
    drawn: ImageChange | None = None
    """How the page is made of its image."""
    rules: TextRules = NOTHING_FORBIDDEN
    """What its sample forbade."""
    image: int = 0
    """Which image of its sample, from 0."""
    sample: tuple[str, str] = ("", "")
    """Version of the dataset and id of the sample; a source fills it in."""

    @property
    def change(self) -> str:
        """Say how it was augmented, and what its sample forbade; empty: nothing."""
        return "; ".join(filter(None, ["" if self.drawn is None else self.drawn.words, self.rules.words]))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoredSample:
    """What one sample's checked bytes hold."""

    tokens_T: npt.NDArray[np.uint32]
    learned_T: npt.NDArray[np.uint8]
    patches_P: npt.NDArray[np.uint8]
    """[P, 3 * side * side]: patches row-major, a patch's values channel-major."""
    grids_I2: npt.NDArray[np.int32]
    check: int
    """Checksum of its tokens as they are without augmentation."""
    notes: tuple[ImageNote, ...] = ()
    """One of each image."""


class SampleReader:
    """Reads samples of one index; several threads may.

    Args:
        patch_px: Side of a patch [pixels].
        merge: Patches per token, each way.
        tokenizer: ``tokenizer.json``, which all indexes of a process share; opened with the first sample.
        pixel_version: How images become pixels (``index.format.PIXELS``).
    """

    def __init__(self, *, patch_px: int, merge: int, tokenizer: Blob, pixel_version: int = BY_CONVOLUTION) -> None:
        self._patch_px, self._merge, self._tokenizer, self._pixel_version = patch_px, merge, tokenizer, pixel_version

    def read(
        self,
        data: bytes,
        grids_I2: npt.NDArray[np.int32],
        visit: Visit | None = None,
        *,
        start: int = 0,
        tokens: int | None = None,
        pixels: bool = True,
    ) -> StoredSample:
        """Make a sample, or a piece of one, of its encoded bytes.

        Args:
            data: Its range of a sample shard, checked against its digest.
            grids_I2: Grids of its images; of a piece, of those that are in it.
            visit: At which visit, where the source is augmented. It changes pixels and coordinates, never a length.
            start: First token of a piece.
            tokens: Count of a piece's tokens; a sample that was not cut is read whole whatever it is.
            pixels: Whether patches are made. Images are decoded all the same, since one that can't be is damage.

        Raises:
            BadRecordError: If an image can't be decoded.
        """
        files = member_files(data)
        record = json.loads(bytes(files[RECORD_FILE]))
        is_cut = GRIDS in record
        all_I2 = np.array(record[GRIDS], np.int32).reshape(-1, 2) if is_cut else grids_I2
        sizes = [(int(columns) * self._patch_px, int(rows) * self._patch_px) for rows, columns in all_I2]
        shapes = shapes_of(record) if FIELDS.keys() & record.keys() else {}
        tokens_T, learned_T, spans = self._encode(record, shapes, sizes, all_I2)
        stop = start + tokens if is_cut and tokens is not None else len(tokens_T)
        check = check_of(tokens_T[start:stop], learned_T[start:stop])
        changes, rules = [unchanged(*size) for size in sizes], NOTHING_FORBIDDEN
        if visit is not None:
            rules = text_rules(record, visit.settings)
            changes = [change_at(visit, image, size, shapes, rules) for image, size in enumerate(sizes)]
            moved = moved_shapes(shapes, [change.move for change in changes])
            if moved != shapes:
                after_T, after_learned_T, _ = self._encode(record, moved, sizes, all_I2)
                if np.array_equal(after_learned_T, learned_T):
                    tokens_T, shapes = after_T, moved
                else:
                    # No length may change: coordinates are digits in fixed places, but a released tokenizer joins some.
                    rules = dataclasses.replace(rules, geometry=JOINS_DIGITS)
                    changes = [change_at(visit, image, size, shapes, rules) for image, size in enumerate(sizes)]
        images = piece_at(spans, start, stop).images if is_cut else range(len(sizes))
        pages = [(record["pages"][image], changes[image]) for image in images]
        return StoredSample(
            tokens_T=tokens_T[start:stop],
            learned_T=learned_T[start:stop],
            patches_P=self._patches(files, pages, pixels=pixels),
            grids_I2=grids_I2,
            check=check,
            notes=tuple(_note(shapes, image, changes[image], rules) for image in images),
        )

    def _encode(
        self,
        record: Mapping[str, Any],
        shapes: Mapping[str, Sequence[Any]],
        sizes: Sequence[tuple[int, int]],
        grids_I2: npt.NDArray[np.int32],
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8], list[list[int]]]:
        """Return the tokens, a one for each that is learned, and the tokens of each image."""
        from polyreme_datahub.record_tokens import encode_record
        from polyreme_datahub.tokens import open_tokenizer, token_arrays

        cells = [int(rows) * int(columns) // self._merge**2 for rows, columns in grids_I2]
        tokenizer = open_tokenizer(self._tokenizer.digest, self._tokenizer.data)
        encoded = encode_record(tokenizer, record, shapes, sizes, cells)
        return *token_arrays(encoded), encoded["images"]

    def _patches(
        self, files: Mapping[str, memoryview], pages: Sequence[tuple[Mapping[str, Any], ImageChange]], *, pixels: bool
    ) -> npt.NDArray[np.uint8]:
        side, cut = self._patch_px, []
        for page, change in pages:
            image = page_image(files, page, least_size(change) if self._pixel_version == BY_CONVOLUTION else None)
            if pixels:
                cut.append(page_patches(image, change, patch_px=side, pixel_version=self._pixel_version))
        if len(cut) == 1:
            return cut[0]
        return np.concatenate(cut) if cut else np.zeros((0, CHANNELS * side**2), np.uint8)


def _note(shapes: Mapping[str, Sequence[Any]], image: int, change: ImageChange, rules: TextRules) -> ImageNote:
    mine = tuple(item for items in shapes.values() for item in items if item["image"] == image)
    return ImageNote(shapes=mine, drawn=change, rules=rules, image=image)


def page_image(
    files: Mapping[str, memoryview], page: Mapping[str, Any], least: tuple[int, int] | None = None
) -> Image.Image:
    """Return the image of a page, decoded or drawn.

    Args:
        files: Of the sample.
        page: What its record says of the page.
        least: Width and height that suffice: a JPEG may be decoded at a smaller scale. None: its own size.

    Raises:
        BadRecordError: If it can't be decoded.
    """
    from PIL import Image

    from polyreme_datahub.operations import images, open_rules, page_patches

    if "file" not in page:
        return Image.fromarray(page_patches.draw_page(page))
    rules = open_rules.OpenRules(**page["open"])
    return images.open_upright(bytes(files[page["file"]]), rules, least=least, accepted=True)


def page_pixels(
    files: Mapping[str, memoryview], page: Mapping[str, Any], height: int, width: int
) -> npt.NDArray[np.uint8]:
    """Return the pixels of a page in the size that the plan gives it, unchanged: [height, width], perhaps channels.

    Raises:
        BadRecordError: If its image can't be decoded.
    """
    return change_pixels(page_image(files, page), unchanged(width, height))


class DecodeRoom:
    """Memory for images while they are decoded: who asks for more than is left waits.

    Args:
        bytes_max: Most bytes at once; what is larger waits until it is alone.
    """

    def __init__(self, bytes_max: int = DECODED_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._held = 0
        self._changed = threading.Condition()

    @contextmanager
    def hold(self, size_bytes: int) -> Iterator[None]:
        """Hold some bytes."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held or self._held + size_bytes <= self._bytes_max)
            self._held += size_bytes
        try:
            yield
        finally:
            with self._changed:
                self._held -= size_bytes
                self._changed.notify_all()


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
    from polyreme_datahub.operations.images import UNREADABLE, open_header

    try:
        with open_header(encoded) as image:
            return image.width * image.height
    except UNREADABLE:
        return 0
