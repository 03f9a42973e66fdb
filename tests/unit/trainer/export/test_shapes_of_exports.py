"""A model is built from its own configuration alone, as for those who ask an export."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from polyreme_api.batch import TokenIds
from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_planner.shapes import KIMI_VL_NANO, PRESETS, ModelShape
from polyreme_trainer.export.config import model_config, text_config
from polyreme_trainer.model.initialise import EXACT, build_model
from polyreme_trainer.weights.whole_model import open_model, read_config, shape_of
from tests.exports import export_model

TOKENS = TokenIds(media=2, end=1, pad=0)


def config_of(shape: ModelShape) -> dict[str, Any]:
    return model_config(shape, tokens=TOKENS) if shape.sees else text_config(shape.decoder, tokens=TOKENS)


@pytest.mark.parametrize("shape", PRESETS.values(), ids=lambda shape: shape.name)
def test_a_configuration_gives_back_the_shape_that_it_was_written_of(shape: ModelShape) -> None:
    found = shape_of(config_of(shape))
    drawn_by = found.decoder.initializer_range  # no weight of a trained model depends on it
    decoder = dataclasses.replace(shape.decoder, initializer_range=drawn_by)
    assert dataclasses.replace(found, name=shape.name) == dataclasses.replace(shape, decoder=decoder)


def test_a_configuration_without_a_size_is_refused() -> None:
    config = config_of(KIMI_VL_NANO)
    for part, field in (("text_config", "hidden_size"), ("vision_config", "patch_size")):
        whole = {key: value for key, value in config[part].items() if key != field}
        with pytest.raises(InvalidConfigError, match=r"config\.json lacks a size or has one of another type"):
            shape_of({**config, part: whole})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_is_read_in_its_own_type(tmp_path: Path, dtype: torch.dtype) -> None:
    model = build_model(KIMI_VL_NANO, seed=3, media_token=2, dtype=dtype)
    state = {name: tensor.float() if name.endswith(EXACT) else tensor for name, tensor in model.state_dict().items()}
    export_model(state, KIMI_VL_NANO, tmp_path / "model", tokens=TOKENS)
    found = open_model(tmp_path / "model", media_token=2).state_dict()
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="no weights"):
        read_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(InvalidConfigError, match="adapters alone can't answer"):
        read_config(tmp_path)
