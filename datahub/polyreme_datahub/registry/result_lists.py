"""Lists of what operations made, beside a version in the object store, so that a rebuilt registry knows it again.

``versions/<name>/<number>/results/<digest>.jsonl.zz`` has the samples, actions and artifacts of one commit. It comes
after the bytes and before the rows: killed between, a list says what is true and what the registry does not know yet.
Lists are deleted with their version. What they name may be gone when they are read, and is left out; a sample that was
rejected later comes back and is rejected again.
"""

from __future__ import annotations

import dataclasses
import json
import zlib
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

from sqlalchemy import Connection

from polyreme_api.store import ObjectNotFoundError, ObjectStore
from polyreme_datahub.digests import blob_key, canonical_json, digest_bytes
from polyreme_datahub.lakehouse import Artifact
from polyreme_datahub.registry import schema
from polyreme_datahub.registry.bulk import insert_new
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.results import insert_actions, places_of
from polyreme_datahub.registry.rows import Action, Results, SampleRow, columns

SUFFIX = ".jsonl.zz"
FORMAT = 1
LEVEL = 1
LIST_BYTES_MAX = 2**28
"""Of one list, uncompressed; a commit has far less (``CommitPace``)."""
_Row = TypeVar("_Row")


class ListDamagedError(Exception):
    """A list is not what was stored."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResultList:
    """What one commit made."""

    samples: Sequence[SampleRow]
    actions: Sequence[Action]
    artifacts: Sequence[Artifact]


def results_folder(name: str, number: int) -> str:
    """Return the prefix of a version's lists."""
    return f"versions/{name}/{number}/results/"


def store_list(store: ObjectStore, version: DatasetVersion, results: Results) -> None:
    """Store the list of a commit; the same results are the same object."""
    if not results.samples and not results.actions and not results.artifacts:
        return
    lines = [canonical_json({"format": FORMAT})]
    for kind, rows in (("sample", results.samples), ("action", results.actions), ("artifact", results.artifacts)):
        lines += [canonical_json({kind: list(columns(row).values())}) for row in rows]
    content = b"".join(line + b"\n" for line in lines)
    key = f"{results_folder(version.name, version.number)}{digest_bytes(content)}{SUFFIX}"
    store.put(key, zlib.compress(content, LEVEL))


class ListRestorer:
    """Enters lists into a registry, as far as the bytes that they name are there.

    Args:
        database: The registry.
        store: The object store.
    """

    def __init__(self, database: Database, store: ObjectStore) -> None:
        self._database, self._store = database, store
        self._there: dict[str, bool] = {}
        """Of each blob, whether the store has it."""

    def keys(self, name: str, number: int) -> list[str]:
        """Return the lists of a version."""
        found = (info.key for info in self._store.list(results_folder(name, number)))
        return sorted(key for key in found if key.endswith(SUFFIX))

    def artifacts(self, key: str) -> int:
        """Enter the artifacts of a list; return how many there were.

        Raises:
            ListDamagedError: If it is not what was stored.
        """
        found = [one for one in self._read(key).artifacts if self._has(one.blob)]
        self._database.write(partial(_insert_artifacts, artifacts=found))
        return len(found)

    def rows(self, key: str, version_id: int) -> tuple[int, int]:
        """Enter the samples and actions of a list that name nothing which is gone; return how many of each.

        The artifacts of all lists are entered before.

        Raises:
            ListDamagedError: If it is not what was stored.
        """
        found = self._read(key)
        needed = {action.key: _needed(action) for action in found.actions}
        digests = {row.record for row in found.samples}.union(*needed.values())
        places = places_of(self._database, digests)
        there = {digest for digest in digests if digest in places or self._has(digest)}
        samples = [row for row in found.samples if row.record in there]
        actions = [action for action in found.actions if needed[action.key] <= there]
        self._database.write(partial(_insert_rows, version_id=version_id, samples=samples, actions=actions))
        return len(samples), len(actions)

    def _read(self, key: str) -> ResultList:
        try:
            content = zlib.decompressobj().decompress(self._store.get(key), LIST_BYTES_MAX)
        except (zlib.error, ObjectNotFoundError) as error:
            raise ListDamagedError(f"can't be read: {error}") from error
        if digest_bytes(content) != key.rpartition("/")[2].removesuffix(SUFFIX):
            raise ListDamagedError("its digest is not that of its name")
        first, *lines = content.splitlines()
        if json.loads(first) != {"format": FORMAT}:
            raise ListDamagedError(f"begins {first[:80]!r}, expected format {FORMAT}")
        found: dict[str, list[list[Any]]] = {"sample": [], "action": [], "artifact": []}
        for line in lines:
            for kind, row in json.loads(line).items():
                found[kind].append(row)
        return ResultList(
            samples=[_filled(SampleRow, row) for row in found["sample"]],
            actions=[
                _filled(Action, [tuple(cell) if isinstance(cell, list) else cell for cell in row])
                for row in found["action"]
            ],
            artifacts=[_filled(Artifact, row) for row in found["artifact"]],
        )

    def _has(self, blob: str) -> bool:
        if blob not in self._there:
            self._there[blob] = self._store.exists(blob_key(blob))
        return self._there[blob]


def _filled(kind: type[_Row], row: Sequence[Any]) -> _Row:
    """Build a row from the values of its columns."""
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    return kind(**dict(zip(names, row, strict=True)))


def _needed(action: Action) -> set[str]:
    """Return the digests that must be stored for an output to be of use."""
    return {action.output} if action.value is None else set(json.loads(action.value).get("blobs", ()))


def _insert_artifacts(connection: Connection, artifacts: Sequence[Artifact]) -> None:
    insert_new(connection, schema.artifacts, [columns(row) for row in artifacts])


def _insert_rows(
    connection: Connection, version_id: int, samples: Sequence[SampleRow], actions: Sequence[Action]
) -> None:
    insert_actions(connection, actions)
    insert_new(connection, schema.samples, [{"version_id": version_id, **columns(row)} for row in samples])
