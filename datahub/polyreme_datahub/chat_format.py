"""The tokens around the texts of a conversation: of a trained tokenizer its own, of a released one its template's."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from polyreme_api.errors import InvalidConfigError

ROLES = ("system", "user", "assistant")
FIELD = "spec.data.tokenizer.template"
_NAMED = re.compile(r"<[^<>\s]+>")
"""What looks like a special token."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    """Token ids around the texts of a conversation, which are encoded one by one."""

    before: Mapping[str, tuple[int, ...]]
    """In front of a turn, by role."""
    after: Mapping[str, tuple[int, ...]]
    """After a turn, by role; that of an answer begins with ``end``."""
    end: int
    """Ends an answer, and is learned with it."""
    pad: int
    media: int
    """A part of an image."""
    opening: tuple[int, ...] = ()
    default_system: tuple[int, ...] = ()
    """In front of the first turn, where that is no system turn."""
    image_before: tuple[int, ...] = ()
    image_after: tuple[int, ...] = ()


def format_of_template(
    template: Mapping[str, Any], *, encode: Callable[[str], list[int]], specials: Mapping[str, int]
) -> ChatFormat:
    """Build the format of a template.

    Args:
        template: ``data.tokenizer.template``.
        encode: Encodes text in which special tokens count as such.
        specials: Special tokens of the tokenizer, with their ids.

    Raises:
        InvalidConfigError: If the template names a special token that the tokenizer lacks.
    """

    def special(name: str, token: str) -> int:
        found = specials.get(token)
        if found is None:
            raise _lacks(name, token)
        return found

    def tokens(name: str, text: str) -> tuple[int, ...]:
        for token in _NAMED.findall(text):
            special(name, token)
        return tuple(encode(text))

    before = {role: tokens(f"{role}.before", template[role]["before"]) for role in ROLES}
    after = {role: tokens(f"{role}.after", template[role]["after"]) for role in ROLES}
    if not after["assistant"] or after["assistant"][0] not in specials.values():
        raise InvalidConfigError(
            f"template does not end an answer: its assistant.after is {template['assistant']['after']!r}, expected a "
            "text that begins with a special token of the tokenizer",
            field=f"{FIELD}.assistant.after",
        )
    end = after["assistant"][0]
    names = ("opening", "default_system", "image_before", "image_after")
    around = {name: tokens(name, template[name]) for name in names}
    media = special("image", template["image"])
    texts = [*before.values(), *after.values(), *around.values()]
    if any(media in text for text in texts):
        raise InvalidConfigError(
            f"template has its image token {template['image']!r} in another text, expected in images only",
            field=f"{FIELD}.image",
        )
    pad = end if template["pad"] is None else special("pad", template["pad"])
    return ChatFormat(before=before, after=after, end=end, pad=pad, media=media, **around)


def _lacks(name: str, token: str) -> InvalidConfigError:
    head, *rest = name.split("_")
    field = head + "".join(map(str.capitalize, rest))
    return InvalidConfigError(
        f"template names a special token that the tokenizer lacks: {token!r}; its tokenizer.json lists them under "
        'added_tokens with "special": true',
        field=f"{FIELD}.{field}",
    )
