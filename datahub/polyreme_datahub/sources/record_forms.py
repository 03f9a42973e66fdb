"""The one reader of records, whatever file they lie in: which fields hold what, and which forms these have. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.index import shapes
from polyreme_datahub.index.sample_bytes import MIRROR_SAFE, REJECTED
from polyreme_datahub.sources.preference_forms import preference_fields, prompt_of, read_preference
from polyreme_datahub.sources.records import (
    FOLDER_QUESTION,
    IMAGES_MAX,
    PREFERENCE_RULES,
    RULES,
    Files,
    build_record,
    check_id,
    check_texts,
)
from polyreme_datahub.sources.turn_forms import (
    CONVERSATIONS,
    TURN_KEYS,
    are_turns,
    from_text,
    rows_of,
    seen,
    turn_of,
    turns_of,
)
from polyreme_datahub.sources.types import Looked, RawRecord

TEXTS = ("text", "caption")
"""Fields that hold one text."""
PAIRS = (
    ("question", "answer"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("prompt", "completion"),
    ("prompt", "response"),
    ("query", "response"),
)
"""Fields that hold a question and its answer."""
INPUT = "input"
"""Continues an ``instruction``."""
SYSTEM = "system"
IMAGES = ("images", "image", "file_name", "file_names")
OWN = (MIRROR_SAFE, *shapes.FIELDS)
"""Fields of our own form that need no file."""
FIELDS_1 = ("conversations", "messages", "texts", "text", "caption")
"""Where the rules of before (``RULES``) found a text."""
FIELDS = frozenset((*CONVERSATIONS, *TEXTS, *(name for pair in PAIRS for name in pair)))
READ = frozenset((*FIELDS, INPUT, SYSTEM, "id", "masks", *IMAGES, *OWN))
"""Every field that is read."""
EXPECTED = f"{', '.join((*CONVERSATIONS, *TEXTS))}, or {', '.join(f'{one} and {other}' for one, other in PAIRS)}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """A record in our own form, and what of it was not read."""

    record: dict[str, Any]
    kind: str
    unread: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A record of a file, before its own files are read.

    Args:
        fields: What it holds, as JSON.
        files: The files that it may name.
        default_id: Its id if it has none.
        where: File and line, row or member, for messages.
        images: Names of the images that its container holds; None: the record names them.
        kind: What it is, for people; empty: its fields say so.
        rules: Under which it was registered.
    """

    fields: Any
    files: Files
    default_id: str
    where: str
    images: Sequence[str] | None = None
    kind: str = ""
    rules: int = RULES

    def read(self) -> RawRecord:
        """Read the record with its files.

        Raises:
            BadRecordError: Naming the first rule that is broken.
        """
        return self._read(self.files)[0]

    def look(self) -> Looked:
        """Read the record without the bytes of its files; errors as ``read``."""
        raw, form = self._read(_Unopened(self.files))
        images = bool(raw.content["images"])
        return Looked(kind=self.kind or _kind(form.kind, images=images), unread=form.unread)

    def _read(self, files: Files) -> tuple[RawRecord, Form]:
        if not isinstance(self.fields, Mapping):
            raise BadRecordError(
                f"{self.where}: record is a {type(self.fields).__name__}, expected an object", rule="fields"
            )
        sample_id = check_id(_id_of(self.fields, self.default_id))
        try:
            form = read_form(self.fields, images=self.images, where=self.where, rules=self.rules)
            content = {**form.record, "id": sample_id}
            return build_record(content, files=files, default_id=sample_id, rules=self.rules), form
        except BadRecordError as error:
            raise BadRecordError(error.message, rule=error.rule, sample_id=sample_id) from error


class _Unopened:
    """Files that could not be opened; only their problems are known."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.size = files.size

    def read(self, name: str, *, bytes_max: int = 0) -> bytes:  # noqa: ARG002 - as the others
        """Return nothing, if there is something."""
        self.size(name)
        return b""


def read_form(fields: Mapping[str, Any], *, images: Sequence[str] | None, where: str, rules: int = RULES) -> Form:
    """Return a record in our own form, without its id.

    Args:
        fields: Of the record; null is the same as none.
        images: Names of the images that its container holds; None: the record names them.
        where: File and line, row or member, for messages.
        rules: Under which it was registered.

    Raises:
        BadRecordError: If no text is of a known form.
    """
    given = {name: value for name, value in fields.items() if not _is_nothing(value)}
    names = list(images) if images is not None else _names_of(given, where)
    if rules >= PREFERENCE_RULES:
        return _read_preference(fields, given, names, where=where, masks=images is None)
    used = text_fields(given, rules=rules)
    if not used:
        raise BadRecordError(f"{where}: {_no_text(given)}", rule="text")
    if used[0] in CONVERSATIONS:
        turns = turns_of(given[used[0]], f"{where}, {used[0]!r}")
    else:
        _refuse_lost_image(fields, names, used, where, rules)
        turns = _turns_of_texts(given, used, names, where)
    record = {"images": names, "conversations": _with_system(turns, given, where, rules)}
    own = OWN if rules > 1 or used[0] == "conversations" else ()
    more = (*own, *(() if images is not None else ("masks",)))
    record |= {name: from_text(given[name]) for name in more if name in given}
    read = {*used, *more, *IMAGES, "id", *((INPUT,) if used[0] == "instruction" else ()), SYSTEM}
    kind = "texts" if used[0] in TEXTS else "conversations"
    unread = (*(name for name in given if name not in read), *_unread_of_turns(given[used[0]], used[0]))
    return Form(record=record, kind=kind, unread=unread)


def _read_preference(
    fields: Mapping[str, Any], given: Mapping[str, Any], names: list[str], *, where: str, masks: bool
) -> Form:
    continued = "instruction" in preference_fields(given)
    found = read_preference(given, where, more=given.get(INPUT, "") if continued else "")
    _refuse_lost_image(fields, names, found.fields, where, PREFERENCE_RULES)
    more = (*OWN, *(("masks",) if masks else ()))
    record = {"images": names, "conversations": _with_system(found.turns, given, where, PREFERENCE_RULES)}
    record |= {REJECTED: found.rejected, **{name: from_text(given[name]) for name in more if name in given}}
    read = {*found.fields, *more, *IMAGES, "id", *((INPUT,) if continued else ()), SYSTEM}
    return Form(record=record, kind="preferences", unread=tuple(name for name in given if name not in read))


def _no_text(given: Mapping[str, Any]) -> str:
    if preference_fields(given):
        return "a preference, but this version holds conversations as its first records are; register them apart"
    return f"no text, expected {EXPECTED}"


def text_fields(names: Mapping[str, Any] | Sequence[str], *, rules: int = RULES) -> tuple[str, ...]:
    """Return the fields that hold the text: one, or those of a question and its answer; none if none does."""
    singles = (*CONVERSATIONS, *TEXTS) if rules > 1 else FIELDS_1
    single = next((name for name in singles if name in names), "")
    if single or rules == 1:
        return (single,) if single else ()
    return next((pair for pair in PAIRS if all(name in names for name in pair)), ())


def named_files(content: Any) -> list[str]:
    """Return the images and masks that a record names, each once; nothing of a record that breaks their rules."""
    if not isinstance(content, dict):
        return []
    names: dict[str, None] = {}
    for value in (_image_value(content), _as_list(content.get("masks"))):
        if not isinstance(value, list) or len(value) > IMAGES_MAX:
            return []
        names |= dict.fromkeys(name for name in value if isinstance(name, str))
    return list(names)


def _names_of(given: Mapping[str, Any], where: str) -> list[str]:
    fields = [name for name in IMAGES if name in given]
    if len(fields) > 1:
        raise BadRecordError(
            f"{where}: images are named by {' and '.join(map(repr, fields))}, expected one of them", rule="images"
        )
    names = check_texts(_image_value(given), fields[0] if fields else "images", IMAGES_MAX)
    if fields and (parts := list(_images_of_parts(given))) and parts != names:
        raise BadRecordError(
            f"{where}: images are named by {fields[0]!r} and, differently, by parts of turns; expected one of them",
            rule="images",
        )
    return names


def _image_value(given: Mapping[str, Any]) -> Any:
    """Return what names a record's images: a list, unless it breaks that rule."""
    value = next((given[name] for name in IMAGES if given.get(name) is not None), None)
    return _as_list(value) if value is not None else list(_images_of_parts(given))


def _images_of_parts(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the images that parts of turns name."""
    given = {name: value for name, value in given.items() if not _is_nothing(value)}
    turns = next((given[name] for name in CONVERSATIONS if name in given), None)
    if preference_fields(given):
        turns = prompt_of(given)
    for turn in rows_of(from_text(turns)):
        content = turn.get("content") if isinstance(turn, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") in {"image", "image_url"}:
                named = part.get(part["type"])
                named = named.get("url") if isinstance(named, Mapping) else named
                if isinstance(named, str):
                    yield named


def _as_list(value: Any) -> Any:
    value = from_text(value)
    return [] if value is None else [value] if isinstance(value, str) else value


def _is_nothing(value: Any) -> bool:
    return value is None or value != value  # noqa: PLR0124 - pandas writes NaN where nothing is


def _id_of(fields: Mapping[str, Any], default_id: str) -> Any:
    value = fields.get("id")
    if _is_nothing(value):
        return default_id
    if type(value) is float and value.is_integer():  # of a column that lacks some
        value = int(value)
    return str(value) if type(value) is int else value


def _refuse_lost_image(
    fields: Mapping[str, Any], names: Sequence[str], used: Sequence[str], where: str, rules: int
) -> None:
    """Refuse a caption or question whose image is null: it would be learned without it."""
    if rules > 1 and not names and any(name in fields and _is_nothing(fields[name]) for name in IMAGES[1:]):
        raise BadRecordError(
            f"{where}, {used[0]!r}: its image is null; leave the field out of texts without image", rule="image"
        )


def _turns_of_texts(
    given: Mapping[str, Any], used: Sequence[str], names: Sequence[str], where: str
) -> list[dict[str, str]]:
    texts = [given[name] for name in used]
    if len(used) > 1 and all(map(are_turns, texts)):  # as TRL has them
        return [turn for name in used for turn in turns_of(given[name], f"{where}, {name!r}")]
    for name, text in zip(used, texts, strict=True):
        if not isinstance(text, str) or not text.strip():
            raise BadRecordError(f"{where}, {name!r}: {seen(text)}, expected text", rule="text")
    if len(used) > 1:
        more = given.get(INPUT) if used[0] == "instruction" else None
        question = texts[0] if not more else f"{texts[0]}\n{more}"
        return [turn_of("user", question), turn_of("assistant", texts[1])]
    if names:
        return [turn_of("user", FOLDER_QUESTION), turn_of("assistant", texts[0].strip())]
    return [turn_of("assistant", texts[0])]


def _with_system(turns: list[dict[str, str]], given: Mapping[str, Any], where: str, rules: int) -> list[dict[str, str]]:
    system = given.get(SYSTEM) if rules > 1 else None
    if not system:
        return turns
    if not isinstance(system, str) or any(turn["role"] == "system" for turn in turns):
        raise BadRecordError(
            f"{where}, {SYSTEM!r}: {seen(system)}, expected text, and no system turn beside it", rule="conversations"
        )
    return [turn_of("system", system), *turns]


def _unread_of_turns(value: Any, field: str) -> list[str]:
    """Return the fields of turns that are not read, such as ``weight``."""
    known = {key for keys in TURN_KEYS for key in keys}
    names: dict[str, None] = {}
    for turn in rows_of(from_text(value)) if field in CONVERSATIONS else ():
        if isinstance(turn, Mapping):
            names |= dict.fromkeys(f"{field}[].{key}" for key, held in turn.items() if key not in known and held)
    return list(names)


def _kind(kind: str, *, images: bool) -> str:
    if kind == "preferences":
        return "preferences with images" if images else "preferences without images"
    if kind == "texts":
        return "images with texts" if images else "texts without images"
    return "conversations with images" if images else "conversations without images"
