"""Catalogue of a folder or bucket of weights: names, shapes and types from the headers of files; no weight is read.

Every file that the index names is opened, so that a missing or truncated one is found before anything is built.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_trainer.export.huggingface import CONFIG_FILE, INDEX_FILE
from polyreme_trainer.weights import FIELD, fp8_blocks, packed_int4
from polyreme_trainer.weights.locations import BadFileError, Folder, folder_at
from polyreme_trainer.weights.stored import Stored

SINGLE_FILE = "model.safetensors"
"""The one file of small models, which have no index."""
FILES_MAX = 4096
"""Most files of one model."""
NAMED_MAX = 3
"""Most names that an error lists; the rest are counted."""
_BITS = re.compile(r"[A-Z]+(\d+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All tensors of a folder, and the ``config.json`` beside them."""

    folder: Folder
    tensors: Mapping[str, Stored]
    """A quantised weight and its scales are one."""
    config: Mapping[str, Any] | None
    """None if there is no such file."""


def read_catalogue(place: Path | Folder) -> Catalogue:
    """Read the index and the header of every file.

    Raises:
        NotFoundError: If the folder, the weights or one of their files do not exist.
        InvalidConfigError: If the index or a file is damaged, or they contradict each other.
        StoreFailedError: If a store stays unavailable.
    """
    folder = folder_at(place)
    weight_map = _weight_map(folder)
    files = sorted(set(weight_map.values())) if weight_map else [SINGLE_FILE]
    missing = [file for file in files if folder.size_bytes(file) is None]
    if missing:
        raise NotFoundError(
            f"weights lack files: {listed(missing)} of {len(files)} that {INDEX_FILE} names, expected all of them "
            f"in {folder}; copy them there",
            field=FIELD,
        )
    tensors: dict[str, Stored] = {}
    for file in files:
        for name, stored in _header(folder, file):
            if name in tensors:
                raise InvalidConfigError(
                    f"weights name a tensor twice: {name} lies in {tensors[name].file} and in {file}, expected once",
                    field=FIELD,
                )
            tensors[name] = stored
    if absent := [name for name, file in weight_map.items() if name not in tensors or tensors[name].file != file]:
        raise InvalidConfigError(
            f"weights lack tensors that {INDEX_FILE} names: {listed(absent)}, expected each in the file that it "
            f"names ({weight_map[absent[0]]} for the first)",
            field=FIELD,
        )
    config = _config(folder)
    tensors = fp8_blocks.joined(packed_int4.joined(tensors), sides=fp8_blocks.block_sides(config))
    return Catalogue(folder=folder, tensors=tensors, config=config)


def listed(names: list[str]) -> str:
    """Name the first few and count the others: ``a, b, c and 5 more``."""
    words = ", ".join(names[:NAMED_MAX])
    return words if len(names) <= NAMED_MAX else f"{words} and {len(names) - NAMED_MAX} more"


def unreadable(folder: Folder, file: str, error: Exception) -> InvalidConfigError:
    """Return the error for a damaged weights file, with its size: most often a copy was cut short."""
    return InvalidConfigError(
        f"weights file can't be read: {folder.named(file)} has {folder.size_bytes(file)} bytes, expected a whole "
        f"safetensors file ({error}); copy it again",
        field=FIELD,
    )


def _weight_map(folder: Folder) -> dict[str, str]:
    """Read which file holds which tensor; empty if a single file needs no index."""
    if not folder.exists():
        raise NotFoundError(f"no weights: {folder} is not a folder", field=FIELD)
    if folder.size_bytes(INDEX_FILE) is None:
        if folder.size_bytes(SINGLE_FILE) is not None:
            return {}
        raise NotFoundError(
            f"no weights: {folder} has neither {INDEX_FILE} nor {SINGLE_FILE}, expected one of them", field=FIELD
        )
    try:
        weight_map = dict(json.loads(folder.read(INDEX_FILE))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidConfigError(
            f"weights' index is damaged: {folder.named(INDEX_FILE)}, expected JSON with a weight_map", field=FIELD
        ) from error
    strange = [str(file) for file in weight_map.values() if not isinstance(file, str) or Path(file).name != file]
    if strange or not 0 < len(set(weight_map.values())) <= FILES_MAX:
        raise InvalidConfigError(
            f"weights' index is damaged: {folder.named(INDEX_FILE)} names {listed(strange) or 'no file, or too many'}, "
            f"expected 1 to {FILES_MAX} plain names of files in the same folder",
            field=FIELD,
        )
    return weight_map


def _header(folder: Folder, file: str) -> Iterator[tuple[str, Stored]]:
    try:
        with folder.opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                part = opened.get_slice(name)
                dtype, shape = part.get_dtype(), tuple(part.get_shape())
                yield name, Stored(file, dtype, shape, math.prod(shape) * _width_bytes(dtype))
    except (SafetensorError, BadFileError) as error:
        raise unreadable(folder, file, error) from error


def _width_bytes(dtype: str) -> int:
    """Bytes of a scalar, from the number of bits in the type's name: ``BF16``, ``F8_E4M3``, ``BOOL``."""
    bits = _BITS.match(dtype)
    return max(1, int(bits[1]) // 8) if bits else 1


def _config(folder: Folder) -> Mapping[str, Any] | None:
    if folder.size_bytes(CONFIG_FILE) is None:
        return None
    try:
        config = json.loads(folder.read(CONFIG_FILE))
    except ValueError as error:
        raise InvalidConfigError(
            f"weights' configuration is damaged: {folder.named(CONFIG_FILE)}, expected JSON", field=FIELD
        ) from error
    if not isinstance(config, Mapping):
        raise InvalidConfigError(
            f"weights' configuration is damaged: {folder.named(CONFIG_FILE)}, expected a JSON object", field=FIELD
        )
    return config
