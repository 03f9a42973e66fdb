"""Decodes answer tokens with the standard library: ranks need no tokenizer, just the bytes that tokens stand for."""

from __future__ import annotations

import json
from collections.abc import Sequence


class TokenText:
    """The text of tokens, special tokens left out."""

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

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens; what is no UTF-8 becomes the replacement character."""
        return b"".join(self._bytes.get(int(token), b"") for token in tokens).decode("utf-8", "replace")


def byte_characters() -> dict[int, str]:
    """The printable character that byte-level BPE (GPT-2) writes for each byte."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + at) for at, byte in enumerate(hidden)}
