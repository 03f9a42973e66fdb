"""Tokenize: pages and conversation -> token ids, which of them are learned, and where the last answer begins.

The form of a turn is the tokenizer's (``chat_format``): of a trained one a role token, the text, and ``<|end|>`` after
each answer. An image takes one media token for each merged cell; a mark such as ``<box:0>`` is written as coordinates
first (``index.shapes``). Only answers, each with the token that ends it, are learned; tokens of images never are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_datahub.chat_format import ChatFormat
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.index.format import check_of
from polyreme_datahub.index.shapes import shapes_of, written_turns
from polyreme_datahub.operations.declare import RECORD, operation
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.sources.types import IMAGE_MARK
from polyreme_datahub.tokens import TextTokenizer

TOKENS_MAX = 1_048_576


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeParameters:
    """What one media token covers."""

    token_px: int
    """Side of the square that becomes one token [pixels]."""


@operation("tokenize", 5, inputs=(RECORD, "compose", "tokenizer"), blobs=("tokenizer",), parameters=TokenizeParameters)
def tokenize(record: Value, composed: Value, tokenizer: Value, parameters: TokenizeParameters) -> Value:
    """Encode a sample's conversation around its images, and note how many tokens it has, and their checksum.

    The tokens are not kept: a rank encodes them again when it needs the sample.

    The value of ``tokenizer`` is the same for all samples: ``{"tokenizer": digest of its file}``, with that blob.
    """
    side = parameters.token_px
    cells = [(page["height"] // side) * (page["width"] // side) for page in composed.data["pages"]]
    opened = open_tokenizer(tokenizer.blobs[tokenizer.data["tokenizer"]])
    sizes = [(page["width"], page["height"]) for page in composed.data["pages"]]
    turns = written_turns(record.data["conversations"], shapes_of(composed.data), sizes)
    encoded = encode_conversation(opened, turns, cells)
    tokens_T, learned_T = token_arrays(encoded)
    return Value.of(
        {
            "tokens": len(tokens_T),
            "check": check_of(tokens_T, learned_T),
            **{name: encoded[name] for name in ("prompt", "question", "expected")},
        }
    )


_OPEN: dict[str, TextTokenizer] = {}


def open_tokenizer(blob: Blob) -> TextTokenizer:
    """Open a tokenizer's file; the newest one is kept."""
    opened = _OPEN.get(blob.digest)
    if opened is None:
        opened = TextTokenizer(blob.data)
        _OPEN.clear()
        _OPEN[blob.digest] = opened
    return opened


def encode_conversation(
    tokenizer: TextTokenizer, turns: Sequence[Mapping[str, str]], cells: Sequence[int]
) -> dict[str, Any]:
    """Encode turns, with ``cells[i]`` media tokens for image ``i``.

    Returns:
        ``tokens``; ``learned``, half-open ranges of tokens that are targets; ``images``, those of each image;
        ``prompt``, the tokens before the last answer; ``question`` and ``expected``, its texts.

    Raises:
        BadRecordError: If there is no answer, or more tokens than any pack holds.
    """
    form = tokenizer.format
    marked = any(IMAGE_MARK in turn["content"] for turn in turns)
    first_user = next((at for at, turn in enumerate(turns) if turn["role"] == "user"), 0)
    tokens = [*form.opening, *(form.default_system if turns[0]["role"] != "system" else ())]
    learned: list[list[int]] = []
    images: list[list[int]] = []
    waiting = list(cells)
    prompt, asked, question, expected = 0, "", "", ""
    for at, turn in enumerate(turns):
        role, content = turn["role"], turn["content"]
        tokens += form.before[role]
        start = len(tokens)
        if not marked and at == first_user:
            while waiting:
                images.append(_add_image(tokens, form, waiting.pop(0)))
        for number, text in enumerate(content.split(IMAGE_MARK)):
            if number:
                images.append(_add_image(tokens, form, waiting.pop(0)))
            begins = len(tokens)
            tokens += tokenizer.encode(text) if text else ()
            if role == "assistant":
                _learn(learned, begins, len(tokens))
        tokens += form.after[role]
        if role == "assistant":
            ends = len(tokens) - len(form.after[role])
            _learn(learned, ends, ends + 1)
            prompt, question, expected = start, asked, content
        elif role == "user":
            asked = content.replace(IMAGE_MARK, "").strip()
    if not learned:
        raise BadRecordError("conversation without an answer", rule="conversations")
    if len(tokens) > TOKENS_MAX:
        raise BadRecordError(f"sample has {len(tokens)} tokens, expected at most {TOKENS_MAX}", rule="tokens")
    return {
        "tokens": tokens,
        "learned": learned,
        "images": images,
        "prompt": prompt,
        "question": question,
        "expected": expected,
    }


def token_arrays(encoded: Mapping[str, Any]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """Return the tokens, and a one for each that is learned."""
    tokens_T = np.array(encoded["tokens"], dtype=np.uint32)
    learned_T = np.zeros(tokens_T.size, dtype=np.uint8)
    for start, stop in encoded["learned"]:
        learned_T[start:stop] = 1
    return tokens_T, learned_T


def _add_image(tokens: list[int], form: ChatFormat, cells: int) -> list[int]:
    """Add the tokens of one image; return the first of them, and the one after the last."""
    start = len(tokens)
    tokens += [*form.image_before, *[form.media] * cells, *form.image_after]
    return [start, len(tokens)]


def _learn(ranges: list[list[int]], start: int, stop: int) -> None:
    """Add a range of learned tokens behind those that there are."""
    if start == stop:
        return
    if ranges and ranges[-1][1] == start:
        ranges[-1][1] = stop
    else:
        ranges.append([start, stop])
