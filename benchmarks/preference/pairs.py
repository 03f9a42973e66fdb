"""The pairs that all sides train on, and the model: token ids of prompts and of two answers, of one length each."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import numpy as np

from polyreme_api.batch import IGNORED_TARGET, PackedBatch
from polyreme_planner.shapes import KIMI_VL_NANO, NO_VISION

SHAPE = dataclasses.replace(KIMI_VL_NANO, name="kimi-vl-nano, decoder", vision=NO_VISION)
FIRST_WORD = 2
"""Ids below it are special."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Pairs of a step, and their scores under a made-up reference."""

    prompts: list[list[int]]
    chosen: list[list[int]]
    rejected: list[list[int]]
    reference: Any
    """Of the chosen and of the rejected answers (pairs, 2)."""


def draw(options: argparse.Namespace) -> Pairs:
    """Draw the same pairs for every side; rejected answers are a little shorter."""
    random = np.random.default_rng(5)

    def words(length: int) -> list[list[int]]:
        size = (options.pairs, length)
        return [[int(word) for word in row] for row in random.integers(FIRST_WORD, SHAPE.decoder.vocabulary, size)]

    answer = options.answer
    shorter = answer - answer // 8
    per_token = random.normal(-6.2, 0.05, size=(options.pairs, 2))
    return Pairs(
        prompts=words(options.prompt),
        chosen=words(answer),
        rejected=words(shorter),
        reference=per_token * np.array([answer, shorter]),
    )


def packed(pairs: Pairs, *, way: str) -> PackedBatch:
    """Lay pairs out as one stream.

    Args:
        pairs: The pairs.
        way: ``shared``: two branches of one document; ``apart``: two documents, of one branch each; ``text``: the
            tokens of ``shared`` as plain documents.
    """
    tokens: list[int] = []
    targets: list[int] = []
    positions: list[int] = []
    offsets, branches = [0], []
    for number, (prompt, chosen, rejected) in enumerate(zip(pairs.prompts, pairs.chosen, pairs.rejected, strict=True)):
        last = len(prompt) - 1
        for answers in [(chosen,), (rejected,)] if way == "apart" else [(chosen, rejected)]:
            begin = len(tokens)
            tokens += prompt[:-1]
            targets += [IGNORED_TARGET] * last
            positions += range(last)
            for answer in answers:
                branches.append([len(offsets) - 1, len(tokens), 0, number])
                positions += range(last, last + 1 + len(answer))
                tokens += [prompt[-1], *answer]
                targets += [*answer, IGNORED_TARGET]
            offsets.append(len(tokens))
            if way == "text":
                positions[begin:] = range(len(tokens) - begin)
    return PackedBatch(
        tokens_T=np.array(tokens),
        targets_T=np.array(targets),
        positions_T=np.array(positions),
        document_offsets=np.array(offsets, np.int32),
        branches_B4=np.array([] if way == "text" else branches, np.int64).reshape(-1, 4),
        patches_PC=np.zeros((0, 588), np.uint8),
        grids_I2=np.zeros((0, 2), np.int32),
        sample_ids=[],
        unmasked_tokens=sum(target != IGNORED_TARGET for target in targets),
    )
