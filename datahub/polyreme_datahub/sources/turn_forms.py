"""Turns of a conversation: the forms that their roles and texts have in public datasets. Pure."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from typing import Any

from polyreme_datahub.chat_format import IMAGE_MARK
from polyreme_datahub.errors import BadRecordError

CONVERSATIONS = ("conversations", "messages", "texts", "conversation")
"""Fields that hold a list of turns."""
TURN_FORMS = "{role, content}, {from, value} or {user, assistant}"
TURN_KEYS = (("role", "content"), ("from", "value"), ("user", "assistant"))
ROLE_NAMES = {
    "human": "user",
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
}
"""Names of roles beside our own."""


def turns_of(value: Any, where: str) -> list[dict[str, str]]:
    """Return turns in our own form.

    Args:
        value: A list of turns, or JSON text of one.
        where: File, line and field, for messages.

    Raises:
        BadRecordError: If it is none.
    """
    value = from_text(value)
    rows = rows_of(value)
    if not rows and not isinstance(value, list):
        raise BadRecordError(f"{where}: {seen(value)}, expected a list of turns", rule="conversations")
    turns: list[dict[str, str]] = []
    for number, turn in enumerate(rows, start=1):
        turns += _one(turn, f"{where}, turn {number}")
    return turns


def rows_of(value: Any) -> list[Any]:
    """Return a list of turns: also of lists by key, as ``datasets`` stores a sequence of objects."""
    if isinstance(value, list):
        return value
    if isinstance(value, Mapping):
        keys = next((keys for keys in TURN_KEYS if set(keys) <= set(value)), ())
        columns = [value[key] for key in keys]
        if columns and all(isinstance(column, list) and len(column) == len(columns[0]) for column in columns):
            return [dict(zip(keys, row, strict=True)) for row in zip(*columns, strict=True)]
    return []


def _one(turn: Any, where: str) -> list[dict[str, str]]:
    """Return a turn, or the question and the answer of a pair."""
    keys = next((keys for keys in TURN_KEYS if set(keys) <= set(turn)), ()) if isinstance(turn, Mapping) else ()
    if not keys:
        raise BadRecordError(f"{where}: {seen(turn)}, expected {TURN_FORMS}", rule="conversations")
    if keys == ("user", "assistant"):
        return [turn_of(role, _content(turn[role], where)) for role in keys]
    return [turn_of(_role(turn[keys[0]], where), _content(turn[keys[1]], where))]


def _content(content: Any, where: str) -> str:
    """Return a turn's text: that of its parts, with a mark for each image."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRecordError(f"{where}: {seen(content)}, expected text or a list of parts", rule="conversations")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in {"image", "image_url"}:
            texts.append(IMAGE_MARK)
        else:
            raise BadRecordError(
                f"{where}: part is {seen(part)}, expected {{type: text, text}} or {{type: image}}",
                rule="conversations",
            )
    return "".join(texts)


def are_turns(value: Any) -> bool:
    """Tell whether a value is a list of objects."""
    value = from_text(value)
    return isinstance(value, list) and bool(value) and all(isinstance(turn, Mapping) for turn in value)


def from_text(value: Any) -> Any:
    """Return what a text of JSON says, where a container can't hold lists; any other value as it is."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{", "true", "false")):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def _role(name: Any, where: str) -> str:
    if not isinstance(name, str):
        raise BadRecordError(f"{where}: role is {seen(name)}, expected text", rule="conversations")
    return ROLE_NAMES.get(name, name)


def turn_of(role: str, content: str) -> dict[str, str]:
    """Make a turn."""
    return {"role": role, "content": content}


def seen(value: Any) -> str:
    """Describe a value for a message."""
    return "nothing" if value is None else reprlib.repr(value)
