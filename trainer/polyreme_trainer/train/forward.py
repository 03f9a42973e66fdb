"""One microbatch forwards through all pipeline stages, outside of a step: nothing is counted, no row is dropped.

Legend: S rows that a rank holds between layers, D decoder width, N unmasked targets of this rank, B branches of
the stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from polyreme_api.batch import EvaluationSource, PackedBatch
from polyreme_trainer.model.stage import decode
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.parallel.pipeline_decode import PipelineDecoder
from polyreme_trainer.train.inputs import Inputs, to_inputs
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState


@contextlib.contextmanager
def answering(models: Iterable[KimiVL]) -> Iterator[None]:
    """Drop no row: the result must not depend on how many samples run at once."""
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for model in models:
            model.train()


def held_out_packs(
    state: TrainState, settings: TrainSettings, source: EvaluationSource, meshes: Meshes
) -> Iterator[tuple[int, PackedBatch, Inputs]]:
    """Yield this data-parallel rank's held-out packs with their numbers.

    Ranks that share experts run equally many passes: after the last pack there are empty ones.
    """
    weigher = state.weigher
    for first in range(0, len(source.pack_sets), meshes.layout.dp):
        number = first + meshes.place("dp")
        batch = source.pack(number)
        yield (
            number,
            batch,
            to_inputs(
                batch,
                device=settings.rank.device_type,
                media_token=state.media_token,
                sharing=state.sharing,
                dtype=state.computes_in,
                reference=None if weigher is None else weigher.held_out,
            ),
        )


def decode_pipeline(state: TrainState, meshes: Meshes) -> PipelineDecoder | None:
    """Return how a stream goes through the stages one after another; None without stages."""
    return PipelineDecoder(state.models, state.stage_ranks, meshes.pp_group) if meshes.layout.pp > 1 else None


def agreement(state: TrainState, meshes: Meshes) -> Callable[[int], int]:
    """Largest number among ranks that depend on each other: for experts, shares of layers, or sharded parameters."""
    rows = bool(state.flat.sharded)
    if meshes.layout.ep == meshes.layout.tp == 1 and not rows:
        return int
    group = meshes.stage_group if rows or meshes.layout.tp > 1 else meshes.ep_group
    return lambda wanted: collectives.largest_number(wanted, group)


def hidden_states(state: TrainState, microbatch: Inputs, meshes: Meshes) -> Tensor | None:
    """Return the rows that the head takes (S, D); None on ranks without the last stage."""
    stage = max(state.stages.items())[1]
    pipeline = decode_pipeline(state, meshes)

    def begin(model: KimiVL) -> Tensor:
        return model.begin(
            microbatch.tokens_T, microbatch.patches_PC, microbatch.grids, microbatch.deliver, microbatch.media_M
        )

    def run(model: KimiVL, stream_SD: Tensor | None) -> Tensor:
        # Not by the stage: it counts the routing, and only trained tokens may move the router's biases.
        return decode(model, stream_SD, microbatch).hidden_TD

    if pipeline is None:
        return run(stage.model, None)
    return pipeline.through(stage.rows(microbatch.tokens_T.shape[0]), begin, run)


@torch.no_grad()
def token_log_probs(state: TrainState, microbatch: Inputs, meshes: Meshes) -> Tensor | None:
    """Return the log-probability of each unmasked target (N), as the stage's objective has it; None elsewhere."""
    hidden_SD = hidden_states(state, microbatch, meshes)
    if hidden_SD is None:
        return None
    stage = max(state.stages.items())[1]
    # Also without branches: with sharded parameters all ranks gather the head together.
    logp_N: Tensor = stage.model.language_model.lm_head(
        stage.heated(hidden_SD), microbatch.targets_T, microbatch.learned_N, scores=True
    )
    return logp_N


def stream_scores(state: TrainState, microbatch: Inputs, meshes: Meshes) -> Tensor | None:
    """Score the branches of a stream (B), on all ranks with the last stage; None elsewhere and without branches."""
    logp_N = token_log_probs(state, microbatch, meshes)
    return None if logp_N is None or microbatch.branches is None else microbatch.branches.scores(logp_N)


def branch_scores(state: TrainState, microbatch: Inputs, meshes: Meshes) -> list[float]:
    """Score the branches of a stream, on the one rank that speaks for them; elsewhere, and without branches, none."""
    scores_B = stream_scores(state, microbatch, meshes)
    if scores_B is None or microbatch.branches is None:
        return []
    scores: list[float] = scores_B.tolist()
    place = max(state.models.items())[1].ranks.place
    return scores if place == 0 and microbatch.branches.speaks else []
