"""Held-out samples: their loss during the run, and answers to their questions after its last step.

The loss is teacher-forced, by the forward and layout of training, on packs of one set each. It leaves nothing in the
model and draws nothing at random: a run has the same losses with and without it. One stage of a pipeline works at a
time.

Questions are answered by free-running greedy decoding, all ranks together, all stages at the same time. The result
is written by rank 0 as a whole::

    {"attempt", "step", "samples", "matched", "exactMatchRatio",
     "pages": [{"sampleId", "question", "expected", "answer", "match", "imageDigest"}]}
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyreme_api.batch import THOUGHT_END, EvaluationSample, EvaluationSource
from polyreme_api.history import evaluation_key
from polyreme_api.progress import ALL_SETS
from polyreme_api.store import ObjectStore
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.parallel.tensor import whole_rows
from polyreme_trainer.serve.answers import answers, settings_for
from polyreme_trainer.serve.engine import Engine
from polyreme_trainer.serve.int4 import held_as
from polyreme_trainer.serve.thinking import ThinkingBudget
from polyreme_trainer.train.forward import (
    agreement,
    answering,
    branch_scores,
    decode_pipeline,
    held_out_packs,
    hidden_states,
)
from polyreme_trainer.train.inputs import Inputs
from polyreme_trainer.train.settings import EvaluationSettings, TrainSettings
from polyreme_trainer.train.state import TrainState, settle

ROWS_MAX = 64
"""Answers that a rank decodes together."""


def evaluate(
    state: TrainState,
    source: EvaluationSource,
    settings: EvaluationSettings,
    meshes: Meshes,
    *,
    stop_token: int,
    attempt: int,
) -> dict[str, Any] | None:
    """Answer every held-out question once; every rank calls it.

    Returns:
        The result on rank 0, None on the others.
    """
    count = min(len(source), settings.samples_max)
    # Ranks that share layers or hold other stages answer the same questions together; prompts are short, so context
    # ranks answer others.
    stage_ranks = meshes.layout.world // meshes.layout.pp
    askers = stage_ranks // meshes.layout.tp
    mine = range(meshes.rank % stage_ranks // meshes.layout.tp, count, askers)
    model = max(state.models.items())[1]
    longest = source.tokens_max + settings.answer_tokens_max
    layers = sum(len(held.section.layers) for held in state.models.values())
    sizes = settings_for(model, layers=layers, tokens_max=longest, rows_max=ROWS_MAX, cache=settings.cache)
    pages: dict[int, dict[str, Any]] = {}
    with whole_rows(model.ranks), answering(state.models.values()), held_as(settings.weights, state.models.values()):
        engine = Engine(model, sizes, pipeline=decode_pipeline(state, meshes), agree=agreement(state, meshes))
        asked = map(source.sample, mine)
        for place, sample, made in answers(
            engine,
            asked,
            stop_token=stop_token,
            new_tokens_max=settings.answer_tokens_max,
            thinking=_thinking(source, settings),
        ):
            tokens = [one.token for one in made]
            pages[place] = _page(source, sample, tokens, stop_token, thinks=settings.thinking_tokens_max is not None)
    gathered = collectives.gather_to_first([page for _, page in sorted(pages.items())], meshes.control_group)
    return None if gathered is None else _result(gathered[: stage_ranks : meshes.layout.tp], state.step, attempt)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """What held-out packs say of the model, by set, and of all sets under ``ALL_SETS``."""

    losses: dict[str, float]
    """Mean over unmasked tokens; sets without such tokens, and those of pairs, are left out."""
    pair_accuracy: dict[str, float]
    """Share of pairs whose chosen answer the model prefers more than its reference does; in stages of preferences."""


@torch.no_grad()
def held_out(state: TrainState, settings: TrainSettings, source: EvaluationSource, meshes: Meshes) -> HeldOut:
    """Measure held-out packs; every rank calls it, and gets the same result."""
    settle(state)
    sets, names = source.pack_sets, source.set_names
    last = max(state.models.items())[1]
    speaks = last.section.last and last.ranks.place == 0
    losses_N2, pairs_N2 = torch.zeros(2, len(names), 2, dtype=torch.float64, device=settings.rank.device_type)
    with answering(state.models.values()):
        for number, _, microbatch in held_out_packs(state, settings, source, meshes):
            if microbatch.branches is not None:
                scores = branch_scores(state, microbatch, meshes)
                if scores and state.weigher is not None and number < len(sets):
                    pairs_N2[sets[number]] += _preferred(scores, microbatch.branches.reference_B)
                continue
            loss_sum = _loss_sum(state, microbatch, meshes)
            if speaks and number < len(sets) and loss_sum is not None:
                losses_N2[sets[number], 0] += loss_sum
                losses_N2[sets[number], 1] += microbatch.unmasked
    both_2N2 = torch.stack((losses_N2, pairs_N2))
    collectives.sum_over(both_2N2, meshes.world_group)
    losses, accuracy = (_means(of, names) for of in both_2N2)
    return HeldOut(losses=losses, pair_accuracy=accuracy)


def _means(sums_N2: Tensor, names: Sequence[str]) -> dict[str, float]:
    rows = dict(zip((ALL_SETS, *names), (sums_N2.sum(0).tolist(), *sums_N2.tolist()), strict=True))
    return {name: total / count for name, (total, count) in rows.items() if count}


def _preferred(scores: Sequence[float], reference_B: Tensor) -> Tensor:
    """Count pairs with a margin above zero, and all pairs."""
    moved_B = torch.tensor(scores, dtype=torch.float64, device=reference_B.device) - reference_B
    return torch.stack(((moved_B[0::2] > moved_B[1::2]).sum(), moved_B[0::2].isfinite().sum()))


def _loss_sum(state: TrainState, microbatch: Inputs, meshes: Meshes) -> Tensor | None:
    """Run a microbatch forwards through all stages; None on ranks without the last one."""
    hidden_SD = hidden_states(state, microbatch, meshes)
    if hidden_SD is None:
        return None
    head = max(state.models.items())[1].language_model.lm_head
    loss_sum: Tensor = head(hidden_SD, microbatch.targets_T, microbatch.learned_N)
    return loss_sum


def write_evaluation(store: ObjectStore, attempt: int, result: dict[str, Any]) -> None:
    """Write the result durably: the old object or the new one, never a part.

    Raises:
        StoreFailedError: If the store refuses.
    """
    store.put(evaluation_key(attempt), json.dumps(result).encode())


def _thinking(source: EvaluationSource, settings: EvaluationSettings) -> ThinkingBudget | None:
    if settings.thinking_tokens_max is None:
        return None
    return ThinkingBudget(
        tokens_max=settings.thinking_tokens_max,
        end=tuple(source.thought_end),
        has_ended=lambda tokens: THOUGHT_END in source.text(tokens),
    )


def _page(
    source: EvaluationSource, sample: EvaluationSample, tokens: list[int], stop_token: int, *, thinks: bool
) -> dict[str, Any]:
    """An answer without its end is wrong, whatever its text; that of one that thinks follows its thought."""
    ended = bool(tokens) and tokens[-1] == stop_token
    answer = source.text(tokens[:-1] if ended else tokens)
    thought, tag, said = answer.rpartition(THOUGHT_END)
    answer = said.strip() if thinks and tag else answer
    return {
        **({"thought": thought + tag} if thinks else {}),
        "sampleId": sample.sample_id,
        "set": sample.set_name,
        "question": sample.question,
        "expected": sample.expected,
        "answer": answer,
        "match": ended and answer == sample.expected,
        "imageDigest": sample.image_digest,
    }


def _result(gathered: list[list[dict[str, Any]]], step: int, attempt: int) -> dict[str, Any]:
    """Put pages back in the order of the source: of n ranks, rank a answered pages a, a + n, ..."""
    longest = max(len(pages) for pages in gathered)
    pages = [rank[place] for place in range(longest) for rank in gathered if place < len(rank)]
    matched = sum(page["match"] for page in pages)
    return {
        "attempt": attempt,
        "step": step,
        "samples": len(pages),
        "matched": matched,
        "exactMatchRatio": matched / len(pages) if pages else None,
        "pages": pages,
    }
