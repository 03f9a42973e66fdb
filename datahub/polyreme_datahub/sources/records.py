"""The rules of a record: its fields, and the files that it names. The format is docs/reference/dataset-format.md."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from polyreme_datahub.chat_format import IMAGE_MARK
from polyreme_datahub.digests import digest_bytes
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.index import shapes
from polyreme_datahub.index.sample_bytes import MIRROR_SAFE, REJECTED
from polyreme_datahub.sources.names import shown
from polyreme_datahub.sources.types import ROLES, RawRecord

FOLDER_QUESTION = "Describe the image."
PDF = ".pdf"
LINE_BYTES_MAX = 4 * 2**20
IMAGE_BYTES_MAX = 256 * 2**20
RECORD_BYTES_MAX = 512 * 2**20
TEXT_BYTES_MAX = 4 * 2**20
BOX_PX_MAX = 1e6
IMAGES_MAX = 64
TURNS_MAX = 256
ID_CHARACTERS_MAX = 512
VERTICES_MAX = 256
"""Corners of a polygon."""
RULES_FIELD = "rules"
"""Of a description: the rules of its records; without it they are those of before."""
RULES, PREFERENCE_RULES = 2, 3
"""Of records. A version keeps those under which it was registered: 1 read fewer fields, and took white space as an
answer; 3 is 2 where each record has a rejected answer, too."""


class Files(Protocol):
    """The files that a record may name."""

    def size(self, name: str) -> int:
        """Return the size of a file; 0 if it can't be read now.

        Raises:
            BadRecordError: If it could not be read when it was listed.
        """
        ...

    def read(self, name: str, *, bytes_max: int = IMAGE_BYTES_MAX) -> bytes:
        """Read a file.

        Raises:
            BadRecordError: If it can't be read, and that is the record's fault.
            EnvironmentFailedError: If it can't be read for another reason.
        """
        ...


def describe_image(name: str, caption: bytes, *, text: str) -> dict[str, Any]:
    """Return the record of an image in a folder: the text beside it is the answer.

    Raises:
        BadRecordError: If the text is not UTF-8.
    """
    try:
        answer = caption.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise BadRecordError(f"text is not UTF-8: {text}", rule="text") from error
    turns = [{"role": "user", "content": FOLDER_QUESTION}, {"role": "assistant", "content": answer}]
    return {"id": shown(name), "images": [name], "conversations": turns}


def is_document(name: str) -> bool:
    """Tell whether a file of a folder is a document, whose pages are the records."""
    return name.lower().endswith(PDF)


def page_record(sample_id: str, document: bytes, digest: str, page: int) -> RawRecord:
    """Return the record of a page, as the operation ``pdf-pages`` takes it; nothing answers its question yet."""
    content = {
        "id": sample_id,
        "kind": "pdf",
        "document": digest,
        "documents": [digest],
        "page": page,
        "conversations": [{"role": "user", "content": FOLDER_QUESTION}],
    }
    return RawRecord(sample_id=sample_id, content=content, blobs=[document], digests=[digest])


def build_record(content: Mapping[str, Any], *, files: Files, default_id: str, rules: int = RULES) -> RawRecord:
    """Check a record of our own form and read its files; fields that it does not know are left out.

    Raises:
        BadRecordError: Naming the first rule that is broken.
    """
    sample_id = check_id(content.get("id", default_id))
    try:
        return _build(content, sample_id, files, rules)
    except BadRecordError as error:
        raise BadRecordError(error.message, rule=error.rule, sample_id=sample_id) from error


def check_id(sample_id: Any) -> str:
    """Return a record's id.

    Raises:
        BadRecordError: If it is none.
    """
    if not isinstance(sample_id, str) or not 1 <= len(sample_id) <= ID_CHARACTERS_MAX or not sample_id.isprintable():
        raise BadRecordError(
            f"id is {reprlib.repr(sample_id)}, expected a whole number or text of 1 to {ID_CHARACTERS_MAX} printable "
            "characters",
            rule="id",
        )
    return sample_id


def check_texts(value: Any, name: str, count_max: int) -> list[str]:
    """Return a list of paths.

    Raises:
        BadRecordError: If it is none.
    """
    if not isinstance(value, list) or len(value) > count_max or not all(isinstance(item, str) for item in value):
        raise BadRecordError(f"{name} is not valid, expected a list of at most {count_max} paths", rule=_RULE_OF[name])
    return value


_RULE_OF = {"mask": "mask", **dict.fromkeys(("images", "image", "file_name", "file_names"), "images")}


def _build(content: Mapping[str, Any], sample_id: str, files: Files, rules: int) -> RawRecord:
    paths = check_texts(content.get("images", []), "images", IMAGES_MAX)
    turns = _turns(content.get("conversations"), len(paths), rules)
    blobs = [files.read(path) for path in _within(files, paths)]
    masks = content.get("masks", [None] * len(paths))
    if not isinstance(masks, list) or len(masks) != len(paths):
        raise BadRecordError(
            f"masks do not match the images, expected a path or null for each of the {len(paths)} images", rule="mask"
        )
    check_texts([path for path in masks if path is not None], "mask", IMAGES_MAX)
    mask_blobs = [None if path is None else files.read(path) for path in masks]
    found = {
        field: _shapes(field, content[field], len(paths)) for field in shapes.FIELDS if content.get(field, []) != []
    }
    rejected = _rejected(content, turns) if rules >= PREFERENCE_RULES else {}
    shapes.check_marks([*turns, *({"content": text} for text in rejected.values())], found)
    safe = content.get(MIRROR_SAFE)
    if MIRROR_SAFE in content and not isinstance(safe, bool):
        raise BadRecordError(f"{MIRROR_SAFE} is {reprlib.repr(safe)}, expected true or false", rule="fields")
    record = {
        "id": sample_id,
        "kind": "images",
        "images": [digest_bytes(blob) for blob in blobs],
        "masks": [None if blob is None else digest_bytes(blob) for blob in mask_blobs],
        "boxes": [],
        "conversations": turns,
        **found,
        **({} if safe is None else {MIRROR_SAFE: safe}),
        **rejected,
    }
    return RawRecord(sample_id=sample_id, content=record, blobs=[*blobs, *(b for b in mask_blobs if b is not None)])


def _turns(value: Any, images: int, rules: int) -> list[dict[str, str]]:
    turns = checked_turns(value, images)
    answers = [turn["content"] for turn in turns if turn["role"] == "assistant"]
    if rules < PREFERENCE_RULES and not any(answer.strip() if rules > 1 else answer for answer in answers):
        raise BadRecordError(
            "conversations has no assistant turn with text, so there is nothing to learn", rule="conversations"
        )
    return turns


def checked_turns(value: Any, images: int) -> list[dict[str, str]]:
    """Return the turns of a conversation with so many images; whether one answers is not checked.

    Raises:
        BadRecordError: Naming the first rule that is broken.
    """
    if not isinstance(value, list) or not 1 <= len(value) <= TURNS_MAX:
        raise BadRecordError(
            f"conversations is not valid, expected a list of 1 to {TURNS_MAX} turns", rule="conversations"
        )
    turns, marks = [], 0
    for turn in value:
        if not isinstance(turn, dict) or set(turn) != {"role", "content"} or turn["role"] not in ROLES:
            raise BadRecordError(
                f"turn is {reprlib.repr(turn)}, expected {{role, content}} with role one of {', '.join(ROLES)}",
                rule="conversations",
            )
        if not isinstance(turn["content"], str) or not _is_unicode(turn["content"]):
            raise BadRecordError("turn: content is not text, or has lone surrogates", rule="conversations")
        marks += turn["content"].count(IMAGE_MARK)
        turns.append({"role": turn["role"], "content": turn["content"]})
    if marks not in {0, images}:
        raise BadRecordError(
            f"conversations: {marks} {IMAGE_MARK} marks, {images} images; expected no marks, or one for each image",
            rule="images",
        )
    return turns


def _rejected(content: Mapping[str, Any], turns: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return the field of the rejected answer, after what the chosen one has to be."""
    rejected, (*prompt, last) = content.get(REJECTED), turns
    if not isinstance(rejected, str) or not _is_unicode(rejected):
        raise BadRecordError(f"{REJECTED} is {reprlib.repr(rejected)}, expected text", rule="preference")
    problem = ""
    if last["role"] != "assistant":
        problem = f"the last turn is of {last['role']}, expected the chosen answer"
    elif not prompt or prompt[-1]["role"] != "user":
        before = f"a turn of {prompt[-1]['role']}" if prompt else "nothing"
        problem = f"the prompt ends with {before}, expected a turn of the user"
    elif not last["content"].strip() or not rejected.strip():
        problem = f"the {'rejected' if last['content'].strip() else 'chosen'} answer is empty, expected text"
    elif last["content"].strip() == rejected.strip():
        problem = "the chosen and the rejected answer are the same, so neither can be preferred"
    elif IMAGE_MARK in last["content"] or IMAGE_MARK in rejected:
        problem = f"an answer shows an image ({IMAGE_MARK}), expected images in the prompt alone"
    if problem:
        raise BadRecordError(f"preference: {problem}", rule="preference")
    return {REJECTED: rejected}


_COORDINATES = {
    "boxes": "[left, top, right, bottom], or bbox: [left, top, width, height]",
    "points": "[x, y]",
    "polygons": f"[[x, y], ...] of 3 to {VERTICES_MAX} corners",
}


def _shapes(field: str, value: Any, images: int) -> list[dict[str, Any]]:
    name, form = shapes.FIELDS[field], _COORDINATES[field]
    if not isinstance(value, list):
        raise BadRecordError(f"{field} is not valid, expected a list of {{image, {name}, label}}", rule=field)
    found = []
    for item in map(_with_box, value) if field == "boxes" else value:
        good = isinstance(item, dict) and set(item) <= {"image", name, "label"} and _IS[field](item.get(name))
        good = good and isinstance(item.get("label", ""), str) and _is_unicode(item.get("label", ""))
        if not good or type(item.get("image", 0)) is not int or not 0 <= item.get("image", 0) < images:
            raise BadRecordError(
                f"{name} is {reprlib.repr(item)}, expected {{image: 0..{images - 1}, {name}: {form}, label}}",
                rule=field,
            )
        found.append({"image": item.get("image", 0), name: item[name], "label": item.get("label", "")})
    return found


def _with_box(item: Any) -> Any:
    """Return a box as our own: ``bbox``, as COCO has it, is left, top, width and height."""
    if not isinstance(item, dict) or "box" in item or not _are_numbers(item.get("bbox"), 4):
        return item
    left, top, width, height = item["bbox"]
    rest = {name: value for name, value in item.items() if name != "bbox"}
    return {**rest, "box": [left, top, left + width, top + height]}


def _is_box(value: Any) -> bool:
    return _are_numbers(value, 4) and value[0] <= value[2] and value[1] <= value[3]


def _is_point(value: Any) -> bool:
    return _are_numbers(value, 2)


def _is_polygon(value: Any) -> bool:
    return isinstance(value, list) and 3 <= len(value) <= VERTICES_MAX and all(map(_is_point, value))


def _are_numbers(value: Any, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(type(edge) in {int, float} and abs(edge) <= BOX_PX_MAX for edge in value)
    )


_IS = {"boxes": _is_box, "points": _is_point, "polygons": _is_polygon}


def _within(files: Files, paths: Sequence[str]) -> Iterator[str]:
    """Yield the paths while their files together stay inside a record's bound."""
    total_bytes = 0
    for path in paths:
        total_bytes += files.size(path)
        if total_bytes > RECORD_BYTES_MAX:
            raise BadRecordError(f"images are too large: more than {RECORD_BYTES_MAX} bytes in one record", rule="file")
        yield path


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
