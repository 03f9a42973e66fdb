"""The stored form of a tokenizer: ``tokenizer.json`` alone, or with the chat template of a released one.

A trained tokenizer is stored as the file that it is. Of a released one the template is a part of what data is made
with, so it is stored with the file, under one digest. Imports no tokenizer: ranks read it too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme_datahub.digests import canonical_json

FORMAT = "polyreme-tokenizer/1"
_BEGINS = b'{"format":"polyreme-tokenizer/'


def with_template(tokenizer: bytes, template: Mapping[str, Any]) -> bytes:
    """Return the stored form of a released tokenizer.

    Args:
        tokenizer: Content of its ``tokenizer.json``.
        template: Content of its ``polyreme-template.json``.
    """
    return canonical_json({"format": FORMAT, "template": dict(template), "tokenizer": tokenizer.decode()})


def split_template(stored: bytes) -> tuple[bytes, Mapping[str, Any] | None]:
    """Return ``tokenizer.json`` of a stored tokenizer, and its template; None for one that a job has trained."""
    if not stored.startswith(_BEGINS):
        return stored, None
    value = json.loads(stored)
    return value["tokenizer"].encode(), value["template"]


def tokenizer_json(stored: bytes) -> bytes:
    """Return ``tokenizer.json`` of a stored tokenizer."""
    return split_template(stored)[0]


class TokenText:
    """The text of tokens, special tokens left out: ranks need no tokenizer, just the bytes that tokens stand for."""

    def __init__(self, tokenizer: bytes) -> None:
        value = json.loads(tokenizer)
        added = value["added_tokens"]
        added_ids = {token["id"] for token in added}
        table = {character: byte for byte, character in byte_characters().items()}
        self._bytes = {
            number: bytes(table[character] for character in token)
            for token, number in value["model"]["vocab"].items()
            if number not in added_ids
        }
        self._bytes |= {token["id"]: token["content"].encode() for token in added if not token["special"]}

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, which may be a part of a character's."""
        return self._bytes.get(token, b"")

    def encode(self, text: str) -> list[int]:
        """Return tokens that decode to a text: the longest first, which a tokenizer may do another way."""
        left, found = text.encode(), []
        by_bytes = {content: token for token, content in self._bytes.items()}
        longest = max(map(len, by_bytes))
        while left:
            size = next(size for size in range(min(longest, len(left)), 0, -1) if left[:size] in by_bytes)
            found.append(by_bytes[left[:size]])
            left = left[size:]
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens; what is no UTF-8 becomes the replacement character."""
        return b"".join(self.token_bytes(int(token)) for token in tokens).decode("utf-8", "replace")


def byte_characters() -> dict[int, str]:
    """The printable character that byte-level BPE (GPT-2) writes for each byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}
