"""The stored objects, in the order of their names, and what each of them owns."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator

from polyreme_cluster.port import KINDS, InvalidObjectError, NotFoundError, ObjectRef
from polyreme_local.api_server import rules
from polyreme_local.api_server.record import Record

Key = tuple[str, str]


class Objects:
    """All objects by kind, namespace and name."""

    def __init__(self) -> None:
        self._records: dict[str, dict[Key, Record]] = {kind: {} for kind in KINDS}
        self._keys: dict[str, list[Key]] = {kind: [] for kind in KINDS}
        self._live_uids: set[str] = set()
        self._owned: dict[str, dict[ObjectRef, None]] = {}
        self._orphans: deque[ObjectRef] = deque()

    def check_kind(self, kind: str) -> None:
        """Refuse a kind that is not served.

        Raises:
            InvalidObjectError: If the kind is unknown.
        """
        if kind not in self._records:
            raise InvalidObjectError(f"unknown kind: {kind!r}, expected one of {', '.join(KINDS)}", field="kind")

    def records(self, kind: str, *, namespace: str | None) -> Iterator[Record]:
        """Iterate over the objects of a kind in the order of (namespace, name)."""
        self.check_kind(kind)
        keys, records = self._keys[kind], self._records[kind]
        start = 0 if namespace is None else bisect.bisect_left(keys, (namespace, ""))
        for key in keys[start:]:
            if namespace is not None and key[0] != namespace:
                return
            yield records[key]

    def get(self, ref: ObjectRef) -> Record | None:
        """Return an object, if it exists."""
        return self._records[ref.kind].get((ref.namespace, ref.name))

    def found(self, ref: ObjectRef) -> Record:
        """Return an object that has to exist.

        Raises:
            InvalidObjectError: If the kind is unknown.
            NotFoundError: If there is none.
        """
        self.check_kind(ref.kind)
        record = self.get(ref)
        if record is None:
            raise NotFoundError(f"not found: {ref}")
        return record

    def insert(self, record: Record) -> None:
        """Add an object, or replace the one of its name."""
        key = (record.namespace, record.name)
        old = self._records[record.kind].get(key)
        if old is None:
            bisect.insort(self._keys[record.kind], key)
            self._live_uids.add(record.uid)
        self._records[record.kind][key] = record
        ref = record.ref
        owners = rules.owner_uids(record.manifest)
        for uid in rules.owner_uids(old.manifest) if old is not None else ():
            if uid not in owners:
                self._owned.get(uid, {}).pop(ref, None)
        for uid in owners:
            self._owned.setdefault(uid, {})[ref] = None

    def evict(self, record: Record) -> None:
        """Remove an object."""
        key = (record.namespace, record.name)
        del self._records[record.kind][key]
        keys = self._keys[record.kind]
        del keys[bisect.bisect_left(keys, key)]
        self._live_uids.discard(record.uid)
        for uid in rules.owner_uids(record.manifest):
            self._owned.get(uid, {}).pop(record.ref, None)

    def release_owned(self, uid: str) -> None:
        """Queue what a deleted object owned for the garbage collector."""
        self._orphans.extend(self._owned.pop(uid, {}))

    def note_if_orphan(self, record: Record) -> None:
        """Queue an object for the garbage collector if none of its owners lives."""
        if self._is_orphan(record):
            self._orphans.append(record.ref)

    def find_orphans(self) -> None:
        """Queue every object none of whose owners lives."""
        for records in self._records.values():
            for record in records.values():
                self.note_if_orphan(record)

    def next_orphan(self) -> Record | None:
        """Take the next object from the garbage collector's queue that is still there and still has no owner."""
        while self._orphans:
            record = self.get(self._orphans.popleft())
            if record is not None and self._is_orphan(record):
                return record
        return None

    def _is_orphan(self, record: Record) -> bool:
        owners = rules.owner_uids(record.manifest)
        return bool(owners) and not any(uid in self._live_uids for uid in owners)
