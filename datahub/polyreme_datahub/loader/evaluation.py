"""Held-out questions for free-running decoding: ``polyreme_api.batch.EvaluationSource``."""

from __future__ import annotations

from collections.abc import Sequence

from polyreme_api.batch import EvaluationSample
from polyreme_datahub.loader.shards import MappedIndex
from polyreme_datahub.loader.source import normalise
from polyreme_datahub.loader.text import TokenText


class HeldOutSource:
    """Samples of some sets, evenly and never more than ``samples_max``; each set's are spread over the whole set."""

    def __init__(
        self, names: Sequence[str], indexes: Sequence[MappedIndex], *, samples_max: int, tokenizer: bytes
    ) -> None:
        self._indexes = indexes
        self._names = names
        self._text = TokenText(tokenizer)
        counts = shared([len(index) for index in indexes], samples_max)
        self._places = [
            (at, number * len(index) // count)
            for at, (index, count) in enumerate(zip(indexes, counts, strict=True))
            for number in range(count)
        ]

    def __len__(self) -> int:
        """Count of samples."""
        return len(self._places)

    def sample(self, index: int) -> EvaluationSample:
        """Return one sample."""
        at, sample = self._places[index]
        source = self._indexes[at]
        details = source.details(sample)
        patches, grids = source.images(sample)
        tokens, _ = source.tokens(sample)
        return EvaluationSample(
            sample_id=source.sample_id(sample),
            set_name=self._names[at],
            prompt_tokens=tokens[: source.prompt_tokens(sample)].tolist(),
            patches_PC=normalise(patches, channels=source.manifest.channels),
            grids_I2=grids,
            question=details["question"],
            expected=details["expected"],
            image_digest=details["pages"][0] if details["pages"] else "",
        )

    def text(self, tokens: Sequence[int]) -> str:
        """Decode answer tokens to text, without special tokens."""
        return self._text.decode(tokens)


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
