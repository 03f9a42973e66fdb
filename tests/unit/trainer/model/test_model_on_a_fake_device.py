"""What an accelerator's kernels ask for of shapes, types, strides and devices, on tensors without memory.

Torch's own descriptions of the kernels refuse what the kernels would: products of experts other than bfloat16, rows
that are not aligned, operands on two devices. Gradients are not made: autograd's engine needs a real device.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from polyreme_planner.shapes import KIMI_VL_A3B, KIMI_VL_NANO, ModelShape
from polyreme_trainer.model.attention_tiles import Answers, Rows, Tile, attend_tile, attend_tile_backward, with_edges
from polyreme_trainer.model.segment_attention import segments
from tests.unit.trainer.fake_device import empty

TOKENS = 640


@pytest.mark.slow
@pytest.mark.parametrize("shape", [KIMI_VL_NANO, KIMI_VL_A3B], ids=lambda shape: shape.name)
def test_the_forward_of_a_model_in_bfloat16_fits_the_kernels(device: torch.device, shape: ModelShape) -> None:
    shape = dataclasses.replace(shape, decoder=dataclasses.replace(shape.decoder, layers=2))
    model = empty(shape, device)
    tokens_T = torch.zeros(TOKENS, dtype=torch.int64, device=device)
    stream_TD = model.language_model.model.embed(tokens_T)
    features_MD = model.image_features(torch.empty(320, 588, device=device), [(16, 16), (8, 8)])
    documents = segments([100, 540], causal=True, device=device, dtype=stream_TD.dtype)
    decoded = model.decode(stream_TD, torch.arange(TOKENS, device=device), lambda _: documents.attend)
    assert documents.offsets_S is not None
    for made in (features_MD, decoded.hidden_TD):
        assert made.device == device
        assert made.dtype == torch.bfloat16
    assert decoded.routing.load_LE.device == device


@pytest.mark.parametrize(
    "lengths", [[300, 340], [600, 40], [100] * 6 + [40], [20] * 32, [150]], ids=["pad", "loop", "rows", "even", "dense"]
)
def test_float32_finds_kernels_that_take_it(device: torch.device, lengths: list[int]) -> None:
    tokens = sum(lengths)
    q_THQ, v_THV = (torch.empty(tokens, 16, width, device=device) for width in (192, 128))
    documents = segments(lengths, causal=True, device=device, dtype=torch.float32)
    assert documents.offsets_S is None
    out_THV = documents.attend(q_THQ, q_THQ, v_THV)
    assert out_THV.shape == v_THV.shape
    assert out_THV.device == device


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [(40, 24), ()], ids=["own", "crossing"])
def test_a_tile_of_a_ring_and_its_gradients_stay_on_the_device(
    device: torch.device, dtype: torch.dtype, causal: tuple[int, ...]
) -> None:
    given = Tile(queries=slice(0, 64), keys=slice(8, 72), causal=causal)
    ((tile,),) = with_edges([[given]], device=device, dtype=dtype)
    rows = Rows(*(torch.empty(80, 16, 192, device=device, dtype=dtype) for _ in range(3)))
    out, lse = attend_tile(tile, rows)
    assert out.device == lse.device == device
    assert lse.dtype == torch.float32
    answers = Answers(*(torch.empty(80, 16, *last, device=device, dtype=kind) for last, kind in (
        ((192,), dtype), ((), torch.float32), ((192,), dtype))))  # fmt: skip
    assert [part.shape for part in attend_tile_backward(tile, rows, answers)] == [out.shape] * 3
