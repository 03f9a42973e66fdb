"""From what a user names to a description, and from a description to a source."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from polyreme_api.urls import is_bucket
from polyreme_datahub.digests import digest_value
from polyreme_datahub.errors import SourceInvalidError
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.sources import describe, digits, files, look_over, samples
from polyreme_datahub.sources.bucket import BucketTree
from polyreme_datahub.sources.describe import CountPages, Progress, Store
from polyreme_datahub.sources.external_sort import Row
from polyreme_datahub.sources.found import Found
from polyreme_datahub.sources.listed import ListedFolder, ListedLines
from polyreme_datahub.sources.listed_shards import ListedShards, list_samples
from polyreme_datahub.sources.listed_tables import ListedTables, has_preference_columns, list_rows
from polyreme_datahub.sources.listing import Listing
from polyreme_datahub.sources.records import PREFERENCE_RULES, RULES, RULES_FIELD
from polyreme_datahub.sources.source_forms import (
    ARROW,
    PARQUET,
    PART_SUFFIXES,
    SHARDS,
    Form,
    check_splits,
    form_of,
    is_pattern,
    names_images,
    saved_files,
)
from polyreme_datahub.sources.text_files import ARRAY, CSV, KINDS
from polyreme_datahub.sources.trees import LocalTree, Tree
from polyreme_datahub.sources.types import Looked, Source

LINES_SUFFIXES = tuple(KINDS)
LINES = frozenset(KINDS.values())


def describe_generated(source: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Describe generated pages (``sources.digits.describe``), and count them.

    Raises:
        SourceInvalidError: If it is another kind of source.
    """
    if source.get("kind") != digits.KIND:
        raise SourceInvalidError(f"unknown kind of source: {source.get('kind')!r}, known is digits", field="source")
    description = digits.describe(
        digits=source["digits"],
        pages=source["pages"],
        seed=source["seed"],
        heldout=source["heldout"],
        answers=source.get("answers", digits.DIGITS),
    )
    return {**description, "scans": digits.scans_digest()}, description["pages"]


def describe_files(
    source: str, *, store: Store, count_pages: CountPages, progress: Progress, preferences: bool = True
) -> tuple[dict[str, Any], int]:
    """List a source of files, describe it by its content, and count its records.

    Args:
        source: Path of a file of records as text (``text_files.KINDS``), of a folder of images, or of shards or tables
            (a folder, a file, or a pattern in its last part), or ``s3://bucket/...`` of one.
        store: Stores the listing.
        count_pages: Counts the pages of a PDF.
        progress: Called now and then.
        preferences: Whether tables with the columns of preferences are listed as such.

    Raises:
        SourceInvalidError: If it is none of these, is empty or can't be listed.
        SourceAwayError: If a file can't be read now.
    """
    found = Found()
    place = _place(source)
    form = None if place.is_lines else _form(place, found)
    if form is not None and (metadata := _metadata(place, form)) is not None:
        found.metadata, found.images_below, found.texts_below = metadata.name, form.images, form.texts
        place, form = metadata, None if metadata.is_lines else _form(metadata, found)
    sink = describe.Sink(store=store, progress=progress, found=found)
    if form is None:
        description, records = describe.describe_text(place.tree, place.name, place.path, sink=sink)
    elif form.kind != files.FOLDER:
        description, records = _describe_parts(place, form, sink, preferences=preferences)
    elif place.name:
        raise SourceInvalidError(
            f"no shards or tables: {source}, expected names that end in {', '.join(PART_SUFFIXES)}", field="source"
        )
    else:
        description, records = describe.describe_folder(
            place.tree, place.path, form.rows, count_pages=count_pages, sink=sink
        )
    return {RULES_FIELD: RULES, **description}, records


def _form(place: _Place, found: Found) -> Form:
    one = place.name and not is_pattern(place.name)
    rows: Iterable[Row] = [[place.name, -1, ""]] if one else place.tree.walk()
    return form_of(rows, place.path, pattern=place.name or "*", is_file=bool(one), found=found)


def _metadata(place: _Place, form: Form) -> _Place | None:
    """Return the file that names the images of a folder; None if they have their texts beside them.

    Raises:
        SourceInvalidError: If there are several.
    """
    named = [name for name in form.metadata if names_images(place.tree, name)]
    if not named or place.name:
        return None
    if len(named) > 1:
        raise SourceInvalidError(
            f"dataset folder {place.path} holds {len(named)} files that name its images, such as {named[0]} and "
            f"{named[1]}; name one of them, as in '{place.path}/{named[0]}'",
            field="source",
        )
    return _place(f"{place.root.rstrip('/')}/{named[0]}")


def _describe_parts(place: _Place, form: Form, sink: describe.Sink, *, preferences: bool) -> tuple[dict[str, Any], int]:
    names: Iterable[str] = (row[0] for row in form.rows)
    if form.kind == ARROW and not place.name:
        names = saved_files(place.tree, names, place.path)
    if form.kind == SHARDS and not place.name:
        check_splits(place.tree, place.path)
    read, rules = partial(list_samples, place.tree), RULES
    if form.kind != SHARDS:
        # The columns of a table that are read are those of its kind of records.
        first = list(itertools.islice(names := iter(names), 1))
        if preferences and any(has_preference_columns(place.tree, name) for name in first):
            rules = PREFERENCE_RULES
        read, names = partial(list_rows, place.tree, rules=rules), itertools.chain(first, names)
    description, records = describe.describe_parts(
        form.kind, place.path, names, read, threads=THREADS[form.kind], sink=sink
    )
    return {**description, "root": place.root, RULES_FIELD: rules}, records


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
    is_lines = source.lower().endswith(LINES_SUFFIXES)
    is_part = source.lower().endswith(PART_SUFFIXES) or is_pattern(source)
    if is_bucket(source):
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


class ListedSource(Source, Protocol):
    """A source of files."""

    def look(self, ordinal: int) -> Looked:
        """Understand a record without the bytes of its images; errors as ``read``."""
        ...


THREADS: Mapping[str, int] = {SHARDS: 4, PARQUET: 2, ARROW: 2}
"""Files that are listed at once: a table's page or batch is in memory as a whole."""
LISTED: Mapping[str, Callable[[Tree, Listing, int], ListedSource]] = {
    files.JSONL: ListedLines,
    ARRAY: partial(ListedLines, kind=ARRAY),
    CSV: partial(ListedLines, kind=CSV),
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
    return digest_value({**{name: description[name] for name in ("kind", "form", "content")}, **inherited(description)})


def inherited(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the description of a version that is made of samples of another one has of that one's."""
    return {RULES_FIELD: PREFERENCE_RULES} if holds_preferences(description) else {}


def holds_preferences(description: Mapping[str, Any]) -> bool:
    """Tell whether the records of a version are preferences: then it is another version than one of conversations."""
    return int(description.get(RULES_FIELD, 1)) >= PREFERENCE_RULES


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
        return _listed(description, lakehouse)
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


def look_at(description: Mapping[str, Any], lakehouse: Lakehouse, records: int) -> dict[str, Any] | None:
    """Look at the first records of described files; return the description with what they are.

    They are preferences where more of them are usable as such than lack a second answer.

    Returns:
        None where the columns of a table are those of preferences, and most rows are none.

    Raises:
        SourceInvalidError: As ``look_over``.
    """
    kind = description["kind"]
    threads = 1 if LISTED[kind] is ListedTables else look_over.THREADS

    def look(rules: int) -> dict[str, Any]:
        tried = {**description, RULES_FIELD: rules}
        found = look_over.look_over(_listed(tried, lakehouse), tried, records, threads=threads)
        return {**tried, look_over.FIELD: found}

    def look_for_preferences() -> dict[str, Any] | None:
        try:
            found = look(PREFERENCE_RULES)
        except SourceInvalidError as error:
            if look_over.lacks_preferences(error):
                return None
            raise
        return found if look_over.are_preferences(found[look_over.FIELD]) else None

    if description[RULES_FIELD] >= PREFERENCE_RULES:
        return look_for_preferences()
    if LISTED[kind] is ListedTables or kind == files.FOLDER:
        return look(RULES)
    conversations: dict[str, Any] | None = None
    with contextlib.suppress(SourceInvalidError):
        conversations = look(RULES)
    if conversations is not None and not look_over.may_be_preferences(conversations[look_over.FIELD]):
        return conversations
    try:
        preferences = look_for_preferences()
    except SourceInvalidError:
        if conversations is None:
            raise
        preferences = None
    return preferences or conversations or look(RULES)


def describe_and_look(
    source: str, lakehouse: Lakehouse, *, store: Store, count_pages: CountPages, progress: Progress
) -> tuple[dict[str, Any], int]:
    """Describe files (``describe_files``) with what their records are; count them."""
    described = partial(describe_files, source, store=store, count_pages=count_pages, progress=progress)
    description, records = described()
    looked = look_at(description, lakehouse, records)
    if looked is None:
        description, records = described(preferences=False)
        looked = look_at(description, lakehouse, records)
    return looked or description, records


def _listed(description: Mapping[str, Any], lakehouse: Lakehouse) -> ListedSource:
    digest = description["listing"]
    listing = Listing(_reader(lakehouse, digest), description["listing_bytes"], name=digest)
    return LISTED[description["kind"]](_tree(description), listing, int(description.get(RULES_FIELD, 1)))


def _tree(description: Mapping[str, Any]) -> Tree:
    path = str(description["path"])
    root = str(description.get("root", (path.rpartition("/")[0] or "/") if description["kind"] in LINES else path))
    return BucketTree(root) if is_bucket(root) else LocalTree(Path(root))


def _reader(lakehouse: Lakehouse, digest: str) -> Callable[..., bytes]:
    def read(*, start: int, length: int) -> bytes:
        return lakehouse.get_range(digest, start=start, length=length)

    return read
