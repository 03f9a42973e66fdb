"""Records of a listed source: each file is checked against the listing when it is read."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

from polyreme_datahub.digests import digest_bytes
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.sources.files import JSONL
from polyreme_datahub.sources.listing import Entry, Listing
from polyreme_datahub.sources.names import shown
from polyreme_datahub.sources.record_forms import Part
from polyreme_datahub.sources.records import (
    IMAGE_BYTES_MAX,
    LINE_BYTES_MAX,
    describe_image,
    is_document,
    page_record,
)
from polyreme_datahub.sources.text_files import UNITS, parse
from polyreme_datahub.sources.trees import Tree
from polyreme_datahub.sources.types import Looked, RawRecord

DOCUMENTS_BYTES_MAX = 256 * 2**20
"""Bytes of documents that are kept while their pages are read; one larger than this is kept alone."""


class ListedFiles:
    """The listed files of one record.

    Args:
        tree: Where they lie.
        entries: Of the record.
    """

    def __init__(self, tree: Tree, entries: Mapping[str, Entry]) -> None:
        self._tree, self._entries = tree, entries

    def size(self, name: str) -> int:
        """Return the size that was listed; errors as ``read``."""
        return self._entry(name).size

    def read(self, name: str, *, bytes_max: int = IMAGE_BYTES_MAX) -> bytes:  # noqa: ARG002 - checked when listed
        """Read a file.

        Raises:
            BadRecordError: If it could not be read when it was listed.
            SourceInvalidError: If it changed since.
        """
        return self._tree.read(self._entry(name))

    def _entry(self, name: str) -> Entry:
        entry = self._entries.get(name)
        if entry is None:  # the release that listed it did not know the field that names it
            raise BadRecordError(f"file was not listed: {name!r}; register the dataset again", rule="file")
        if entry.problem:
            raise BadRecordError(entry.problem, rule=entry.rule)
        return entry


class ListedLines:
    """Records of a file of text; paths in it are relative to its folder.

    Args:
        tree: Where it lies.
        listing: Its records.
        rules: Of records, under which it was registered.
        kind: Its form.
    """

    def __init__(self, tree: Tree, listing: Listing, rules: int, *, kind: str = JSONL) -> None:
        self._tree, self._listing, self._rules, self._kind = tree, listing, rules, kind

    def record_id(self, ordinal: int) -> str:
        """Name a record by its line, where its own id can't be read."""
        return f"{UNITS[self._kind]}-{self._number(self._listing.of(ordinal), ordinal)}"

    def read(self, ordinal: int) -> RawRecord:
        """Read a line and its images."""
        return self._part(ordinal).read()

    def look(self, ordinal: int) -> Looked:
        """Understand a line."""
        return self._part(ordinal).look()

    def _part(self, ordinal: int) -> Part:
        entries = self._listing.of(ordinal)
        if entries[0].problem and not entries[0].is_line:
            raise BadRecordError(entries[0].problem, rule=entries[0].rule)
        lines = [entry for entry in entries if entry.is_line]
        number, unit = self._number(entries, ordinal), UNITS[self._kind]
        if lines[-1].size > LINE_BYTES_MAX:
            raise BadRecordError(f"{unit} {number} is over {LINE_BYTES_MAX} bytes", rule="line-size")
        *header, data = [self._tree.read(line) for line in lines]
        fields = parse(
            data,
            self._kind,
            name=lines[-1].path,
            number=number,
            header=b"".join(header),
            strict=self._rules > 1,
        )
        return Part(
            fields=fields,
            files=ListedFiles(self._tree, {entry.path: entry for entry in entries if not entry.is_line}),
            default_id=self.record_id(ordinal),
            where=f"{unit} {number}",
            rules=self._rules,
        )

    @staticmethod
    def _number(entries: list[Entry], ordinal: int) -> int:
        """Return the number of a line: that of its record, unless blank lines come before it."""
        return next((entry.row for entry in entries if entry.row >= 0), ordinal + 1)


class ListedFolder:
    """Images of a folder, each described by the text beside it, and pages of PDFs."""

    def __init__(self, tree: Tree, listing: Listing, rules: int) -> None:
        self._tree, self._listing, self._rules = tree, listing, rules
        self._documents: OrderedDict[str, tuple[bytes, str]] = OrderedDict()
        """The newest documents and their digests, by path: several threads read the pages of one after the other."""
        self._lock = threading.Lock()

    def record_id(self, ordinal: int) -> str:
        """Name a record by its file's path, and its page from 1."""
        first = self._listing.of(ordinal)[0]
        return shown(first.path) + (f"#page={first.page + 1}" if first.page >= 0 else "")

    def read(self, ordinal: int) -> RawRecord:
        """Read an image and its text, or a document for one of its pages."""
        first = self._listing.of(ordinal)[0]
        return self._page(first, self.record_id(ordinal)) if is_document(first.path) else self._part(ordinal).read()

    def look(self, ordinal: int) -> Looked:
        """Understand an image and its text, or a page."""
        first = self._listing.of(ordinal)[0]
        if not is_document(first.path):
            return self._part(ordinal).look()
        if first.problem:
            raise BadRecordError(first.problem, rule=first.rule)
        return Looked(kind="pages of PDFs, for a recipe with pdf-pages")

    def _part(self, ordinal: int) -> Part:
        image, text = self._listing.of(ordinal)
        files = ListedFiles(self._tree, {entry.path: entry for entry in (image, text)})
        return Part(
            fields=describe_image(image.path, files.read(text.path), text=text.path),
            files=files,
            default_id=self.record_id(ordinal),
            where=shown(image.path),
            kind="images with texts",
            rules=self._rules,
        )

    def _page(self, entry: Entry, sample_id: str) -> RawRecord:
        if entry.problem:
            raise BadRecordError(entry.problem, rule=entry.rule, sample_id=sample_id)
        with self._lock:
            document = self._documents.get(entry.path)
        if document is None:
            data = self._tree.read(entry)
            document = data, digest_bytes(data)
            self._keep(entry.path, document)
        return page_record(sample_id, *document, entry.page)

    def _keep(self, path: str, document: tuple[bytes, str]) -> None:
        with self._lock:
            self._documents[path] = document
            size_bytes = sum(len(data) for data, _ in self._documents.values())
            while len(self._documents) > 1 and size_bytes > DOCUMENTS_BYTES_MAX:
                size_bytes -= len(self._documents.popitem(last=False)[1][0])
