"""Padding takes no expert, wherever it lies in the packs of a step and however ranks share their stream."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.stage import Stage
from polyreme_trainer.parallel.ring import ContextRanks
from polyreme_trainer.train.inputs import Sharing, to_inputs
from tests.parallel.pages import MEDIA, Pages

ALONE: Any = None
"""The group of ranks that exchange nothing here."""
PAGES = Pages(packs=4, text=True, hole_every=5)


def padding() -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Tokens of the first four packs that are of no sample."""
    batch = PAGES.packs(1, first=0, count=4)
    offsets, found = np.asarray(batch.document_offsets), np.zeros(len(np.asarray(batch.tokens_T)), dtype=bool)
    for document in batch.padding_documents:
        found[offsets[document] : offsets[document + 1]] = True
    return found


def test_the_load_of_the_experts_is_that_of_the_samples() -> None:
    stage = Stage(build_model(KIMI_VL_NANO, seed=0, media_token=MEDIA))
    with torch.no_grad():
        stage(microbatch=to_inputs(PAGES.packs(1, first=0, count=4), device="cpu"))
        routing = stage.take_routing()
        real = int((~padding()).sum())
        assert 0 < real < len(padding())
        decoder = KIMI_VL_NANO.decoder
        assert routing.load_LE.sum(1).tolist() == [real * decoder.experts_per_token] * routing.load_LE.shape[0]


@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize("ulysses", [1, 2])
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_that_share_a_stream_find_the_same_padding(ring: int, ulysses: int, tp: int) -> None:
    batch = PAGES.packs(1, first=0, count=4)
    expected, found = padding(), np.ones(len(padding()), dtype=bool)
    for rank in range(ring * ulysses * tp):
        context = ContextRanks(place=rank // tp, ring=ring, ulysses=ulysses, ring_group=ALONE, ulysses_group=ALONE)
        sharing = Sharing(context=context, tp=tp, rank=rank, group=ALONE, media_token=MEDIA, shape=KIMI_VL_NANO)
        inputs = to_inputs(batch, device="cpu", sharing=sharing)
        held = np.split(context.cut(len(expected)).tokens_of(rank // tp), tp)[rank % tp]
        assert inputs.real_N is not None
        found[held[inputs.real_N.numpy()]] = False
    assert (found == expected).all()
