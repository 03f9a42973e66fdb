"""An export in an object store: files of a finished local one, uploaded so that a half one never looks whole.

A store renames nothing, so ``config.json``, without which no library takes the folder for a model, is deleted first and
written last: an uploader that was killed leaves a folder without it, and the next one starts again.
"""

from __future__ import annotations

import mmap
import re
from collections.abc import Sequence
from pathlib import Path

from polyreme_api.batch import TEMPLATE_FILE
from polyreme_api.store import Data, ObjectStore
from polyreme_trainer.export import peft
from polyreme_trainer.export.huggingface import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    INDEX_FILE,
    PREPROCESSOR_CONFIG_FILE,
    TEXT_DIRECTORY,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
)
from polyreme_trainer.rank_page import advance

PART_BYTES = 8 << 20
"""Bytes of a file that are handed over at a time."""
_CONFIGS = (CONFIG_FILE, peft.CONFIG_FILE)
_FILES = (
    *_CONFIGS,
    peft.WEIGHTS_FILE,
    INDEX_FILE,
    TOKENIZER_FILE,
    TOKENIZER_CONFIG_FILE,
    TEMPLATE_FILE,
    GENERATION_CONFIG_FILE,
    PREPROCESSOR_CONFIG_FILE,
)
_NAMES = "|".join(re.escape(name) for name in _FILES)
EXPORTED = re.compile(rf"({TEXT_DIRECTORY}/)?({_NAMES}|model-[0-9]{{5}}-of-[0-9]{{5}}\.safetensors)")
"""Keys that an export writes; others under the same root are never touched."""


class StoredExport:
    """The place of an export in an object store."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        """Name a place.

        Args:
            store: Where keys are the names of the export's files.
            url: Its root, for messages.
        """
        self._store = store
        self._url = url.rstrip("/")

    def __str__(self) -> str:
        """Return its URL."""
        return self._url

    def upload(self, folder: Path) -> None:
        """Replace what an earlier export left by the files of a folder.

        Raises:
            StoreFailedError: If the store refuses; the place then has no ``config.json``, or still the earlier export.
        """
        earlier = [info.key for info in self._store.list("") if EXPORTED.fullmatch(info.key)]
        for key in sorted(earlier, key=_order):
            self._store.delete(key)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = {path.relative_to(folder).as_posix(): path for path in files}
        for key in sorted(names, key=_order, reverse=True):
            self._store.put(key, _parts(names[key]))
            advance()


def _order(key: str) -> tuple[bool, bool, str]:
    """Order of deletion: the configuration of the whole, then the text part's, then all others."""
    return key not in _CONFIGS, not key.endswith(f"/{CONFIG_FILE}"), key


def _parts(path: Path) -> Data:
    """Return a file's bytes in parts that are read as they are sent."""
    size_bytes = path.stat().st_size
    if size_bytes <= PART_BYTES:
        return path.read_bytes()
    with path.open("rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    parts: Sequence[memoryview] = [view[start : start + PART_BYTES] for start in range(0, size_bytes, PART_BYTES)]
    return parts
