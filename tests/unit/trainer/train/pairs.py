"""Made-up pairs of answers to prompts with images, as packs that share the prompt or repeat it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from polyreme_api.batch import IGNORED_TARGET, PackedBatch

MEDIA, PAD = 1, 0
GRID = (2, 4)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A prompt with an image of two tokens, and two answers to it."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]

    def shared(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """Tokens, targets, positions and first tokens of branches of one document."""
        last = len(self.prompt) - 1
        tokens = [*self.prompt, *self.chosen, self.prompt[-1], *self.rejected]
        targets = [IGNORED_TARGET] * last + [*self.chosen, IGNORED_TARGET, *self.rejected, IGNORED_TARGET]
        positions = [*range(last + 1 + len(self.chosen)), *range(last, last + 1 + len(self.rejected))]
        return tokens, targets, positions, [last, last + 1 + len(self.chosen)]

    def apart(self, answer: list[int]) -> tuple[list[int], list[int], list[int], list[int]]:
        """The same of a document with one answer; it has no branch."""
        last = len(self.prompt) - 1
        targets = [IGNORED_TARGET] * last + [*answer, IGNORED_TARGET]
        return [*self.prompt, *answer], targets, list(range(last + 1 + len(answer))), []


def some_pairs(count: int, *, seed: int = 0, prompt_max: int = 12, answer_max: int = 9) -> list[Pair]:
    """Draw pairs."""
    draw = np.random.default_rng(seed)

    def words(count: int) -> list[int]:
        return [int(word) for word in draw.integers(2, 500, count)]

    return [
        Pair(
            [*words(1), MEDIA, MEDIA, *words(int(draw.integers(1, prompt_max)))],
            words(int(draw.integers(1, answer_max))),
            words(int(draw.integers(1, answer_max))),
        )
        for _ in range(count)
    ]


def packed(pairs: list[Pair], *, shared: bool, tokens_max: int = 0) -> PackedBatch:
    """Lay pairs out as one pack: two branches each, or two documents each, with padding at the end."""
    draw = np.random.default_rng(7)
    pictures = [draw.normal(size=(GRID[0] * GRID[1], 588)).astype(np.float32) for _ in pairs]
    tokens: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    offsets, branches = [0], []
    patches: list[Any] = []
    for number, (pair, picture) in enumerate(zip(pairs, pictures, strict=True)):
        for laid in [pair.shared()] if shared else [pair.apart(pair.chosen), pair.apart(pair.rejected)]:
            begin = len(tokens)
            tokens += laid[0]
            targets += laid[1]
            positions += laid[2]
            branches += [[len(offsets) - 1, begin + first, 0, number] for first in laid[3]]
            offsets.append(len(tokens))
            patches.append(picture)
    gap = tokens_max - len(tokens)
    if gap > 0:
        tokens += [PAD] * gap
        targets += [IGNORED_TARGET] * gap
        positions += range(gap)
        offsets.append(len(tokens))
    return PackedBatch(
        tokens_T=np.array(tokens),
        targets_T=np.array(targets),
        positions_T=np.array(positions),
        document_offsets=np.array(offsets, np.int32),
        branches_B4=np.array(branches, np.int64).reshape(-1, 4),
        patches_PC=np.concatenate(patches),
        grids_I2=np.array([GRID] * len(patches), np.int32),
        sample_ids=[str(number) for number in range(len(pairs))],
        unmasked_tokens=sum(target != IGNORED_TARGET for target in targets),
        padding_documents=(len(offsets) - 2,) if gap > 0 else (),
    )
