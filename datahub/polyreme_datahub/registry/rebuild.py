"""The registry's versions as objects beside the lakehouse, and the registry rebuilt from them.

``versions/<name>/<number>.json`` says all that the version's row says; it is stored before the row is committed.
A removed version's object is replaced by a mark before its row goes. Of a subset or a split, whose samples stand in the
registry alone, ``versions/<name>/<number>/samples-<first>.jsonl`` lists the samples, and where their records and raw
objects lie; ``versions/<name>/<number>/sealed.json`` is written last and has the digest of each list. What was ingested
and what operations made is in lists of its own (``result_lists``).
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Connection, select

from polyreme_api.store import ObjectNotFoundError, ObjectStore
from polyreme_datahub.digests import canonical_json, digest_bytes
from polyreme_datahub.lakehouse import Artifact
from polyreme_datahub.registry import schema
from polyreme_datahub.registry.bulk import insert_new
from polyreme_datahub.registry.datasets import DatasetVersion, VersionDocument, row_of
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.lineage import samples_after
from polyreme_datahub.registry.marks import Read, named
from polyreme_datahub.registry.result_lists import ListDamagedError, ListRestorer
from polyreme_datahub.registry.results import places_of
from polyreme_datahub.registry.rows import SampleRow, columns

FORMAT = 1
VERSIONS = "versions/"
SEALED = "sealed.json"
REMOVED = "removed"
PAGE_SAMPLES = 10_000
"""Samples of one list, about."""
SHOWN_MAX = 1000


@dataclasses.dataclass(slots=True, kw_only=True)
class RebuildReport:
    """What was restored; rows that were there already count too."""

    versions: int = 0
    samples: int = 0
    artifacts: int = 0
    actions: int = 0
    """Results of operations."""
    unsealed: list[str] = dataclasses.field(default_factory=list)
    """Versions of whose records some are not listed as samples: processing reads those again."""
    damaged: list[str] = dataclasses.field(default_factory=list)
    """Objects that can't be read as what they should be, at most ``SHOWN_MAX``; the others were restored."""


class _DamagedError(Exception):
    """An object is not what was stored."""


def store_document(store: ObjectStore) -> Callable[[VersionDocument], None]:
    """Return what ``add_version`` calls before it commits a row."""

    def put(document: VersionDocument) -> None:
        content = {"format": FORMAT, **dataclasses.asdict(document), "source": dict(document.source)}
        # A removed version may have had the number before.
        store.delete(f"{_folder(document.name, document.number)}{SEALED}")
        store.put(_key(document.name, document.number), canonical_json(content))

    return put


def mark_removed(store: ObjectStore) -> Callable[[str, int], None]:
    """Return what ``remove_versions`` calls before it commits: a rebuilt registry has the version no more."""

    def mark(name: str, number: int) -> None:
        try:
            store.get(_key(name, number))
        except ObjectNotFoundError:
            return
        store.put(_key(name, number), canonical_json({"format": FORMAT, "name": name, "number": number, REMOVED: True}))

    return mark


def delete_samples(store: ObjectStore, name: str, number: int) -> None:
    """Delete the lists of a removed version's samples."""
    store.delete(f"{_folder(name, number)}{SEALED}")
    for info in store.list(_folder(name, number)):
        store.delete(info.key)


def seal_samples(database: Database, store: ObjectStore, version: DatasetVersion, read: Read) -> int:
    """List the samples of a version that has all of them; return their number. Again, it writes the same.

    Args:
        database: The registry.
        store: The object store.
        version: The version.
        read: Returns the bytes of artifacts (``Lakehouse.get_parts``).
    """
    folder = _folder(version.name, version.number)
    digests: dict[str, str] = {}
    count = 0
    for page in _pages(database, version.id):
        lines = [canonical_json({"sample": [row.ordinal, row.sample_id, row.record]}) for row in page]
        places = places_of(database, {row.record for row in page})
        raw = {name for content in read(places).values() for name in named(content)}
        places |= places_of(database, raw)
        lines += [canonical_json({"artifact": list(columns(places[digest]).values())}) for digest in sorted(places)]
        content = b"".join(line + b"\n" for line in lines)
        name = f"samples-{page[0].ordinal:012d}.jsonl"
        store.put(folder + name, content)
        digests[name] = digest_bytes(content)
        count += len(page)
    sealed = {"format": FORMAT, "name": version.name, "number": version.number, "samples": count, "lists": digests}
    store.put(f"{folder}{SEALED}", canonical_json(sealed))
    return count


def rebuild_registry(database: Database, store: ObjectStore) -> RebuildReport:
    """Restore datasets, versions, samples and artifacts from the object store; what the registry has stays.

    May be killed and run again. Tags, pins, statistics and dead letters are not restored.
    """
    report = RebuildReport()
    restored_ids: list[tuple[VersionDocument, int]] = []
    for info in store.list(VERSIONS):
        if not info.key.endswith(".json") or info.key.endswith(f"/{SEALED}"):
            continue
        try:
            document = _document(store.get(info.key))
            if document is None:
                continue
            restored = database.write(partial(_restore_version, document=document))
            if restored is None:
                continue
            report.versions += 1
            restored_ids.append((document, restored))
            _restore_samples(database, store, document, restored, report)
        except _DamagedError as error:
            _note(report.damaged, f"{info.key}: {error}")
    _restore_results(database, store, restored_ids, report)
    return report


def _restore_results(
    database: Database, store: ObjectStore, versions: Sequence[tuple[VersionDocument, int]], report: RebuildReport
) -> None:
    """Restore what lists of results name: all artifacts first, since a result may name those of another version."""
    restorer = ListRestorer(database, store)
    lists = [(key, of, number) for of, number in versions for key in restorer.keys(of.name, of.number)]
    damaged: set[str] = set()
    restored: Counter[str] = Counter()
    for key, _, _ in lists:
        try:
            report.artifacts += restorer.artifacts(key)
        except ListDamagedError as error:
            damaged.add(key)
            _note(report.damaged, f"{key}: {error}")
    for key, of, version_id in lists:
        if key in damaged:
            continue
        try:
            samples, actions = restorer.rows(key, version_id)
        except ListDamagedError as error:
            _note(report.damaged, f"{key}: {error}")
            continue
        report.actions += actions
        restored[f"{of.name}@{of.number}"] += samples
    report.samples += restored.total()
    records = {f"{of.name}@{of.number}": of.records for of, _ in versions}
    report.unsealed = [one for one in report.unsealed if restored[one] < records[one]]


def _restore_samples(
    database: Database, store: ObjectStore, document: VersionDocument, version_id: int, report: RebuildReport
) -> None:
    folder = _folder(document.name, document.number)
    try:
        sealed = _parsed(store.get(f"{folder}{SEALED}"))
    except ObjectNotFoundError:
        _note(report.unsealed, f"{document.name}@{document.number}")
        return
    lists = sealed.get("lists")
    if not isinstance(lists, dict):
        raise _DamagedError("sealed.json names no lists")
    for name, digest in sorted(lists.items()):
        try:
            content = store.get(folder + name)
            if digest_bytes(content) != digest:
                raise _DamagedError("its digest is not the sealed one")
        except (ObjectNotFoundError, _DamagedError) as error:
            _note(report.damaged, f"{folder}{name}: {error}")
            continue
        samples, artifacts = _rows(content)
        database.write(partial(_insert, version_id=version_id, samples=samples, artifacts=artifacts))
        report.samples += len(samples)
        report.artifacts += len(artifacts)


def _restore_version(connection: Connection, document: VersionDocument) -> int | None:
    """Insert a version; None if its number or its content has another row already."""
    insert_new(connection, schema.versions, [row_of(document)])
    versions = schema.versions.c
    mine = (versions.name == document.name, versions.number == document.number, versions.digest == document.digest)
    found = connection.execute(select(versions.id).where(*mine)).scalar()
    return None if found is None else int(found)


def _insert(connection: Connection, version_id: int, samples: list[SampleRow], artifacts: list[Artifact]) -> None:
    insert_new(connection, schema.artifacts, [columns(row) for row in artifacts])
    insert_new(connection, schema.samples, [{"version_id": version_id, **columns(row)} for row in samples])


def _pages(database: Database, version_id: int) -> Iterator[list[SampleRow]]:
    page: list[SampleRow] = []
    ordinal = -1
    while some := samples_after(database, version_id, ordinal):
        page += some
        ordinal = some[-1].ordinal
        if len(page) >= PAGE_SAMPLES:
            yield page
            page = []
    if page:
        yield page


def _key(name: str, number: int) -> str:
    return f"{VERSIONS}{name}/{number}.json"


def _folder(name: str, number: int) -> str:
    return f"{VERSIONS}{name}/{number}/"


def _document(content: bytes) -> VersionDocument | None:
    """Return what an object says; None if its version was removed."""
    value = dict(_parsed(content))
    if value.get(REMOVED) is True:
        return None
    fields = {field.name: value.get(field.name) for field in dataclasses.fields(VersionDocument)}
    kinds: dict[str, Any] = {"name": str, "number": int, "source": dict, "digest": str, "records": int}
    for name, kind in kinds.items():
        if not isinstance(fields[name], kind):
            raise _DamagedError(f"{name} is {fields[name]!r}")
    if not isinstance(fields["created_s"], (int, float)):
        raise _DamagedError(f"created_s is {fields['created_s']!r}")
    return VersionDocument(**fields)  # type: ignore[arg-type]


def _parsed(content: bytes) -> Mapping[str, Any]:
    try:
        value = json.loads(content)
    except ValueError as error:
        raise _DamagedError(f"is no JSON: {error}") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _DamagedError(f"has no format {FORMAT}")
    return value


def _rows(content: bytes) -> tuple[list[SampleRow], list[Artifact]]:
    samples, artifacts = [], []
    for line in content.splitlines():
        value = json.loads(line)
        if "sample" in value:
            ordinal, sample_id, record = value["sample"]
            samples.append(SampleRow(ordinal=ordinal, sample_id=sample_id, record=record))
        else:
            digest, blob, start, length = value["artifact"]
            artifacts.append(Artifact(digest=digest, blob=blob, start=start, length=length))
    return samples, artifacts


def _note(notes: list[str], note: str) -> None:
    if len(notes) < SHOWN_MAX:
        notes.append(note)
