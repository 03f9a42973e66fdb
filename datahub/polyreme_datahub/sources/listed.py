"""Records of a listed source: each file is checked against the listing when it is read."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import PurePosixPath

from polyreme_datahub.digests import digest_bytes
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.sources.listing import Entry, Listing
from polyreme_datahub.sources.names import shown
from polyreme_datahub.sources.records import (
    IMAGE_BYTES_MAX,
    LINE_BYTES_MAX,
    build_record,
    describe_image,
    is_document,
    page_record,
)
from polyreme_datahub.sources.trees import Tree
from polyreme_datahub.sources.types import RawRecord

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
        """Return the size that was listed."""
        return self._entries[name].size

    def read(self, name: str, *, bytes_max: int = IMAGE_BYTES_MAX) -> bytes:  # noqa: ARG002 - checked when listed
        """Read a file.

        Raises:
            BadRecordError: If it could not be read when it was listed.
            SourceInvalidError: If it changed since.
        """
        entry = self._entries[name]
        if entry.problem:
            raise BadRecordError(entry.problem, rule=entry.rule)
        return self._tree.read(entry)


class ListedLines:
    """Records of a JSON Lines file; paths in it are relative to its folder."""

    def __init__(self, tree: Tree, listing: Listing) -> None:
        self._tree, self._listing = tree, listing

    def record_id(self, ordinal: int) -> str:
        """Name a record by its line, where its own id can't be read."""
        return f"line-{ordinal + 1}"

    def read(self, ordinal: int) -> RawRecord:
        """Read a line and its images."""
        line, *files = self._listing.of(ordinal)
        if line.size > LINE_BYTES_MAX:
            raise BadRecordError(f"line {ordinal + 1} is over {LINE_BYTES_MAX} bytes", rule="line-size")
        data = self._tree.read(line)
        try:
            content = json.loads(data.decode("utf-8-sig" if ordinal == 0 else "utf-8"))
        except (ValueError, RecursionError) as error:
            raise BadRecordError(f"line {ordinal + 1} is not JSON: {error}", rule="json") from error
        named = ListedFiles(self._tree, {entry.path: entry for entry in files})
        return build_record(content, files=named, default_id=self.record_id(ordinal))


class ListedFolder:
    """Images of a folder, each described by the ``.txt`` beside it, and pages of PDFs."""

    def __init__(self, tree: Tree, listing: Listing) -> None:
        self._tree, self._listing = tree, listing
        self._documents: OrderedDict[str, tuple[bytes, str]] = OrderedDict()
        """The newest documents and their digests, by path: several threads read the pages of one after the other."""
        self._lock = threading.Lock()

    def record_id(self, ordinal: int) -> str:
        """Name a record by its file's path, and its page from 1."""
        first = self._listing.of(ordinal)[0]
        return shown(first.path) + (f"#page={first.page + 1}" if first.page >= 0 else "")

    def read(self, ordinal: int) -> RawRecord:
        """Read an image and its text, or a document for one of its pages."""
        entries = self._listing.of(ordinal)
        name = entries[0].path
        if is_document(name):
            return self._page(entries[0], self.record_id(ordinal))
        files = ListedFiles(self._tree, {entry.path: entry for entry in entries})
        text = str(PurePosixPath(name).with_suffix(".txt"))
        content = describe_image(name, files.read(text), text=text)
        return build_record(content, files=files, default_id=self.record_id(ordinal))

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
