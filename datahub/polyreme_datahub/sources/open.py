"""From what a user names to a description, and from a description to a source."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from polyreme_datahub.digests import digest_value
from polyreme_datahub.errors import SourceInvalidError
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.sources import describe, digits, files, samples
from polyreme_datahub.sources.bucket import SCHEME, BucketTree
from polyreme_datahub.sources.describe import CountPages, Progress, Store
from polyreme_datahub.sources.listed import ListedFolder, ListedLines
from polyreme_datahub.sources.listing import Listing
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
        source: Path of a JSON Lines file or of a folder of images, or ``s3://bucket/...`` of one.
        store: Stores the listing.
        count_pages: Counts the pages of a PDF.
        progress: Called now and then.

    Raises:
        SourceInvalidError: If it is neither, is empty or can't be listed.
        SourceAwayError: If a file can't be read now.
    """
    if source.startswith(SCHEME):
        return _describe_bucket(source.rstrip("/"), store=store, count_pages=count_pages, progress=progress)
    path = Path(source)
    if path.is_dir():
        real = os.path.realpath(path)
        return describe.describe_folder(
            LocalTree(Path(real)), real, store=store, count_pages=count_pages, progress=progress
        )
    if path.suffix not in LINES_SUFFIXES:
        raise SourceInvalidError(
            f"not a dataset source: {source}, expected a folder of images or a .jsonl file", field="source"
        )
    path = Path(os.path.realpath(path))
    return describe.describe_jsonl(LocalTree(path.parent), path.name, str(path), store=store, progress=progress)


def _describe_bucket(
    url: str, *, store: Store, count_pages: CountPages, progress: Progress
) -> tuple[dict[str, Any], int]:
    if not url.endswith(LINES_SUFFIXES):
        return describe.describe_folder(BucketTree(url), url, store=store, count_pages=count_pages, progress=progress)
    folder, _, name = url.rpartition("/")
    return describe.describe_jsonl(BucketTree(folder), name, url, store=store, progress=progress)


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
    if form == describe.FORM and kind in {files.JSONL, files.FOLDER}:
        tree = _tree(description)
        digest = description["listing"]
        listing = Listing(_reader(lakehouse, digest), description["listing_bytes"], name=digest)
        return ListedFolder(tree, listing) if kind == files.FOLDER else ListedLines(tree, listing)
    opened: dict[str, Callable[[Mapping[str, Any]], Source]] = {
        files.JSONL: files.JsonlSource,
        files.FOLDER: files.FolderSource,
    }
    if kind not in opened or form != 1:
        raise SourceInvalidError(
            f"records of this version can't be read again: its source is {kind!r} of form {form}, known are "
            f"{', '.join([digits.KIND, *opened])}"
        )
    return opened[kind](description)


def _tree(description: Mapping[str, Any]) -> Tree:
    if description["path"].startswith(SCHEME):
        url = description["path"]
        return BucketTree(url if description["kind"] == files.FOLDER else url.rpartition("/")[0])
    path = Path(description["path"])
    return LocalTree(path if description["kind"] == files.FOLDER else path.parent)


def _reader(lakehouse: Lakehouse, digest: str) -> Callable[..., bytes]:
    def read(*, start: int, length: int) -> bytes:
        return lakehouse.get_range(digest, start=start, length=length)

    return read
