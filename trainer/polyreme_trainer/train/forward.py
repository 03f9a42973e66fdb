"""One microbatch forwards through all pipeline stages, outside of a step: nothing is counted, no row is dropped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

from torch import Tensor

from polyreme_trainer.model.stage import decode
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.parallel.pipeline_decode import PipelineDecoder
from polyreme_trainer.train.inputs import Inputs
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


def decode_pipeline(state: TrainState, meshes: Meshes) -> PipelineDecoder | None:
    """Return how a stream goes through the stages one after another; None without stages."""
    return PipelineDecoder(state.models, state.stage_ranks, meshes.pp_group) if meshes.layout.pp > 1 else None


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
