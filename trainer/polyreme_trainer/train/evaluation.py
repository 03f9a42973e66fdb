"""Held-out samples: their loss during the run, and answers to their questions after its last step.

The loss is teacher-forced, by the forward and layout of training, on packs of one set each. It leaves nothing in the
model and draws nothing at random: a run has the same losses with and without it. With pipeline stages, a stream goes
through them one after another, as for answers.

Questions are answered by free-running greedy decoding, all ranks together. The result is written by rank 0 as a whole::

    {"attempt", "step", "samples", "matched", "exactMatchRatio",
     "pages": [{"sampleId", "question", "expected", "answer", "match", "imageDigest"}]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyreme_api.batch import EvaluationSample, EvaluationSource
from polyreme_api.history import evaluation_key
from polyreme_api.progress import ALL_SETS
from polyreme_api.store import ObjectStore
from polyreme_trainer.model.generate import generate
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.parallel.tensor import whole_rows
from polyreme_trainer.train.forward import answering, decode_pipeline, hidden_states
from polyreme_trainer.train.inputs import Inputs, to_inputs
from polyreme_trainer.train.settings import EvaluationSettings
from polyreme_trainer.train.state import TrainState, settle

PROMPTS_AT_ONCE = 64
"""Prompts that a rank decodes together."""


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
    pages: list[dict[str, Any]] = []
    # Under expert parallelism, and with sharded parameters, all ranks run the same passes: equally many batches, the
    # last ones perhaps empty.
    for batch in range(math.ceil(math.ceil(count / askers) / PROMPTS_AT_ONCE)):
        samples = [source.sample(index) for index in mine[batch * PROMPTS_AT_ONCE : (batch + 1) * PROMPTS_AT_ONCE]]
        with whole_rows(model.ranks), answering(state.models.values()):
            answers = generate(
                model,
                samples,
                stop_token=stop_token,
                new_tokens_max=settings.answer_tokens_max,
                agree=_agree(state, meshes),
                prompts_at_once=PROMPTS_AT_ONCE,
                pipeline=decode_pipeline(state, meshes),
            )
        pages += [_page(source, sample, answer, stop_token) for sample, answer in zip(samples, answers, strict=True)]
    gathered = collectives.gather_to_first(pages, meshes.control_group)
    return None if gathered is None else _result(gathered[: stage_ranks : meshes.layout.tp], state.step, attempt)


@torch.no_grad()
def held_out_losses(state: TrainState, source: EvaluationSource, meshes: Meshes, *, device: str) -> dict[str, float]:
    """Measure the held-out loss; every rank calls it, and gets the same result.

    Returns:
        Mean over unmasked tokens, by set, and of all sets under ``ALL_SETS``; sets without such tokens are left out.
    """
    settle(state)
    sets, names = source.pack_sets, source.set_names
    last = max(state.models.items())[1]
    speaks = last.section.last and last.ranks.place == 0
    sums_N2 = torch.zeros(len(names), 2, dtype=torch.float64, device=device)
    with answering(state.models.values()):
        # Ranks that share experts run equally many passes: after the last pack there are empty ones.
        for first in range(0, len(sets), meshes.layout.dp):
            number = first + meshes.place("dp")
            microbatch = to_inputs(
                source.pack(number), device=device, media_token=state.media_token, sharing=state.sharing
            )
            loss_sum = _loss_sum(state, microbatch, meshes)
            if speaks and number < len(sets) and loss_sum is not None:
                sums_N2[sets[number], 0] += loss_sum
                sums_N2[sets[number], 1] += microbatch.unmasked
    collectives.sum_over(sums_N2, meshes.world_group)
    rows = dict(zip((ALL_SETS, *names), (sums_N2.sum(0).tolist(), *sums_N2.tolist()), strict=True))
    return {name: loss_sum / unmasked for name, (loss_sum, unmasked) in rows.items() if unmasked}


def _loss_sum(state: TrainState, microbatch: Inputs, meshes: Meshes) -> Tensor | None:
    """Run a microbatch forwards through all stages; None on ranks without the last one."""
    hidden_SD = hidden_states(state, microbatch, meshes)
    if hidden_SD is None:
        return None
    head = max(state.models.items())[1].language_model.lm_head
    loss_sum: Tensor = head(hidden_SD, microbatch.targets_T, microbatch.learned_N)
    return loss_sum


def _agree(state: TrainState, meshes: Meshes) -> Callable[[bool], bool]:
    """Whether all ranks that depend on each other are done: for experts, shares of layers, or sharded parameters."""
    rows = bool(state.flat.sharded)
    if meshes.layout.ep == meshes.layout.tp == 1 and not rows:
        return bool
    group = meshes.stage_group if rows or meshes.layout.tp > 1 else meshes.ep_group
    return lambda done: collectives.all_agree(done, group)


def write_evaluation(store: ObjectStore, attempt: int, result: dict[str, Any]) -> None:
    """Write the result durably: the old object or the new one, never a part.

    Raises:
        StoreFailedError: If the store refuses.
    """
    store.put(evaluation_key(attempt), json.dumps(result).encode())


def _page(source: EvaluationSource, sample: EvaluationSample, tokens: list[int], stop_token: int) -> dict[str, Any]:
    """An answer without its end is wrong, whatever its text."""
    ended = bool(tokens) and tokens[-1] == stop_token
    answer = source.text(tokens[:-1] if ended else tokens)
    return {
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
