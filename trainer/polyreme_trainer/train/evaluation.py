"""Held-out questions after the last step: answered by free-running greedy decoding, all ranks together.

The result is written by rank 0 as a whole::

    {"attempt", "step", "samples", "matched", "exactMatchRatio",
     "pages": [{"sampleId", "question", "expected", "answer", "match", "imageDigest"}]}
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from polyreme_api.batch import EvaluationSample, EvaluationSource
from polyreme_api.history import evaluation_key
from polyreme_api.store import ObjectStore
from polyreme_trainer.model.generate import generate
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.line import StageLine
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.parallel.tensor import whole_rows
from polyreme_trainer.train.settings import EvaluationSettings
from polyreme_trainer.train.state import TrainState

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
    # Under expert parallelism all ranks run the same passes: equally many batches, the last ones perhaps empty.
    for batch in range(math.ceil(math.ceil(count / askers) / PROMPTS_AT_ONCE)):
        samples = [source.sample(index) for index in mine[batch * PROMPTS_AT_ONCE : (batch + 1) * PROMPTS_AT_ONCE]]
        with whole_rows(model.ranks), _answering(state.models.values()):
            answers = generate(
                model,
                samples,
                stop_token=stop_token,
                new_tokens_max=settings.answer_tokens_max,
                agree=_agree(meshes),
                prompts_at_once=PROMPTS_AT_ONCE,
                line=_line(state, meshes),
            )
        pages += [_page(source, sample, answer, stop_token) for sample, answer in zip(samples, answers, strict=True)]
    gathered = collectives.gather_to_first(pages, meshes.world_group)
    return None if gathered is None else _result(gathered[: stage_ranks : meshes.layout.tp], state.step, attempt)


@contextlib.contextmanager
def _answering(models: Iterable[KimiVL]) -> Iterator[None]:
    """Drop no row while questions are answered: the number of prompts must not decide what an answer is."""
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model in models:
            model.train()


def _line(state: TrainState, meshes: Meshes) -> StageLine | None:
    return StageLine(state.models, state.stage_ranks, meshes.pp_group) if meshes.layout.pp > 1 else None


def _agree(meshes: Meshes) -> Callable[[bool], bool]:
    """Whether all ranks are done that need each other: for experts, and for shares of layers."""
    if meshes.layout.ep == meshes.layout.tp == 1:
        return bool
    group = meshes.ep_group if meshes.layout.tp == 1 else meshes.stage_group
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
    """Put pages back in the order of the source: of n askers, asker a answered a, a + n, ..."""
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
