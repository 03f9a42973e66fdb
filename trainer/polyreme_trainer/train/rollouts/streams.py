"""Streams of prompts and drawn answers: pure arithmetic between a step's packs and the answers to their prompts.

A document of the data is a prompt and the answer that the data expect. Its stream has the prompt and, as branches, the
answers that the model has drawn; the loader left room for them. Answers that were cut by their limit are left out: that
they were too long is all that is known of them (DAPO, arXiv:2503.14476, section 3.4).

Legend: T places of a stream, P patches or tokens of a prompt, C values of a patch, I images, B branches, L layers with
experts, X experts of a token.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from polyreme_api.batch import IGNORED_TARGET, PackedBatch
from polyreme_api.errors import InvalidConfigError, StepFailedError
from polyreme_api.job.objective import Objective
from polyreme_trainer.train.inputs import DrawnAnswers
from polyreme_trainer.train.rollouts.record import Answer, Answers, Chosen

Places = npt.NDArray[np.int64]
PADDING_TOKENS = 128
DEVIATION_MIN = 1e-4
"""Added to a deviation, as others do (TRL): equal rewards divide by it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DocumentPrompt:
    """A prompt of a stream: implements the engine's ``Prompt``."""

    begin: int
    """Its first place in the stream."""
    prompt_tokens: Sequence[int]
    patches_PC: npt.NDArray[np.generic]
    grids_I2: npt.NDArray[np.int32]
    expected: Sequence[int]
    """The answer of the data, without the token that ends it."""
    key: str
    """Names its content."""

    @classmethod
    def of(
        cls,
        begin: int,
        prompt: Sequence[int],
        expected: Sequence[int],
        patches_PC: npt.NDArray[np.generic],
        grids_I2: npt.NDArray[np.int32],
    ) -> DocumentPrompt:
        """Name a prompt by its content."""
        content = hashlib.sha256(np.array([*prompt, -1, *expected], np.int64).tobytes())
        content.update(np.ascontiguousarray(patches_PC).tobytes())
        return cls(
            begin=begin,
            prompt_tokens=prompt,
            patches_PC=patches_PC,
            grids_I2=grids_I2,
            expected=expected,
            key=content.hexdigest()[:16],
        )


def prompts_of(batch: PackedBatch, *, media: int, end: int, merge: int) -> list[DocumentPrompt]:
    """Return the prompts of a stream's documents: each up to where its last answer begins.

    Args:
        batch: Packs.
        media: Media token.
        end: Token that ends an answer.
        merge: One media token covers a square of so many patches on each side.

    Raises:
        InvalidConfigError: If a document has images in or after its answer.
    """
    tokens_T, targets_T = np.asarray(batch.tokens_T), np.asarray(batch.targets_T)
    offsets: list[int] = np.asarray(batch.document_offsets).tolist()
    grids_I2 = np.asarray(batch.grids_I2).reshape(-1, 2)
    patches_PC = np.asarray(batch.patches_PC)
    cells_I = grids_I2.prod(axis=1, dtype=np.int64) // merge**2
    image_ends, patch_ends = np.cumsum(cells_I), np.concatenate([[0], np.cumsum(cells_I * merge**2)])
    found: list[DocumentPrompt] = []
    seen = 0
    padding = frozenset(batch.padding_documents)
    for document, (begin, stop) in enumerate(itertools.pairwise(offsets)):
        learned = np.flatnonzero(targets_T[begin:stop] != IGNORED_TARGET)
        if document in padding:
            continue
        first = int(np.searchsorted(image_ends, seen, side="right"))
        seen += int(np.count_nonzero(tokens_T[begin:stop] == media))
        last = int(np.searchsorted(image_ends, seen, side="right"))
        if not learned.size and first == last:
            continue
        breaks = np.flatnonzero(np.diff(learned) > 1)
        answer = learned[breaks[-1] + 1 if breaks.size else 0 :] + begin
        if not answer.size or np.count_nonzero(tokens_T[answer[0] + 1 : stop] == media):
            raise InvalidConfigError(
                "an image is in or after the last answer of a sample; a stage of objective GroupRelative takes "
                "samples whose images are in their prompts",
                field="spec.data.sources",
            )
        expected: list[int] = targets_T[answer].tolist()
        found.append(
            DocumentPrompt.of(
                begin,
                tokens_T[begin : answer[0] + 1].tolist(),
                expected[:-1] if expected[-1] == end else expected,
                patches_PC[patch_ends[first] : patch_ends[last]],
                grids_I2[first:last],
            )
        )
    return found


def shares_of(answers: Answers, objective: Objective, *, step: int) -> Mapping[str, Sequence[float]]:
    """Return what a token of each answer counts in a mean over all answers of the step that were not cut.

    Raises:
        StepFailedError: If all were.
    """
    lengths = [len(answer.tokens) for of in answers.values() for answer in of if answer.ended]
    if not lengths:
        raise StepFailedError(
            f"step {step} has nothing to learn from: all of its answers were cut at {objective.answer_tokens} tokens",
            field="spec.training.stages[].objective.answerTokens",
        )
    alike = len(lengths) / sum(lengths)
    return {
        key: [alike if objective.aggregation == "Tokens" else 1 / len(answer.tokens) for answer in of]
        for key, of in answers.items()
    }


def advantages_of(answers: Sequence[Answer], objective: Objective) -> list[float]:
    """Return how much better each answer to a prompt is than all of them on average."""
    rewards = [answer.reward for answer in answers]
    mean = math.fsum(rewards) / len(rewards)
    scale = 1.0
    if objective.advantage == "MeanAndDeviation":
        squares = math.fsum((reward - mean) ** 2 for reward in rewards)
        scale = math.sqrt(squares / (len(rewards) - 1)) + DEVIATION_MIN
    return [(reward - mean) / scale for reward in rewards]


def with_answers(
    batch: PackedBatch,
    prompts: Sequence[DocumentPrompt],
    answers: Answers,
    shares: Mapping[str, Sequence[float]],
    *,
    objective: Objective,
    pack_tokens: int,
    pad: int,
) -> tuple[PackedBatch, DrawnAnswers]:
    """Lay out the prompts of a stream with the answers that were drawn.

    Args:
        batch: Packs, as the loader made them.
        prompts: Of the batch.
        answers: To them.
        shares: ``shares_of`` them.
        objective: Of the stage.
        pack_tokens: Tokens of a pack.
        pad: Token of the padding.

    Raises:
        InvalidConfigError: If the answers do not fit.
    """
    laid = _Stream.like(batch, answers, pad=pad)
    for first in range(0, laid.tokens_T.size, pack_tokens):
        laid.at, edge = first, first + pack_tokens
        for prompt in prompts:
            if first <= prompt.begin < edge:
                of = answers[prompt.key]
                ways = zip(of, advantages_of(of, objective), shares[prompt.key], strict=True)
                laid.put(prompt.prompt_tokens, of[0].prompt_chosen, [way for way in ways if way[0].ended], edge)
        laid.pad(edge)
    return laid.batch(batch), laid.drawn()


@dataclasses.dataclass(slots=True, kw_only=True)
class _Stream:
    """A stream that is laid out from its begin to its end."""

    tokens_T: Places
    targets_T: Places
    positions_T: Places
    log_prob_T: npt.NDArray[np.float64]
    at: int = 0
    offsets: list[int]
    padding: list[int]
    branches: list[tuple[int, int, int, int]]
    advantages: list[float]
    shares: list[float]
    chosen_TLX: Chosen | None

    @classmethod
    def like(cls, batch: PackedBatch, answers: Answers, *, pad: int) -> _Stream:
        tokens_T = np.asarray(batch.tokens_T)
        chosen = next((answer.chosen for of in answers.values() for answer in of), None)
        return cls(
            tokens_T=np.full_like(tokens_T, pad),
            targets_T=np.full_like(tokens_T, IGNORED_TARGET),
            positions_T=np.zeros_like(tokens_T),
            log_prob_T=np.zeros(tokens_T.size),
            offsets=[0],
            padding=[],
            branches=[],
            advantages=[],
            shares=[],
            chosen_TLX=None if chosen is None else np.zeros((tokens_T.size, *chosen.shape[1:]), chosen.dtype),
        )

    def put(
        self,
        prompt: Sequence[int],
        chosen_PLX: Chosen | None,
        ways: Sequence[tuple[Answer, float, float]],
        edge: int,
    ) -> None:
        """Lay out a prompt, and each answer with its advantage and its share; each repeats the prompt's last token."""
        shared = len(prompt) - 1
        self._write(prompt[:shared] if ways else prompt, 0, edge, chosen_PLX)
        for answer, advantage, share in ways:
            begin, tokens = self.at, [prompt[-1], *answer.tokens[:-1]]
            went = None
            if chosen_PLX is not None and answer.chosen is not None:
                went = np.concatenate([chosen_PLX[-1:], answer.chosen])
            self._write(tokens, shared, edge, went)
            self.targets_T[begin : self.at] = answer.tokens
            self.log_prob_T[begin : self.at] = answer.log_probs
            self.branches.append((len(self.offsets) - 1, begin, 0, 0))
            self.advantages.append(advantage)
            self.shares.append(share)
        self.offsets.append(self.at)

    def pad(self, edge: int) -> None:
        """Fill a pack up, with short documents: the cost of attention grows with the square of their length."""
        while self.at < edge:
            stop = min(edge, self.at + PADDING_TOKENS)
            self.padding.append(len(self.offsets) - 1)
            self.positions_T[self.at : stop] = np.arange(stop - self.at)
            self.offsets.append(stop)
            self.at = stop

    def _write(self, tokens: Sequence[int], position: int, edge: int, chosen_TLX: Chosen | None) -> None:
        stop = self.at + len(tokens)
        if stop > edge:
            raise InvalidConfigError(
                f"answers do not fit their pack: they end at token {stop} of the stream, the pack at {edge}; the data "
                "were packed for shorter or fewer answers",
                field="spec.training.stages[].objective.answerTokens",
            )
        self.tokens_T[self.at : stop] = tokens
        self.positions_T[self.at : stop] = np.arange(position, position + len(tokens))
        if self.chosen_TLX is not None and chosen_TLX is not None:
            self.chosen_TLX[self.at : stop] = chosen_TLX[: len(tokens)]
        self.at = stop

    def batch(self, like: PackedBatch) -> PackedBatch:
        return dataclasses.replace(
            like,
            tokens_T=self.tokens_T,
            targets_T=self.targets_T,
            positions_T=self.positions_T,
            document_offsets=np.array(self.offsets, np.int32),
            unmasked_tokens=int(np.count_nonzero(self.targets_T != IGNORED_TARGET)),
            padding_documents=tuple(self.padding),
            branches_B4=np.array(self.branches, np.int64).reshape(-1, 4),
        )

    def drawn(self) -> DrawnAnswers:
        return DrawnAnswers(
            log_prob_T=self.log_prob_T,
            advantage_B=np.array(self.advantages),
            share_B=np.array(self.shares),
            chosen_TLX=self.chosen_TLX,
        )
