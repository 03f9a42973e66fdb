"""Records as other tools write them, in shards and tables: which field holds the text, and which form it has. Pure."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.sources.records import FOLDER_QUESTION
from polyreme_datahub.sources.types import IMAGE_MARK

CONVERSATIONS = ("conversations", "messages", "texts")
"""Fields that hold a list of turns."""
TEXTS = ("text", "caption")
"""Fields that hold one text."""
FIELDS = (*CONVERSATIONS, *TEXTS)
"""Where a record's text is: the first of these that it has."""
TURN_FORMS = "{role, content}, {from, value} or {user, assistant}"
ROLE_NAMES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant"}
"""Names of roles beside our own."""


def text_field(names: Sequence[str]) -> str:
    """Return the field that holds the text; empty if none does."""
    return next((name for name in FIELDS if name in names), "")


def record_of(field: str, value: Any, *, images: Sequence[str], where: str) -> dict[str, Any]:
    """Return a record of our own form.

    Args:
        field: One of ``FIELDS``.
        value: What it holds.
        images: Names of the record's images.
        where: File and row or member, for messages.

    Raises:
        BadRecordError: If the value is not of a known form.
    """
    if field in CONVERSATIONS:
        turns = _turns(value, f"{where}, {field!r}")
    elif not isinstance(value, str) or not value.strip():
        raise BadRecordError(f"{where}, {field!r}: {_seen(value)}, expected text", rule="text")
    elif images:
        turns = [_turn("user", FOLDER_QUESTION), _turn("assistant", value.strip())]
    else:
        turns = [_turn("assistant", value)]
    return {"images": list(images), "conversations": turns}


def _turns(value: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(value, list):
        raise BadRecordError(f"{where}: {_seen(value)}, expected a list of turns", rule="conversations")
    turns: list[dict[str, str]] = []
    for number, turn in enumerate(value, start=1):
        turns += _one(turn, f"{where}, turn {number}")
    return turns


def _one(turn: Any, where: str) -> list[dict[str, str]]:
    """Return a turn, or the question and the answer of a pair."""
    if isinstance(turn, Mapping):
        if {"role", "content"} <= set(turn):
            return [_turn(_role(turn["role"], where), _content(turn["content"], where))]
        if {"from", "value"} <= set(turn):
            return [_turn(_role(turn["from"], where), _content(turn["value"], where))]
        if {"user", "assistant"} <= set(turn):
            return [_turn(role, _content(turn[role], where)) for role in ("user", "assistant")]
    raise BadRecordError(f"{where}: {_seen(turn)}, expected {TURN_FORMS}", rule="conversations")


def _content(content: Any, where: str) -> str:
    """Return a turn's text: that of its parts, with a mark for each image."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRecordError(f"{where}: {_seen(content)}, expected text or a list of parts", rule="conversations")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind == "image":
            texts.append(IMAGE_MARK)
        else:
            raise BadRecordError(
                f"{where}: part is {_seen(part)}, expected {{type: text, text}} or {{type: image}}",
                rule="conversations",
            )
    return "".join(texts)


def _role(name: Any, where: str) -> str:
    if not isinstance(name, str):
        raise BadRecordError(f"{where}: role is {_seen(name)}, expected text", rule="conversations")
    return ROLE_NAMES.get(name, name)


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _seen(value: Any) -> str:
    return "nothing" if value is None else reprlib.repr(value)
