"""Weights in 4 bits, as our exports have them, are read as their levels times their scales."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.objects import open_store
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.export.form import WeightsForm
from polyreme_trainer.export.huggingface import INDEX_FILE
from polyreme_trainer.export.names import to_checkpoint
from polyreme_trainer.model.sharding import cut_of, slice_of
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.weights import packed_int4
from polyreme_trainer.weights.catalogue import read_catalogue
from polyreme_trainer.weights.compatibility import check_fit
from polyreme_trainer.weights.load import load_weights
from polyreme_trainer.weights.locations import StoredFolder
from polyreme_trainer.weights.slices import Place, Rows
from tests.exports import export_model
from tests.unit.trainer.export.reading import TOKENS, assert_equal, read_back
from tests.unit.trainer.export.test_export_form import unpacked

GROUP = 32
O_PROJ, Q_PROJ = (f"language_model.model.layers.1.self_attn.{part}_proj.weight" for part in ("o", "q"))


@pytest.fixture
def packed(model: KimiVL, tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "packed"
    export_model(model.state_dict(), KIMI_VL_NANO, folder, tokens=TOKENS, form=WeightsForm(int4_group=GROUP))
    return folder


@pytest.fixture
def meant(packed: pathlib.Path) -> dict[str, Tensor]:
    """Every tensor of the files by its name in them, packed ones as what they mean."""
    (file,) = packed.glob("*.safetensors")
    stored = load_file(file)
    names = {name.removesuffix("_packed") for name in stored if not name.endswith(("_scale", "_shape"))}
    return {name: stored[name] if name in stored else unpacked(stored, name, GROUP) for name in names}


def scales_elsewhere(folder: pathlib.Path) -> None:
    """Move all scales to a file of their own."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale")}
    save_file(tensors, file)
    save_file(scales, folder / "scales.safetensors")
    weight_map = dict.fromkeys(tensors, file.name) | dict.fromkeys(scales, "scales.safetensors")
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def test_weights_in_4_bits_are_read_by_their_scales(packed: pathlib.Path, meant: dict[str, Tensor]) -> None:
    back = read_back(packed)
    in_files = to_checkpoint(back)
    assert in_files.keys() == meant.keys()
    for name, tensor in in_files.items():
        assert torch.equal(tensor, meant[name]), name
    scales_elsewhere(packed)
    assert_equal(back, read_back(packed))
    assert_equal(back, read_back(StoredFolder(open_store(packed.as_uri()), packed.as_uri())))


@pytest.mark.parametrize("name", [O_PROJ, Q_PROJ])
@pytest.mark.parametrize("parts", [2, 4])
def test_a_slice_has_the_scales_of_its_own_groups(
    packed: pathlib.Path, meant: dict[str, Tensor], name: str, parts: int
) -> None:
    """Slices of columns may begin within a group, and within a word of eight."""
    cut = cut_of(name)
    assert cut is not None
    for place in range(parts):
        expected = slice_of(meant[name], cut, place=place, parts=parts)
        own = torch.empty(expected.shape)
        catalogue = read_catalogue(packed)
        whole = Place(experts=range(0), tensor=place, tensor_parts=parts)
        load_weights({name: Rows(own=own, rows=own.shape[0])}, catalogue, check_fit(catalogue, KIMI_VL_NANO), whole)
        assert torch.equal(own, expected)


def changed(folder: pathlib.Path, name: str, tensor: Tensor | None) -> None:
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors.pop(name)
    save_file(tensors if tensor is None else {**tensors, name: tensor}, file)
    (folder / INDEX_FILE).unlink(missing_ok=True)
    file.rename(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("part", "tensor"),
    [
        ("_scale", None),
        ("_scale", torch.ones(7, 3)),
        ("_packed", torch.zeros(128, 4, dtype=torch.int64)),
        ("_packed", torch.zeros(7, 16, dtype=torch.int32)),
    ],
)
def test_parts_that_do_not_fit_are_refused(packed: pathlib.Path, part: str, tensor: Tensor | None) -> None:
    changed(packed, f"{O_PROJ}{part}", tensor)
    with pytest.raises(InvalidConfigError, match="weight has another type"):
        read_back(packed)


def test_a_scale_that_is_not_finite_is_named_and_counted_in_the_whole(packed: pathlib.Path) -> None:
    """Ranks with different slices report the same."""
    (file,) = packed.glob("*.safetensors")
    scales = load_file(file)[f"{O_PROJ}_scale"]
    scales[0, 0] = scales[-1, -1] = torch.nan
    changed(packed, f"{O_PROJ}_scale", scales)
    catalogue, cut = read_catalogue(packed), cut_of(O_PROJ)
    names = check_fit(catalogue, KIMI_VL_NANO)
    assert cut is not None
    for place in range(2):
        half = Place(experts=range(0), tensor=place, tensor_parts=2)
        own = slice_of(torch.empty(catalogue.tensors[O_PROJ].shape), cut, place=place, parts=2).clone()
        with pytest.raises(InvalidConfigError, match=rf"{O_PROJ}_scale has 2 NaN and 0 Inf"):
            load_weights({O_PROJ: Rows(own=own, rows=own.shape[0])}, catalogue, names, half)


def test_any_columns_of_a_packed_weight_are_those_of_the_whole() -> None:
    inputs, group = 64, 16
    name = O_PROJ
    parts = WeightsForm(int4_group=group).of({name: torch.randn(3, inputs)})
    whole = unpacked(parts, name, group)
    for first in range(0, inputs, 3):
        for columns in range(1, inputs - first + 1, 5):
            words = parts[f"{name}_packed"][:, packed_int4.columns_of_words(first, first + columns)]
            found = packed_int4.scaled(words, parts[f"{name}_scale"], first=first, columns=columns, group=group)
            assert torch.equal(found, whole[:, first : first + columns])
