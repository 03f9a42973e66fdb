"""Work of one rank in a step, which sets a rank with more to do apart from a slow one [operations]."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence

from polyreme_planner.flops import Mix, forward_flops, image_flops, uneven_flops
from polyreme_planner.layout import Layout
from polyreme_planner.model_parts import Part
from polyreme_planner.shapes import ModelShape
from polyreme_trainer import rank_page
from polyreme_trainer.model.section import Section
from polyreme_trainer.train.inputs import Inputs
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState


def work_of(state: TrainState, settings: TrainSettings, microbatches: Sequence[Inputs]) -> int:
    """Count the work of this rank in the step that it has just trained."""
    held = [stage.model.section for stage in state.stages.values()]
    return step_work(settings.shape, held, settings.layout, microbatches, rows=rank_page.rows())


def step_work(
    shape: ModelShape, held: Iterable[Section], layout: Layout, microbatches: Sequence[Inputs], *, rows: int
) -> int:
    """Count the forward of a rank's sections; its backward and what it recomputes are about in proportion.

    Args:
        shape: Sizes of the model.
        held: Sections of the model that the rank holds.
        layout: Degrees of the axes.
        microbatches: What the rank trains on.
        rows: Rows that its experts got from all ranks of their group; 0: those of its own tokens.
    """
    decoder, by_part = shape.decoder, _by_part(shape)
    row = 2 * 3 * decoder.width * decoder.expert_ffn_width
    tokens, sharing = sum(each.tokens_T.shape[0] for each in microbatches), layout.cp * layout.tp
    work = rows * row
    for section in held:
        mixtures = sum(layer >= decoder.dense_layers for layer in section.layers)
        token = (len(section.layers) - mixtures) * by_part[Part.DENSE] + mixtures * by_part[Part.MOE]
        token += by_part[Part.HEAD] if section.last else 0.0
        token -= mixtures * row * decoder.experts_per_token if rows else 0.0
        work += int(tokens * token / layout.tp)
        share = len(section.layers) / decoder.layers / sharing
        for each in microbatches:
            documents = [end - begin for begin, end in itertools.pairwise(each.document_offsets)]
            work += int(uneven_flops(shape, documents, ()) * share)
            work += sum(image_flops(shape, high * wide) for high, wide in each.grids) if section.first else 0
    return work


@functools.cache
def _by_part(shape: ModelShape) -> Mapping[Part, float]:
    """Count the forward of one text token, without the core of attention, by part."""
    return forward_flops(shape, Mix(sequence_tokens=1, visual_share=0.0))
