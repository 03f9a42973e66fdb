"""Registers a source: reads every file once, writes the listing, and describes the version by its content.

Memory is bounded whatever the number of files: names are sorted in runs, files are digested by a few threads with few
of them ahead, and the listing is streamed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from polyreme_datahub.errors import BadRecordError, SourceInvalidError
from polyreme_datahub.sources.chunks import FIELD, cut, encode_counts
from polyreme_datahub.sources.external_sort import Row
from polyreme_datahub.sources.files import FOLDER, SUFFIXES
from polyreme_datahub.sources.found import Found
from polyreme_datahub.sources.in_order import in_order
from polyreme_datahub.sources.listing import Entry, ListingWriter
from polyreme_datahub.sources.record_forms import named_files
from polyreme_datahub.sources.records import IMAGE_BYTES_MAX, PDF, TEXT_BYTES_MAX, is_document
from polyreme_datahub.sources.text_files import TextRecord, kind_of, parse, records_of
from polyreme_datahub.sources.trees import Tree, problem_of

FORM = 2
TEXT = ".txt"
UNREAD = {
    **dict.fromkeys((".heic", ".heif", ".hif"), "HEIC"),
    ".avif": "AVIF",
    ".jxl": "JPEG XL",
    **dict.fromkeys((".jp2", ".j2k", ".jpf", ".jpx"), "JPEG 2000"),
    ".psd": "Photoshop",
    ".svg": "SVG",
    **dict.fromkeys((".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2"), "raw camera"),
}
"""Image formats that no decoder here reads: they are listed, so that each is a dead letter and not left out."""
THREADS = 8
"""Files that are digested at once, or requests in flight to a bucket."""
BATCH = 16
"""Files that a thread takes at once."""
AHEAD = 16
"""Batches that are being digested, or wait for their turn in the listing."""
PROGRESS_FILES = 100

Progress = Callable[[Found], None]
Store = Callable[[BinaryIO], tuple[str, int]]
"""Stores a file in the lakehouse; returns its digest and size."""
CountPages = Callable[[bytes], int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """Where a description goes, and what was found on the way."""

    store: Store
    """Stores the listing."""
    progress: Progress
    """Called now and then."""
    found: Found
    """What was found, growing."""


def describe_folder(
    tree: Tree, path: str, rows: Iterable[Row], *, count_pages: CountPages, sink: Sink
) -> tuple[dict[str, Any], int]:
    """Describe a folder of images, each with the text of the same name beside it, and of PDFs; count the records.

    Args:
        tree: The files.
        path: What the user named, in full.
        rows: Of the images, texts and PDFs, as ``walk`` yields them, by stem.
        count_pages: Counts the pages of a PDF (``sandbox.count_pages``).
        sink: Where it goes.

    Raises:
        SourceInvalidError: If there is no record, or a folder can't be listed.
        SourceAwayError: If a file can't be read now.
    """
    describer = _Describer(tree, sink.found, count_pages)
    entries = describer.entries(describer.folder_jobs(rows))
    description, records = _describe(FOLDER, path, entries, sink)
    if not records:
        raise SourceInvalidError(
            f"dataset folder holds no image: {path}, expected files ending in {', '.join(sorted({*SUFFIXES, PDF}))}",
            field="source",
        )
    return description, records


def describe_text(tree: Tree, name: str, path: str, *, sink: Sink) -> tuple[dict[str, Any], int]:
    """Describe a file of text and the files that its records name; arguments and errors as ``describe_folder``."""
    describer = _Describer(tree, sink.found, _no_pages)
    file, etag = tree.open(name)
    with file:
        kind = kind_of(file, name)
        entries = describer.entries(describer.line_jobs(name, file, etag, kind))
        description, records = _describe(kind, path, entries, sink)
    if not records:
        raise SourceInvalidError(f"dataset file is empty: {path}, expected at least one record", field="source")
    return {**description, "name": name}, records


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """The entries of one record of a shard or a table."""

    entries: Sequence[Entry]
    images: int = 0
    """Inside the record."""
    files: Sequence[str] = ()
    """Names of files that the record names, which have entries of their own."""
    left: Sequence[str] = ()
    """Names of members that are not read."""


def describe_parts(
    kind: str,
    path: str,
    files: Iterable[str],
    read: Callable[[str], Iterator[Listed]],
    *,
    threads: int,
    sink: Sink,
) -> tuple[dict[str, Any], int]:
    """Describe files that hold many records each; errors as ``describe_folder``.

    Args:
        kind: Of the source.
        path: What the user named, in full.
        files: Their paths, in order.
        read: Yields the records of one; threads call it.
        threads: Files that are read at once.
        sink: Where it goes.
    """
    with contextlib.closing(in_order(files, read, threads=threads)) as parts:
        entries = _entries_of(parts, sink.found)
        description, records = _describe(kind, path, entries, sink)
    if not records:
        raise SourceInvalidError(f"dataset files hold no record: {path}, expected at least one", field="source")
    return description, records


def _entries_of(parts: Iterable[Listed], found: Found) -> Iterator[Entry]:
    for record, part in enumerate(parts):
        found.lines += 1
        found.images += part.images
        found.leave(part.left)
        for entry in part.entries:
            yield dataclasses.replace(entry, record=record)


def _describe(kind: str, path: str, entries: Iterable[Entry], sink: Sink) -> tuple[dict[str, Any], int]:
    with ListingWriter() as listing:
        sizes = _Sizes()
        counts = encode_counts(cut(sizes.of(_noted(_numbered(entries), listing, sink))))
        sink.progress(sink.found)
        digest, size = sink.store(listing.finish()) if sizes.records else ("", 0)
    description = {
        "kind": kind,
        "form": FORM,
        "path": path,
        "content": listing.content,
        "listing": digest,
        "listing_bytes": size,
        FIELD: counts,
        "found": sink.found.counts(),
    }
    return description, sizes.records


def _noted(entries: Iterable[Entry], listing: ListingWriter, sink: Sink) -> Iterator[Entry]:
    for entry in entries:
        listing.add(entry)
        sink.found.note(entry, unread=UNREAD.get(_suffix(entry.member or entry.path), ""))
        if sink.found.files % PROGRESS_FILES == 0:
            sink.progress(sink.found)
        yield entry


@dataclasses.dataclass(slots=True)
class _Job:
    """A file to digest, or an entry that is known."""

    entry: Entry
    """Its record is a number that groups the entries of one record: pages have none yet."""
    bytes_max: int = 0
    seen: Row | None = None
    is_document: bool = False


class _Describer:
    def __init__(self, tree: Tree, found: Found, count_pages: CountPages) -> None:
        self._tree, self._found, self._count_pages = tree, found, count_pages

    def folder_jobs(self, rows: Iterable[Row]) -> Iterator[_Job]:
        """Yield the images and texts of a folder by stem, so that a text comes with its images."""
        for record, files in enumerate(_by_stem(rows, self._found)):
            for name, row, bytes_max in files:
                entry = Entry(record=record, path=name)
                yield _Job(entry, bytes_max, row, is_document=is_document(name))

    def line_jobs(self, name: str, file: BinaryIO, etag: str, kind: str) -> Iterator[_Job]:
        """Yield each record of a file of text, after its header, and the files that it names."""
        header: list[TextRecord] = []
        for record, one in enumerate(_with_header(records_of(file, kind, name=name), header)):
            self._found.lines += 1
            if one.problem:
                yield _Job(Entry(record=record, path=name, problem=one.problem, rule="json"))
                continue
            for line in (*header, one):
                number = one.number if line is one and one.number != record + 1 else -1
                yield _Job(
                    Entry(
                        record=record,
                        path=name,
                        start=line.start,
                        size=line.size,
                        sha256=line.sha256,
                        etag=etag,
                        row=number,
                    )
                )
            for named in named_files(_parsed(one, kind, name, header)):
                yield _Job(Entry(record=record, path=named), IMAGE_BYTES_MAX)

    def entries(self, jobs: Iterable[_Job]) -> Iterator[Entry]:
        """Yield the entries of jobs in order, digested by threads."""
        remaining = iter(jobs)
        with ThreadPoolExecutor(THREADS) as threads:
            ahead: deque[tuple[list[_Job], Future[list[Entry]]]] = deque()
            try:
                while batch := list(itertools.islice(remaining, BATCH)):
                    ahead.append((batch, threads.submit(self._look_all, batch)))
                    if len(ahead) >= AHEAD:
                        yield from self._finish(*ahead.popleft())
                while ahead:
                    yield from self._finish(*ahead.popleft())
            finally:
                for _, waiting in ahead:
                    waiting.cancel()

    def _look_all(self, jobs: Sequence[_Job]) -> list[Entry]:
        return [self._look(job) for job in jobs]

    def _look(self, job: _Job) -> Entry:
        if not job.bytes_max:
            return job.entry
        name = job.entry.path
        if job.seen is _MISSING:
            missing = problem_of(name, "No such file or directory")
            return dataclasses.replace(job.entry, problem=missing, rule="file")
        look = self._tree.look(name, bytes_max=job.bytes_max, seen=job.seen)
        return dataclasses.replace(job.entry, **dataclasses.asdict(look))

    def _finish(self, jobs: Sequence[_Job], looked: Future[list[Entry]]) -> Iterator[Entry]:
        for job, entry in zip(jobs, looked.result(), strict=True):
            if job.is_document and not entry.problem:
                yield from self._pages(entry)
            else:
                yield entry

    def _pages(self, entry: Entry) -> list[Entry]:
        """Return an entry for each page of a document: one with a problem if it can't be opened.

        One document at a time is in memory and in the sandbox, whose child belongs to this thread.
        """
        try:
            pages = self._count_pages(self._tree.read(entry))
        except BadRecordError as error:
            return [dataclasses.replace(entry, problem=f"{entry.path!r}: {error.message}", rule=error.rule)]
        return [dataclasses.replace(entry, page=page) for page in range(pages)]


_MISSING: Row = ()
"""What ``walk`` has yielded for a file that it has not found."""


class _Sizes:
    """Bytes of each record, from the entries of all."""

    def __init__(self) -> None:
        self.records = 0

    def of(self, entries: Iterable[Entry]) -> Iterator[int]:
        for _, some in itertools.groupby(entries, key=lambda entry: entry.record):
            self.records += 1
            yield sum(entry.size for entry in some if entry.page < 1)


def _numbered(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Number the records: each page of a document is one."""
    number, last = -1, (-1, 0)
    for entry in entries:
        here = (entry.record, max(0, entry.page))
        number += here != last
        last = here
        yield dataclasses.replace(entry, record=number)


def _by_stem(rows: Iterable[Row], found: Found) -> Iterator[list[tuple[str, Row | None, int]]]:
    """Yield the files of each record of a folder: an image and its text, or a PDF."""
    for _, group in itertools.groupby(rows, key=lambda row: stem(row[0])[0]):
        files = list(group)
        texts = {row[0]: row for row in files if _suffix(row[0]) == TEXT}
        images = [row for row in files if row[0] not in texts]
        if not images:
            found.texts_alone += len(texts)
        for row in images:
            name = row[0]
            if is_document(name):
                yield [(name, row, IMAGE_BYTES_MAX)]
                continue
            text = str(PurePosixPath(name).with_suffix(TEXT))
            text = text if text in texts else min(texts, default=text)
            seen = texts.get(text, _MISSING)
            found.images_alone += seen is _MISSING
            yield [(name, row, IMAGE_BYTES_MAX), (text, seen, TEXT_BYTES_MAX)]


def _with_header(records: Iterator[TextRecord], header: list[TextRecord]) -> Iterator[TextRecord]:
    """Yield the records; a header is put aside."""
    for record in records:
        if record.number:
            yield record
        else:
            header.append(record)


def _parsed(record: TextRecord, kind: str, name: str, header: Sequence[TextRecord]) -> Any:
    try:
        data = b"".join(one.data for one in header)
        return parse(record.data, kind, name=name, number=record.number, header=data, strict=False)
    except BadRecordError:
        return None


def _suffix(name: str) -> str:
    return PurePosixPath(name).suffix.lower()


def stem(name: str) -> Sequence[str]:
    """Return what names are sorted by: the path without its suffix, then the whole of it."""
    return [name.removesuffix(PurePosixPath(name).suffix), name]


def _no_pages(_: bytes) -> int:
    raise BadRecordError("a record names images, not documents", rule="file")
