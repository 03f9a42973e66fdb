"""From what a user names to a description, and from a description to a source."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from polyreme_datahub.digests import digest_value
from polyreme_datahub.errors import SourceInvalidError
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.sources import describe, digits, files, samples
from polyreme_datahub.sources.bucket import SCHEME, BucketTree
from polyreme_datahub.sources.describe import CountPages, Listed, Progress, Store
from polyreme_datahub.sources.external_sort import Row
from polyreme_datahub.sources.listed import ListedFolder, ListedLines
from polyreme_datahub.sources.listed_shards import ListedShards, list_samples
from polyreme_datahub.sources.listed_tables import ListedTables, list_rows
from polyreme_datahub.sources.listing import Listing
from polyreme_datahub.sources.source_forms import (
    ARROW,
    PARQUET,
    PART_SUFFIXES,
    SHARDS,
    form_of,
    is_pattern,
    saved_files,
)
from polyreme_datahub.sources.trees import LocalTree, Tree
from polyreme_datahub.sources.types import Source

LINES_SUFFIXES = (".jsonl", ".ndjson")


def describe_generated(source: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Describe generated pages (``sources.digits.describe``), and count them.

    Raises:
        SourceInvalidError: If it is another kind of source.
    """
    if source.get("kind") != digits.KIND:
        raise SourceInvalidError(f"unknown kind of source: {source.get('kind')!r}, known is digits", field="source")
    description = digits.describe(
        digits=source["digits"], pages=source["pages"], seed=source["seed"], heldout=source["heldout"]
    )
    return {**description, "scans": digits.scans_digest()}, description["pages"]


def describe_files(
    source: str, *, store: Store, count_pages: CountPages, progress: Progress
) -> tuple[dict[str, Any], int]:
    """List a source of files, describe it by its content, and count its records.

    Args:
        source: Path of a JSON Lines file, of a folder of images, or of shards or tables (a folder, a file, or a pattern
            in its last part), or ``s3://bucket/...`` of one.
        store: Stores the listing.
        count_pages: Counts the pages of a PDF.
        progress: Called now and then.

    Raises:
        SourceInvalidError: If it is none of these, is empty or can't be listed.
        SourceAwayError: If a file can't be read now.
    """
    place = _place(source)
    if place.is_lines:
        return describe.describe_jsonl(place.tree, place.name, place.path, store=store, progress=progress)
    if place.name and not is_pattern(place.name):
        rows: Iterable[Row] = [[place.name, -1, ""]]
    else:
        rows = place.tree.walk()
    form = form_of(rows, place.path, pattern=place.name or "*")
    if form.kind == files.FOLDER:
        if place.name:
            raise SourceInvalidError(
                f"no shards or tables: {source}, expected names that end in {', '.join(PART_SUFFIXES)}", field="source"
            )
        return describe.describe_folder(
            place.tree, place.path, form.rows, store=store, count_pages=count_pages, progress=progress
        )
    names: Iterable[str] = (row[0] for row in form.rows)
    if form.kind == ARROW and not place.name:
        names = saved_files(place.tree, names, place.path)
    description, records = describe.describe_parts(
        form.kind,
        place.path,
        names,
        partial(READERS[form.kind], place.tree),
        threads=THREADS[form.kind],
        store=store,
        progress=progress,
    )
    return {**description, "root": place.root}, records


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """What a user named."""

    tree: Tree
    root: str
    """Of the tree."""
    name: str = ""
    """Of a file in the tree, or a pattern of names; empty for the whole tree."""
    is_lines: bool = False

    @property
    def path(self) -> str:
        """What was named, in full."""
        return f"{self.root.rstrip('/')}/{self.name}" if self.name else self.root


def _place(source: str) -> _Place:
    is_lines = source.endswith(LINES_SUFFIXES)
    is_part = source.lower().endswith(PART_SUFFIXES) or is_pattern(source)
    if source.startswith(SCHEME):
        root, _, name = source.rstrip("/").rpartition("/") if is_lines or is_part else (source.rstrip("/"), "", "")
        return _Place(tree=BucketTree(root), root=root, name=name, is_lines=is_lines)
    path = Path(source)
    if path.is_dir():
        root, name = os.path.realpath(path), ""
    elif not (is_lines or is_part):
        expected = ", ".join((*LINES_SUFFIXES, *PART_SUFFIXES))
        raise SourceInvalidError(
            f"not a dataset source: {source}, expected a folder of images, shards or tables, or a file that ends in "
            f"{expected}",
            field="source",
        )
    elif is_lines:
        root, name = os.path.split(os.path.realpath(path))
    else:
        root, name = os.path.realpath(path.parent), path.name
        if not is_pattern(name) and not path.exists():
            raise SourceInvalidError(f"dataset file can't be read: {source}, no such file", field="source")
    return _Place(tree=LocalTree(Path(root)), root=root, name=name, is_lines=is_lines and bool(name))


READERS: Mapping[str, Callable[[Tree, str], Iterator[Listed]]] = {
    SHARDS: list_samples,
    PARQUET: list_rows,
    ARROW: list_rows,
}
"""How the records of one file of each form are listed."""
THREADS: Mapping[str, int] = {SHARDS: 4, PARQUET: 2, ARROW: 2}
"""Files that are listed at once: a table's page or batch is in memory as a whole."""
LISTED: Mapping[str, Callable[[Tree, Listing], Source]] = {
    files.JSONL: ListedLines,
    files.FOLDER: ListedFolder,
    SHARDS: ListedShards,
    PARQUET: ListedTables,
    ARROW: ListedTables,
}
"""How the records of a listing are read."""


def identity_of(description: Mapping[str, Any]) -> str:
    """Return the digest of a version: of the content of its files, not of where they lie."""
    if description.get("form") != describe.FORM:
        return digest_value(description)
    return digest_value({name: description[name] for name in ("kind", "form", "content")})


def open_source(description: Mapping[str, Any], lakehouse: Lakehouse) -> Source:
    """Open a described source.

    Raises:
        SourceInvalidError: If no source of this release is of that kind.
        IndexDamagedError: If its listing is damaged.
    """
    kind, form = description["kind"], description.get("form")
    if kind == digits.KIND:
        return digits.DigitsSource(description)
    if kind == samples.KIND:
        return samples.SamplesSource(description, lakehouse.store)
    if form == describe.FORM and kind in LISTED:
        tree = _tree(description)
        digest = description["listing"]
        listing = Listing(_reader(lakehouse, digest), description["listing_bytes"], name=digest)
        return LISTED[kind](tree, listing)
    opened: dict[str, Callable[[Mapping[str, Any]], Source]] = {
        files.JSONL: files.JsonlSource,
        files.FOLDER: files.FolderSource,
    }
    if kind not in opened or form != 1:
        raise SourceInvalidError(
            f"records of this version can't be read again: its source is {kind!r} of form {form}, known are "
            f"{', '.join([digits.KIND, *LISTED])}"
        )
    return opened[kind](description)


def _tree(description: Mapping[str, Any]) -> Tree:
    path = str(description["path"])
    root = str(
        description.get("root", (path.rpartition("/")[0] or "/") if description["kind"] == files.JSONL else path)
    )
    return BucketTree(root) if root.startswith(SCHEME) else LocalTree(Path(root))


def _reader(lakehouse: Lakehouse, digest: str) -> Callable[..., bytes]:
    def read(*, start: int, length: int) -> bytes:
        return lakehouse.get_range(digest, start=start, length=length)

    return read
