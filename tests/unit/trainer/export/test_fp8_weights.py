"""Weights in FP8 by blocks, as DeepSeek-V3 and Kimi-K2 are released, are read as their values times their scales."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyreme_datahub.objects import open_store
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.export.form import QUANTISED
from polyreme_trainer.export.huggingface import CONFIG_FILE, INDEX_FILE
from polyreme_trainer.model.sharding import cut_of, slice_of
from polyreme_trainer.weights.catalogue import read_catalogue
from polyreme_trainer.weights.compatibility import check_fit
from polyreme_trainer.weights.load import load_weights
from polyreme_trainer.weights.locations import StoredFolder
from polyreme_trainer.weights.slices import Place, Rows
from tests.unit.trainer.export.reading import assert_equal, read_back

SIDES = (40, 28)
"""Rows and columns of a block, which divide no slice."""
O_PROJ, Q_PROJ = (f"language_model.model.layers.1.self_attn.{part}_proj.weight" for part in ("o", "q"))


def in_blocks(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight in FP8, its scales, and what both mean."""
    height, width = SIDES
    stored, meant = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    scales = torch.empty(-(-weight.shape[0] // height), -(-weight.shape[1] // width))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = (slice(row * height, (row + 1) * height), slice(column * width, (column + 1) * width))
            scales[row, column] = weight[block].abs().max() / 448
            stored[block] = (weight[block] / scales[row, column]).to(torch.float8_e4m3fn)
            meant[block] = stored[block].float() * scales[row, column]
    return stored, scales, meant


@pytest.fixture
def meant(exported: pathlib.Path) -> dict[str, Tensor]:
    """What an export means whose matrices are in FP8; their scales lie in another file."""
    index = json.loads((exported / INDEX_FILE).read_text())
    means, all_scales = {}, {}
    for file in sorted(exported.glob("*.safetensors")):
        tensors = load_file(file)
        for name in [name for name in tensors if QUANTISED.fullmatch(name)]:
            tensors[name], all_scales[f"{name}_scale_inv"], means[name] = in_blocks(tensors[name])
        save_file(tensors, file)
    save_file(all_scales, exported / "scales.safetensors")
    index["weight_map"] |= dict.fromkeys(all_scales, "scales.safetensors")
    (exported / INDEX_FILE).write_text(json.dumps(index))
    config = json.loads((exported / CONFIG_FILE).read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(SIDES)}
    (exported / CONFIG_FILE).write_text(json.dumps(config))
    return means


def test_weights_in_blocks_of_fp8_are_read_by_their_scales(exported: pathlib.Path, meant: dict[str, Tensor]) -> None:
    back = read_back(exported)
    assert torch.equal(back[O_PROJ], meant[O_PROJ])
    layer = "language_model.model.layers.1.mlp.experts."
    gates = torch.cat([meant[f"{layer}3.{part}_proj.weight"] for part in ("gate", "up")])
    assert torch.equal(back[f"{layer}gate_up_proj"][3], gates)
    assert_equal(back, read_back(StoredFolder(open_store(exported.as_uri()), exported.as_uri())))


@pytest.mark.parametrize("name", [O_PROJ, Q_PROJ])
def test_a_slice_is_scaled_by_its_own_blocks(exported: pathlib.Path, meant: dict[str, Tensor], name: str) -> None:
    cut = cut_of(name)
    assert cut is not None
    for place in range(2):
        expected = slice_of(meant[name], cut, place=place, parts=2)
        own = torch.empty(expected.shape)
        catalogue = read_catalogue(exported)
        rows = Rows(own=own, rows=own.shape[0])
        load_weights(
            {name: rows},
            catalogue,
            check_fit(catalogue, KIMI_VL_NANO),
            Place(experts=range(0), tensor=place, tensor_parts=2),
        )
        assert torch.equal(own, expected)
