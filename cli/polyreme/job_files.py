"""Jobs, queues and topologies as YAML files."""

from __future__ import annotations

import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_api.job import TrainingJob
from polyreme_api.kinds import KINDS, AnyObject
from polyreme_api.labels import KIND_JOB
from polyreme_planner.loading import load_job, load_object

DOCUMENT_BYTES_MAX = 2 * 1024 * 1024
_MARKS = {
    "UTF-32": (b"\xff\xfe\0\0", b"\0\0\xfe\xff"),
    "UTF-16": (b"\xff\xfe", b"\xfe\xff"),
}
"""Byte-order marks of text that is no UTF-8; the longer ones first."""
_CONFLICT = re.compile(r"(<{7}|>{7}|\|{7})( |$)|={7}$")
"""A line that git leaves where two changes meet."""
_LOOKALIKE = re.compile("[\u00a0\u1680\u2000-\u200a\u202f\u205f\u3000\uff10-\uff1a\uff21-\uff3a\uff41-\uff5a]")
"""Spaces that are none to YAML, and fullwidth digits, letters and colons."""
_QUOTED = re.compile(r""""(\\.|[^"\\])*"|'([^']|'')*'""")
_COMMENT = re.compile(r"(^|\s)#.*")
DEPTH_MAX = 64
"""Deepest nesting of a document; a job needs about ten levels."""


def read_job(path: Path) -> TrainingJob:
    """Read the one TrainingJob of a file (``-``: standard input) and refuse what can't run.

    Raises:
        NotFoundError: If there is no such file.
        InvalidConfigError: If it is no YAML, holds another count of documents, or the job is refused.
    """
    return load_job(the_document(read_documents(path), path))


def the_document(documents: Sequence[Any], path: Path) -> Any:
    """Return the one document of a file.

    Raises:
        InvalidConfigError: If the file holds another count of documents.
    """
    if len(documents) != 1:
        raise InvalidConfigError(
            f"{path} holds {len(documents)} YAML documents, expected exactly one TrainingJob", field="the file"
        )
    return documents[0]


def read_documents(path: Path) -> list[Any]:
    """Read the documents of a YAML file (``-``: standard input).

    Raises:
        NotFoundError: If there is no such file.
        InvalidConfigError: If it can't be read, is too large, or is no YAML.
    """
    try:
        data = _bytes_of(path)
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: {path}", field="the path") from error
    except OSError as error:
        raise InvalidConfigError(f"can't read the job: {path}: {error.strerror}", field="the path") from error
    if len(data) > DOCUMENT_BYTES_MAX:
        raise InvalidConfigError(
            f"job file is too large: {path}, expected at most {DOCUMENT_BYTES_MAX} bytes", field="the file"
        )
    text = _text_of(data, path)
    try:
        return [document for document in yaml.load_all(text, JobLoader) if document is not None]
    except (yaml.YAMLError, ValueError) as error:
        # A ValueError comes of a scalar that looks like a date or a number and is none: 2026-02-30, 5,000 digits.
        words = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
        raise InvalidConfigError(f"not YAML: {path}: {words}", field="the file") from error


def _bytes_of(path: Path) -> bytes:
    if str(path) == "-":
        return sys.stdin.buffer.read(DOCUMENT_BYTES_MAX + 1)
    with path.open("rb") as file:
        return file.read(DOCUMENT_BYTES_MAX + 1)


def _text_of(data: bytes, path: Path) -> str:
    """Return the text of a file.

    Raises:
        InvalidConfigError: If it is not UTF-8, ends lines with a carriage return alone, or has marks of a merge
            conflict or characters that only look like others. YAML's own message would name another place, or none.
    """
    named = next((name for name, marks in _MARKS.items() if data.startswith(marks)), None)
    if named is not None or b"\0" in data:
        kind = named or "binary, or UTF-16 without its mark"
        raise InvalidConfigError(
            f"can't read the job: {path} is {kind}, not UTF-8 text; save it as UTF-8", field="the file"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidConfigError(
            f"can't read the job: {path} is not UTF-8 text, from byte {error.start} on", field="the file"
        ) from error
    if "\r" in text.replace("\r\n", ""):
        raise InvalidConfigError(
            f"can't read the job: lines of {path} end with a carriage return alone, expected line feeds; save it with "
            "Unix line ends",
            field="the file",
        )
    for number, line in enumerate(text.splitlines(), start=1):
        if _CONFLICT.match(line):
            raise InvalidConfigError(
                f"can't read the job: line {number} of {path} is {line[:20]!r}, left by a merge conflict; choose one "
                "side and drop the marks",
                field="the file",
            )
        plain = _QUOTED.sub(lambda quoted: " " * len(quoted[0]), line)
        if found := _LOOKALIKE.search(_COMMENT.sub("", plain)):
            character = found[0]
            raise InvalidConfigError(
                f"can't read the job: line {number} of {path} has {unicodedata.name(character, 'a character')} "
                f"(U+{ord(character):04X}) in column {found.start() + 1}, which only looks like "
                f"{unicodedata.normalize('NFKC', character)!r}; type that instead",
                field="the file",
            )
    return text


class JobLoader(yaml.SafeLoader):
    """Refuses what YAML allows and what can only be a mistake: a key given twice, nesting without end."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Read a node and what it holds."""
        self._depth += 1
        if self._depth > DEPTH_MAX:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(None, None, f"nested more than {DEPTH_MAX} levels deep", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float:
        """Return a number that reads the same to everybody: 1_20 is 120 to YAML, and 1:20 is 80."""
        text = str(self.construct_scalar(node))
        number: int | float = (
            self.construct_yaml_int(node) if node.tag.endswith(":int") else self.construct_yaml_float(node)
        )
        if "_" in text or ":" in text:
            raise yaml.MarkedYAMLError(
                None, None, f"{text} would be read as {number}; write {number}, or put it in quotes", node.start_mark
            )
        return number

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return a mapping, none of whose keys is given twice."""
        seen: dict[str, yaml.Mark] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and seen.setdefault(key.value, key.start_mark) is not key.start_mark:
                before = f"first in line {seen[key.value].line + 1}, then again"
                raise yaml.MarkedYAMLError(None, None, f"key {key.value!r} is given twice, {before}", key.start_mark)
        return super().construct_mapping(node, deep)


for _tag in ("int", "float"):
    JobLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", JobLoader.construct_number)


def load_cluster_objects(documents: Sequence[Any]) -> list[AnyObject] | None:
    """Load what administrators apply; None where not every document is of such a kind.

    Raises:
        InvalidConfigError: If one is refused; of several it is named.
    """
    kinds = [document.get("kind") if isinstance(document, Mapping) else None for document in documents]
    if not kinds or not all(isinstance(kind, str) and kind in KINDS and kind != KIND_JOB for kind in kinds):
        return None
    loaded = []
    for number, document in enumerate(documents, start=1):
        try:
            loaded.append(load_object(document))
        except InvalidConfigError as error:
            if len(documents) == 1:
                raise
            raise InvalidConfigError(
                f"document {number}, a {kinds[number - 1]}: {error.message}", field=error.field
            ) from error
    return loaded
