"""The files of a dataset in a bucket: identified by key, size and ETag, and read only if the ETag is still the same.

Registering reads no object but JSON Lines, PDFs, shards and tables: a listing by pages, or one request for each file
that a record names. Requests in flight are bounded by the threads that call.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, cast

from polyreme_api.store import ObjectNotFoundError
from polyreme_datahub.errors import BadRecordError, SourceInvalidError
from polyreme_datahub.objects import BucketStore, open_store
from polyreme_datahub.sources.external_sort import Row
from polyreme_datahub.sources.listing import Entry, RangeFile
from polyreme_datahub.sources.names import refusal
from polyreme_datahub.sources.trees import Look, changed, check_bytes, problem_of

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import S3Store

PAGE_KEYS = 1000
LINES_BUFFER_BYTES = 8 * 2**20


class BucketTree:
    """The objects below a prefix.

    Args:
        url: ``s3://bucket/prefix``; server and credentials come from the environment, as for every bucket.

    Raises:
        InvalidConfigError: If it is no such URL, or holds credentials.
    """

    def __init__(self, url: str) -> None:
        store = open_store(url)
        assert isinstance(store, BucketStore), "the URL begins with s3://"
        self._store, self._url = store, url.rstrip("/")

    def walk(self) -> Iterator[Row]:
        """Yield every object, page by page; a page that failed is asked for again from the last key."""
        last: str | None = None
        while page := self._store.request(last or "", partial(_page, after=last)):
            yield from page
            last = page[-1][0]

    def look(self, name: str, *, bytes_max: int, seen: Row | None = None) -> Look:
        """Return size and ETag of an object."""
        if reason := refusal(name) or _unnamed(name):
            return Look(problem=problem_of(name, reason), rule="path")
        try:
            _, size, etag = seen or self._head(name)
        except ObjectNotFoundError:
            return Look(problem=problem_of(name, "no such object in the bucket"), rule="file")
        if size > bytes_max:
            return Look(problem=problem_of(name, f"it has more than {bytes_max} bytes"), rule="file")
        return Look(size=size, etag=etag)

    def read(self, entry: Entry) -> bytes:
        """Read an object, or a part of one, if it is still the one that was listed."""
        where = f"{self._url}/{entry.path}"
        if not entry.size and entry.is_part:
            return check_bytes(b"", entry, where=where)
        start = entry.start if entry.is_part else None
        try:
            data = self._get(entry.path, etag=entry.etag, start=start, length=entry.size)
        except ObjectNotFoundError as error:
            raise changed(where, "it is gone") from error
        except _ChangedError as error:
            raise changed(where, f"its ETag is no longer {entry.etag}") from error
        return check_bytes(data, entry, where=where)

    def open_found(self, name: str) -> tuple[BinaryIO, str]:
        """Open an object that ``walk`` found, or say why it is never read."""
        if reason := refusal(name) or _unnamed(name):
            raise BadRecordError(problem_of(name, reason), rule="path")
        return self.open(name)

    def open(self, name: str) -> tuple[BinaryIO, str]:
        """Open an object, to be read by ranges of one ETag."""
        where = f"{self._url}/{name}"
        try:
            _, size, etag = self._head(name)
        except ObjectNotFoundError as error:
            raise SourceInvalidError(f"dataset file can't be read: {where}, no such object", field="source") from error

        def read_range(*, start: int, length: int) -> bytes:
            try:
                return self._get(name, etag=etag, start=start, length=length)
            except (ObjectNotFoundError, _ChangedError) as error:
                raise changed(where, "while it was being registered") from error

        return cast("BinaryIO", io.BufferedReader(RangeFile(read_range, size), LINES_BUFFER_BYTES)), etag

    def _head(self, name: str) -> Row:
        import obstore

        meta = self._store.request(name, lambda client: obstore.head(client, _key(name)))
        return [name, meta["size"], meta["e_tag"] or ""]

    def _get(self, name: str, *, etag: str, start: int | None, length: int) -> bytes:
        import obstore
        from obstore.exceptions import PreconditionError

        options: GetOptions = {"if_match": etag} if etag else {}
        if start is not None:
            options["range"] = (start, start + length)

        def get(client: S3Store) -> bytes:
            try:
                found = obstore.get(client, _key(name), options=options)
                if etag and found.meta["e_tag"] != etag:  # a server that knows no If-Match
                    raise _ChangedError
                return found.bytes().to_bytes()
            except PreconditionError as error:
                raise _ChangedError from error

        return self._store.request(name, get)


class _ChangedError(Exception):
    """An object is no longer the one that was listed."""


def _page(client: S3Store, after: str | None) -> list[Row]:
    import obstore

    for page in obstore.list(client, offset=after, chunk_size=PAGE_KEYS):
        return [[meta["path"], meta["size"], meta["e_tag"] or ""] for meta in page]
    return []


def _key(name: str) -> str:
    """Return the key of a path: a bucket knows no ``.`` parts."""
    return "/".join(part for part in name.split("/") if part not in {"", "."})


def _unnamed(name: str) -> str:
    """Return why no object has this name; empty if one may."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return "the name is not UTF-8, as every key of a bucket is"
    return "" if _key(name) else "the path names the folder itself"
