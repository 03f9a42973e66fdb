"""Work of a rank in a step: what of uneven data it counts, and for which part of the model."""

from __future__ import annotations

import dataclasses

import torch

from polyreme_planner.flops import image_flops
from polyreme_planner.layout import Layout
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.section import Section
from polyreme_trainer.train.inputs import Inputs
from polyreme_trainer.train.step_work import step_work

DECODER = KIMI_VL_NANO.decoder
WHOLE = Section(layers=range(DECODER.layers))
MIXTURES = DECODER.layers - DECODER.dense_layers
BATCH = Inputs(
    tokens_T=torch.zeros(64, dtype=torch.int64),
    targets_T=torch.zeros(64, dtype=torch.int64),
    positions_T=torch.zeros(64, dtype=torch.int64),
    document_offsets=[0, 32, 64],
    patches_PC=torch.zeros(0, 588),
    grids=[],
    unmasked=64,
)


def work(*batches: Inputs, held: tuple[Section, ...] = (WHOLE,), rows: int = 0, **layout: int) -> int:
    return step_work(KIMI_VL_NANO, held, Layout(**layout), batches or (BATCH,), rows=rows)


def test_longer_documents_images_and_rows_of_experts_are_more_work() -> None:
    joined = dataclasses.replace(BATCH, document_offsets=[0, 64])
    core = DECODER.layers * DECODER.heads * (DECODER.query_dim + DECODER.value_dim)
    assert work(joined) - work() == core * (64**2 - 2 * 32**2)
    assert work(dataclasses.replace(BATCH, grids=[(4, 6)])) - work() == image_flops(KIMI_VL_NANO, 24)
    own = 64 * DECODER.experts_per_token * MIXTURES
    assert work(rows=own) == work(), "those of its own tokens, as without exchanges"
    assert work(rows=2 * own) - work() == 6 * DECODER.width * DECODER.expert_ffn_width * own
    assert work(BATCH, joined) == work() + work(joined)


def test_a_pipeline_stage_counts_its_layers_and_only_the_first_one_images() -> None:
    seeing = dataclasses.replace(BATCH, grids=[(4, 6)])
    first = Section(layers=range(1), last=False)
    rest = Section(layers=range(1, DECODER.layers), first=False)
    parts = [work(seeing, held=(section,), pp=2) for section in (first, rest)]
    assert abs(sum(parts) - work(seeing)) <= len(parts)
    assert parts[1] == work(held=(rest,), pp=2)
