"""Sharded safetensors with ``config.json``, under Kimi-VL's names; the text part loads in ``transformers``.

A directory appears whole or not at all: everything is written beside it, synced, and renamed. Writing does not need
``transformers``.

    directory/           the whole model: config.json, model-0000i-of-0000n.safetensors, model.safetensors.index.json
    directory/text/      the decoder alone, for ``AutoModelForCausalLM.from_pretrained``

A model that takes no images is its decoder, and lies in ``directory/`` under that part's names.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from polyreme_api.batch import TokenIds
from polyreme_api.plan.shapes import ModelShape
from polyreme_trainer.export.config import model_config, text_config
from polyreme_trainer.export.names import text_part, to_checkpoint

SHARD_BYTES_MAX = 4 << 30
"""Largest weights file [bytes], unless one tensor is larger."""
TEXT_DIRECTORY = "text"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def export_model(
    state: Mapping[str, Tensor],
    shape: ModelShape,
    directory: pathlib.Path,
    *,
    tokens: TokenIds,
    tokenizer: bytes | None = None,
    shard_bytes_max: int = SHARD_BYTES_MAX,
) -> None:
    """Write the whole model and its text part; an older export at ``directory`` is replaced.

    Args:
        state: Full state dict of ``KimiVL``, all experts in it, on any device.
        shape: Sizes of the model.
        directory: Where the export shall be; its parent is made.
        tokens: Special tokens for the configuration.
        tokenizer: ``tokenizer.json`` to put beside the weights, for ``AutoTokenizer``.
        shard_bytes_max: Largest weights file [bytes].

    Raises:
        OSError: If the disk refuses; the older export is kept, at the latest by the next call.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    replaced = directory.with_name(f".{directory.name}.replaced")
    if replaced.exists() and not directory.exists():
        replaced.rename(directory)  # an earlier writer was killed between its two renames
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    text_folder = partial / TEXT_DIRECTORY if shape.sees else partial
    text_folder.mkdir(parents=True)
    dtype = str(state["language_model.lm_head.weight"].dtype).removeprefix("torch.")
    text = text_config(shape.decoder, tokens=tokens, dtype=dtype)
    _write_part(text_folder, to_checkpoint(text_part(state)), text, shard_bytes_max)
    if shape.sees:
        _write_part(partial, to_checkpoint(state), model_config(shape, tokens=tokens, dtype=dtype), shard_bytes_max)
    if tokenizer is not None:
        for folder in {partial, text_folder}:
            _write_tokenizer(folder, tokenizer, tokens)
    if directory.exists():
        directory.rename(replaced)
    partial.rename(directory)
    _sync(directory.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def shards(tensors: Mapping[str, Tensor], shard_bytes_max: int) -> list[dict[str, Tensor]]:
    """Split tensors in order into groups of at most ``shard_bytes_max``, each at least one tensor."""
    groups: list[dict[str, Tensor]] = []
    held = shard_bytes_max + 1
    for name, tensor in tensors.items():
        if held + tensor.nbytes > shard_bytes_max:
            groups.append({})
            held = 0
        groups[-1][name] = tensor
        held += tensor.nbytes
    return groups


def _write_part(
    directory: pathlib.Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], shard_bytes_max: int
) -> None:
    weight_map: dict[str, str] = {}
    groups = shards(tensors, shard_bytes_max)
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        # A view of a stacked tensor shares its storage, which the format does not allow: copy one shard at a time.
        copies = {name: tensor.detach().cpu().clone() for name, tensor in group.items()}
        save_file(copies, directory / file, metadata={"format": "pt"})
        _sync(directory / file)
        weight_map |= dict.fromkeys(group, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(directory / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(directory / CONFIG_FILE, config)
    _sync(directory)


def _write_tokenizer(directory: pathlib.Path, tokenizer: bytes, tokens: TokenIds) -> None:
    words = {entry["id"]: entry["content"] for entry in json.loads(tokenizer)["added_tokens"]}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": words[tokens.pad],
        "eos_token": words[tokens.end],
        "clean_up_tokenization_spaces": False,
    }
    (directory / TOKENIZER_FILE).write_bytes(tokenizer)
    _sync(directory / TOKENIZER_FILE)
    _write_json(directory / TOKENIZER_CONFIG_FILE, config)


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    _sync(path)


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
