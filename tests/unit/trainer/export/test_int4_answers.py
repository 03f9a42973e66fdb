"""Weights in 4 bits that answer: torch's own product of them, their bytes by formula; the rest does not change."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import Tensor

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.adapters import Adapters, Target
from polyreme_planner.int4_weights import GROUP, GROUPS, WeightsKind
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.export.form import WeightsForm
from polyreme_trainer.model.adapters import merged
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.serve.int4 import MIDDLE, Int4Experts, Int4Linear, held_as, pack, rounded, weights_bytes
from polyreme_trainer.weights.whole_model import open_model
from tests.exports import export_model
from tests.unit.trainer.export.reading import TOKENS
from tests.unit.trainer.peak import PeakMemory

SCALE_BYTES = 4
"""Of a group in torch: a scale and a zero point in bfloat16, which it wants even where that is zero."""
TOLERANCE = 0.02
"""Of a product in bfloat16, relative to its size."""
HELD = 3 * 2 + 3 * 3 + 2 * 2 * 8
"""Matrices in 4 bits of the nano model: queries and outputs, feed-forwards, experts."""


def levels_times_scales(weight_OI: Tensor, group: int) -> Tensor:
    level_OI, scale_ON2 = rounded(weight_OI, group)
    scale_ON1, zero_ON1 = scale_ON2.float()[..., :1], scale_ON2.float()[..., 1:]
    made_ONG: Tensor = (level_OI.unflatten(1, (-1, group)) - MIDDLE) * scale_ON1 + zero_ON1
    return made_ONG.flatten(1)


def assert_close(found: Tensor, meant: Tensor) -> None:
    assert float((found - meant).norm()) <= TOLERANCE * float(meant.norm())


@pytest.fixture
def asked(exported: pathlib.Path) -> KimiVL:
    return open_model(exported, media_token=TOKENS.media)


@pytest.mark.parametrize("group", GROUPS)
def test_a_product_is_that_of_levels_and_scales(group: int) -> None:
    weight_OI = torch.randn(48, 256)
    weight_OI[3], weight_OI[4] = 0.0, 0.25
    meant_OI = levels_times_scales(weight_OI, group)
    assert float((meant_OI - weight_OI).norm() / weight_OI.norm()) < 0.105, "errors of rounding to 16 levels"
    assert torch.equal(meant_OI[3:5], weight_OI[3:5])
    for rows in (0, 1, 17):
        x_SI = torch.randn(rows, 256).bfloat16().float()
        assert_close(Int4Linear(weight_OI, group)(x_SI), x_SI @ meant_OI.T)


def test_weights_that_were_rounded_around_zero_are_exact() -> None:
    """As those of our exports are: the largest weight of a group is at one end of the levels or the other."""
    weight_ONG = torch.randn(64, 4, 32)
    scale_ON1 = (weight_ONG.abs().amax(-1, keepdim=True) / 7.5).bfloat16().float()
    weight_OI = ((weight_ONG / scale_ON1).round().clamp(-8, 7) * scale_ON1).flatten(1)
    assert torch.equal(levels_times_scales(weight_OI, 32), weight_OI)


def test_experts_multiply_their_own_rows() -> None:
    gate_up_LOI, down_LOI = torch.randn(4, 64, 96), torch.randn(4, 96, 32)
    rows_SD, counts_L = torch.randn(9, 96), torch.tensor([2, 0, 6, 1])
    gates, downs = ([levels_times_scales(each, 32) for each in of] for of in (gate_up_LOI, down_LOI))
    meant = []
    for own_SD, gate_up_OI, down_OI in zip(rows_SD.split(counts_L.tolist()), gates, downs, strict=True):
        gate_SF, up_SF = (own_SD @ gate_up_OI.T).chunk(2, dim=-1)
        meant.append((torch.nn.functional.silu(gate_SF) * up_SF) @ down_OI.T)
    experts = Int4Experts(gate_up_LOI, down_LOI)
    assert_close(experts(rows_SD, counts_L), torch.cat(meant))
    assert experts(rows_SD[:0], torch.zeros(4, dtype=torch.int64)).shape == (0, 96)


def test_bytes_are_those_of_the_formula(asked: KimiVL) -> None:
    before = weights_bytes(asked)
    sizes = {name: tensor.shape for name, tensor in asked.state_dict().items()}
    replaced = pack(asked)
    gone = sizes.keys() - asked.state_dict().keys()
    matrices = [size[-2:] for name in gone for size in [sizes[name]] for _ in range(size[0] if len(size) > 2 else 1)]
    saved = sum((4 - 0.5 - SCALE_BYTES / GROUP) * outputs * inputs for outputs, inputs in matrices)
    assert len(matrices) == HELD
    assert len(replaced) == 3 * 2 + 3 * 3 + 2, "experts of a layer are one module"
    assert weights_bytes(asked) == before - saved


def test_an_export_in_4_bits_keeps_its_levels(model: KimiVL, tmp_path: pathlib.Path) -> None:
    form = WeightsForm(dtype=torch.bfloat16, int4_group=32)
    export_model(model.state_dict(), KIMI_VL_NANO, tmp_path, tokens=TOKENS, form=form)
    whole, packed = (open_model(tmp_path, media_token=TOKENS.media, weights=kind) for kind in WeightsKind)
    for number, layer in whole.language_model.model.layers.items():
        weight_OI = layer.get_parameter("self_attn.o_proj.weight")
        held = packed.language_model.model.layers[number].get_submodule("self_attn.o_proj")
        read_OI: Tensor = held(torch.eye(weight_OI.shape[1])).T
        rounded_by = float((read_OI - weight_OI).abs().max() / weight_OI.abs().max())
        assert rounded_by <= 2**-7, "as bfloat16 does, not to other levels"


def test_an_export_is_read_layer_by_layer(exported: pathlib.Path) -> None:
    with PeakMemory("cpu") as peak:
        packed = open_model(exported, media_token=TOKENS.media, weights=WeightsKind.INT4)
        held = weights_bytes(packed)
    layer = 4 * 8 * 3 * 64 * 96
    assert peak.peak_bytes - held < 4 * layer, "rounding a layer's experts takes some copies of them"
    with PeakMemory("cpu") as peak:
        pack(open_model(exported, media_token=TOKENS.media))
    assert peak.peak_bytes > held + 2 * layer


def test_adapters_are_merged_first() -> None:
    adapters = Adapters(rank=4, alpha=8.0, targets=frozenset(Target))
    model = build_model(KIMI_VL_NANO, seed=3, media_token=TOKENS.media, adapters=adapters)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.1)
    state = model.state_dict()
    name = "language_model.model.layers.1.mlp.shared_experts.up_proj"
    meant = Int4Linear(merged(state, f"{name}.weight", adapters))
    pack(model)
    assert torch.equal(model.get_buffer(f"{name}.words"), meant.words)
    assert not [name for name in model.state_dict() if "lora" in name and "kv_" not in name]


def test_training_has_its_weights_back(asked: KimiVL) -> None:
    before = dict(asked.named_parameters())
    with held_as(WeightsKind.INT4, [asked]):
        assert len(dict(asked.named_parameters())) < len(before)
    after = dict(asked.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is parameter for name, parameter in before.items())


def test_another_device_is_refused() -> None:
    model = build_model(KIMI_VL_NANO, seed=0, media_token=TOKENS.media, device="meta")
    with pytest.raises(InvalidConfigError, match="on processors alone, not on meta"):
        pack(model)
