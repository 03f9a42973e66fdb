"""A whole model of the files of an export, or of released weights, with the shape that their configuration says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_planner.int4_weights import GROUP, GROUPS, WeightsKind
from polyreme_planner.shapes import NO_VISION, DecoderShape, ModelShape, VisionShape
from polyreme_trainer.export import peft
from polyreme_trainer.export.config import POSITIONS_MAX
from polyreme_trainer.export.huggingface import CONFIG_FILE
from polyreme_trainer.model.initialise import EXACT, build_model, open_buffers
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.serve.int4 import pack
from polyreme_trainer.weights.catalogue import read_catalogue
from polyreme_trainer.weights.compatibility import check_fit, decoder_fields
from polyreme_trainer.weights.load import load_weights
from polyreme_trainer.weights.slices import Place, Rows

FIELD = "RUN"
_LAYERS = "language_model.model.layers."
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_VISION = {
    "num_hidden_layers": "layers",
    "hidden_size": "width",
    "num_attention_heads": "heads",
    "intermediate_size": "ffn_width",
    "patch_size": "patch_px",
    "init_pos_emb_height": "position_rows",
}
"""Sizes of ours by their names in ``vision_config``."""


def read_config(folder: Path) -> Mapping[str, Any]:
    """Read ``config.json`` of a folder of weights.

    Raises:
        NotFoundError: If there is none, or the weights lack files.
        InvalidConfigError: If it holds adapters alone, or is damaged.
    """
    if (folder / peft.CONFIG_FILE).is_file():
        raise InvalidConfigError(
            f"adapters alone can't answer: {folder} has no model; name the run, or export it without --adapters",
            field=FIELD,
        )
    config = read_catalogue(folder).config
    if config is None:
        raise NotFoundError(f"no model: {folder} has weights and no {CONFIG_FILE}", field=FIELD)
    return config


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the shape that a configuration describes; ``config.model_config`` is the other way.

    Raises:
        InvalidConfigError: If it lacks a size, or one has another type.
    """
    text, vision = config.get("text_config", config), config.get("vision_config")
    try:
        return ModelShape(
            name=str(config["model_type"]),
            decoder=DecoderShape(**decoder_fields(text)),
            vision=NO_VISION if vision is None else _vision(vision),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise InvalidConfigError(
            f"model can't be built: {CONFIG_FILE} lacks a size or has one of another type "
            f"({type(error).__name__}: {error}), expected the fields of Kimi-VL or DeepSeek-V3",
            field=FIELD,
        ) from error


def positions_of(config: Mapping[str, Any]) -> int:
    """Return the longest sequence that a configuration names [tokens]."""
    text = config.get("text_config", config)
    return int(text.get("max_position_embeddings", POSITIONS_MAX))


def open_model(folder: Path, *, media_token: int, weights: WeightsKind = WeightsKind.AUTO) -> KimiVL:
    """Read a model to ask, in host memory, in the type that its configuration names.

    In 4 bits, no more than one layer of it is ever in memory as it was.

    Args:
        folder: Of the weights.
        media_token: Token whose embedding an image feature replaces.
        weights: How they are held.

    Raises:
        NotFoundError: If the folder or a file of it does not exist.
        InvalidConfigError: If the weights are damaged, not finite, or do not fit their configuration.
    """
    catalogue, config = read_catalogue(folder), read_config(folder)
    shape = shape_of(config)
    names = check_fit(catalogue, shape)
    model = build_model(shape, seed=0, media_token=media_token, device="meta")
    open_buffers(model, "cpu")
    for layer, part in _parts(model):
        _allocate(model, part, _type_of(config))
        state = model.state_dict()
        held = Rows.whole({name: state[name] for name in part})
        load_weights(held, catalogue, names, Place(experts=range(shape.decoder.experts)))
        if layer is not None and weights is WeightsKind.INT4:
            pack(model, [layer], group=_group_of(config))
    return model.eval()


def _parts(model: KimiVL) -> list[tuple[nn.Module | None, list[str]]]:
    """Return the names of each decoder layer's tensors with the layer, and those of the rest."""
    every = list(model.state_dict())
    layers = [
        (layer, [name for name in every if name.startswith(f"{_LAYERS}{number}.")])
        for number, layer in model.language_model.model.layers.items()
    ]
    return [*layers, (None, [name for name in every if not name.startswith(_LAYERS)])]


def _group_of(config: Mapping[str, Any]) -> int:
    """Return the group of weights that are in 4 bits in their files, so that they keep their levels."""
    groups = config.get("quantization_config", {}).get("config_groups", {})
    named = [of.get("weights", {}).get("group_size") for of in groups.values()]
    return named[0] if len(named) == 1 and named[0] in GROUPS else GROUP


def _type_of(config: Mapping[str, Any]) -> torch.dtype:
    text = config.get("text_config", config)
    named = next((str(part[key]) for part in (config, text) for key in ("dtype", "torch_dtype") if key in part), "")
    return _TYPES.get(named, torch.float32)


def _allocate(model: KimiVL, names: Sequence[str], dtype: torch.dtype) -> None:
    """Give parameters memory: those that choose experts stay float32, as in training."""
    parameters = dict(model.named_parameters())
    for name in names:
        if (parameter := parameters.get(name)) is None:
            continue
        empty = torch.empty(parameter.shape, dtype=torch.float32 if name.endswith(EXACT) else dtype)
        module, _, own = name.rpartition(".")
        model.get_submodule(module).register_parameter(own, nn.Parameter(empty, requires_grad=False))


def _vision(config: Mapping[str, Any]) -> VisionShape:
    sizes = {ours: int(config[theirs]) for theirs, ours in _VISION.items()}
    return VisionShape(**sizes, merge=int(config.get("merge_kernel_size", (2, 2))[0]))
