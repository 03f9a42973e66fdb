"""Preview of what a step trains on, for people: made of the very packs that a rank would get.

A source that knows more of its images than ranks need (``notes``) has boxes, masks and augmentation shown too. A mask
is laid over its image as that was augmented. Ranks never read masks: models here do not train on them, and what a step
trains on does not depend on them.

Shape suffixes as in ``polyreme_api.batch``.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from polyreme_api.batch import IGNORED_TARGET, BatchSource, PackedBatch
from polyreme_datahub.loader.sample.pixels import CHANNELS, ImageChange, move_labels
from polyreme_datahub.loader.sample.reader import ImageNote
from polyreme_datahub.operations.values import Blob
from polyreme_datahub.tokenizer_file import TokenText

if TYPE_CHECKING:
    from PIL import Image

PNG_LEVEL = 6
COLORS: npt.NDArray[np.uint8] = np.array(
    [(230, 57, 70), (29, 120, 220), (42, 157, 80), (240, 160, 20), (140, 80, 200), (0, 170, 180)], np.uint8
)
"""Of the values of a gray mask, over and over; 0 is no object and stays clear."""
OPACITY = 120
"""Of 255."""

Tokens: TypeAlias = npt.NDArray[np.int64]
SampleName: TypeAlias = tuple[str, str]
"""Version of a dataset, and id of a sample."""
ReadMasks: TypeAlias = Callable[[Collection[SampleName]], Mapping[SampleName, Sequence[Blob | None]]]
"""Finds the masks of samples, one or None for each image; a sample that has none may be left out."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Tokens in a row that the model learns all or none of."""

    text: str
    tokens: int
    learned: bool
    answer: str = ""
    """Of a pair: ``chosen`` or ``rejected``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """An image as the model sees it."""

    height: int
    """[pixels]"""
    width: int
    """[pixels]"""
    tokens: int
    png: bytes = dataclasses.field(repr=False)
    shapes: Sequence[Mapping[str, Any]] = ()
    """Boxes, points and polygons, in its pixels."""
    change: str = ""
    """How it was augmented at this visit."""
    mask: bytes = dataclasses.field(default=b"", repr=False)
    """A translucent PNG of the same size; empty: the image has no mask."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreviewDocument:
    """One sample in a pack."""

    sample_id: str
    tokens: int
    learned: int
    """Tokens that the model learns to write."""
    parts: tuple[Span | Picture, ...]
    same: int = 0
    """Of a pair: tokens with which both answers begin."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreviewPack:
    """One pack of a step."""

    number: int
    tokens_max: int
    documents: tuple[PreviewDocument, ...]

    @property
    def tokens(self) -> int:
        """Tokens without the padding."""
        return sum(document.tokens for document in self.documents)


@runtime_checkable
class Noting(Protocol):
    """A source that says more of its images."""

    def notes(self, step: int, *, pack: int) -> Sequence[ImageNote]:
        """Return what there is to say about each image of a pack."""
        ...


def preview(
    source: BatchSource, text: TokenText, step: int, *, first: int, count: int, masks: ReadMasks = lambda _: {}
) -> Iterator[PreviewPack]:
    """Yield some packs of a step as people may read them.

    Args:
        source: Training data; its errors are passed on.
        text: Decodes its tokens.
        step: Counts from 1.
        first: First pack, from 0.
        count: How many packs.
        masks: Reads the masks of samples; its errors are passed on.
    """
    for number in range(first, first + count):
        batch = source.packs(step, first=number, count=1)
        notes = source.notes(step, pack=number) if isinstance(source, Noting) else ()
        found = masks({note.sample for note in notes})
        drawn = [_mask(note, found.get(note.sample, ())) for note in notes]
        documents = tuple(_documents(batch, text, notes, drawn, media=source.token_ids.media))
        yield PreviewPack(number=number, tokens_max=source.pack_tokens_in(step), documents=documents)


def _mask(note: ImageNote, masks: Sequence[Blob | None]) -> bytes:
    mask = masks[note.image] if note.image < len(masks) else None
    return b"" if mask is None or note.drawn is None else draw_mask(mask.pixels(), note.drawn)


def _documents(
    batch: PackedBatch, text: TokenText, notes: Sequence[ImageNote], masks: Sequence[bytes], *, media: int
) -> Iterator[PreviewDocument]:
    tokens_T, targets_T = np.asarray(batch.tokens_T), np.asarray(batch.targets_T)
    offsets = np.asarray(batch.document_offsets).tolist()
    pictures = _pictures(batch, int(np.count_nonzero(tokens_T == media)), notes, masks)
    branches: dict[int, list[int]] = {}
    for document, begin in np.asarray(batch.branches_B4)[:, :2].tolist():
        branches.setdefault(document, []).append(begin)
    bounds = enumerate(itertools.pairwise(offsets))
    for sample_id, (number, (start, stop)) in zip(batch.sample_ids, bounds, strict=False):
        # A token is learned where the token before it has a target.
        learned_T = np.concatenate([[False], targets_T[start : stop - 1] != IGNORED_TARGET])
        parts = tuple(_parts(tokens_T[start:stop], learned_T, text, media, pictures))
        begins = branches.get(number, [])
        yield PreviewDocument(
            sample_id=sample_id,
            tokens=stop - start,
            learned=int(np.count_nonzero(learned_T)),
            parts=_pair(parts) if begins else parts,
            same=_same(*(tokens_T[at + 1 : end] for at, end in itertools.pairwise([*begins, stop]))) if begins else 0,
        )


def _pair(parts: Sequence[Span | Picture]) -> tuple[Span | Picture, ...]:
    """Name the two answers at the end of a pair, and leave the token between them out: it repeats the prompt's last."""
    *prompt, chosen, _, rejected = parts
    both = zip((chosen, rejected), ("chosen", "rejected"), strict=True)
    answers = [dataclasses.replace(part, answer=name) for part, name in both if isinstance(part, Span)]
    return (*prompt, *answers)


def _same(one_T: Tokens, other_T: Tokens) -> int:
    """Count the tokens with which two answers begin."""
    shorter = min(len(one_T), len(other_T))
    return int(np.logical_and.accumulate(one_T[:shorter] == other_T[:shorter]).sum())


def _parts(
    tokens_T: Tokens, learned_T: npt.NDArray[np.bool_], text: TokenText, media: int, pictures: Iterator[Picture]
) -> Iterator[Span | Picture]:
    kind_T = np.where(tokens_T == media, 2, learned_T.astype(np.int64))
    borders = [0, *(np.flatnonzero(np.diff(kind_T)) + 1).tolist(), len(tokens_T)]
    for start, stop in itertools.pairwise(borders):
        if kind_T[start] != 2:
            spoken = text.decode(tokens_T[start:stop].tolist())
            yield Span(text=spoken, tokens=stop - start, learned=bool(kind_T[start]))
            continue
        left = stop - start
        while left > 0:
            picture = next(pictures)
            left -= picture.tokens
            yield picture


def _pictures(
    batch: PackedBatch, media_tokens: int, notes: Sequence[ImageNote], masks: Sequence[bytes]
) -> Iterator[Picture]:
    """Yield the images of a batch in order, each with its share of the tokens that stand for images."""
    patches_PC, grids_I2 = np.asarray(batch.patches_PC), np.asarray(batch.grids_I2)
    side = round((patches_PC.shape[1] / CHANNELS) ** 0.5)
    patches_per_token = len(patches_PC) // max(1, media_tokens)
    at = 0
    for image, (rows, columns) in enumerate(grids_I2.tolist()):
        note = notes[image] if image < len(notes) else ImageNote(shapes=())
        cut_PC = patches_PC[at : at + rows * columns]
        at += rows * columns
        pixels = cut_PC.reshape(rows, columns, CHANNELS, side, side).transpose(0, 3, 1, 4, 2)
        yield Picture(
            height=rows * side,
            width=columns * side,
            tokens=rows * columns // patches_per_token,
            png=_png(pixels.reshape(rows * side, columns * side, CHANNELS)),
            shapes=note.shapes,
            change=note.change,
            mask=masks[image] if image < len(masks) else b"",
        )


def draw_mask(mask: Image.Image, change: ImageChange) -> bytes:
    """Return a mask as a translucent PNG that fits the page of its image, changed as the image was.

    Args:
        mask: Upright, gray or RGB; values and colors are labels, 0 and black are no object.
        change: What was drawn for its image.
    """
    labels = move_labels(mask, change)
    colors = COLORS[(labels.astype(np.int64) - 1) % len(COLORS)] if labels.ndim == 2 else labels
    seen = (labels if labels.ndim == 2 else labels.max(axis=2)) > 0
    return _png(np.dstack([colors * seen[..., None], seen * np.uint8(OPACITY)]).astype(np.uint8))


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=PNG_LEVEL)
    return buffer.getvalue()
