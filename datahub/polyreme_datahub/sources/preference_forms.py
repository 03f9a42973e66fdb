"""Preferences: a prompt with a chosen and a rejected answer, in the layouts of public datasets. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.sources.turn_forms import (
    CONVERSATIONS,
    ROLE_NAMES,
    TURN_KEYS,
    from_text,
    rows_of,
    seen,
    turn_of,
    turns_of,
)

PROMPTS = ("prompt", "question", "instruction", "query")
CHOSEN = "chosen"
REJECTED = ("rejected", "rejected_response", "rejected_messages")
ANSWERS = (CHOSEN, *REJECTED)
"""Fields that hold an answer, or a whole conversation that ends with it."""
RULE, NO_PREFERENCE = "preference", "no-preference"
EXPECTED = "chosen and rejected with a prompt or as whole conversations, or a conversation and rejected_response"
_SPOKEN = re.compile(r"\n\n(Human|Assistant):")
"""Begins a turn in a text, as Anthropic wrote them."""
_SPEAKERS = {"Human": "user", "Assistant": "assistant"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """What a record's fields say; whether it is a good preference is decided with the other rules of records."""

    turns: list[dict[str, str]]
    """The prompt, and the chosen answer as the last turn."""
    rejected: str
    fields: tuple[str, ...]
    """Those that were read."""


def preference_fields(names: Mapping[str, Any] | Sequence[str]) -> tuple[str, ...]:
    """Return the fields of a preference, that of the rejected answer last; none if it is none."""
    prompt = next((name for name in (*CONVERSATIONS, *PROMPTS) if name in names), "")
    rejected = next((name for name in REJECTED if name in names), "")
    if not rejected or not (CHOSEN in names or prompt in CONVERSATIONS):
        return ()
    return tuple(filter(None, (prompt, CHOSEN if CHOSEN in names else "", rejected)))


def prompt_of(given: Mapping[str, Any]) -> Any:
    """Return the value that holds the turns of the prompt, whose parts may name images."""
    fields = preference_fields(given)
    return given[CHOSEN] if CHOSEN in fields and _is_whole(given[CHOSEN]) else given[fields[0]]


def read_preference(given: Mapping[str, Any], where: str, *, more: str = "") -> Preference:
    """Read a preference.

    Args:
        given: Fields of the record that hold something.
        where: File and line, row or member, for messages.
        more: Continues a prompt that is one text.

    Raises:
        BadRecordError: If it is none, or its two conversations differ before their last answers.
    """
    fields = preference_fields(given)
    if not fields:
        raise BadRecordError(
            f"{where}: no rejected answer, and this version holds preferences; expected {EXPECTED}", rule=NO_PREFERENCE
        )
    rejected = fields[-1]
    if CHOSEN in fields and _is_whole(given[CHOSEN]):
        chosen_turns = _conversation(given[CHOSEN], f"{where}, {CHOSEN!r}")
    else:
        chosen_turns = _prompt(given, fields[0], where, more)
        if CHOSEN in fields:
            chosen_turns = [*chosen_turns, turn_of("assistant", _answer(given[CHOSEN], f"{where}, {CHOSEN!r}"))]
    if _is_whole(given[rejected]):
        other = _conversation(given[rejected], f"{where}, {rejected!r}")
        _check_prompts(chosen_turns, other, where)
        return Preference(turns=chosen_turns, rejected=other[-1]["content"], fields=fields)
    answer = _answer(given[rejected], f"{where}, {rejected!r}")
    return Preference(turns=chosen_turns, rejected=answer, fields=fields)


def _prompt(given: Mapping[str, Any], field: str, where: str, more: str) -> list[dict[str, str]]:
    value = given[field]
    if field in ANSWERS:
        raise BadRecordError(f"{where}: no prompt, expected {EXPECTED}", rule=RULE)
    if field in CONVERSATIONS or _rows(value):
        return turns_of(value, f"{where}, {field!r}")
    if not isinstance(value, str) or not value.strip():
        raise BadRecordError(f"{where}, {field!r}: {seen(value)}, expected text or a list of turns", rule=RULE)
    return [turn_of("user", f"{value}\n{more}" if more else value)]


def _check_prompts(turns: Sequence[Mapping[str, str]], other: Sequence[Mapping[str, str]], where: str) -> None:
    """Refuse two conversations that are more than one prompt with two answers."""
    same = next((at for at, (one, two) in enumerate(zip(turns, other, strict=False)) if one != two), len(turns))
    if len(turns) != len(other) or same < len(turns) - 1:
        raise BadRecordError(
            f"{where}: the chosen conversation has {len(turns)} turns, the rejected one {len(other)}, and they differ "
            f"from turn {same + 1} on; expected the same turns up to the last answer",
            rule=RULE,
        )
    if other[-1]["role"] != "assistant":
        raise BadRecordError(
            f"{where}: the rejected conversation ends with a turn of {other[-1]['role']}, expected an answer", rule=RULE
        )


def _is_whole(value: Any) -> bool:
    """Tell whether a value is a conversation, and not an answer alone."""
    if isinstance(value, str) and _SPOKEN.match(value):
        return True
    rows = _rows(value)
    return bool(rows) and isinstance(rows[0], Mapping) and not all(map(_is_answer, rows))


def _rows(value: Any) -> list[Any]:
    """Return the turns of a value; none of a text, unless it is JSON text of turns: an answer may be other JSON."""
    rows = rows_of(from_text(value))
    return rows if not isinstance(value, str) or all(map(_is_turn, rows)) else []


def _is_turn(value: Any) -> bool:
    return isinstance(value, Mapping) and any(set(keys) <= set(value) for keys in TURN_KEYS)


def _is_answer(turn: Any) -> bool:
    role = turn.get("role", turn.get("from")) if isinstance(turn, Mapping) else None
    return ROLE_NAMES.get(str(role), role) == "assistant"


def _conversation(value: Any, where: str) -> list[dict[str, str]]:
    if isinstance(value, str) and _SPOKEN.match(value):
        _, *parts = _SPOKEN.split(value)
        both = zip(parts[::2], parts[1::2], strict=True)
        return [turn_of(_SPEAKERS[speaker], text.strip()) for speaker, text in both]
    return turns_of(value, where)


def _answer(value: Any, where: str) -> str:
    """Return an answer: a text, or one turn of the assistant."""
    held = from_text(value)
    rows = _rows(value) or ([held] if _is_turn(held) else [])
    if isinstance(value, str) and not rows:
        return value
    turns = turns_of(rows, where)
    if len(turns) != 1 or turns[0]["role"] != "assistant":
        raise BadRecordError(f"{where}: {seen(held)}, expected a text or one turn of the assistant", rule=RULE)
    return turns[0]["content"]
