"""Exports in another type or in 4 bits: what is rounded, by how much, and what stays as it is."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.export.form import WeightsForm
from polyreme_trainer.export.names import to_checkpoint
from polyreme_trainer.model.vlm import KimiVL
from tests.exports import export_model
from tests.unit.trainer.export.reading import TOKENS, read_back

LAYER = "language_model.model.layers.2."


def exported(model: KimiVL, folder: pathlib.Path, form: WeightsForm) -> dict[str, Tensor]:
    export_model(model.state_dict(), KIMI_VL_NANO, folder, tokens=TOKENS, form=form)
    (file,) = folder.glob("*.safetensors")
    return load_file(file)


def test_bfloat16_rounds_all_but_routers(model: KimiVL, tmp_path: pathlib.Path) -> None:
    exported(model, tmp_path / "e", WeightsForm(dtype=torch.bfloat16))
    back = read_back(tmp_path / "e")
    for name, tensor in model.state_dict().items():
        routes = ".mlp.gate." in name
        assert torch.equal(back[name], tensor if routes else tensor.bfloat16().float()), name
    for folder in (tmp_path / "e", tmp_path / "e" / "text"):
        assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"


def unpacked(stored: dict[str, Tensor], name: str, group: int) -> Tensor:
    """Undo the packing, by compressed-tensors' description of it."""
    word_OW, scale_ON = stored[f"{name}_packed"], stored[f"{name}_scale"].float()
    levels = [((word_OW >> 4 * place) & 15) - 8 for place in range(8)]
    level_OI = torch.stack(levels, dim=-1).flatten(1).float()
    assert stored[f"{name}_shape"].tolist() == list(level_OI.shape)
    return level_OI * scale_ON.repeat_interleave(group, dim=1)


def test_4_bits_are_the_nearest_levels_of_each_group(model: KimiVL, tmp_path: pathlib.Path) -> None:
    stored = exported(model, tmp_path / "e", WeightsForm(int4_group=32))
    whole = to_checkpoint(model.state_dict())
    packed = {name.removesuffix("_packed") for name in stored if name.endswith("_packed")}
    for name in packed:
        assert stored[f"{name}_packed"].dtype == torch.int32
        error = (unpacked(stored, name, 32) - whole[name]).abs()
        step = stored[f"{name}_scale"].repeat_interleave(32, dim=1)
        assert (error <= 0.5001 * step).all(), name
    assert {f"{LAYER}{part}.weight" for part in PACKED} <= packed
    untouched = {name for name in whole if name not in packed}
    assert not any(part in name for name in packed for part in ("vision", "multi_modal", "embed", "lm_head", ".gate."))
    for name in untouched:
        assert torch.equal(stored[name], whole[name]), name


PACKED = (
    "self_attn.q_proj",
    "self_attn.kv_a_proj_with_mqa",
    "self_attn.kv_b_proj",
    "self_attn.o_proj",
    "mlp.shared_experts.up_proj",
    "mlp.experts.7.down_proj",
)


def test_the_configuration_names_the_form(model: KimiVL, tmp_path: pathlib.Path) -> None:
    exported(model, tmp_path / "e", WeightsForm(dtype=torch.bfloat16, int4_group=32))
    for folder in (tmp_path / "e", tmp_path / "e" / "text"):
        form = json.loads((folder / "config.json").read_text())["quantization_config"]
        assert (form["quant_method"], form["format"]) == ("compressed-tensors", "pack-quantized")
        (group,) = form["config_groups"].values()
        assert group["weights"]["group_size"] == 32


def test_groups_that_do_not_divide_the_inputs_are_refused(model: KimiVL, tmp_path: pathlib.Path) -> None:
    rule = r"layers\.0\.self_attn\.q_proj has 96 inputs, expected a multiple of 64; take a smaller group"
    with pytest.raises(InvalidConfigError, match=rule):
        exported(model, tmp_path / "e", WeightsForm(int4_group=64))
    assert not (tmp_path / "e").exists()


def test_groups_divide_the_inputs_of_each_rank_of_a_server() -> None:
    """Of Kimi-VL's experts: 1,408 = 22 x 64 inputs, which servers cut where they lead back."""
    expert = "language_model.model.layers.1.mlp.experts.0."
    weights = {f"{expert}{part}_proj.weight": torch.zeros(8, 1408, device="meta") for part in ("up", "down")}
    WeightsForm(int4_group=64, int4_ranks=2).of(weights)
    rule = r"experts\.0\.down_proj has 1408 inputs, expected a multiple of 64 for each of 4 ranks; take a smaller"
    with pytest.raises(InvalidConfigError, match=rule):
        WeightsForm(int4_group=64, int4_ranks=4).of(weights)
    WeightsForm(int4_group=32, int4_ranks=4).of(weights)
