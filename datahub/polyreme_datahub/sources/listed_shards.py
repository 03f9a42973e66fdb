"""Samples of listed tar shards: each member is read by its range, and checked against the listing."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from typing import Any

from polyreme_datahub.errors import BadRecordError, SourceAwayError
from polyreme_datahub.sources.describe import UNREAD, Listed
from polyreme_datahub.sources.files import SUFFIXES
from polyreme_datahub.sources.listed import ListedFiles
from polyreme_datahub.sources.listing import Entry, Listing
from polyreme_datahub.sources.names import shown
from polyreme_datahub.sources.record_forms import Part, text_fields
from polyreme_datahub.sources.records import PREFERENCE_RULES
from polyreme_datahub.sources.tar_members import is_record, is_text, key_of, samples_of
from polyreme_datahub.sources.text_files import parse_json
from polyreme_datahub.sources.trees import Tree
from polyreme_datahub.sources.turn_forms import CONVERSATIONS
from polyreme_datahub.sources.types import Looked, RawRecord


def list_samples(tree: Tree, path: str) -> Iterator[Listed]:
    """Yield the entries of each sample of a shard.

    Raises:
        SourceAwayError: If it can't be read now.
    """
    try:
        file, etag = tree.open_found(path)
    except BadRecordError as error:
        yield Listed(entries=[Entry(record=0, path=path, problem=error.message, rule=error.rule)])
        return
    with file:
        try:
            left: list[str] = []
            for entries in samples_of(file, path, etag, images=SUFFIXES | frozenset(UNREAD), left=left):
                yield Listed(entries=entries, left=tuple(left))
                left.clear()
        except OSError as error:
            raise SourceAwayError(f"file can't be read: {shown(path)}, {error.strerror}") from error


class ListedShards:
    """Samples of tar shards, in the order of shards and of members."""

    def __init__(self, tree: Tree, listing: Listing, rules: int) -> None:
        self._tree, self._listing, self._rules = tree, listing, rules

    def record_id(self, ordinal: int) -> str:
        """Name a sample by its shard and key."""
        first = self._listing.of(ordinal)[0]
        return "/".join(map(shown, filter(None, (first.path, key_of(first.member)))))

    def read(self, ordinal: int) -> RawRecord:
        """Read a sample's images, text and record."""
        return self._part(ordinal).read()

    def look(self, ordinal: int) -> Looked:
        """Understand a sample."""
        return self._part(ordinal).look()

    def _part(self, ordinal: int) -> Part:
        entries, sample_id = self._listing.of(ordinal), self.record_id(ordinal)
        for entry in entries:
            if entry.problem:
                raise BadRecordError(entry.problem, rule=entry.rule, sample_id=sample_id)
        images = sorted(
            (entry.member for entry in entries if not is_text(entry.member) and not is_record(entry.member)),
            key=_in_numbers,
        )
        return Part(
            fields=self._fields(entries),
            files=ListedFiles(self._tree, {entry.member: entry for entry in entries}),
            default_id=sample_id,
            where=sample_id,
            images=images,
            rules=self._rules,
        )

    def _fields(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """Return the record: its conversation or question, else the text, else the record's caption."""
        fields: dict[str, Any] = {}
        for entry in entries:
            if is_record(entry.member):
                fields = self._record(entry)
        if self._rules >= PREFERENCE_RULES:
            return fields
        found = text_fields([name for name, value in fields.items() if value is not None], rules=self._rules)
        if found and (found[0] in CONVERSATIONS or len(found) > 1):
            return fields
        for entry in entries:
            if is_text(entry.member):
                return {**fields, "text": self._text(entry)}
        return fields

    def _record(self, entry: Entry) -> dict[str, Any]:
        where = f"{shown(entry.path)}/{shown(entry.member)}"
        data = self._tree.read(entry).removeprefix(codecs.BOM_UTF8)
        fields = parse_json(data, where=where, strict=self._rules > 1)
        if isinstance(fields, list) and self._rules > 1:  # as Energon takes them
            return {CONVERSATIONS[0]: fields}
        if not isinstance(fields, dict):
            raise BadRecordError(f"{where}: {type(fields).__name__}, expected an object", rule="fields")
        return fields

    def _text(self, entry: Entry) -> str:
        try:
            return self._tree.read(entry).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadRecordError(
                f"{shown(entry.path)}/{shown(entry.member)}: text is not UTF-8 at byte {error.start}", rule="text"
            ) from error


def _in_numbers(name: str) -> list[tuple[int, str]]:
    """Sort ``key.2.jpg`` before ``key.10.jpg``."""
    return [
        (int(part), "") if part.isdecimal() and part.isascii() else (0, part) for part in re.split(r"([0-9]+)", name)
    ]
