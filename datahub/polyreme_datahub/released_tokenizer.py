"""Reads the tokenizer of released weights: ``tokenizer.json`` in a folder or a bucket, checked before data is made."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job.data import Tokenizer
from polyreme_api.store import ObjectNotFoundError
from polyreme_datahub.loader.text import byte_characters
from polyreme_datahub.locations import local_root, masked
from polyreme_datahub.objects import open_store
from polyreme_datahub.tokenizer_file import with_template
from polyreme_datahub.tokens import TextTokenizer

FILE = "tokenizer.json"
FILE_BYTES_MAX = 128 * 2**20
FIELD = "spec.data.tokenizer.location"


def read_released(tokenizer: Tokenizer, *, embedded: int) -> bytes:
    """Return a released tokenizer as it is stored (``tokenizer_file``).

    Args:
        tokenizer: With a location and a template.
        embedded: Tokens that the model embeds.

    Raises:
        InvalidConfigError: If there is no such file, it is no byte-level BPE, or it does not fit template or model.
        StoreFailedError: If a bucket can't be reached.
    """
    assert tokenizer.location is not None, "a spec has both or none"
    assert tokenizer.template is not None, "a spec has both or none"
    place = masked(tokenizer.location)
    data = _read(tokenizer.location)
    if data is None:
        raise InvalidConfigError(f"no tokenizer: there is no {FILE} in {place}; copy it there", field=FIELD)
    if len(data) > FILE_BYTES_MAX:
        raise InvalidConfigError(
            f"tokenizer is too large: {FILE} in {place} has more than {FILE_BYTES_MAX} bytes", field=FIELD
        )
    _check_kind(data, place)
    try:
        stored = with_template(data, tokenizer.template.model_dump())
        opened = TextTokenizer(stored)
    except InvalidConfigError:
        raise
    except Exception as error:
        raise InvalidConfigError(f"tokenizer can't be read: {FILE} in {place}: {error}", field=FIELD) from error
    if opened.ids_end > embedded:
        raise InvalidConfigError(
            f"tokenizer does not fit the model: {FILE} in {place} has ids up to {opened.ids_end - 1}, the model embeds "
            f"{embedded} tokens",
            field=FIELD,
        )
    return stored


def _read(location: str) -> bytes | None:
    if urlsplit(location).scheme == "s3":
        try:
            return open_store(location).get(FILE)
        except ObjectNotFoundError:
            return None
    try:
        with (local_root(location) / FILE).open("rb") as file:
            return file.read(FILE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise InvalidConfigError(
            f"tokenizer can't be read: {error.filename}: {error.strerror}; give this user the right to read it",
            field=FIELD,
        ) from error


def _check_kind(data: bytes, place: str) -> None:
    """Refuse what is no byte-level BPE: answers could not be decoded, and texts would not come back as written."""
    try:
        value: Any = json.loads(data)
        model = value["model"]
        kind, words = model["type"], set(model["vocab"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidConfigError(
            f"tokenizer can't be read: {FILE} in {place} is no tokenizer of Hugging Face's ({type(error).__name__}: "
            f"{error})",
            field=FIELD,
        ) from error
    lacking = sorted(set(byte_characters().values()) - words)
    if kind != "BPE" or lacking:
        why = f"its model is {kind}" if kind != "BPE" else f"its vocabulary lacks {len(lacking)} of 256 bytes"
        raise InvalidConfigError(f"tokenizer is no byte-level BPE: {FILE} in {place}: {why}", field=FIELD)
