"""Reads the tokenizer of released weights, and its chat template, from a folder or a bucket, and checks both."""

from __future__ import annotations

import json
from typing import Any

from polyreme_api.batch import TEMPLATE_FILE
from polyreme_api.errors import InvalidConfigError
from polyreme_api.load import parse_object
from polyreme_api.store import ObjectNotFoundError
from polyreme_api.urls import is_bucket, is_folder, masked
from polyreme_datahub.chat_format import FIELD, ChatTemplate
from polyreme_datahub.objects import open_store, store_folder
from polyreme_datahub.tokenizer_file import TokenText, byte_characters, with_template
from polyreme_datahub.tokens import TextTokenizer

FILE = "tokenizer.json"
FILE_BYTES_MAX = 128 * 2**20
PROBES = (
    "Plain text, 1234 and 5.",
    " leading, trailing and  inner   spaces ",
    "lines\n\n\tindented\r\n",
    "UPPER and lower",
    "\u00e9 \u00fc \u00df \u0130",
    "\ufb01 \u00b2 \uff21 \u00a0 \u00bd \u3000",
    "\u4e2d\u6587 \u0e44\u0e17\u0e22 \u200b\u200d \U0001f600",
    "\u201cquotes\u201d \u2014 \u2026 <tag>",
)
"""Texts that come back as they are from what changes none. All are in NFC."""


def read_released(location: str, *, embedded: int) -> bytes:
    """Return a released tokenizer as it is stored (``tokenizer_file``).

    Args:
        location: ``data.tokenizer.location``.
        embedded: Tokens that the model embeds.

    Raises:
        InvalidConfigError: If a file is missing, it is no byte-level BPE, or it does not fit template or model.
        StoreFailedError: If a bucket can't be reached.
    """
    place = masked(location)
    data, template = _read(location, FILE), _parse_template(_read(location, TEMPLATE_FILE), place)
    _check_kind(data, place)
    _check_normalizer(data, place)
    try:
        stored = with_template(data, template.model_dump(by_alias=True))
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
    _check_texts(opened, TokenText(data), place)
    return stored


def _check_texts(opened: TextTokenizer, text: TokenText, place: str) -> None:
    """Refuse a tokenizer whose tokens do not give back the text that they were made of."""
    for probe in PROBES:
        if (back := text.decode(opened.encode(probe))) != probe:
            raise InvalidConfigError(
                f"tokenizer changes text: {FILE} in {place} makes {back!r} of {probe!r}, expected the same text, so "
                "that answers can be compared; normalizer and pre_tokenizer may not add, drop or replace characters",
                field=FIELD,
            )


def _check_normalizer(data: bytes, place: str) -> None:
    """Refuse what may change texts that are not among the probes; NFC only joins a letter with its accents."""
    normalizer = json.loads(data).get("normalizer")
    parts = normalizer.get("normalizers", [normalizer]) if isinstance(normalizer, dict) else []
    kinds = [str(part.get("type")) if isinstance(part, dict) else repr(part) for part in parts]
    if changing := [kind for kind in kinds if kind != "NFC"]:
        raise InvalidConfigError(
            f"tokenizer changes text: normalizer of {FILE} in {place} is {changing[0]}, expected none or NFC, so that "
            "answers come back as they are written",
            field=FIELD,
        )


def _read(location: str, name: str) -> bytes:
    place = masked(location)
    if not is_bucket(location) and not is_folder(location):
        raise InvalidConfigError(
            f"tokenizer's location is {place!r}, expected file:///folder or s3://bucket/prefix", field=FIELD
        )
    try:
        if is_bucket(location):
            data = open_store(location).get(name)
        else:
            with (store_folder(location) / name).open("rb") as file:
                data = file.read(FILE_BYTES_MAX + 1)
    except (ObjectNotFoundError, FileNotFoundError, NotADirectoryError) as error:
        raise InvalidConfigError(f"tokenizer is not whole: there is no {name} in {place}", field=FIELD) from error
    except OSError as error:
        raise InvalidConfigError(f"tokenizer can't be read: {error.filename}: {error.strerror}", field=FIELD) from error
    if len(data) > FILE_BYTES_MAX:
        raise InvalidConfigError(
            f"tokenizer is too large: {name} in {place} has more than {FILE_BYTES_MAX} bytes", field=FIELD
        )
    return data


def _parse_template(data: bytes, place: str) -> ChatTemplate:
    try:
        return parse_object(json.loads(data), ChatTemplate)
    except (InvalidConfigError, ValueError) as error:
        why = error.message if isinstance(error, InvalidConfigError) else f"it is no JSON: {error}"
        raise InvalidConfigError(
            f"chat template can't be read: {TEMPLATE_FILE} in {place}: {why}", field=FIELD
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
