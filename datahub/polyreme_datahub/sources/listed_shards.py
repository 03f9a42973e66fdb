"""Samples of listed tar shards: each member is read by its range, and checked against the listing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from polyreme_datahub.errors import BadRecordError, SourceAwayError
from polyreme_datahub.index import shapes
from polyreme_datahub.index.sample_bytes import MIRROR_SAFE
from polyreme_datahub.sources.conversation_forms import CONVERSATIONS, FIELDS, record_of, text_field
from polyreme_datahub.sources.describe import UNREAD, Listed
from polyreme_datahub.sources.files import SUFFIXES
from polyreme_datahub.sources.listed import ListedFiles
from polyreme_datahub.sources.listing import Entry, Listing
from polyreme_datahub.sources.names import shown
from polyreme_datahub.sources.records import build_record
from polyreme_datahub.sources.tar_members import is_record, is_text, key_of, samples_of
from polyreme_datahub.sources.trees import Tree
from polyreme_datahub.sources.types import RawRecord

OWN_FIELDS = frozenset({MIRROR_SAFE, *shapes.FIELDS})
"""Of a record with ``conversations``, taken as they are."""


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
            for entries in samples_of(file, path, etag, images=SUFFIXES | frozenset(UNREAD)):
                yield Listed(entries=entries)
        except OSError as error:
            raise SourceAwayError(f"file can't be read: {shown(path)}, {error.strerror}") from error


class ListedShards:
    """Samples of tar shards, in the order of shards and of members."""

    def __init__(self, tree: Tree, listing: Listing) -> None:
        self._tree, self._listing = tree, listing

    def record_id(self, ordinal: int) -> str:
        """Name a sample by its shard and key."""
        first = self._listing.of(ordinal)[0]
        return "/".join(map(shown, filter(None, (first.path, key_of(first.member)))))

    def read(self, ordinal: int) -> RawRecord:
        """Read a sample's images, text and record."""
        entries, sample_id = self._listing.of(ordinal), self.record_id(ordinal)
        for entry in entries:
            if entry.problem:
                raise BadRecordError(entry.problem, rule=entry.rule, sample_id=sample_id)
        images = sorted(
            (entry.member for entry in entries if not is_text(entry.member) and not is_record(entry.member)),
            key=_in_numbers,
        )
        content = self._content(entries, images, sample_id)
        return build_record(
            content, files=ListedFiles(self._tree, {entry.member: entry for entry in entries}), default_id=sample_id
        )

    def _content(self, entries: Sequence[Entry], images: Sequence[str], sample_id: str) -> dict[str, Any]:
        """Return the record: from its conversation, else from the text, else from the record's caption."""
        fields: dict[str, Any] = {}
        for entry in entries:
            if is_record(entry.member):
                fields = self._fields(entry)
        field = text_field([name for name, value in fields.items() if value is not None])
        value = fields.get(field)
        for entry in entries:
            if is_text(entry.member) and field not in CONVERSATIONS:
                field, value = "text", self._text(entry)
        if not field:
            raise BadRecordError(
                f"{sample_id}: no text, expected a member .txt, or .json with one of {', '.join(FIELDS)}", rule="text"
            )
        record = record_of(field, value, images=images, where=sample_id)
        if field == "conversations":
            record |= {name: fields[name] for name in sorted(OWN_FIELDS & set(fields))}
        if fields.get("id") is not None:
            record["id"] = str(fields["id"]) if type(fields["id"]) is int else fields["id"]
        return record

    def _fields(self, entry: Entry) -> dict[str, Any]:
        where = f"{shown(entry.path)}/{shown(entry.member)}"
        try:
            fields = json.loads(self._tree.read(entry).decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise BadRecordError(f"{where}: not JSON: {error}", rule="json") from error
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
