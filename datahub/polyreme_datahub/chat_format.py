"""The tokens around the texts of a conversation: of a trained tokenizer its own, of a released one its template's."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import Field

from polyreme_api.batch import TEMPLATE_FILE
from polyreme_api.errors import InvalidConfigError
from polyreme_api.fields import Part

FIELD = "spec.data.tokenizer.location"
ROLES = ("system", "user", "assistant")
IMAGE_MARK = "<image>"
"""Marks the place of an image in a turn's text."""
_NAMED = re.compile(r"<[^<>\s]+>")
"""What looks like a special token."""
_Text = Annotated[str, Field(max_length=1024)]
_Token = Annotated[str, Field(min_length=1, max_length=128)]


class TurnText(Part):
    """What is written around the text of a turn."""

    before: _Text = ""
    after: _Text = ""
    """Of an answer it begins with the special token that ends the answer."""


class ChatTemplate(Part):
    """How a conversation becomes tokens of a released tokenizer.

    Special tokens count as such in these texts, and never in the text of a dataset.
    """

    opening: _Text = ""
    """Before every conversation."""
    default_system: _Text = ""
    """Before the first turn, where that is no system turn."""
    system: TurnText
    user: TurnText
    assistant: TurnText
    image_before: _Text = ""
    image: _Token
    """The special token of a part of an image, written once for each part."""
    image_after: _Text = ""
    pad: _Token | None = None
    """The special token that fills packs; none: the one that ends an answer."""


PAD, END, MEDIA = "<|pad|>", "<|end|>", "<|media|>"
OWN_TEMPLATE = ChatTemplate(
    system=TurnText(before="<|system|>"),
    user=TurnText(before="<|user|>"),
    assistant=TurnText(before="<|assistant|>", after=END),
    image=MEDIA,
    pad=PAD,
)
"""Of a tokenizer that a job trains: a token for each role, and one after each answer."""


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
    template: ChatTemplate, *, encode: Callable[[str], list[int]], specials: Mapping[str, int]
) -> ChatFormat:
    """Build the format of a template.

    Args:
        template: Of a released tokenizer.
        encode: Encodes text in which special tokens count as such.
        specials: Special tokens of the tokenizer, with their ids.

    Raises:
        InvalidConfigError: If the template names a special token that the tokenizer lacks.
    """

    def special(name: str, token: str) -> int:
        found = specials.get(token)
        if found is None:
            raise _refused(name, token, 'a special token of tokenizer.json: in its added_tokens, with "special": true')
        return found

    def tokens(name: str, text: str) -> tuple[int, ...]:
        for token in _NAMED.findall(text):
            special(name, token)
        return tuple(encode(text))

    turns = {role: getattr(template, role) for role in ROLES}
    before = {role: tokens(f"{role}.before", turn.before) for role, turn in turns.items()}
    after = {role: tokens(f"{role}.after", turn.after) for role, turn in turns.items()}
    if not after["assistant"] or after["assistant"][0] not in specials.values():
        rule = "a text that begins with the special token that ends an answer"
        raise _refused("assistant.after", template.assistant.after, rule)
    end = after["assistant"][0]
    media = special("image", template.image)
    form = ChatFormat(
        before=before,
        after=after,
        end=end,
        pad=end if template.pad is None else special("pad", template.pad),
        media=media,
        opening=tokens("opening", template.opening),
        default_system=tokens("defaultSystem", template.default_system),
        image_before=tokens("imageBefore", template.image_before),
        image_after=tokens("imageAfter", template.image_after),
    )
    around = (form.opening, form.default_system, form.image_before, form.image_after)
    if any(media in text for text in (*before.values(), *after.values(), *around)):
        raise _refused("image", template.image, "a token that no other text of the template has")
    return form


def jinja_of(template: ChatTemplate) -> str:
    """Write a template as transformers' chat templates are written, for those who serve the model."""
    begin = _shown(template.opening)
    if template.default_system:
        begin += f"{{% if messages[0]['role'] != 'system' %}}{_shown(template.default_system)}{{% endif %}}"
    image = _shown(template.image_before + template.image + template.image_after)
    content = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        f"{{% if part['type'] == 'text' %}}{{{{ part['text'] }}}}{{% else %}}{image}{{% endif %}}"
        "{% endfor %}{% endif %}"
    )
    turns = [
        f"{{% {word} message['role'] == '{role}' %}}{_shown(turn.before)}{content}{_shown(turn.after)}"
        for word, role in zip(("if", "elif", "elif"), ROLES, strict=True)
        for turn in [getattr(template, role)]
    ]
    answer = f"{{% if add_generation_prompt %}}{_shown(template.assistant.before)}{{% endif %}}"
    return f"{begin}{{% for message in messages %}}{''.join(turns)}{{% endif %}}{{% endfor %}}{answer}"


def _shown(text: str) -> str:
    """Write a text as a Jinja expression."""
    return f"{{{{ {json.dumps(text, ensure_ascii=False)} }}}}" if text else ""


def _refused(name: str, seen: str, rule: str) -> InvalidConfigError:
    return InvalidConfigError(
        f"chat template is refused: {name} of {TEMPLATE_FILE} is {seen!r}, expected {rule}", field=FIELD
    )
