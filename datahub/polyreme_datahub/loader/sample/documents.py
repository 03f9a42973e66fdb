"""Documents, which are samples as the trainer takes them, and the packs in which they are laid out.

Shape suffixes as in ``polyreme_api.batch``.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from polyreme_api.batch import IGNORED_TARGET, PackedBatch
from polyreme_datahub.loader.sample.mapped_index import MappedIndex
from polyreme_datahub.loader.sample.reader import ImageNote, StoredSample

CHANNELS = 3
NULL_DOCUMENT_TOKENS = 128
"""A null pack is cut into documents so short that attention to them costs little: it must not be the dearest pack."""


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """A sample as the trainer takes it."""

    tokens_T: npt.NDArray[np.int64]
    targets_T: npt.NDArray[np.int64]
    patches_PC: npt.NDArray[np.uint8]
    grids_I2: npt.NDArray[np.int32]
    sample_id: str
    unmasked: int
    """Targets that are not masked."""
    lost_images: int = 0
    """Images that the index has and that are not here."""
    notes: tuple[ImageNote, ...] = ()
    """One of each image, for people."""
    placeholder: bool = False
    """Whether it is padding in the place of a damaged sample."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its arrays."""
        return self.patches_PC.nbytes + self.tokens_T.nbytes + self.targets_T.nbytes + self.grids_I2.nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class LaidPacks:
    """Packs whose patches still lie in their documents: whoever moves them to their place copies them once."""

    batch: PackedBatch
    """All but the patches, of which it has none."""
    patches: Sequence[npt.NDArray[np.uint8]]
    """Of each document, in order; at least one array."""

    def joined(self) -> PackedBatch:
        """Return the packs with their patches."""
        return dataclasses.replace(self.batch, patches_PC=np.concatenate(self.patches))


def cut(index: MappedIndex, sample: int, stored: StoredSample) -> Document:
    """Make a document of a sample: targets are the tokens that follow, where they are learned."""
    tokens_T = stored.tokens_T.astype(np.int64)
    targets_T = np.full(tokens_T.size, IGNORED_TARGET, dtype=np.int64)
    following = stored.learned_T[1:].astype(bool)
    targets_T[:-1][following] = tokens_T[1:][following]
    return Document(
        tokens_T,
        targets_T,
        stored.patches_P,
        stored.grids_I2,
        index.sample_id(sample),
        int(np.count_nonzero(following)),
        notes=stored.notes,
    )


def assemble(
    packs: Sequence[Sequence[Document]],
    *,
    pack_tokens: int,
    pad: int,
    values: int,
    null: int = 0,
    marks_padding: bool = True,
) -> LaidPacks:
    """Lay documents out as packs, one behind the other; what is left of a pack is a document of padding.

    Args:
        packs: Documents of each pack, which fit it; a pack may have none.
        pack_tokens: Tokens of a pack.
        pad: Token of the padding.
        values: Values of a patch.
        null: How many packs, the last ones, are null packs.
        marks_padding: Whether all padding is marked as such; else null packs alone, as for jobs of earlier releases.
    """
    total = len(packs) * pack_tokens
    tokens_T = np.full(total, pad, dtype=np.int64)
    targets_T = np.full(total, IGNORED_TARGET, dtype=np.int64)
    offsets, padding = [0], []
    real = len(packs) - null
    inside = int(marks_padding)
    for number, documents in enumerate(packs[:real]):
        at = number * pack_tokens
        for document in documents:
            stop = at + document.tokens_T.size
            tokens_T[at:stop] = document.tokens_T
            targets_T[at:stop] = document.targets_T
            padding += [len(offsets) - 1] * (inside * document.placeholder)
            offsets.append(stop)
            at = stop
        if at < (number + 1) * pack_tokens:
            padding += [len(offsets) - 1] * inside
            offsets.append((number + 1) * pack_tokens)
    for number in range(real, len(packs)):
        begin, end = number * pack_tokens, (number + 1) * pack_tokens
        cuts = [*range(begin + NULL_DOCUMENT_TOKENS, end, NULL_DOCUMENT_TOKENS), end]
        padding += range(len(offsets) - 1, len(offsets) - 1 + len(cuts))
        offsets += cuts
    bounds = np.array(offsets, dtype=np.int32)
    laid = [document for documents in packs for document in documents]
    none_PC = np.zeros((0, values), np.uint8)
    batch = PackedBatch(
        tokens_T=tokens_T,
        targets_T=targets_T,
        positions_T=np.arange(total) - np.repeat(bounds[:-1], np.diff(bounds)).astype(np.int64),
        document_offsets=bounds,
        patches_PC=none_PC,
        grids_I2=np.concatenate([np.zeros((0, 2), np.int32), *(d.grids_I2 for d in laid)]),
        sample_ids=[document.sample_id for document in laid],
        unmasked_tokens=sum(document.unmasked for document in laid),
        lost_images=_lost(laid),
        padding_documents=tuple(padding),
    )
    return LaidPacks(batch, [none_PC, *(document.patches_PC for document in laid)])


def _lost(documents: Sequence[Document]) -> list[int]:
    """Number the images that are not there among those that the index has."""
    counts = [len(document.grids_I2) + document.lost_images for document in documents]
    firsts = itertools.accumulate(counts, initial=0)
    return [
        number
        for document, first in zip(documents, firsts, strict=False)
        for number in range(first, first + document.lost_images)
    ]
