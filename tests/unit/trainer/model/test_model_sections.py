"""Sections of the model, run one after another, are the model: names, values, results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.shapes import KIMI_VL_NANO, model_shape
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.section import sections

if TYPE_CHECKING:
    from tests.unit.trainer.model.conftest import Batch

Split = tuple[tuple[int, int], ...]
SPLITS: list[Split] = [
    ((0, 1), (1, 3)),
    ((0, 0), (0, 3)),
    ((0, 3), (3, 3)),
    ((0, 1), (1, 2), (2, 3)),
    ((0, 0), (0, 1), (1, 3), (3, 3)),
]


@pytest.mark.parametrize("split", SPLITS)
def test_sections_hold_every_tensor_once_with_the_values_of_the_whole(split: Split) -> None:
    whole = build_model(KIMI_VL_NANO, seed=7, media_token=1).state_dict()
    held = [
        (name, tensor)
        for section in sections(KIMI_VL_NANO, split)
        for name, tensor in build_model(KIMI_VL_NANO, seed=7, media_token=1, section=section).state_dict().items()
    ]
    assert sorted(name for name, _ in held) == sorted(whole)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in held)


@pytest.mark.parametrize("split", SPLITS)
def test_one_section_behind_the_other_is_the_model(split: Split, batch: Batch) -> None:
    inputs = (batch.tokens_T, batch.positions_T, batch.offsets, batch.patches_PC, batch.grids)
    whole = build_model(KIMI_VL_NANO, seed=7, media_token=1)(*inputs)
    stream_SD, loads = None, []
    for section in sections(KIMI_VL_NANO, split):
        model = build_model(KIMI_VL_NANO, seed=7, media_token=1, section=section)
        decoded = model(*inputs, stream_SD=stream_SD)
        stream_SD = decoded.hidden_TD
        loads.append(decoded.routing.load_LE)
    assert stream_SD is not None
    assert torch.equal(stream_SD, whole.hidden_TD)
    assert torch.equal(torch.cat(loads), whole.routing.load_LE)


@pytest.mark.parametrize(
    ("split", "words"),
    [
        (((0, 1), (2, 3)), "stage 1 holds layers 2 to 3, it must begin at layer 1"),
        (((0, 1), (1, 2)), "it ends at layer 2, the model has 3"),
        (((0, 1), (1, 1), (1, 3)), "stage 1 holds no layer"),
        (((0, 2), (2, 1), (1, 3)), "stage 1 holds layers 2 to 1"),
    ],
)
def test_a_split_that_misses_a_layer_is_refused(split: Split, words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        sections(model_shape("kimi-vl-nano"), split)
