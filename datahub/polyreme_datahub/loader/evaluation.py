"""Held-out samples: questions for free-running decoding, packs for their loss (``EvaluationSource``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from polyreme_api.batch import THOUGHT_END, EvaluationSample, PackedBatch
from polyreme_api.store import ObjectStore
from polyreme_datahub.errors import SampleDamagedError
from polyreme_datahub.index.damage import note_damage
from polyreme_datahub.loader.order.order import pack
from polyreme_datahub.loader.sample.documents import assemble, cut
from polyreme_datahub.loader.sample.mapped_index import MappedIndex
from polyreme_datahub.loader.sample.pixels import CHANNELS
from polyreme_datahub.loader.sample.reader import StoredSample
from polyreme_datahub.tokenizer_file import TokenText

_Read = TypeVar("_Read")
_log = logging.getLogger(__name__)


class HeldOutSource:
    """Samples of some sets, evenly and never more than ``samples_max``; each set's are spread over the whole set.

    Where a sample's stored bytes are damaged, opening raises; with ``placeholders`` the sample is left out, which is a
    function of the bytes, so every rank agrees. Damage that comes later always raises: ranks could disagree about it.
    The next attempt leaves that sample out.
    """

    def __init__(
        self,
        names: Sequence[str],
        indexes: Sequence[MappedIndex],
        *,
        samples_max: int,
        pack_tokens: int,
        tokenizer: bytes,
        store: ObjectStore,
        placeholders: bool,
    ) -> None:
        self._indexes = indexes
        self._names = names
        self._store = store
        self._text = TokenText(tokenizer)
        counts = shared([len(index) for index in indexes], samples_max)
        self._places = [
            (at, number * len(index) // count)
            for at, (index, count) in enumerate(zip(indexes, counts, strict=True))
            for number in range(count)
            if self._is_whole(index, number * len(index) // count, placeholders=placeholders)
        ]
        # Names, questions and answers have no checksum of their own: they are kept as they were when the shard was
        # checked.
        self._details = [indexes[at].details(sample) for at, sample in self._places]
        self._pack_tokens = pack_tokens
        self._packs = [made for at in range(len(indexes)) for made in self._packs_of(at)]
        """Set and samples of each pack."""

    def __len__(self) -> int:
        """Count of samples."""
        return len(self._places)

    def sample(self, index: int) -> EvaluationSample:
        """Return one sample."""
        at, sample = self._places[index]
        source, details = self._indexes[at], self._details[index]
        stored = self._read(source, sample)
        grids = stored.grids_I2
        prompt_T = stored.tokens_T[: source.prompt_tokens(sample)]
        images = _images_in(prompt_T, grids, media=source.manifest.token_ids["media"], merge=source.manifest.merge)
        return EvaluationSample(
            sample_id=source.sample_id(sample),
            set_name=self._names[at],
            prompt_tokens=prompt_T.tolist(),
            patches_PC=stored.patches_P[: int(grids[:images].prod(axis=1).sum())],
            grids_I2=grids[:images],
            question=details["question"],
            expected=details["expected"],
            image_digest=source.image_reference(sample),
        )

    @property
    def set_names(self) -> Sequence[str]:
        """Names of the sets."""
        return self._names

    @property
    def pack_sets(self) -> Sequence[int]:
        """Which set each pack is of."""
        return [at for at, _ in self._packs]

    @property
    def tokens_max(self) -> int:
        """Length of the longest sample."""
        return max((int(self._indexes[at].lengths[sample]) for at, sample in self._places), default=0)

    def pack(self, number: int) -> PackedBatch:
        """Return a pack of whole samples of one set, as they are trained on; past the last one, an empty pack."""
        at, samples = self._packs[number] if number < len(self._packs) else (0, [])
        index = self._indexes[at]
        manifest = index.manifest
        return assemble(
            [[cut(index, sample, self._read(index, sample), source=at) for sample in samples]],
            pack_tokens=self._pack_tokens,
            pad=manifest.token_ids["pad"],
            values=CHANNELS * manifest.patch_px**2,
        ).joined()

    def _is_whole(self, index: MappedIndex, sample: int, *, placeholders: bool) -> bool:
        try:
            self._noting(index, sample, index.encoded)
        except SampleDamagedError as error:
            if not placeholders:
                raise
            _log.warning("%s; it is excluded from the evaluation (data.onDamage: Placeholder)", error.message)
            return False
        return True

    def _read(self, index: MappedIndex, sample: int) -> StoredSample:
        return self._noting(index, sample, index.read)

    def _noting(self, index: MappedIndex, sample: int, read: Callable[[int], _Read]) -> _Read:
        try:
            return read(sample)
        except SampleDamagedError as error:
            note_damage(self._store, index.digest, error.message, ordinal=sample, sample_id=index.sample_id(sample))
            raise

    def _packs_of(self, at: int) -> list[tuple[int, list[int]]]:
        samples = [sample for of, sample in self._places if of == at]
        lengths = self._indexes[at].lengths[samples].tolist()
        return [(at, [samples[place] for place in places]) for places in pack(lengths, capacity=self._pack_tokens)]

    @property
    def thought_end(self) -> Sequence[int]:
        """Tokens of the tag that ends a thought."""
        return self._text.encode(THOUGHT_END)

    def text(self, tokens: Sequence[int]) -> str:
        """Decode answer tokens to text, without special tokens."""
        return self._text.decode(tokens)


def _images_in(tokens_T: npt.NDArray[np.uint32], grids_I2: npt.NDArray[np.int32], *, media: int, merge: int) -> int:
    """Count the images whose tokens stand in a prompt: one shown in the answer does not."""
    cells_I = grids_I2.prod(axis=1, dtype=np.int64) // merge**2
    return int(np.searchsorted(np.cumsum(cells_I), np.count_nonzero(tokens_T == media), side="right"))


def shared(sizes: Sequence[int], total_max: int) -> list[int]:
    """Share ``total_max`` evenly among sets of these sizes; what a small set can't use goes to the others."""
    counts = [0] * len(sizes)
    left = min(total_max, sum(sizes))
    while left:
        hungry = [at for at, size in enumerate(sizes) if counts[at] < size][:left]
        share = max(1, left // len(hungry))
        for at in hungry:
            more = min(share, sizes[at] - counts[at])
            counts[at] += more
            left -= more
    return counts
