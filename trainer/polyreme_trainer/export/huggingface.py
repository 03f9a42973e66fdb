"""Sharded safetensors with ``config.json``, under Kimi-VL's names; the text part loads in ``transformers``.

A directory appears whole or not at all: everything is written to a temporary one, synced, and renamed. Writing does not
need ``transformers``.

Tensors may come one by one, and none is kept: files are laid out by the sizes of all tensors before the first one
comes, and each is written to its place. ``safetensors`` itself writes a file from tensors that are all in memory.

    directory/           the whole model: config.json, model-0000i-of-0000n.safetensors, model.safetensors.index.json,
                         preprocessor_config.json for ``polyreme_processor``
    directory/text/      the decoder alone, for ``AutoModelForCausalLM.from_pretrained``

For a model that takes no images, ``directory/`` holds the decoder under that part's names.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from polyreme_api.batch import TEMPLATE_FILE, TokenIds, TokenizerFile
from polyreme_planner.shapes import ModelShape
from polyreme_trainer.export.config import generation_config, model_config, preprocessor_config, text_config
from polyreme_trainer.export.form import AS_TRAINED, WeightsForm
from polyreme_trainer.export.names import text_part, to_checkpoint
from polyreme_trainer.rank_page import advance

SHARD_BYTES_MAX = 4 << 30
"""Largest weights file [bytes], unless one tensor is larger."""
TEXT_DIRECTORY = "text"
INDEX_FILE = "model.safetensors.index.json"
CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
PREPROCESSOR_CONFIG_FILE = "preprocessor_config.json"
_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32", torch.int64: "I64"}
_HEADER_ALIGNMENT = 8


def export_tensors(
    expected: Mapping[str, Tensor],
    tensors: Iterable[tuple[str, Tensor]],
    shape: ModelShape,
    directory: pathlib.Path,
    *,
    tokens: TokenIds,
    tokenizer: TokenizerFile | None = None,
    form: WeightsForm = AS_TRAINED,
    shard_bytes_max: int = SHARD_BYTES_MAX,
) -> None:
    """Write the whole model and its text part; an older export at ``directory`` is replaced.

    Args:
        expected: Names, shapes and types of all tensors, in the order of the files; only these are read.
        tensors: The tensors, in any order, on any device. Only one is held at a time, while it is written.
        shape: Sizes of the model.
        directory: Where the export shall be; its parent is created.
        tokens: Special tokens for the configuration.
        tokenizer: To put beside the weights, for ``AutoTokenizer`` and for jobs that continue from them.
        form: How weights are written.
        shard_bytes_max: Largest weights file [bytes].

    Raises:
        InvalidConfigError: If weights have no such form.
        OSError: If the disk refuses; the older export is kept, at the latest by the next call.
        ValueError: If a tensor did not come, or differs from what was expected.
    """
    with written_whole(directory) as partial:
        text_folder = partial / TEXT_DIRECTORY if shape.sees else partial
        text_folder.mkdir(exist_ok=True)
        dtype = str(form.dtype or expected["language_model.lm_head.weight"].dtype).removeprefix("torch.")
        laid_out = form.of(to_checkpoint({name: tensor.to("meta") for name, tensor in expected.items()}))
        text = _Part(text_folder, text_part(laid_out), shard_bytes_max)
        whole = _Part(partial, laid_out, shard_bytes_max) if shape.sees else None
        for name, tensor in tensors:
            advance()
            one = form.of(to_checkpoint({name: tensor}))
            text.write(text_part(one))
            if whole is not None:
                whole.write(one)
            del one, tensor  # before the next one is made
        text.finish(text_config(shape.decoder, tokens=tokens, dtype=dtype) | form.config)
        if whole is not None:
            whole.finish(model_config(shape, tokens=tokens, dtype=dtype) | form.config)
        for folder in {partial, text_folder}:
            _write_json(folder / GENERATION_CONFIG_FILE, generation_config(tokens))
            if tokenizer is not None:
                _write_tokenizer(folder, tokenizer, tokens)
        if tokenizer is not None and whole is not None:
            image_token = _special_tokens(tokenizer)[tokens.media]
            config = preprocessor_config(shape.vision, tokenizer, image_token=image_token)
            _write_json(partial / PREPROCESSOR_CONFIG_FILE, config)


@contextlib.contextmanager
def written_whole(directory: pathlib.Path) -> Iterator[pathlib.Path]:
    """Give an empty folder to write, which replaces a directory when the block ends without an error.

    Raises:
        OSError: If the disk refuses; the older directory is kept, at the latest by the next call.
    """
    partial = directory.with_name(f".{directory.name}.partial")
    replaced = directory.with_name(f".{directory.name}.replaced")
    if replaced.exists() and not directory.exists():
        replaced.rename(directory)  # an earlier writer was killed between its two renames
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    yield partial
    for file in partial.iterdir():
        _sync(file)
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


class _Part:
    """The weights of one folder: files that are laid out at once, and filled as tensors come; index and config last."""

    def __init__(self, directory: pathlib.Path, expected: Mapping[str, Tensor], shard_bytes_max: int) -> None:
        self._directory = directory
        self._expected = expected
        self._weight_map: dict[str, str] = {}
        self._begin: dict[str, int] = {}
        """Position in its file of a tensor that is still to come."""
        groups = shards(expected, shard_bytes_max)
        for number, group in enumerate(groups, start=1):
            file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            self._weight_map |= dict.fromkeys(group, file)
            header, begins = _lay_out(group)
            self._begin |= begins
            (directory / file).write_bytes(header)

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write tensors to their places."""
        for name, tensor in tensors.items():
            if name not in self._begin or tensor.shape != self._expected[name].shape:
                raise ValueError(f"export does not fit: {name} {tuple(tensor.shape)} is not a tensor that was expected")
            if tensor.dtype != self._expected[name].dtype:
                raise ValueError(f"export does not fit: {name} is {tensor.dtype}, not {self._expected[name].dtype}")
            with (self._directory / self._weight_map[name]).open("r+b") as file:
                file.seek(self._begin.pop(name))
                file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)

    def finish(self, config: Mapping[str, Any]) -> None:
        """Make the files durable, then write index and config, which say that they are whole."""
        if self._begin:
            raise ValueError(f"export lacks {len(self._begin)} tensors, the first is {next(iter(self._begin))}")
        for file in dict.fromkeys(self._weight_map.values()):
            _sync(self._directory / file)
        total = sum(tensor.nbytes for tensor in self._expected.values())
        index = {"metadata": {"total_size": total}, "weight_map": self._weight_map}
        _write_json(self._directory / INDEX_FILE, index)
        _write_json(self._directory / CONFIG_FILE, config)
        _sync(self._directory)


def _lay_out(group: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int]]:
    """Make the header of a file (huggingface.co/docs/safetensors, "Format"), and return where each tensor begins.

    Wide types first, so that each begins at a multiple of its own size.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins: dict[str, int] = {}
    end = 0
    for name, tensor in sorted(group.items(), key=lambda item: -item[1].itemsize):
        begins[name], end = end, end + tensor.nbytes
        header[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begins[name], end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, {name: 8 + len(text) + begin for name, begin in begins.items()}


def _special_tokens(tokenizer: TokenizerFile) -> dict[int, str]:
    return {entry["id"]: entry["content"] for entry in json.loads(tokenizer.content)["added_tokens"]}


def _write_tokenizer(directory: pathlib.Path, tokenizer: TokenizerFile, tokens: TokenIds) -> None:
    words = _special_tokens(tokenizer)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": words[tokens.pad],
        "eos_token": words[tokens.end],
        "clean_up_tokenization_spaces": False,
        "chat_template": tokenizer.chat_template,
    }
    (directory / TOKENIZER_FILE).write_bytes(tokenizer.content)
    _sync(directory / TOKENIZER_FILE)
    _write_json(directory / TOKENIZER_CONFIG_FILE, config)
    if tokenizer.template:
        (directory / TEMPLATE_FILE).write_bytes(tokenizer.template + b"\n")
        _sync(directory / TEMPLATE_FILE)


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
    _sync(path)


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
