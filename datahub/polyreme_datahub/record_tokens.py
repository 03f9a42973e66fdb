"""Tokens of a record: its conversation, or its prompt with two answers, with the coordinates of its shapes written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polyreme_datahub.index.sample_bytes import REJECTED
from polyreme_datahub.index.shapes import written_turns
from polyreme_datahub.tokens import TextTokenizer, encode_conversation, encode_preference


def encode_record(
    tokenizer: TextTokenizer,
    record: Mapping[str, Any],
    shapes: Mapping[str, Sequence[Any]],
    sizes: Sequence[tuple[int, int]],
    cells: Sequence[int],
) -> dict[str, Any]:
    """Encode a record's conversation, or its preference, with the coordinates of its shapes.

    Args:
        tokenizer: The tokenizer.
        record: As its source gave it.
        shapes: Boxes, points and polygons, in pixels of their pages.
        sizes: Width and height of each page.
        cells: Media tokens of each page.

    Returns:
        As ``encode_conversation``.

    Raises:
        BadRecordError: As ``encode_conversation``.
    """
    turns = written_turns(record["conversations"], shapes, sizes)
    if REJECTED not in record:
        return encode_conversation(tokenizer, turns, cells)
    [rejected] = written_turns([{"content": record[REJECTED]}], shapes, sizes)
    return encode_preference(tokenizer, turns, rejected["content"], cells)
